"""Plots of benchmark results at the width of a paper's column.

Whiskers of times reach from the fastest to the slowest round, those of ratios over their interval (statistics.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from ..figures import BOTH_COLUMNS, CAPTION, COLOURS, COLUMN, draw, look
from ..gemm.cost.mean import lower_bound
from .series import ResultRow, Series, series_of
from .statistics import Spread, named
from .tables import (
    baselines,
    blas,
    block_title,
    gemm_title,
    in_nodes,
    loaded,
    machines,
    mixed_threads,
    processor,
    rounds,
    scaling_title,
    shares_cores,
    version,
)

CHARACTERS = 24
"""Characters of a caption that fit into an inch."""
WIDE = 8
"""Quotient of the ends of a logarithmic axis, above which it holds three of the numbers 1, 2 and 5."""
NARROW = 2.5
"""Quotient of the ends of a logarithmic axis, below which it may hold fewer than two of 1, 1.5, 2, 3, 5 and 7."""
ROW_HEIGHT = 0.14  # inches of a line of a dot plot
NUMPY, IDEAL, SHARED = "numpy", "ideal", "ranks share cores"


def write(result: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Write the plot of a result to `paths`, whose endings select the formats.

    Raises ImportError where matplotlib is not installed; without paths, it is not needed.
    """
    if paths:
        draw(partial(DRAW[result["kind"]], result=result), paths)


def timed(rows: Sequence[ResultRow], ratios: Iterable[Spread | None] = ()) -> str:
    """Caption for marks and whiskers."""
    kinds = named(ratios)
    return f"{rounds(rows)}, whiskers from the fastest to the slowest" + (f", of ratios their {kinds}" if kinds else "")


def caption(figure: Any, *parts: str | None) -> None:
    """Write a caption below the panels, in lines that fit the figure's width."""
    width = round(CHARACTERS * figure.get_size_inches()[0])
    figure.supxlabel("\n".join(wrap("; ".join(filter(None, parts)), width)), x=0.01, ha="left", **CAPTION)


def on_machines(result: Mapping[str, Any]) -> str:
    """The machines of a result in the few words of a caption."""
    return "; ".join(
        f"{in_nodes(machine)}, {processor(machine)}{loaded(machine)}, "
        f"{multiplier(result, machine)}, {machine['mpi']}, {version(machine)}"
        for machine in machines(result)
    )


