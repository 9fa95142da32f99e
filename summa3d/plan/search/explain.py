"""Why a plan is where it is: its terms beside others', what bounds it, and which number of the cluster would put it first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...cluster import Cluster
from ...errors import ClusterError, ConfigError
from ...parallel.schedule import is_split
from .memory import memory
from .plans import MOST_CHUNKS, Plan, is_possible
from .search import Found, Priced
from .timing import Times

MOST = 16.0
"""By how much a number is changed at most."""
HALVINGS = 7
SHAKE = (0.8, 1.25)
"""What all numbers are changed by, one after the other, to see whether the first plan stays ahead."""
GIB = 2**30


def explain(result: Found, number: int, times: Times) -> Iterator[str]:
    """The lines of --explain NUMBER. Raises ConfigError for a number that no shown plan has."""
    if not 1 <= number <= len(result.best):
        raise ConfigError(f"--explain {number}: the plans that are kept are 1 to {len(result.best)}; --top keeps more.")
    return _explained(result, number, times)


def _explained(result: Found, number: int, times: Times) -> Iterator[str]:
    """The lines of `explain`."""
    item, first = result.best[number - 1], result.best[0]
    others = {"1": first, f"best of {item.plan.family}": result.families[item.plan.family]}
    columns = {str(number): item, **{name: other for name, other in others.items() if other is not item}}
    if len(columns) == 1 and len(result.best) > 1:
        columns["2"] = result.best[1]
    yield f"\nplan {number}: {item.plan}"
    yield from _terms(columns)
    yield from _bound(result, item, times)
    keys = changeable(result.cluster, result.space.dtype)
    if item is not first:
        yield _smallest_change(result.cluster, keys, ShownPlans((item, first), times))
    yield _regret(result, keys, times)


def _terms(columns: dict[str, Priced]) -> Iterator[str]:
    """Seconds and bytes, a column for each plan."""
    yield f"{'':<16}" + "".join(f"{name:>18}" for name in columns)
    flat = [_flat(column) for column in columns.values()]
    for term in dict.fromkeys(term for item in flat for term in item):
        yield f"{term:<16}" + "".join(f"{item.get(term, 0.0):>18.4g}" for item in flat)


def _flat(candidate: Priced) -> dict[str, float]:
    terms: dict[str, Any] = candidate.terms
    times = {
        "s/step": candidate.seconds,
        "compute": terms["compute"],
        **{f"axis {axis}": time for axis, time in terms["axis"].items()},
    }
    times |= {name: terms[name] for name in ("p2p", "bubble", "dp", "optimizer", "hidden")}
    return times | {
        f"GiB {name}": size / GIB for name, size in zip(candidate.memory._fields[:-1], candidate.memory, strict=False)
    }


def _bound(result: Found, candidate: Priced, times: Times) -> Iterator[str]:
    """Lines on neighbours of a plan that need more memory than there is, and on the level of links that bounds each axis."""
    limit, plan = result.limit, candidate.plan
    for what, other in neighbours(plan, result.space.era.schedules):
        cells, units = times.store.cells(other.inner, other.units)
        size = memory(other, cells, units, times.muon(other)).total
        verdict = "does not fit" if size > limit else "fits"
        yield f"{what} needs {size / GIB:.1f} GiB of {limit / GIB:.1f}: it {verdict}"
    for axis, size in (*plan.inner.axes, *plan.inner.outer):
        if size > 1:
            level, seconds = times.slowest_level(plan, axis)
            yield f"axis {axis} is bound by the ports of level {level}: {1e-9 / seconds:.3g} GB/s a rank"


def neighbours(plan: Plan, schedules: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """Plans that keep more: twice the micro-batch, nothing computed again, and gradients of weights that wait."""
    model, half = plan.inner.model, plan.micro_batches // 2
    if plan.micro_batches % 2 == 0 and is_possible(plan.schedule, model.layers, plan.pp, half, plan.chunks):
        yield f"micro-batch {2 * plan.rows}", replace(plan, units=2 * plan.units, micro_batches=half)
    if plan.inner.recompute == "full":
        yield "the same without recomputation", replace(plan, inner=replace(plan.inner, recompute="none"))
    for name in schedules:
        if name == plan.schedule or not is_split(name, plan.pp):
            continue
        for chunks in range(1, MOST_CHUNKS + 1):
            if is_possible(name, model.layers, plan.pp, plan.micro_batches, chunks):
                yield f"schedule {name}", replace(plan, inner=replace(plan.inner, split=True), schedule=name, chunks=chunks)


def changeable(cluster: Cluster, dtype: str) -> list[str]:
    """The numbers of a cluster that times depend on."""
    outside = ("device.memory", "band.percent", "collectives.chunk")
    return [
        key
        for key, number in cluster.numbers.items()
        if number.value
        and key not in outside
        and not key.endswith((".size", ".ports"))
        and (not key.startswith("peak.") or key == f"peak.{dtype}")
    ]


class ShownPlans:
    """Plans, and their seconds on clusters with other numbers: as far from the whole simulation as on the described one."""

    def __init__(self, shown: Sequence[Priced], times: Times) -> None:
        self.times, self.plans = times, [item.plan for item in shown]
        self._off = [item.seconds / times.estimate(item.plan) for item in shown]

    def on(self, cluster: Cluster, key: str, factor: float) -> tuple[Times, list[float]] | None:
        """Times on the cluster with one number changed, and the plans' seconds; None where the number cannot be so."""
        try:
            other = self.times.on(cluster.replaced({key: cluster[key] * factor}, "assumed"))
        except ClusterError:
            return None
        return other, [off * other.estimate(plan) for off, plan in zip(self._off, self.plans, strict=True)]


