"""Tables and titles of benchmark results, as `summa3d bench` and `summa3d report` print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(result: Mapping[str, Any]) -> str:
    """A benchmark result as text: one line on the machine, then the table of the result's kind."""
    lines = [in_one_line(result["machine"])] if result.get("machine") else []
    lines += TABLES[result["kind"]](result)
    return "\n".join(lines)


def in_one_line(machine: Mapping[str, Any]) -> str:
    """One line on the machine of a benchmark: cores, load, BLAS with its core type, Gflop/s of one core, MPI and numpy."""
    speeds = ", ".join(f"{speed:.1f} {dtype}" for dtype, speed in machine["gflops_per_core"].items())
    load = "" if machine.get("load") is None else f", load {machine['load']:.1f} at the start"
    blas = f"{machine['blas']} ({machine['core_type']}), one core {speeds} Gflop/s"
    products = f"; products by {machine['products']}" if machine.get("products") else ""
    return f"{machine['cores']} cores{load}; numpy's {blas}{products}; {machine['mpi']}; numpy {machine['numpy']}"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of text with aligned columns; the first `left` columns are aligned left, the others right.

    >>> aligned(("name", "ms"), [("a", "10.00")])
    ['name     ms', 'a     10.00']
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        placed = zip(range(len(row)), row, widths, strict=True)
        return "  ".join(cell.ljust(width) if place < left else cell.rjust(width) for place, cell, width in placed).rstrip()

    return [line(row) for row in (header, *rows)]


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds.

    >>> milliseconds(0.01234), milliseconds(2.5)
    ('12.34', '2500')
    """
    return f"{seconds * 1e3:.2f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def share(value: float | None) -> str:
    """A fraction as text with two decimals; empty for None."""
    return "" if value is None else f"{value:.2f}"


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['m']}×{row['n']}×{row['k']} {row['form']} {row['dtype']}{place_of([row])}"


def _ceilings(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for top in result["ceiling"]:
        speed = f"{milliseconds(top['seconds']['median'])} ms, {top['gflops']:.1f} Gflop/s"
        lines.append(f"numpy, {top['threads']} threads, {_shape(top)}: {speed}")
    return lines


def gemm_table(result: Mapping[str, Any]) -> list[str]:
    """The table of `bench gemm`: one line per algorithm and grid, fastest first."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["median"])
    header = ("algorithm and grid", "median ms", "min", "max", "Gflop/s", "of ceiling", "words/rank", "messages", "workspace MiB")
    cells = [
        (
            row["label"],
            *(milliseconds(row["seconds"][name]) for name in ("median", "min", "max")),
            f"{row['gflops']:.1f}",
            share(row["fraction_of_ceiling"]),
            f"{row['words_per_rank']:,}",
            str(row["messages_per_rank"]),
            f"{row['workspace_bytes'] / (1 << 20):.1f}",
        )
        for row in rows
    ]
    title = f"{_shape(rows[0])}, {max(row['ranks'] for row in rows)} ranks, {len(rows[0]['seconds']['all'])} rounds"
    return [title, *aligned(header, cells), *_ceilings(result)]


def first_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of the same algorithm on the smallest rank count, relative to which scaling is measured."""
    same = [other for other in rows if other["algorithm"] == row["algorithm"]]
    return min(same, key=lambda other: int(other["ranks"]))


def scaling(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Gflop/s of a row relative to the same algorithm on the smallest rank count."""
    return float(row["gflops"] / first_of(row, rows)["gflops"])


