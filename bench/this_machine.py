"""Benchmark of the planner: this machine is calibrated, plans are searched for it, and each is run for a few training steps.

Steps run as those of `summa3d plan --try`, in two passes over the plans of 2 and 4 ranks: the difference of a plan's two
medians is the noise of this run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import mpi4py
from common import BLAS_OVERRIDES, conclude, on_ranks, options, save

mpi4py.rc.initialize = False  # the search needs the names of MPI alone

from summa3d import find_plans  # noqa: E402
from summa3d.cli.plan import measure_on  # noqa: E402
from summa3d.plan.order import kendall  # noqa: E402
from summa3d.plan.search.find import Plans  # noqa: E402
from summa3d.table import Column, Table  # noqa: E402

WIDE = ("demo", "layers=2", "hidden=384", "heads=8", "sequence=64")
DEEP = ("demo", "layers=4", "hidden=192", "heads=8", "sequence=128")
ALONE = ("dp=1", "pp=1")


class Group(NamedTuple):
    """Plans of one model on so many ranks: the fastest that each tuple of --fix leaves."""

    ranks: int
    model: tuple[str, ...]
    batch: int
    fixes: tuple[tuple[str, ...], ...]


JUDGED = (
    Group(2, DEEP, 16, (("scheme=oned", *ALONE), ("scheme=cuboid", *ALONE), ("dp=2",), ("pp=2",))),
    Group(2, WIDE, 32, (("scheme=oned-sp", *ALONE), ("scheme=cuboid", *ALONE), ("dp=2", "zero=3"), ("pp=2",))),
    Group(4, DEEP, 16, (("scheme=oned", *ALONE), ("scheme=summa",), ("dp=4",), ("dp=2", "pp=2"))),
    Group(4, WIDE, 32, (("scheme=cuboid", *ALONE), ("scheme=cuboid", "dp=2", "pp=1"), ("dp=4", "zero=3"), ("pp=2", "dp=1"))),
)
ORDERED = (
    Group(8, WIDE, 32, (("scheme=oned", *ALONE), ("scheme=cuboid", *ALONE), ("dp=8",), ("dp=4", "pp=2"), ("scheme=summa",))),
)
"""More ranks than cores: their order alone is claimed."""
LOAD, ERROR, ALIKE, REGRET, ALIKE_SHARED = 0.5, 0.10, 0.8, 0.03, 0.6


def main() -> None:
    """Calibrate, plan, run, and print what was predicted beside what was measured."""
    parser = options(__doc__)
    parser.add_argument("--cluster", metavar="FILE", help="Plan with this description in place of new calibrations.")
    parser.add_argument("--few", action="store_true", help="Try the script: the first two plans of the first group alone.")
    args = parser.parse_args()
    for name in BLAS_OVERRIDES:
        os.environ.pop(name, None)
    load = os.getloadavg()[0]
    print(f"load {load:.2f} at the start", flush=True)
    groups = (JUDGED[0]._replace(fixes=JUDGED[0].fixes[:2]),) if args.few else (*JUDGED, *ORDERED)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clusters = {ranks: args.cluster or described(ranks, Path(folder)) for ranks in dict.fromkeys(one.ranks for one in groups)}
        plans = {group: [planned(group, fix, clusters[group.ranks]) for fix in group.fixes] for group in groups}
        twice = [group for group in groups for _ in range(group not in ORDERED)]
        passes = [{group: run(plans[group], group) for group in some} for some in (groups, twice)]
    for group, found in plans.items():
        steps = zip(*(one[group] for one in passes if group in one), strict=True)
        rows += [row(group, one, taken) for one, taken in zip(found, steps, strict=True)]
    print(as_table(rows).text())
    few = max((one.ranks for one in JUDGED), default=0)
    judged, shared = ([one for one in rows if (one["ranks"] <= few) == within] for within in (True, False))
    result = {"kind": "this_machine", "load": load, "judged": judgement(judged), "rows": rows}
    claims = [(f"load below {LOAD} at the start; {load:.2f}", load < LOAD), *claimed(result["judged"])]
    if shared:
        result["shared"] = order = judgement(shared)
        tau = order["kendall"]
        claims.append((f"8 ranks: Kendall's tau of the order ≥ {ALIKE_SHARED}; {tau:.2f}", tau >= ALIKE_SHARED))
    conclude(claims)
    save(result, args.json)


def described(ranks: int, folder: Path) -> str:
    """The file of a calibration on so many ranks, which share the cores as the plans' ranks will."""
    file = str(folder / f"{ranks}.toml")
    print(on_ranks(ranks, ["-m", "summa3d", "bench", "calibrate", "--write", file]).strip().splitlines()[-1], flush=True)
    return file


