"""Tables and plots of a sweep's points: speed-up and efficiency beside the ideal, predictions and published points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..bench.plots import caption, legend, on_machines, plain, thousands, timed
from ..bench.results import alike, of_lines
from ..bench.series import in_ranks
from ..bench.table import Column, Table
from ..bench.tables import COUNT, HUNDREDTHS, digits, in_ms, rounds
from ..bench.traced import COMPUTE, OTHER
from ..figures import COLOURS, COLUMN, look
from ..plan.papers.paper import table_of as paper_of
from .lines import SweepLine

SWEEP = "sweep"
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

    def speed(self, line: SweepLine) -> float:
        """FLOP/s ÷ FLOP/s of the first point."""
        return rate(line) / rate(self.lines[0])

    def predicted(self, line: SweepLine) -> float | None:
        """The same of predicted times."""
        first, own = self.lines[0].get("predicted"), line.get("predicted")
        return None if not first or not own else line["flops"] / own * first / self.lines[0]["flops"]

    def efficiency(self, line: SweepLine) -> float:
        """FLOP/s per rank ÷ those of the first point."""
        return float(self.speed(line) * self.lines[0]["ranks"] / line["ranks"])

    def times(self, line: SweepLine) -> float:
        """Time of the first point ÷ time of this one: the efficiency of weak scaling where the work per rank is equal."""
        return float(self.lines[0]["seconds"]["median"] / line["seconds"]["median"])


def rate(line: SweepLine) -> float:
    """FLOP/s by the median time."""
    return float(line["flops"] / line["seconds"]["median"])


def results(lines: Sequence[SweepLine]) -> list[dict[str, Any]]:
    """Results for tables and plots: products as `summa3d bench` has them, blocks and training steps as sweeps, by their names."""
    found: list[dict[str, Any]] = []
    named: dict[tuple[str, str], list[SweepLine]] = {}
    for line in sorted(lines, key=lambda line: int(line["ranks"])):
        named.setdefault((line["sweep"]["name"], line["what"]), []).append(line)
    for (_, what), own in named.items():
        good = [line for line in own if "error" not in line]
        failed = [f"{line['id']} {line['label']}: {line['error'].splitlines()[0]}" for line in own if "error" in line]
        if what == "gemm" and good:
            rows = [{**line["row"], "machine": line["machine"], "predicted": line["predicted"]} for line in good]
            found += [{**result, "failed": failed} for result in of_lines(rows)]
        else:
            machines = alike([line["machine"] for line in good])
            found.append({"kind": SWEEP, "rows": good, "failed": failed, "machines": machines})
    return found


def curves(lines: Iterable[SweepLine]) -> list[Curve]:
    """The lines of a plot, by series; of several grids at one x, the fastest."""
    found: dict[str, dict[Any, SweepLine]] = {}
    for line in lines:
        own = found.setdefault(line["series"], {})
        if line["x"] not in own or rate(line) > rate(own[line["x"]]):
            own[line["x"]] = line
    return [Curve(name, [own[x] for x in sorted(own, key=_order)]) for name, own in found.items()]


def _order(x: Any) -> tuple[bool, Any]:
    return isinstance(x, str), x


def table(result: Mapping[str, Any]) -> Table:
    """A row for each point: its times, prediction, speed-up and efficiency, words measured and by the formula."""
    lines, found = result["rows"], {curve.name: curve for curve in curves(result["rows"])}
    if not lines:
        return Table("no point was measured", [], result["failed"])
    about = lines[0]["sweep"]
    of = [found[line["series"]] for line in lines]
    pairs = list(zip(of, lines, strict=True))
    scaling = about["kind"] != "grid"
    columns = [
        Column("id", [line["id"] for line in lines], csv_only=True),
        Column("point", [line["label"] for line in lines], left=True),
        Column("ranks", [line["ranks"] for line in lines]),
        Column(about["x"], [line["x"] for line in lines], csv_only=about["x"] in ("ranks", "grid")),
        Column("median ms", in_ms(line["seconds"]["median"] for line in lines), digits),
        Column("min", in_ms(line["seconds"]["min"] for line in lines), digits),
        Column("max", in_ms(line["seconds"]["max"] for line in lines), digits),
        Column("predicted ms", in_ms(line.get("predicted") for line in lines), digits),
        Column("Gflop/s", [rate(line) / GIGA for line in lines], digits),
        Column("GFLOP/rank", [line["flops"] / line["ranks"] / GIGA for line in lines], digits),
        Column("speed-up", [curve.speed(line) for curve, line in pairs], HUNDREDTHS),
        Column("efficiency", [curve.efficiency(line) if scaling else None for curve, line in pairs], HUNDREDTHS),
        Column("t₀/t", [curve.times(line) if about["kind"] == "weak" else None for curve, line in pairs], HUNDREDTHS),
        Column("words/rank", [line["words"] for line in lines], COUNT),
        Column("formula", [line["words_formula"] for line in lines], COUNT),
        Column("computing", [_share(line) for line in lines], "{:.0%}".format),
        Column("raced with", [line["race"] - 1 for line in lines], csv_only=True),
    ]
    return Table(f"{title(about, lines)}; {baseline(found.values(), about)}; {rounds(lines)}", columns, result["failed"])


def _share(line: SweepLine) -> float | None:
    """The share of the time in which a rank computes, on average."""
    return line["split"][COMPUTE] / sum(line["split"].values()) if line.get("split") else None


def title(about: Mapping[str, Any], lines: Sequence[SweepLine]) -> str:
    """The sweep's name, kind and subject."""
    kind = {"strong": "strong scaling of ", "weak": "weak scaling of ", "grid": ""}[about["kind"]]
    return f"{about['name']}: {kind}{SUBJECTS[lines[0]['what']]}"


