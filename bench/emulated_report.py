"""What emulated_nodes.py says of its measurements: rows, claims, the block of a page, and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from statistics import median
from typing import Any

from common import about, verdict

from summa3d.columns import counted
from summa3d.table import Column, Table

WITHIN, APART, BEST, HEADERS = 0.20, 0.15, 0.05, 0.05
"""A time is to be within WITHIN of its prediction; times whose predictions are further apart than APART are to be in their order;
the plan that is predicted the fastest is to be within BEST of the fastest; headers may add HEADERS to the bytes of a port."""
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


def title(race: Mapping[str, Any]) -> str:
    """Say what a race is about, and where it ran."""
    where = f"{counted(race['nodes'], 'node')} × {race['ranks'] // race['nodes']} ranks, {race['port']}, load {race['load']:.1f}"
    return f"{race['part']}: {where}"


def table(race: Mapping[str, Any]) -> Table:
    """Return the table of a race: predicted and measured times of each case, and the bytes of the busiest port."""
    cases = race["cases"]
    wanted, least, middle = zip(*((case["seconds"], min(case["times"]), median(case["times"])) for case in cases), strict=True)
    carried = [case["port_bytes"] and case["carried"] / case["port_bytes"] for case in cases]
    times = {"predicted ms": wanted, "min": least, "median": middle}
    columns = [
        Column("case", [case["label"] for case in cases], left=True),
        *(Column(name, [one * 1e3 for one in seconds], "{:.0f}".format) for name, seconds in times.items()),
        Column("min ÷ predicted", [got / want for got, want in zip(least, wanted, strict=True)], "{:.2f}".format),
        Column("bytes ÷ predicted", carried, "{:.2f}".format),
    ]
    return Table(title(race), columns)


def errors(races: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each race, and one for all: cases, median and range of fastest ÷ predicted − 1, pairs in order of all."""
    pairs = {title(race): [(case["seconds"], min(case["times"])) for case in race["cases"]] for race in races}
    off = {name: sorted(got / want - 1 for want, got in times) for name, times in pairs.items()}
    order = {name: [(a < c) == (b < d) for (a, b), (c, d) in combinations(times, 2)] for name, times in pairs.items()}
    off["all"], order["all"] = sorted(chain(*off.values())), [*chain(*order.values())]  # no times of different races compared
    columns = [
        Column("race", list(off), left=True),
        Column("cases", [len(one) for one in off.values()]),
        Column("median error", [median(one) for one in off.values()], "{:+.0%}".format),
        Column("range", [f"{one[0]:+.0%} to {one[-1]:+.0%}" for one in off.values()]),
        Column("pairs in order", [f"{sum(one)} of {len(one)}" for one in order.values()]),
    ]
    return Table("", columns)


