"""Tables and captions of benchmark results, as `summa3d bench` and `summa3d report` print them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..table import Column, Table
from .series import ResultRow, Series, in_ranks, on_host, place, series_of
from .statistics import Spread, named

MEBI = 1 << 20
COUNT, TENTHS, HUNDREDTHS = "{:,}".format, "{:.1f}".format, "{:.2f}".format


def table(result: Mapping[str, Any]) -> Table:
    """The table of a benchmark result of any kind, with the machine as its last remark."""
    made = TABLES[result["kind"]](result)
    remarks = [*made.remarks, *agreement(result), *result.get("failed", ()), *map(in_one_line, machines(result))]
    return Table(made.title, made.columns, remarks)


def machines(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The machines of a result: one, several where results are joined, none where a script noted none."""
    return list(result.get("machines") or filter(None, [result.get("machine")]))


def in_one_line(machine: Mapping[str, Any]) -> str:
    """One line on a machine: nodes, ranks, threads, cores, processor, load, libraries, versions, and Gflop/s of a core."""
    hosts, speeds = machine["hosts"], machine["gflops_per_core"]
    names = hosts[0] if len(hosts) == 1 else f"{hosts[0]} … {hosts[-1]}"
    speed = f", one core {', '.join(f'{speed:.1f} {dtype}' for dtype, speed in speeds.items())} Gflop/s" if speeds else ""
    return "; ".join(
        [
            f"{in_nodes(machine)} ({names}), {processor(machine)}{loaded(machine)}",
            f"numpy {machine['numpy']} with {machine['blas']} ({machine['core_type']}){speed}",
            f"products by {blas(machine)}",
            f"{machine['mpi']}, Python {machine['python']}, {version(machine)}",
        ]
    )


def blas(machine: Mapping[str, Any]) -> str:
    """The BLAS that multiplied blocks, with its version."""
    name: str = machine["products"].partition(" (")[0]
    return f"numpy's {machine['blas']}" if name.startswith("numpy") else name


def in_nodes(machine: Mapping[str, Any]) -> str:
    """Nodes, ranks a node, threads a rank and cores as text."""
    nodes, cores = machine["nodes"], machine["cores"]
    return (
        f"{nodes} node{'s' if nodes > 1 else ''} × {span(machine['ranks_per_node'], 'rank')} × "
        f"{span(machine['threads_per_rank'], 'thread')} on {cores} core{'s' if cores > 1 else ''}"
    )


def span(counts: Sequence[int], what: str = "") -> str:
    """The smallest and the largest of some counts, with their noun.

    >>> span([1, 1], "rank"), span([2, 8], "rank")
    ('1 rank', '2–8 ranks')
    """
    low, high = min(counts), max(counts)
    return (f"{low}" if low == high else f"{low}–{high}") + (f" {what}{'s' if high > 1 else ''}" if what else "")


def processor(machine: Mapping[str, Any]) -> str:
    """The processor, and the GPU where there is one."""
    return " and ".join(filter(None, (machine["processor"], machine["gpu"])))


def loaded(machine: Mapping[str, Any]) -> str:
    """The load average at the start, where the system has one; of several jobs the least and the greatest."""
    loads = [f"{load:.1f}" for load in sorted({*machine.get("loads", [machine["load"]])} - {None})]
    return f", load {'–'.join(dict.fromkeys([loads[0], loads[-1]]))} at the start" if loads else ""


def version(machine: Mapping[str, Any]) -> str:
    """The version of summa3d, with its commit where it ran from a checkout."""
    return f"summa3d {machine['summa3d']}" + (f" ({machine['commit'][:10]})" if machine["commit"] else "")


def in_ms(seconds: Iterable[float | None]) -> list[float | None]:
    """Seconds in milliseconds."""
    return [None if second is None else second * 1e3 for second in seconds]


def digits(value: float) -> str:
    """A number as text: two decimals below 1000, two digits below 0.1.

    >>> digits(12.341), digits(2500.2), digits(0.00912)
    ('12.34', '2500', '0.0091')
    """
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def sizes(row: ResultRow) -> str:
    """The sizes of a product, as 64×32×16."""
    return f"{row['m']}×{row['n']}×{row['k']}"


def operands(row: ResultRow) -> str:
    """Form, dtype and device of a product's operands; the host goes without saying."""
    return f"{row['form']} {row['dtype']}" + on_device(row)


def on_device(row: ResultRow) -> str:
    """The device for a title, as " on cuda"; empty for the host."""
    return "" if on_host(row) else f" on {row['device']}"


def rounds(rows: Iterable[ResultRow]) -> str:
    """Describe the times: medians of so many rounds."""
    return f"medians of {span([len(row['seconds']['all']) for row in rows], 'round')}"


def times(rows: Sequence[ResultRow]) -> list[Column]:
    """The columns of median, fastest and slowest round, in milliseconds."""
    ends = {"median ms": "median", "min": "min", "max": "max"}
    return [Column(name, in_ms(row["seconds"][end] for row in rows), digits) for name, end in ends.items()]


