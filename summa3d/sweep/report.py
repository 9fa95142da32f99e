"""Tables and plots of a sweep's points: speed-up and efficiency beside the ideal, predictions and published points."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench import tables
from ..bench.plots import caption, forecast, legend, on_machines, plain, ratios, thousands, timed, times
from ..bench.race import COMPUTE, OTHER
from ..bench.results import alike, of_lines
from ..bench.series import in_ranks
from ..bench.statistics import Spread, ratio, times_of
from ..bench.tables import COUNT, HUNDREDTHS, digits, of_ratios, rounds
from ..figures import COLOURS, COLUMN, look
from ..table import Column, Table
from .lines import SweepLine

SWEEP = "sweep"
OF_TABLES = "paper"
"""What published points of earlier versions name: a table that is no longer installed."""
SUBJECTS = {"block": "transformer blocks, forward and backward", "train": "training steps", "gemm": "products"}
IDEAL = "ideal"
GIGA = 1e9
PANEL = 1.75
"""Height of a panel in inches."""


@dataclass(frozen=True)
class Curve:
    """The points of one line of a plot, the fastest of each x, in order; speeds are relative to the first."""

    name: str
    lines: Sequence[SweepLine]

    def times(self, line: SweepLine) -> Spread:
        """Time of the first point ÷ time of this one: the efficiency of weak scaling where the work per rank is equal."""
        return ratio(self.lines[0]["seconds"]["all"], line["seconds"]["all"])

    def speed(self, line: SweepLine) -> Spread:
        """FLOP/s ÷ FLOP/s of the first point."""
        return self.times(line).times(line["flops"] / self.lines[0]["flops"])

    def efficiency(self, line: SweepLine) -> Spread:
        """FLOP/s per rank ÷ those of the first point."""
        return self.speed(line).times(self.lines[0]["ranks"] / line["ranks"])


def rate(line: SweepLine) -> float:
    """FLOP/s by the median time."""
    return float(line["flops"] / line["seconds"]["median"])


def results(lines: Sequence[SweepLine]) -> list[dict[str, Any]]:
    """Results for tables and plots: products as `summa3d bench` has them, blocks and training steps as sweeps, by their names."""
    outcome: list[dict[str, Any]] = []
    named: dict[tuple[str, str], list[SweepLine]] = {}
    for line in sorted(lines, key=lambda line: int(line["ranks"])):
        named.setdefault((line["sweep"]["name"], line["what"]), []).append(line)
    for (_, what), own in named.items():
        good = pooled([line for line in own if "error" not in line])
        failed = [f"{line['id']} {line['label']}: {line['error'].splitlines()[0]}" for line in own if "error" in line]
        if what == "gemm" and good:
            rows = [{**line["row"], "machine": line["machine"], "predicted": line["predicted"]} for line in good]
            about = {"failed": failed, "prediction": prediction(good[0]["sweep"])}
            outcome += [{**result, **about} for result in of_lines(rows)]
        else:
            machines = alike([line["machine"] for line in good])
            outcome.append({"kind": SWEEP, "rows": good, "failed": failed, "machines": machines})
    return outcome


def prediction(about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The cluster that a sweep's times were predicted for, and its band; None where they were not."""
    return {"cluster": about["cluster"], "band": about["band"]} if about["cluster"] else None


def pooled(lines: Sequence[SweepLine]) -> list[SweepLine]:
    """The lines, the repeats of a point of blocks or steps as one line with all their rounds (of products, rows are joined)."""
    groups: dict[str, list[SweepLine]] = {}
    for line in lines:
        content = line["id"] if line["what"] == "gemm" else json.dumps([line["ranks"], line["config"]], sort_keys=True)
        groups.setdefault(content, []).append(line)
    return [
        {**group[0], "seconds": times_of([seconds for line in group for seconds in line["seconds"]["all"]])}
        for group in groups.values()
    ]


