"""Plans that were run: their predicted beside their measured seconds, and the few numbers of the cluster that these refit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..cluster import FITTED, Cluster
from ..errors import ClusterError
from ..table import Column, Table

if TYPE_CHECKING:
    from .search.find import Plans

SecondsOn = Callable[[Cluster], Sequence[float]]
"""A cluster → the seconds of a step of each plan that was run."""
NOISE = 0.05
"""The error of a measured step, as a logarithm, that the fit reckons with."""
PRIOR = log(2)
"""How far a number is expected to be off, as a logarithm: what the plans say little of stays about where it was."""
LEAST = 0.02
"""Numbers of which steps depend less are not refitted: d log(seconds) / d log(number), the root of its mean square."""
DIFFERENCE, ITERATIONS, CLOSE = 1e-3, 12, 1e-3
"""Of the logarithms of numbers: the step of a derivative, how often the fit moves at most, and a move that ends it."""
DIGITS = 4
"""Significant digits of a refitted number."""


class TriedPlan(NamedTuple):
    """A plan that was run: its number, its predicted seconds, those of each measured step, and the prediction by the refit."""

    number: int
    plan: str
    predicted: float
    steps: Sequence[float]
    refitted: float

    @property
    def measured(self) -> float:
        """The median step."""
        return median(self.steps)


@dataclass(frozen=True)
class Refit:
    """Plans that were run, and the cluster that predicts them.

    plans : in the order of their predicted seconds. before, after : the cluster. keys : of the numbers that were refitted.
    order : (number, plan, seconds by the refit) of all plans that the search kept, ascending.
    """

    plans: Sequence[TriedPlan]
    before: Cluster
    after: Cluster
    keys: Sequence[str]
    order: Sequence[tuple[int, str, float]]

    @property
    def errors(self) -> tuple[float, float]:
        """The median error of the plans that were run, before and after."""
        pairs = [(plan.predicted / plan.measured - 1, plan.refitted / plan.measured - 1) for plan in self.plans]
        before, after = (median(abs(error) for error in errors) for errors in zip(*pairs, strict=True))
        return before, after

    @property
    def fastest(self) -> TriedPlan:
        """The plan whose measured steps took the least."""
        return min(self.plans, key=lambda item: item.measured)

    def as_json(self) -> dict[str, Any]:
        """Report of it that ``summa3d plan --try --json`` prints."""
        error, refitted_error = self.errors
        return {
            "plans": [{**plan._asdict(), "steps": list(plan.steps), "measured": plan.measured} for plan in self.plans],
            "numbers": {key: {"before": self.before[key], "after": self.after[key]} for key in self.keys},
            "error": error,
            "refitted_error": refitted_error,
            "fastest": self.fastest.number,
            "order": [{"number": number, "plan": plan, "seconds": seconds} for number, plan, seconds in self.order],
        }

    def as_text(self) -> Iterator[str]:
        """Predicted beside measured seconds, what was refitted, and the order of the plans by it."""
        columns = [
            Column("#", [plan.number for plan in self.plans]),
            Column("plan", [item.plan for item in self.plans], left=True),
            Column("predicted", [plan.predicted for plan in self.plans], "{:.4g}".format),
            Column("measured", [plan.measured for plan in self.plans], "{:.4g}".format),
            Column("from", [min(plan.steps) for plan in self.plans], "{:.4g}".format),
            Column("to", [max(plan.steps) for plan in self.plans], "{:.4g}".format),
            Column("error", [plan.predicted / plan.measured - 1 for plan in self.plans], "{:+.0%}".format),
            Column("refitted", [plan.refitted for plan in self.plans], "{:.4g}".format),
            Column("error", [plan.refitted / plan.measured - 1 for plan in self.plans], "{:+.0%}".format),
        ]
        yield Table(f"seconds of a step, predicted for {self.before.name} and measured on this machine", columns).text()
        changes = [f"{key} {self.before[key]:.4g} → {self.after[key]:.4g}" for key in self.keys]
        yield f"refitted: {', '.join(changes) or 'nothing: the steps depend on no number that can be'}"
        error, refitted_error = self.errors
        yield f"median error {error:.0%} → {refitted_error:.0%}, of the plans that the numbers were refitted to"
        first, fastest = self.plans[0], self.fastest
        if fastest.number != first.number:
            loss = first.measured / fastest.measured - 1
            yield f"the fastest as measured is plan {fastest.number}: plan {first.number} took {loss:.1%} more"
        yield "order by the refit: " + ", ".join(f"{number} ({seconds:.4g} s)" for number, _, seconds in self.order)


def refit(plans: Plans, steps: Sequence[Sequence[float]]) -> Refit:
    """Refit the cluster of a search to measured steps of its first plans.

    steps : the seconds of each measured step of plan 1, of plan 2, …

    At most FITTED numbers move, and fewer than there are plans: those that the plans' seconds depend on the most (`candidates`).
    Of all values of these the likeliest is taken, with measured steps that are NOISE off and numbers that were PRIOR off.
    """
    result, store = plans.result, plans.searched.times.store
    times = type(plans.searched.times)

    def seconds(cluster: Cluster, many: int) -> list[float]:
        priced = times(cluster, store)
        return [priced.seconds(item.plan) for item in result.best[:many]]

    def predict(cluster: Cluster) -> list[float]:
        return seconds(cluster, len(steps))

    before, measured = result.cluster, [median(step) for step in steps]
    slopes = dependence(predict, before, candidates(before, result.space.dtype))
    keys = chosen(slopes, before.fitted, max(1, len(steps) - 1))
    after = fitted(predict, before, keys, measured)
    refitted = seconds(after, len(result.best))
    rows = zip(result.best, steps, refitted, strict=False)
    tried = [TriedPlan(at, str(row.plan), row.seconds, taken, new) for at, (row, taken, new) in enumerate(rows, 1)]
    named = zip(result.best, refitted, strict=True)
    order = sorted(((at, str(item.plan), new) for at, (item, new) in enumerate(named, 1)), key=lambda item: item[2])
    return Refit(tried, before, after, keys, order)


def candidates(cluster: Cluster, dtype: str) -> list[str]:
    """The keys that may be refitted, of those that a cluster has a number of above 0: rates, launches, and a node's links."""
    inner = cluster.level_names[0]
    launches = ("elements.function", "layers.launch", "collectives.launch")
    keys = (f"peak.{dtype}", "device.memory_bandwidth", *launches, f"{inner}.bandwidth", f"{inner}.latency")
    return [key for key in keys if cluster[key] > 0]