def predicted(result: Mapping[str, Any], rows: Sequence[ResultRow]) -> list[Column]:
    """The columns of predicted times, and of how far off they are where a benchmark compares them."""
    compared = "errors" in (result.get("prediction") or {})
    errors = [row["predicted"] / row["seconds"]["median"] - 1 if compared else None for row in rows]
    times = in_ms(row.get("predicted") for row in rows)
    return [Column("predicted ms", times, digits), Column("error", errors, "{:+.0%}".format)]


def agreement(result: Mapping[str, Any]) -> list[str]:
    """A line on how far off predictions are and how alike their order is; none where none were compared."""
    results = result.get("prediction") or {}
    if "errors" not in results:
        return []
    order = "" if results["kendall"] is None else f"; Kendall's tau of the order {results['kendall']:.2f}"
    off = f"median error {results['median_error']:.0%}, largest {max(map(abs, results['errors'])):.0%}{order}"
    return [f"predicted on cluster {results['cluster']} (± {results['band']:.0f} %): {off}"]


def moved(rows: Sequence[ResultRow]) -> list[Column]:
    """The columns of a product's speed, words, messages and workspace."""
    return [
        Column("form and dtype", [operands(row) for row in rows], csv_only=True),
        Column("Gflop/s", [row["gflops"] for row in rows], TENTHS),
        Column("speed ÷ numpy's", [row.get("speed_over_numpy") for row in rows], HUNDREDTHS),
        Column("words/rank", [row["words_per_rank"] for row in rows], COUNT),
        Column("words by formula", [row.get("words_per_rank_formula") for row in rows], COUNT, csv_only=True),
        Column("messages", [row["messages_per_rank"] for row in rows]),
        Column("workspace MiB", [row["workspace_bytes"] / MEBI for row in rows], TENTHS),
    ]


def numpy_remarks(result: Mapping[str, Any]) -> list[str]:
    """A line for each product of numpy that was timed beside the others."""
    return [
        f"numpy, {span([own['threads']], 'thread')}, {sizes(own)} {operands(own)}: {digits(own['seconds']['median'] * 1e3)} ms, "
        f"{own['gflops']:.1f} Gflop/s"
        for own in result["numpy"]
    ]


def gemm_table(result: Mapping[str, Any]) -> Table:
    """The table of `bench gemm`: one line per algorithm and grid, fastest first."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["median"])
    title = f"{gemm_title(result)}, {rounds(rows)}"
    names = Column("algorithm and grid", [row["label"] for row in rows], left=True)
    given = [Column("ranks", [row["ranks"] for row in rows], csv_only=True), Column("m×n×k", [*map(sizes, rows)], csv_only=True)]
    return Table(title, [names, *given, *times(rows), *predicted(result, rows), *moved(rows)], numpy_remarks(result))


def gemm_title(result: Mapping[str, Any]) -> str:
    """Sizes, operands and ranks of `bench gemm`."""
    rows = result["rows"]
    return f"{sizes(rows[0])} {operands(rows[0])}, {in_ranks(max(row['ranks'] for row in rows))}"


def scaling_table(result: Mapping[str, Any]) -> Table:
    """The table of strong and weak scaling: one line per series and rank count, with speed-up and efficiency."""
    results = series_of(result["rows"])
    pairs = [(series, row) for series in results for row in series.rows]
    rows = [row for _, row in pairs]
    several, weak = len(results) > 1, result["kind"] == "weak"
    columns = [
        Column("series", [series.name for series, _ in pairs], left=True, csv_only=not several),
        Column("ranks", [row["ranks"] for row in rows]),
        Column("threads/rank", [row["threads"] for row in rows], csv_only=mixed_threads(rows) is None),
        Column("algorithm and grid", [place(row) for row in rows], left=True),
        Column("m×n×k", [sizes(row) for row in rows], csv_only=not weak),
        *times(rows),
        *predicted(result, rows),
        *of_ratios("speed-up", [series.speed_up(row) for series, row in pairs]),
        Column("efficiency", [ratio and ratio.middle for ratio in (series.efficiency(row) for series, row in pairs)], digits),
        *moved(rows),
    ]
    title = f"{scaling_title(result)}; {baselines(results)}; {rounds(rows)}"
    return Table(title, columns, [*numpy_remarks(result), *filter(None, [mixed_threads(rows), shared_cores(result)])])


def of_ratios(name: str, ratios: Sequence[Spread | None]) -> list[Column]:
    """The columns of a ratio of median times: it, its interval or range for readers, and both ends for programs."""
    return [
        Column(name, [ratio and ratio.middle for ratio in ratios], digits),
        Column(named(ratios) or "", [ratio and ratio.ends for ratio in ratios], shown_only=True),
        *(
            Column(f"{name}, {end}", [ratio and getattr(ratio, end) for ratio in ratios], csv_only=True)
            for end in ("low", "high")
        ),
    ]


def scaling_title(result: Mapping[str, Any]) -> str:
    """Kind, sizes and operands of strong or weak scaling."""
    least = min(result["rows"], key=lambda row: row["ranks"])
    if result["kind"] == "strong":
        return f"Strong scaling of {sizes(least)} {operands(least)}"
    start = f"{sizes(least)} {operands(least)} on {in_ranks(least['ranks'])}"
    return f"Weak scaling from {start}, m, n and k grow with the cube root of the ranks"


def baselines(curves: Sequence[Series]) -> str:
    """Names of what speed-up and efficiency are relative to."""
    names = {series.baseline_name for series in curves}
    return f"speed-up and efficiency over {names.pop() if len(names) == 1 else 'the fewest ranks of each series'}"


def shares_cores(row: ResultRow) -> bool:
    """Return whether the threads of a row's ranks outnumber the cores that these ranks may use."""
    return on_host(row) and row["ranks"] * row["threads"] > row["cores"]