def baseline(found: Iterable[Curve], about: Mapping[str, Any]) -> str:
    """What speed-ups are relative to."""
    first = {curve.lines[0]["ranks"] for curve in found}
    least = f" ({in_ranks(first.pop())})" if len(first) == 1 and about["x"] == "ranks" else ""
    return f"speed-up of FLOP/s over the first point of each series{least}"


def published(about: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Name of a series here → x and FLOP/s, relative to the first, of the points that a paper prints."""
    given = about["published"]
    if not given:
        return {}
    paper = paper_of(given["paper"])
    found = {}
    for name, theirs in given["series"].items():
        points = []
        for row in paper["row"]:
            if row["series"] == theirs:
                whole = {**paper.get("step", {}), "layers": paper.get("layers"), **row}
                whole.setdefault("gpus", prod(row.get("axes", {}).values()))
                sequence = whole.get("sequence") or paper["sequence"]
                points.append((float(whole[given.get("x", "gpus")]), _speed(whole, int(sequence))))
        points.sort()
        found[name] = [(x, speed / points[0][1]) for x, speed in points]
    return found


def _speed(row: Mapping[str, Any], sequence: int) -> float:
    """FLOP/s of a row, up to a factor that all rows of a series share: from FLOP/s, sequences per second, or seconds."""
    flops = row["layers"] * (6 * row["hidden"] ** 2 + sequence * row["hidden"])  # of a sequence's products, in units of 4s
    if "tflops" in row:
        return float(row["tflops"] * row["gpus"])
    if "sequences" in row:
        return float(row["sequences"] * flops)
    seconds = row.get("corrected", row.get("average"))
    if seconds is None:
        seconds = row["step"] / row["batch"] if "step" in row else row["forward"] + row["backward"]
    return float(flops / seconds)


def source(about: Mapping[str, Any]) -> str | None:
    """Where the published points are from."""
    if not about["published"]:
        return None
    paper = paper_of(about["published"]["paper"])
    return f"hollow: published ({paper['source'].partition(';')[0]}), relative to its own first point"


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw speed-up, in scaling efficiency as well, words per rank, and where the time goes."""
    lines = result["rows"]
    about, found, marks = lines[0]["sweep"], curves(lines), published(lines[0]["sweep"])
    scaling = about["kind"] != "grid"
    panels = figure.subplots(4 if scaling else 3, 1)
    figure.set_size_inches(COLUMN, PANEL * len(panels) + 0.7)
    speed, *efficiency, words, times = panels
    ticks = sorted({line["x"] for line in lines} | {x for points in marks.values() for x, _ in points}, key=_order)
    _relative(speed, found, marks)
    for panel in efficiency:
        _relative(panel, found, marks, per_rank=True)
        panel.axhline(1, linestyle="--", color="0.5")
    _words(words, found, about["x"])
    if scaling:
        first = min(line["ranks"] for line in lines)
        speed.plot(ticks, [x / first for x in ticks], "--", color="0.5", label=IDEAL)
        for panel in (*efficiency, words):
            panel.sharex(speed)
    for panel in (speed, *efficiency, words):
        _scale(panel, ticks)
    thousands(words.yaxis)
    shares(times, found)
    legend(figure, *speed.get_legend_handles_labels())
    spread = about["band"]
    forecast_says = f"dotted: predicted for {about['cluster']} ±{spread:g} %" if about["cluster"] else None
    says = (title(about, lines), baseline(found, about), forecast_says, source(about), timed(lines), on_machines(result))
    caption(figure, *says)


def _relative(
    panel: Any, found: Sequence[Curve], marks: Mapping[str, Sequence[tuple[float, float]]], per_rank: bool = False
) -> None:
    """Speed-ups, or `per_rank` efficiencies: measured, predicted, and published as hollow marks."""
    names = list(dict.fromkeys([*(curve.name for curve in found), *marks]))
    for number, curve in enumerate(found):
        growth = [line["ranks"] / curve.lines[0]["ranks"] if per_rank else 1 for line in curve.lines]
        values = ([of(line) for line in curve.lines] for of in (curve.speed, curve.predicted))
        _line(panel, curve, number, *([one and one / by for one, by in zip(own, growth, strict=True)] for own in values))
    for name, points in marks.items():
        hollow = {**look(names.index(name)), "linestyle": "none", "markerfacecolor": "none"}
        panel.plot([x for x, _ in points], [y * points[0][0] / x if per_rank else y for x, y in points], **hollow)
    panel.set(ylabel="efficiency" if per_rank else "speed-up")


def _words(panel: Any, found: Sequence[Curve], x: str) -> None:
    """Words of the points that receive some."""
    for number, curve in enumerate(found):
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


def _line(panel: Any, curve: Curve, number: int, values: Sequence[Any], predicted: Sequence[Any]) -> None:
    """A line of medians with whiskers, and a dotted one of what was predicted, with its band."""
    style, x = look(number), [line["x"] for line in curve.lines]
    pairs = [(value, line["seconds"]) for value, line in zip(values, curve.lines, strict=True)]
    low, high = ([value * one["median"] / one[end] for value, one in pairs] for end in ("max", "min"))
    reach = [[value - end for (value, _), end in zip(pairs, low, strict=True)]]
    reach.append([end - value for (value, _), end in zip(pairs, high, strict=True)])
    panel.errorbar(x, values, yerr=reach, label=curve.name, **style)
    known = [(at, value) for at, value in zip(x, predicted, strict=True) if value is not None]
    if known:
        at, middle = zip(*known, strict=True)
        more = 1 + curve.lines[0]["sweep"]["band"] / 100
        panel.plot(at, middle, ":", color=style["color"])
        ends = [value / more for value in middle], [value * more for value in middle]
        panel.fill_between(at, *ends, color=style["color"], alpha=0.12, lw=0)


def shares(panel: Any, found: Sequence[Curve]) -> None:
    """Stack where the time of each point goes: arithmetic, the calls and waits of each axis, the rest."""
    drawn = [(curve, line) for curve in found for line in curve.lines if line.get("split")]
    parts = [COMPUTE, *sorted({name for _, line in drawn for name in line["split"]} - {COMPUTE, OTHER}), OTHER]
    below = [0.0] * len(drawn)
    for number, part in enumerate(parts):
        heights = [line["split"].get(part, 0.0) / sum(line["split"].values()) for _, line in drawn]
        colour = "0.85" if part == OTHER else COLOURS[number % len(COLOURS)]
        panel.bar(range(len(drawn)), heights, 0.8, bottom=below, label=part, color=colour)
        below = [one + height for one, height in zip(below, heights, strict=True)]
    labels = [f"{curve.name} {line['x']}" for curve, line in drawn]
    panel.set_xticks(range(len(drawn)), labels, rotation=90, fontsize=5)
    panel.set(ylabel="share of a rank's time", ylim=(0, 1))
    panel.grid(visible=False, axis="x")
    panel.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
