"""Fits of a cluster's numbers to reported times, and how well they predict what they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import NamedTuple

from summa3d.cluster import Cluster

NumberRanges = Mapping[str, tuple[float, float]]
"""Key of a cluster → the least and the most that its number may be."""
SOFT = 0.2
"""The error, as a logarithm, beyond which a row counts less than by its square."""
DIGITS = 4
"""Significant digits of a fitted number."""


Predict = Callable[[Cluster], float]


@dataclass(frozen=True)
class ReportedNumber:
    """One reported number.

    cluster : that it was measured on. predict : the prediction on such a cluster. group : of the rows between which a choice is
    judged. batch : sequences of a step.
    """

    name: str
    use: str
    series: str
    ranks: int
    cluster: Cluster
    reported: float
    corrected: float | None
    erratum: str
    predict: Predict
    group: str = ""
    batch: int = 1

    @property
    def target(self) -> float:
        """Return what the prediction is compared with."""
        return self.reported if self.corrected is None else self.corrected


class Fitted(NamedTuple):
    """The cluster with fitted numbers, and the keys of those that lie at an end of their range."""

    cluster: Cluster
    at_bound: tuple[str, ...]


def fit(rows: Sequence[ReportedNumber], cluster: Cluster, ranges: NumberRanges, start: Cluster | None = None) -> Fitted:
    """Fit the numbers of `ranges`: least squares of log(predicted/reported), soft-L1, from `start` or the middle of each range.

    Needs scipy, of the extra `plan`.
    """
    from scipy.optimize import least_squares

    keys = list(ranges)
    least, most = [[log(max(ranges[key][end], 1e-12)) for key in keys] for end in (0, 1)]

    def errors(logs: Sequence[float]) -> list[float]:
        tried = cluster.replaced({key: exp(value) for key, value in zip(keys, logs, strict=True)})
        return [log(row.predict(tried) / row.target) for row in rows]

    middle = [(low + high) / 2 for low, high in zip(least, most, strict=True)]
    first = middle if start is None else [log(start[key]) for key in keys]
    found = least_squares(errors, first, bounds=(least, most), loss="soft_l1", f_scale=SOFT)
    values = {key: float(f"{exp(value):.{DIGITS}g}") for key, value in zip(keys, found.x, strict=True)}
    at_bound = tuple(key for key, value in values.items() if min(abs(value / end - 1) for end in ranges[key] if end) < 1e-2)
    return Fitted(cluster.replaced(values), at_bound)


def error(row: ReportedNumber, cluster: Cluster) -> float:
    """predicted/reported − 1."""
    return row.predict(cluster) / row.target - 1


def memoized(row: ReportedNumber, keys: Sequence[str]) -> ReportedNumber:
    """The row with its predictions kept, where no number but those of `keys` changes: fits to all rows but one begin alike."""
    known: dict[tuple[float, ...], float] = {}

    def predict(cluster: Cluster) -> float:
        values = tuple(cluster[key] for key in keys)
        if values not in known:
            known[values] = row.predict(cluster)
        return known[values]

    return replace(row, predict=predict)


def out_of_fold(rows: Sequence[ReportedNumber], cluster: Cluster, ranges: NumberRanges) -> list[float]:
    """The prediction of each row by a fit to all others. The fits start from that to all rows, which few steps leave."""
    rows = [memoized(row, list(ranges)) for row in rows]
    whole = fit(rows, cluster, ranges)
    start = None if whole.at_bound else whole.cluster
    others = ([other for other in rows if other is not row] for row in rows)
    return [row.predict(fit(train, cluster, ranges, start).cluster) for row, train in zip(rows, others, strict=True)]


def held_out(
    rows: Sequence[ReportedNumber], train: Sequence[ReportedNumber], cluster: Cluster, ranges: NumberRanges
) -> list[float]:
    """The errors of `rows` by a fit to `train`."""
    fitted = fit(train, cluster, ranges).cluster
    return [error(row, fitted) for row in rows]