def claims(races: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """The claims of each race with what was found, and whether they hold."""
    for race in races:
        where = f"{race['part']}, {counted(race['nodes'], 'node')}, {race['port']}"
        least = [min(case["times"]) for case in race["cases"]]
        wanted = [case["seconds"] for case in race["cases"]]
        if race["part"] == "placement":
            worst = furthest(got / want for got, want in zip(least, wanted, strict=True))
            claim = f"every fastest round within {WITHIN:.0%} of its prediction; the worst is {worst:.2f} times"
            yield f"{where}: {claim}", abs(worst - 1) <= WITHIN
            worst = furthest(case["carried"] / case["port_bytes"] for case in race["cases"])
            claim = f"the busiest port carries what is predicted, within {HEADERS:.0%}; the worst is {worst:.3f} times"
            yield f"{where}: {claim}", abs(worst - 1) <= HEADERS
        pairs = [pair for pair in combinations(range(len(least)), 2) if apart(*(wanted[one] for one in pair))]
        wrong = sum((wanted[one] < wanted[other]) != (least[one] < least[other]) for one, other in pairs)
        if pairs:
            claim = f"{len(pairs) - wrong} of {len(pairs)} pairs that are predicted over {APART:.0%} apart in order"
            yield f"{where}: {claim}", not wrong
        if race["part"] == "strong":
            behind = least[wanted.index(min(wanted))] / min(least) - 1
            yield f"{where}: the plan predicted the fastest is {behind:.1%} behind the fastest", behind <= BEST


def furthest(ratios: Iterator[float]) -> float:
    """The ratio that is furthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def apart(one: float, other: float) -> bool:
    """Return whether two predictions are so far apart that the order must be right."""
    return max(one, other) > (1 + APART) * min(one, other)


def block(result: Mapping[str, Any]) -> str:
    """The measurements as a page has them, between its marks."""
    found = [f"{result['rounds']} rounds; {about(result['machine'])}.", ""]
    for made in (*map(table, result["races"]), errors(result["races"])):
        found += [made.markdown(), ""]
    said = [*claims(result["races"])]
    missed = [f"- {verdict(claim, holds)}" for claim, holds in said if not holds]
    found.append(f"{len(said) - len(missed)} of {len(said)} claims hold (`bench/README.md` lists them).")
    found += ["", *missed] if missed else []
    return "\n".join([BEGIN, "", *found, "", END])


def replaced(page: str, result: Mapping[str, Any]) -> str:
    """A page with other measurements between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + block(result) + rest.partition(END)[2]


def figures(result: Mapping[str, Any], folder: Path) -> None:
    """Write the figures of placements and of strong scaling. Raises ImportError where matplotlib is not installed."""
    from summa3d.figures import draw

    for part, fill in (("placement", placements), ("strong", scaling)):
        races = [race for race in result["races"] if race["part"] == part]
        if races:
            draw(partial(fill, races=races), [folder / f"emulated-{part}.svg"])


def placements(figure: Any, races: Sequence[Mapping[str, Any]]) -> None:
    """Bars from the fastest round to the median; predictions as hollow marks."""
    from summa3d.figures import look

    for panel, race in zip(figure.subplots(len(races), 1, sharex=True, squeeze=False)[:, 0], races, strict=True):
        places = range(len(race["cases"]))
        least = [min(case["times"]) * 1e3 for case in race["cases"]]
        upper = [median(case["times"]) * 1e3 - low for case, low in zip(race["cases"], least, strict=True)]
        panel.bar(places, least, yerr=[[0.0] * len(least), upper], color=look(0)["color"], alpha=0.6, label="fastest, to median")
        wanted = [case["seconds"] * 1e3 for case in race["cases"]]
        panel.plot(places, wanted, linestyle="none", marker="o", color="black", markerfacecolor="none", label="predicted")
        panel.set(ylabel="ms", title=title(race))
        panel.margins(y=0.35)  # room for the legend
    panel.set_xticks(places, [case["label"] for case in races[-1]["cases"]], rotation=60, ha="right", fontsize=4.5)
    panel.legend()


def scaling(figure: Any, races: Sequence[Mapping[str, Any]]) -> None:
    """The fastest plan of each scheme on each number of nodes: predicted as dashed lines, measured as solid ones."""
    from summa3d.figures import CAPTION, look

    panel = figure.subplots()
    series: dict[str, list[tuple[int, float, float]]] = {}
    for race in races:
        for scheme in dict.fromkeys(case["what"] for case in race["cases"]):
            own = [case for case in race["cases"] if case["what"] == scheme]
            times = min(case["seconds"] for case in own), min(min(case["times"]) for case in own)
            series.setdefault(scheme, []).append((race["nodes"], *times))
    for number, (scheme, points) in enumerate(series.items()):
        nodes, wanted, found = zip(*points, strict=True)
        style = look(number)
        panel.plot(nodes, found, label=scheme, **style)
        panel.plot(nodes, wanted, linestyle="--", **style, markerfacecolor="none")
    title = f"a block, forward and backward, ports of {races[-1]['port']}"
    panel.set(xscale="log", yscale="log", xlabel="nodes of 2 ranks", ylabel="seconds", title=title)
    panel.set_xticks([race["nodes"] for race in races], [str(race["nodes"]) for race in races], minor=False)
    panel.minorticks_off()
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=len(series))
    about = "solid: fastest round; dashed: predicted. The nodes share one machine's cores:\n"
    about += "with more of them communication grows, and arithmetic becomes no faster"
    figure.supxlabel(about, x=0.01, ha="left", **CAPTION)