def _smallest_change(cluster: Cluster, keys: list[str], pair: ShownPlans) -> str:
    """The key whose smallest factor puts the first plan of a pair before the second."""
    best = min(
        ((_least_factor(cluster, key, up, pair), key) for key in keys for up in (True, False)),
        key=lambda change: (max(change[0], 1 / change[0]), change[1]),
    )
    factor, key = best
    if max(factor, 1 / factor) >= MOST:
        return f"no number of the cluster, changed by up to {MOST:.0f}×, puts it before plan 1"
    return f"with {factor:.3g}× {key} it would be before plan 1"


def _least_factor(cluster: Cluster, key: str, up: bool, pair: ShownPlans) -> float:
    """The factor of `key`, upwards or downwards, at which the first plan is as fast as the second; MOST where there is none."""
    low, high = 1.0, MOST
    if not _ahead(cluster, key, high if up else 1 / high, pair):
        return MOST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if _ahead(cluster, key, middle if up else 1 / middle, pair):
            high = middle
        else:
            low = middle
    return high if up else 1 / high


def _ahead(cluster: Cluster, key: str, factor: float, pair: ShownPlans) -> bool:
    changed = pair.on(cluster, key, factor)
    return changed is not None and changed[1][0] < changed[1][1]


def _regret(result: Found, keys: list[str], times: Times) -> str:
    """Loss of plan 1 against the best of the shown plans where one number is other than described: the worst one simulated."""
    shown = ShownPlans([*{str(item.plan): item for item in (*result.best, *result.families.values())}.values()], times)
    worst, at = 0.0, ""
    for key in keys:
        for factor in SHAKE:
            changed = shown.on(result.cluster, key, factor)
            if changed is not None and (regret := changed[1][0] / min(changed[1]) - 1) > worst:
                worst, at, other = regret, f"{factor}× {key}", changed[0]
    if worst:
        seconds = [other.seconds(plan) for plan in shown.plans]
        worst = seconds[0] / min(seconds) - 1
    if not worst:
        return "plan 1 stays the fastest of the plans shown, if one number is 20 % off"
    return f"regret of plan 1 among the plans shown, if one number is 20 % off: {worst:.1%} at most ({at})"
