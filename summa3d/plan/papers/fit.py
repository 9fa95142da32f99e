"""Fits of a cluster's numbers to reported times, and how well they predict what they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import NamedTuple, Protocol

from ..cluster import Cluster

Ranges = Mapping[str, tuple[float, float]]
"""Key of a cluster → the least and the most that its number may be."""
SOFT = 0.2
"""The error, as a logarithm, beyond which a row counts less than by its square."""
DIGITS = 4
"""Significant digits of a fitted number."""


class Target(Protocol):
    """A reported number to be predicted."""

    @property
    def target(self) -> float:
        """The reported number, corrected where it was printed wrong."""

    @property
    def predict(self) -> Callable[[Cluster], float]:
        """The prediction on a cluster."""


class Fitted(NamedTuple):
    """A cluster with fitted numbers, and the keys of those that lie at an end of their range."""

    cluster: Cluster
    at_bound: tuple[str, ...]


def fit(rows: Sequence[Target], cluster: Cluster, ranges: Ranges) -> Fitted:
    """Fit the numbers of `ranges`: least squares of log(predicted/reported), soft-L1, from the middle of each range.

    Needs scipy, of the extra `plan`.
    """
    from scipy.optimize import least_squares

    keys = list(ranges)
    least, most = [[log(max(ranges[key][end], 1e-12)) for key in keys] for end in (0, 1)]

    def errors(logs: Sequence[float]) -> list[float]:
        tried = cluster.replaced({key: exp(value) for key, value in zip(keys, logs, strict=True)})
        return [log(row.predict(tried) / row.target) for row in rows]

    middle = [(low + high) / 2 for low, high in zip(least, most, strict=True)]
    found = least_squares(errors, middle, bounds=(least, most), loss="soft_l1", f_scale=SOFT)
    values = {key: float(f"{exp(value):.{DIGITS}g}") for key, value in zip(keys, found.x, strict=True)}
    at_bound = tuple(key for key, value in values.items() if min(abs(value / end - 1) for end in ranges[key] if end) < 1e-2)
    return Fitted(cluster.replaced(values), at_bound)


def error(row: Target, cluster: Cluster) -> float:
    """predicted/reported − 1."""
    return row.predict(cluster) / row.target - 1


def held_out(rows: Sequence[Target], train: Sequence[Target], cluster: Cluster, ranges: Ranges) -> list[float]:
    """The errors of `rows` by a fit to `train`."""
    fitted = fit(train, cluster, ranges).cluster
    return [error(row, fitted) for row in rows]


def leave_one_out(rows: Sequence[Target], cluster: Cluster, ranges: Ranges) -> list[float]:
    """The error of each row by a fit to all others."""
    return [held_out([row], [other for other in rows if other is not row], cluster, ranges)[0] for row in rows]
