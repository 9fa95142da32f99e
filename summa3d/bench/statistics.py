"""Median times, their ratios, and how sure these are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb, exp, log, sqrt
from statistics import NormalDist, median
from typing import Any, NamedTuple

ENOUGH = 6
"""Times of each side from which on a ratio has an interval; of fewer it has the range."""
CONFIDENCE = 0.95
INTERVAL, RANGE = "95 % interval", "range"


class Spread(NamedTuple):
    """A ratio of median times: its interval of CONFIDENCE, or the ratios of the furthest times (`is_range`)."""

    middle: float
    low: float
    high: float
    is_range: bool = False

    def times(self, factor: float) -> Spread:
        """The same of a multiple of the ratio."""
        return Spread(self.middle * factor, self.low * factor, self.high * factor, self.is_range)

    @property
    def ends(self) -> str:
        """Both ends as text.

        >>> Spread(2, 1.9, 2.25).ends
        '1.90–2.25'
        """
        return f"{self.low:.2f}–{self.high:.2f}"


def times_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Minimum, median and maximum of `seconds`, and all of them.

    >>> times_of([3.0, 1.0, 2.0])
    {'min': 1.0, 'median': 2.0, 'max': 3.0, 'all': [3.0, 1.0, 2.0]}
    """
    return {"min": min(seconds), "median": median(seconds), "max": max(seconds), "all": seconds}


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The median of some times ÷ that of others, which were measured independently of them.

    The interval is that of Price and Bonett (2002), "Distribution-free confidence intervals for difference and ratio of medians":
    the logarithms' difference ± 1.96 standard errors, each error from the distance of two order statistics. The times of one and
    the same measurement have the ratio 1.

    >>> ratio([2.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    Spread(middle=2.0, low=2.0, high=4.0, is_range=True)
    """
    middle = median(above) / median(below)
    if above is below or list(above) == list(below):
        return Spread(middle, middle, middle, min(len(above), len(below)) < ENOUGH)
    if min(len(above), len(below)) < ENOUGH:
        return Spread(middle, min(above) / max(below), max(above) / min(below), True)
    error = sqrt(_error_of_log_median(above) ** 2 + _error_of_log_median(below) ** 2)
    reach = exp(NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error)
    return Spread(middle, middle / reach, middle * reach)


def _error_of_log_median(seconds: Sequence[float]) -> float:
    """The standard error of the logarithm of the median, from the order statistics about √n to its left and right.

    The least and the greatest of all are not taken: of 6 and 7 times they make intervals that hold 98 % in place of 95.
    """
    ordered, n = sorted(seconds), len(seconds)
    place = max(2, round((n + 1) / 2 - sqrt(n)))
    outside = sum(comb(n, below) for below in range(place)) / 2**n
    return log(ordered[n - place] / ordered[place - 1]) / (2 * NormalDist().inv_cdf(1 - outside))


def named(spreads: Iterable[Spread | None]) -> str | None:
    """Name of the ends of some ratios: intervals, ranges, or some of each; None of no ratio."""
    kinds = {spread.is_range for spread in spreads if spread is not None}
    if not kinds:
        return None
    names = [name for is_range, name in ((False, INTERVAL), (True, RANGE)) if is_range in kinds]
    return " or ".join(names)
