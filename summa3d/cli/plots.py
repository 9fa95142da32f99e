"""Plots of benchmark results: bars of times, and lines of scaling. matplotlib is imported at the first plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .tables import block_title, scaling

NUMPY_LABEL = "numpy, all cores"


def figure(result: Mapping[str, Any]) -> Any:
    """A matplotlib figure of a benchmark result of any kind. Raises ImportError where matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(drawn)
    DRAW[result["kind"]](drawn.add_subplot(), result)
    return drawn


def gemm(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw a bar for the median time of each entry, whiskers from its fastest to its slowest round, and the ceiling as a line."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["median"], reverse=True)
    middle = [row["seconds"]["median"] * 1e3 for row in rows]
    below = [(row["seconds"]["median"] - row["seconds"]["min"]) * 1e3 for row in rows]
    above = [(row["seconds"]["max"] - row["seconds"]["median"]) * 1e3 for row in rows]
    axes.barh([row["label"] for row in rows], middle, xerr=[below, above], color="tab:blue", ecolor="0.4", capsize=3)
    for top in result["ceiling"]:
        axes.axvline(top["seconds"]["median"] * 1e3, color="tab:red", label=f"numpy, {top['threads']} threads")
    if result["ceiling"]:
        axes.legend()
    axes.set(xlabel="ms", title="{m}×{n}×{k} {form} {dtype}, {ranks} ranks".format_map(rows[0]))


def strong(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw the speed-up over the smallest rank count, and the ideal speed-up, which stops at the number of cores."""
    _lines(axes, result)
    counts = sorted({row["ranks"] for row in result["rows"]})
    cores = result["machine"]["cores"] if result.get("machine") else counts[-1]
    perfect = [max(1, min(count, cores) / counts[0]) for count in counts]
    axes.plot(counts, perfect, "--", color="0.6", label=f"perfect on {cores} cores")
    axes.set(ylabel=f"speed-up over {counts[0]} rank{'s' if counts[0] > 1 else ''}", title="strong scaling")
    axes.legend()


def weak(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw Gflop/s relative to the smallest rank count; the work per rank is constant."""
    strong(axes, result)
    title = "weak scaling: m, n and k grow with the cube root of the ranks"
    axes.set(ylabel="Gflop/s relative to the smallest rank count", title=title)


def _lines(axes: Any, result: Mapping[str, Any]) -> None:
    rows = sorted(result["rows"], key=lambda row: row["ranks"])
    for name in sorted({row["algorithm"] for row in rows}):
        own = [row for row in rows if row["algorithm"] == name]
        axes.plot([row["ranks"] for row in own], [scaling(row, rows) for row in own], "o-", label=name)
    counts = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.3)


def versus(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw each library's fraction of numpy's speed with all cores, case by case, and published fractions as marks."""
    rows, peers = result["rows"], result["peers"]
    width = 0.8 / len(peers)
    places = range(len(rows))
    for number, peer in enumerate(peers):
        heights = [row["fractions"].get(peer, 0) for row in rows]
        axes.bar([place + (number - (len(peers) - 1) / 2) * width for place in places], heights, width, label=peer)
    for name, mark in zip(result.get("noted", ()), "_x+", strict=False):
        known = [(place, row["noted"][name]) for place, row in zip(places, rows, strict=True) if name in row.get("noted", {})]
        if known:
            axes.plot(*zip(*known, strict=True), mark, color="black", label=f"{name} (noted, not this run)")
    axes.axhline(1, color="0.5", linewidth=0.8, label=NUMPY_LABEL)
    labels = [f"{row['case']}\n{row['dtype'].replace('float', 'f')}\nP={row['ranks']}" for row in rows]
    axes.set_xticks(list(places), labels, fontsize=7 if len(rows) < 16 else 5)
    axes.set(ylabel="fraction of the ceiling", title="C = A·B: time of numpy with all cores ÷ time of each")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
    axes.figure.set_size_inches(max(9, 0.45 * len(rows)), 5)


def block(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw stacked bars of forward and backward of each scheme and grid, whiskers over the rounds, and the words moved."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["both"]["median"], reverse=True)
    labels = [row["label"] for row in rows]
    forward, backward = ([row["seconds"][phase]["median"] * 1e3 for row in rows] for phase in ("forward", "backward"))
    ends = [first + second for first, second in zip(forward, backward, strict=True)]
    whiskers: list[list[float]] = [[], []]
    for row, end in zip(rows, ends, strict=True):
        whiskers[0].append(max(0.0, end - row["seconds"]["both"]["min"] * 1e3))
        whiskers[1].append(max(0.0, row["seconds"]["both"]["max"] * 1e3 - end))
    axes.barh(labels, forward, color="tab:blue", label="forward")
    axes.barh(labels, backward, left=forward, xerr=whiskers, color="tab:orange", ecolor="0.4", capsize=3, label="backward")
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        if "words_per_rank" in row:
            axes.annotate(f" {sum(row['words_per_rank'].values()) / 1e6:.2f} M words", (end, place), va="bottom", fontsize=7)
    axes.set(xlabel="ms", title=block_title(result))
    axes.title.set_fontsize(9)
    axes.legend()
    axes.figure.set_size_inches(9, max(5, 0.3 * len(rows)))


DRAW = {"gemm": gemm, "strong": strong, "weak": weak, "versus": versus, "block": block}