def curves(lines: Iterable[SweepLine]) -> list[Curve]:
    """The lines of a plot, by series; of several grids at one x, the fastest."""
    result: dict[str, dict[Any, SweepLine]] = {}
    for line in lines:
        own = result.setdefault(line["series"], {})
        if line["x"] not in own or rate(line) > rate(own[line["x"]]):
            own[line["x"]] = line
    return [Curve(name, [own[x] for x in sorted(own, key=_order)]) for name, own in result.items()]


def _order(x: Any) -> tuple[bool, Any]:
    return isinstance(x, str), x


def table(result: Mapping[str, Any]) -> Table:
    """A row for each point: its times, prediction, speed-up and efficiency, words measured and by the formula."""
    lines, results = result["rows"], {curve.name: curve for curve in curves(result["rows"])}
    if not lines:
        return Table("no point was measured", [], result["failed"])
    about = lines[0]["sweep"]
    of = [results[line["series"]] for line in lines]
    pairs = list(zip(of, lines, strict=True))
    scaling = about["kind"] != "grid"
    columns = [
        Column("id", [line["id"] for line in lines], csv_only=True),
        Column("point", [line["label"] for line in lines], left=True),
        Column("ranks", [line["ranks"] for line in lines]),
        Column(about["x"], [line["x"] for line in lines], csv_only=about["x"] in ("ranks", "grid")),
        *tables.times(lines),
        *tables.predicted({}, lines),
        Column("Gflop/s", [rate(line) / GIGA for line in lines], digits),
        Column("GFLOP/rank", [line["flops"] / line["ranks"] / GIGA for line in lines], digits),
        *of_ratios("speed-up", [curve.speed(line) for curve, line in pairs]),
        Column("efficiency", [curve.efficiency(line).middle if scaling else None for curve, line in pairs], HUNDREDTHS),
        Column("t₀/t", [curve.times(line).middle if about["kind"] == "weak" else None for curve, line in pairs], HUNDREDTHS),
        Column("words/rank", [line["words"] for line in lines], COUNT),
        Column("formula", [line["words_formula"] for line in lines], COUNT),
        Column("computing", [_share(line) for line in lines], "{:.0%}".format),
        Column("raced with", [line["race"] - 1 for line in lines], csv_only=True),
    ]
    return Table(f"{title(about, lines)}; {baseline(results.values(), about)}; {rounds(lines)}", columns, result["failed"])


def _share(line: SweepLine) -> float | None:
    """The share of the time in which a rank computes, on average."""
    return line["split"][COMPUTE] / sum(line["split"].values()) if line.get("split") else None


def title(about: Mapping[str, Any], lines: Sequence[SweepLine]) -> str:
    """The sweep's name, kind and subject."""
    kind = {"strong": "strong scaling of ", "weak": "weak scaling of ", "grid": ""}[about["kind"]]
    return f"{about['name']}: {kind}{SUBJECTS[lines[0]['what']]}"


def baseline(curves: Iterable[Curve], about: Mapping[str, Any]) -> str:
    """Point that speed-ups are relative to."""
    first = {curve.lines[0]["ranks"] for curve in curves}
    least = f" ({in_ranks(first.pop())})" if len(first) == 1 and about["x"] == "ranks" else ""
    return f"speed-up of FLOP/s over the first point of each series{least}"