def scaling_table(result: Mapping[str, Any]) -> list[str]:
    """The table of `bench strong` and `bench weak`: one line per rank count, with time, Gflop/s and speed-up."""
    rows = sorted(result["rows"], key=lambda row: (row["algorithm"], row["ranks"]))
    header = ("algorithm and grid", "ranks", "m×n×k", "median ms", "Gflop/s", "speed-up", "per rank", "of ceiling", "words/rank")
    cells = [
        (
            row["label"],
            str(row["ranks"]),
            f"{row['m']}×{row['n']}×{row['k']}",
            milliseconds(row["seconds"]["median"]),
            f"{row['gflops']:.1f}",
            f"{scaling(row, rows):.2f}",
            f"{scaling(row, rows) * first_of(row, rows)['ranks'] / row['ranks']:.2f}",
            share(row["fraction_of_ceiling"]),
            f"{row['words_per_rank']:,}",
        )
        for row in rows
    ]
    title = "the same product on more ranks" if result["kind"] == "strong" else "the same work per rank on more ranks"
    shared = result.get("machine") and not place_of(rows)
    cores = f"; beyond {result['machine']['cores']} ranks they share cores" if shared else ""
    return [f"{title}, {rows[0]['form']} {rows[0]['dtype']}{place_of(rows)}{cores}", *aligned(header, cells), *_ceilings(result)]


def place_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The device of the rows for a title, as " on cuda"; empty for the host."""
    device = rows[0].get("device", "cpu")
    return "" if device == "cpu" else f" on {device}"


def versus_table(result: Mapping[str, Any]) -> list[str]:
    """Libraries side by side: the time of each, its fraction of numpy's speed with all cores, and quotients of times."""
    peers, quotients, noted = result["peers"], result["quotients"], result.get("noted", ())
    header = ("case", "P", "numpy ms", *(f"{peer} ms" for peer in peers), *(f"{peer}/ceiling" for peer in peers), *quotients)
    header += tuple(f"{name}/ceiling (noted)" for name in noted)
    cells = [
        (
            f"{row['case']} {row['dtype']}",
            str(row["ranks"]),
            milliseconds(row["ceiling_seconds"]),
            *(milliseconds(row["seconds"][peer]) if peer in row["seconds"] else "" for peer in peers),
            *(share(row["fractions"].get(peer)) for peer in peers),
            *(_times(row["quotients"].get(name)) for name in quotients),
            *(share(row["noted"].get(name)) for name in noted),
        )
        for row in result["rows"]
    ]
    return [*aligned(header, cells), *result.get("remarks", ())]


def _times(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} [{ratio['min']:.2f}–{ratio['max']:.2f}]"


def block_title(result: Mapping[str, Any]) -> str:
    """The title of `bench block`: family, sizes b, s, h and a, ranks; for a paper's shape, its source and scaling."""
    case, paper = result["case"], result.get("paper")
    sizes = f"b={case['batch']} s={case['sequence']} h={case['hidden']} a={case['heads']} {case['dtype']}{place_of([case])}"
    source = f"; {paper['name']} with s and h divided by {paper['factor']} ({paper['source']})" if paper else ""
    return f"{case['layers']} {case['family']} block{'s' if case['layers'] > 1 else ''}, {sizes}, {result['ranks']} ranks{source}"


def block_table(result: Mapping[str, Any]) -> list[str]:
    """The table of `bench block`: one line per scheme and grid, fastest first, with times, words, messages and memory."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["both"]["median"])
    header = (
        "scheme and grid",
        "median ms",
        "min",
        "max",
        "forward",
        "backward",
        "words/rank",
        "messages",
        "saved MiB",
        "peak MiB",
    )
    cells = [
        (
            row["label"],
            *(milliseconds(row["seconds"]["both"][name]) for name in ("median", "min", "max")),
            *(milliseconds(row["seconds"][phase]["median"]) for phase in ("forward", "backward")),
            *(f"{sum(row[name].values()):,}" if name in row else "" for name in ("words_per_rank", "messages_per_rank")),
            *(f"{row[name] / (1 << 20):.1f}" for name in ("saved_bytes", "peak_bytes")),
        )
        for row in rows
    ]
    title = f"{block_title(result)}, {len(rows[0]['seconds']['both']['all'])} rounds"
    furthest = max(row["relative_difference"] for row in rows)
    return [title, *aligned(header, cells), f"outputs differ by at most {furthest:.1e} of their norm"]


TABLES = {"gemm": gemm_table, "strong": scaling_table, "weak": scaling_table, "versus": versus_table, "block": block_table}