def mixed_threads(rows: Sequence[ResultRow]) -> str | None:
    """A remark on rows whose ranks have different numbers of threads, so that ratios are not those of ranks; else None."""
    counts = {row["threads"] for row in rows}
    if len(counts) == 1 or not on_host(rows[0]):
        return None
    return f"ranks have {span(sorted(counts), 'thread')}: rows with other thread counts than the baseline have no speed-up"


def shared_cores(result: Mapping[str, Any]) -> str | None:
    """A remark on rows whose ranks share cores; None where none do."""
    sharing = [row for row in result["rows"] if shares_cores(row)]
    if not sharing:
        return None
    counts = ", ".join(str(count) for count in sorted({row["ranks"] for row in sharing}))
    return f"ranks share cores in the rows of {counts} ranks ({span([row['cores'] for row in sharing], 'core')})"


def versus_table(result: Mapping[str, Any]) -> Table:
    """Libraries side by side: the time of each, its speed beside numpy's with all cores, and quotients of times."""
    rows, peers = result["rows"], result["peers"]
    quotients, noted = result["quotients"], result.get("noted", ())
    columns = [
        Column("case", [f"{row['case']} {row['dtype']}" for row in rows], left=True),
        Column("P", [row["ranks"] for row in rows]),
        Column("numpy ms", in_ms(row["numpy_seconds"] for row in rows), digits),
        *(Column(f"{peer} ms", in_ms(row["seconds"].get(peer) for row in rows), digits) for peer in peers),
        *(Column(f"{peer} ÷ numpy's speed", [row["fractions"].get(peer) for row in rows], HUNDREDTHS) for peer in peers),
        *(Column(name, [_middle(row, name) for row in rows], HUNDREDTHS) for name in quotients),
        *(Column(f"{name}, range", [_range(row, name) for row in rows]) for name in quotients),
        *(Column(f"{name} ÷ numpy's speed (noted)", [row["noted"].get(name) for row in rows], HUNDREDTHS) for name in noted),
    ]
    return Table("", columns, result.get("remarks", ()))


def _middle(row: ResultRow, name: str) -> float | None:
    return row["quotients"][name]["median"] if name in row["quotients"] else None


def _range(row: ResultRow, name: str) -> str | None:
    ratio = row["quotients"].get(name)
    return None if ratio is None else f"{ratio['min']:.2f}–{ratio['max']:.2f}"


def block_title(result: Mapping[str, Any]) -> str:
    """The title of `bench block`: family, sizes b, s, h and a, ranks; for a paper's shape, its source and scaling."""
    case, paper = result["case"], result.get("paper")
    of = f"b={case['batch']} s={case['sequence']} h={case['hidden']} a={case['heads']} {case['dtype']}{on_device(case)}"
    source = f"; {paper['name']} with s and h divided by {paper['factor']} ({paper['source']})" if paper else ""
    blocks = f"{case['layers']} {case['family']} block{'s' if case['layers'] > 1 else ''}"
    return f"{blocks}, {of}, {in_ranks(result['ranks'])}{source}"


def block_table(result: Mapping[str, Any]) -> Table:
    """The table of `bench block`: one line per scheme and grid, fastest first, with times, words, messages and memory."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["both"]["median"])
    both = [{**row, "seconds": row["seconds"]["both"]} for row in rows]
    columns = [
        Column("scheme and grid", [row["label"] for row in rows], left=True),
        *times(both),
        *predicted(result, both),
        *(Column(phase, in_ms(row["seconds"][phase]["median"] for row in rows), digits) for phase in ("forward", "backward")),
        Column("words/rank", [_sum(row, "words_per_rank") for row in rows], COUNT),
        Column("messages", [_sum(row, "messages_per_rank") for row in rows], COUNT),
        Column("saved MiB", [row["saved_bytes"] / MEBI for row in rows], TENTHS),
        Column("peak MiB", [row["peak_bytes"] / MEBI for row in rows], TENTHS),
    ]
    furthest = max(row["relative_difference"] for row in rows)
    return Table(f"{block_title(result)}, {rounds(both)}", columns, [f"outputs differ by at most {furthest:.1e} of their norm"])


def _sum(row: ResultRow, name: str) -> int | None:
    return sum(row[name].values()) if name in row else None


TABLES = {"gemm": gemm_table, "strong": scaling_table, "weak": scaling_table, "versus": versus_table, "block": block_table}