def published(about: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Name of a series here → x and FLOP/s, relative to the first, of the points that a paper prints."""
    given = about["published"]
    return (
        {}
        if OF_TABLES in given
        else {name: [(x, speed) for x, speed in points] for name, points in given.get("series", {}).items()}
    )


def source(about: Mapping[str, Any]) -> str | None:
    """Source of the published points."""
    given = about["published"]
    if OF_TABLES in given:
        return f"not drawn: the published points, which lines of earlier versions name by the paper ({given[OF_TABLES]})"
    return f"hollow: published ({given['source']}), relative to its own first point" if given else None


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw seconds, speed-up, in scaling efficiency as well, words per rank, and where the time goes."""
    lines = result["rows"]
    about, results, marks = lines[0]["sweep"], curves(lines), published(lines[0]["sweep"])
    scaling = about["kind"] != "grid"
    panels = figure.subplots(5 if scaling else 4, 1)
    figure.set_size_inches(COLUMN, PANEL * len(panels) + 0.7)
    seconds, speed, *efficiency, words, shared = panels
    ticks = sorted({line["x"] for line in lines} | {x for points in marks.values() for x, _ in points}, key=_order)
    for number, curve in enumerate(results):
        times(seconds, number, [line["x"] for line in curve.lines], curve.lines, about["band"])
    seconds.set(ylabel="seconds")
    _relative(speed, results, marks)
    for panel in efficiency:
        _relative(panel, results, marks, per_rank=True)
        panel.axhline(1, linestyle="--", color="0.5")
    _words(words, results, about["x"])
    if scaling:
        first = min(line["ranks"] for line in lines)
        speed.plot(ticks, [x / first for x in ticks], "--", color="0.5", label=IDEAL)
        for panel in (seconds, *efficiency, words):
            panel.sharex(speed)
    for panel in (seconds, speed, *efficiency, words):
        _scale(panel, ticks)
    thousands(words.yaxis)
    shares(shared, results)
    legend(figure, *speed.get_legend_handles_labels())
    spreads = [curve.speed(line) for curve in results for line in curve.lines[1:]]
    what = (title(about, lines), baseline(results, about), forecast(prediction(about)), source(about))
    caption(figure, *what, timed(lines, spreads), on_machines(result))


def _relative(
    panel: Any, curves: Sequence[Curve], marks: Mapping[str, Sequence[tuple[float, float]]], per_rank: bool = False
) -> None:
    """Speed-ups, or `per_rank` efficiencies: measured, and published as hollow marks."""
    names = list(dict.fromkeys([*(curve.name for curve in curves), *marks]))
    for number, curve in enumerate(curves):
        of = curve.efficiency if per_rank else curve.speed
        ratios(panel, number, curve.name, [line["x"] for line in curve.lines], [of(line) for line in curve.lines])
    for name, points in marks.items():
        hollow = {**look(names.index(name)), "linestyle": "none", "markerfacecolor": "none"}
        panel.plot([x for x, _ in points], [y * points[0][0] / x if per_rank else y for x, y in points], **hollow)
    panel.set(ylabel="efficiency" if per_rank else "speed-up")


def _words(panel: Any, curves: Sequence[Curve], x: str) -> None:
    """Words of the points that receive some."""
    for number, curve in enumerate(curves):
        moving = [line for line in curve.lines if line["words"]]
        panel.plot([line["x"] for line in moving], [line["words"] for line in moving], **look(number))
    panel.set(ylabel="words received per rank", xlabel=x)


def _scale(panel: Any, ticks: Sequence[Any]) -> None:
    """Logarithmic axes; of x only where it has numbers."""
    panel.set_yscale("log")
    if all(isinstance(x, (int, float)) for x in ticks):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
        panel.xaxis.minorticks_off()
    plain(panel.yaxis)


def shares(panel: Any, curves: Sequence[Curve]) -> None:
    """Stack where the time of each point goes: arithmetic, the calls and waits of each axis, the rest."""
    drawn = [(curve, line) for curve in curves for line in curve.lines if line.get("split")]
    parts = [COMPUTE, *sorted({name for _, line in drawn for name in line["split"]} - {COMPUTE, OTHER}), OTHER]
    below = [0.0] * len(drawn)
    for number, part in enumerate(parts):
        heights = [line["split"].get(part, 0.0) / sum(line["split"].values()) for _, line in drawn]
        colour = "0.85" if part == OTHER else COLOURS[number % len(COLOURS)]
        panel.bar(range(len(drawn)), heights, 0.8, bottom=below, label=part, color=colour)
        below = [item + height for item, height in zip(below, heights, strict=True)]
    labels = [f"{curve.name} {line['x']}" for curve, line in drawn]
    panel.set_xticks(range(len(drawn)), labels, rotation=90, fontsize=5)
    panel.set(ylabel="share of a rank's time", ylim=(0, 1))
    panel.grid(visible=False, axis="x")
    panel.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