def planned(group: Group, fix: tuple[str, ...], cluster: str) -> Plans:
    """The fastest plan that `fix` leaves."""
    return find_plans(list(group.model), cluster, group.ranks, group.batch, fix=fix, top=1)


def run(found: list[Plans], group: Group) -> list[list[float]]:
    """The seconds of each measured step of each plan."""
    peak = max(one.result.best[0].memory.total for one in found)
    return [list(map(float, steps)) for steps in measure_on(group.ranks)([one.config() for one in found], peak)]


def row(group: Group, found: Plans, taken: tuple[list[float], ...]) -> dict[str, Any]:
    """A plan with its predicted seconds, the median of all its steps, and how far its passes are apart."""
    medians = [median(steps) for steps in taken]
    measured = median(step for steps in taken for step in steps)
    about = {"group": f"{' '.join(group.model)}, {group.ranks} ranks", "ranks": group.ranks, "plan": str(found.best)}
    about |= {"predicted": found.seconds, "measured": measured, "error": found.seconds / measured - 1}
    return about | {"noise": max(medians) / min(medians) - 1, "steps": [list(steps) for steps in taken]}


def judgement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median error, Kendall's tau of all rows and the mean of each group's, the regret of each group's pick, and the noise.

    The regret is what the plan that is predicted to be the fastest takes over the fastest of its group, as a part of it.
    """
    groups = [[one for one in rows if one["group"] == name] for name in dict.fromkeys(one["group"] for one in rows)]
    picks = [
        min(group, key=lambda one: one["predicted"])["measured"] / min(one["measured"] for one in group) - 1 for group in groups
    ]
    return {
        "error": median(abs(one["error"]) for one in rows),
        "largest": max(abs(one["error"]) for one in rows),
        "kendall": order_of(rows),
        "kendall_of_groups": mean(order_of(group) for group in groups),
        "regret": mean(picks),
        "regrets": picks,
        "noise": median(one["noise"] for one in rows),
    }


def order_of(rows: list[dict[str, Any]]) -> float:
    """Kendall's tau of predicted and measured seconds; 0 where there is no order."""
    return kendall([one["measured"] for one in rows], [one["predicted"] for one in rows]) or 0.0


def claimed(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return what is claimed of 2 and 4 ranks, each with its figure."""
    least = max(REGRET, found["noise"])
    each = ", ".join(f"{one:.1%}" for one in found["regrets"])
    return [
        (f"median error ≤ {ERROR:.0%}; {found['error']:.1%}, largest {found['largest']:.0%}", found["error"] <= ERROR),
        (
            f"Kendall's tau ≥ {ALIKE}; {found['kendall']:.2f}, inside groups {found['kendall_of_groups']:.2f}",
            found["kendall"] >= ALIKE,
        ),
        (
            f"mean regret ≤ {REGRET:.0%} or the noise of this run, {found['noise']:.1%}; {found['regret']:.1%} ({each})",
            found["regret"] <= least,
        ),
    ]


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Predicted beside measured seconds."""
    return Table(
        "seconds of a step, predicted by this machine's calibration and measured",
        [
            Column("model, ranks", [one["group"] for one in rows], left=True),
            Column("plan", [one["plan"] for one in rows], left=True),
            Column("predicted", [one["predicted"] for one in rows], "{:.4g}".format),
            Column("measured", [one["measured"] for one in rows], "{:.4g}".format),
            Column("error", [one["error"] for one in rows], "{:+.0%}".format),
            Column("noise", [one["noise"] for one in rows], "{:.1%}".format),
        ],
    )


if __name__ == "__main__":
    main()