def multiplier(result: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """The library that multiplied: torch in blocks, else the BLAS."""
    return f"torch {result['torch']}" if "torch" in result else blas(machine)


def gemm(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw the time and the words of each algorithm and grid, fastest on top, and numpy's time in the last line."""
    rows = sorted(result["rows"], key=lambda row: row["seconds"]["median"])
    names = [row["label"] for row in rows] + [f"{NUMPY}, {own['threads']} threads" for own in result["numpy"]]
    figure.set_size_inches(COLUMN, 1.1 + ROW_HEIGHT * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(names))
    for number, (place, row) in enumerate(zip(places, [*rows, *result["numpy"]], strict=True)):
        own = COLOURS[0] if number < len(rows) else "0.4"
        left.errorbar(row["seconds"]["median"] * 1e3, place, xerr=whiskers([row["seconds"]], 1e3), fmt="o", color=own)
    right.plot([row["words_per_rank"] for row in rows], places[: len(rows)], "o", color=COLOURS[1], clip_on=False)
    left.set_yticks(places, names)
    left.invert_yaxis()
    left.set(xlabel="time (ms)", xscale="log")
    plain(left.xaxis)
    right.set(xlabel="words per rank", xlim=(0, None))
    thousands(right.xaxis)
    caption(figure, gemm_title(result), timed(rows), on_machines(result))


def whiskers(seconds: Sequence[Mapping[str, float]], scale: float = 1.0) -> list[list[float]]:
    """The distances from the median to the fastest and to the slowest round."""
    return [
        [scale * (times["median"] - times["min"]) for times in seconds],
        [scale * (times["max"] - times["median"]) for times in seconds],
    ]


def scaling(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw time, speed-up, efficiency and words per rank against ranks, each on logarithmic axes, with the ideal of each."""
    figure.set_size_inches(COLUMN, 6.6)
    results, panels = series_of(result["rows"]), figure.subplots(4, 1, sharex=True)
    counts = sorted({row["ranks"] for row in result["rows"]})
    fewest = min(series.baseline["ranks"] for series in results)
    foretold = result.get("prediction")
    drawn: list[Spread | None] = []
    for number, series in enumerate(results):
        ranks = [row["ranks"] for row in series.rows]
        speed_ups = [series.speed_up(row) for row in series.rows]
        times(panels[0], number, ranks, series.rows, foretold and foretold["band"])
        ratios(panels[1], number, series.name, ranks, speed_ups)
        ratios(panels[2], number, series.name, ranks, [series.efficiency(row) for row in series.rows])
        moving = [row for row in series.rows if row["words_per_rank"]]
        panels[3].plot([row["ranks"] for row in moving], [row["words_per_rank"] for row in moving], **look(number))
        drawn += speed_ups
    panels[1].plot(counts, [count / fewest for count in counts], "--", color="0.5", label=IDEAL)
    panels[2].plot(counts, [1] * len(counts), "--", color="0.5")
    least = {row["ranks"]: lower_bound(row["m"], row["n"], row["k"], row["ranks"]) for row in result["rows"]}
    bounds = [least[count] or None for count in counts]
    bound = panels[3].plot(counts, bounds, "--_", color="0.5", label="least if every operand is held once")
    speed = "speed-up" if result["kind"] == "strong" else "scaled speed-up"
    for panel, name in zip(panels, ("seconds", speed, "efficiency", "words received per rank"), strict=True):
        panel.set(xscale="log", yscale="log", ylabel=name)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.xaxis.minorticks_off()
        shade_shared(panel, result["rows"], counts)
        plain(panel.yaxis)
    panels[3].set_xlabel("ranks")
    thousands(panels[3].yaxis)
    panels[3].legend(handles=bound)
    figure.align_ylabels()
    handles, labels = panels[1].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: labels[place] in (IDEAL, SHARED))  # series first
    legend(figure, [handles[place] for place in order], [labels[place] for place in order])
    remarks = (forecast(foretold), mixed_threads(result["rows"]), without_words(results))
    caption(figure, scaling_title(result), baselines(results), *remarks, timed(result["rows"], drawn), on_machines(result))


def forecast(prediction: Mapping[str, Any] | None) -> str | None:
    """Caption for dotted lines, which are times predicted for a cluster, with its band; None without predictions."""
    return None if prediction is None else f"dotted: predicted for {prediction['cluster']} ±{prediction['band']:g} %"


def times(panel: Any, number: int, x: Sequence[Any], rows: Sequence[ResultRow], band: float | None) -> None:
    """Draw measured seconds, whiskers from the fastest to the slowest round, and predicted ones, dotted in their `band` (%)."""
    style = look(number)
    panel.errorbar(x, [row["seconds"]["median"] for row in rows], yerr=whiskers([row["seconds"] for row in rows]), **style)
    foretold = [(at, row["predicted"]) for at, row in zip(x, rows, strict=True) if row.get("predicted") is not None]
    if foretold and band is not None:
        at, seconds = zip(*foretold, strict=True)
        more = 1 + band / 100
        panel.plot(at, seconds, ":", color=style["color"])
        ends = [second / more for second in seconds], [second * more for second in seconds]
        panel.fill_between(at, *ends, color=style["color"], alpha=0.12, lw=0)


def legend(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int = 4) -> None:
    """Put a legend above the panels, in as many columns as fit the figure's width."""
    made = figure.legend(handles, labels, loc="outside upper center", ncols=columns)
    if columns > 1 and made.get_window_extent().width > figure.bbox.width:
        made.remove()
        legend(figure, handles, labels, columns - 1)


def without_words(curves: Sequence[Series]) -> str | None:
    """A remark on series with rows that receive no words on several ranks, which a logarithmic axis cannot show; else None."""
    silent = [series.name for series in curves if any(row["ranks"] > 1 and not row["words_per_rank"] for row in series.rows)]
    return f"points of 0 words are not drawn ({', '.join(silent)})" if silent else None


def ratios(panel: Any, number: int, name: str, x: Sequence[Any], values: Sequence[Spread | None]) -> None:
    """Draw the ratios that there are at their places, with whiskers over their intervals."""
    there = [(at, value) for at, value in zip(x, values, strict=True) if value]
    reach = [[value.middle - value.low for _, value in there], [value.high - value.middle for _, value in there]]
    panel.errorbar([at for at, _ in there], [value.middle for _, value in there], yerr=reach, label=name, **look(number))


def plain(axis: Any) -> None:
    """Label a logarithmic axis by two or more plain numbers: 1, 2 and 5 of each decade, or more where there is hardly one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    wider = max(1.0, (NARROW * low / high) ** 0.5)
    axis.set_view_interval(low / wider, high * wider, ignore=True)
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high > WIDE * low else (1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def thousands(axis: Any) -> None:
    """Label an axis by numbers of thousands (k), millions (M) and so on."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def shade_shared(panel: Any, rows: Sequence[ResultRow], counts: Sequence[int]) -> None:
    """Shade the rank counts whose ranks share cores, where no further speed-up can be expected."""
    sharing = [row["ranks"] for row in rows if shares_cores(row)]
    if sharing:
        below = [count for count in counts if count < min(sharing)]
        start = (min(sharing) * below[-1]) ** 0.5 if below else counts[0] / 1.1
        panel.axvspan(start, max(counts) * 1.1, color="0.92", zorder=0, label=SHARED)
        panel.set_xlim(counts[0] / 1.1, max(counts) * 1.1)


def versus(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw each library's speed beside numpy's with all cores, case by case, and published fractions as crosses."""
    rows, peers = result["rows"], result["peers"]
    figure.set_size_inches(BOTH_COLUMNS if len(rows) > 8 else COLUMN, 2.8)
    axes, width, places = figure.add_subplot(), 0.8 / len(peers), range(len(rows))
    for number, peer in enumerate(peers):
        heights = [row["fractions"].get(peer, 0) for row in rows]
        shifted = [place + (number - (len(peers) - 1) / 2) * width for place in places]
        axes.bar(shifted, heights, width, label=peer, color=COLOURS[number])
    for name in result.get("noted", ()):
        known = [(place, row["noted"][name]) for place, row in zip(places, rows, strict=True) if name in row["noted"]]
        if known:
            axes.plot(*zip(*known, strict=True), "x", color="black", label=f"{name} (noted, not this run)")
    axes.axhline(1, color="0.5", linewidth=0.8, label=NUMPY)
    labels = [f"{row['case']} {row['dtype'].replace('float', 'f')} P={row['ranks']}" for row in rows]
    axes.set_xticks(places, labels, rotation=90, fontsize=5.5)
    axes.set_ylabel("speed ÷ numpy's, all cores")
    axes.grid(visible=False, axis="x")
    legend(figure, *axes.get_legend_handles_labels())
    caption(figure, "C = A·B", on_machines(result))


def block(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw the time of each entry against the words that a rank receives, a colour for each scheme."""
    figure.set_size_inches(COLUMN, 3.2)
    axes = figure.add_subplot()
    rows = [row for row in result["rows"] if "words_per_rank" in row]
    for number, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
        for keeps in (False, True):
            own = [row for row in rows if row["scheme"] == scheme and row["regather"] is not keeps]
            axes.errorbar(
                [sum(row["words_per_rank"].values()) for row in own],
                [row["seconds"]["both"]["median"] * 1e3 for row in own],
                yerr=whiskers([row["seconds"]["both"] for row in own], 1e3),
                linestyle="none",
                elinewidth=0.4,
                capsize=0,
                label=None if keeps else scheme,
                markerfacecolor="white" if keeps else look(number)["color"],
                **look(number),
            )
    axes.set(xlabel="words received per rank, forward and backward", ylabel="time of forward and backward (ms)")
    axes.set(xscale="log", yscale="log")
    plain(axes.yaxis)
    plain(axes.xaxis)
    thousands(axes.xaxis)
    legend(figure, *axes.get_legend_handles_labels())
    best = min(rows, key=lambda row: row["seconds"]["both"]["median"])["label"]
    open_marks = "open: gathered operands are kept" if any(not row["regather"] for row in rows) else ""
    both = [{"seconds": row["seconds"]["both"]} for row in rows]
    caption(figure, block_title(result), f"the fastest is {best}", open_marks, timed(both), on_machines(result))


DRAW = {"gemm": gemm, "strong": scaling, "weak": scaling, "versus": versus, "block": block}