def dependence(predict: SecondsOn, cluster: Cluster, keys: Sequence[str]) -> dict[str, float]:
    """Key → how much the logarithms of the plans' seconds change with that of the number, the root of the mean square."""
    base, result = np.log(predict(cluster)), {}
    for key in keys:
        moved = cluster.replaced({key: cluster[key] * exp(-DIFFERENCE)}, "assumed")
        result[key] = float(np.sqrt(np.square((np.log(predict(moved)) - base) / DIFFERENCE).mean()))
    return result


def chosen(slopes: Mapping[str, float], fitted_before: Sequence[str], most: int) -> list[str]:
    """The keys on which the seconds depend the most; those that were fitted before come first, since a file has few."""
    ordered = sorted((key for key in slopes if slopes[key] >= LEAST), key=lambda key: (key not in fitted_before, -slopes[key]))
    others = [key for key in fitted_before if key not in ordered]
    return ordered[: min(most, FITTED - len(others))]


def fitted(predict: SecondsOn, cluster: Cluster, keys: Sequence[str], measured: Sequence[float]) -> Cluster:
    """The cluster with the likeliest values of `keys`, by Gauss-Newton steps in logarithms; a move that does not help is cut.

    A value that no cluster may have is a move that does not help.
    """

    def moved(logs: np.ndarray) -> Cluster:
        values = {key: float(f"{cluster[key] * exp(item):.12g}") for key, item in zip(keys, logs, strict=True)}
        return cluster.replaced(values, "fitted")

    def misfit(logs: np.ndarray) -> np.ndarray:
        try:
            seconds = predict(moved(logs))
        except ClusterError:
            return np.array([np.inf])
        return np.concatenate([np.log(np.divide(seconds, measured)) / NOISE, logs / PRIOR])

    if not keys:
        return cluster
    logs = np.zeros(len(keys))
    rows = misfit(logs)
    for _ in range(ITERATIONS):
        slopes = [(misfit(logs - DIFFERENCE * item) - rows) / -DIFFERENCE for item in np.eye(len(keys))]
        step = np.linalg.lstsq(np.column_stack(slopes), -rows, rcond=None)[0]
        steps = ((part * step, misfit(logs + part * step)) for part in (1.0, 0.5, 0.25, 0.125))
        better = next(((by, new) for by, new in steps if new @ new < rows @ rows), None)
        if better is None:
            break
        logs, rows = logs + better[0], better[1]
        if np.abs(better[0]).max() < CLOSE:
            break
    return cluster.replaced({key: float(f"{moved(logs)[key]:.{DIGITS}g}") for key in keys}, "fitted")
