"""How alike the order of predictions is to that of what was measured: Spearman's and Kendall's correlations."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np


def order(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, float | None]:
    """Spearman's correlation, and Kendall's tau-b with what 95 % of random orders stay below; None below three rows."""
    if len(measured) < 3 or len(set(measured)) == 1 or len(set(predicted)) == 1:
        return {"spearman": None, "kendall": None, "kendall_by_chance": None}
    n = len(measured)
    chance = 1.645 * sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))
    return {
        "spearman": float(np.corrcoef(_places(measured), _places(predicted))[0, 1]),
        "kendall": kendall(measured, predicted),
        "kendall_by_chance": chance,
    }


def _places(values: Sequence[float]) -> list[float]:
    """The place of each value in their order; equal ones share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def kendall(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Kendall's τ_b: how many more two rows are in the same order than not; None where all are alike on one side.

    >>> round(kendall([1, 2, 3], [10, 30, 20]), 3)
    0.333
    """
    signs = [np.sign(np.subtract.outer(values, values)) for values in (np.asarray(measured), np.asarray(predicted))]
    ordered = sqrt(np.abs(signs[0]).sum() * np.abs(signs[1]).sum())
    return float(np.sum(signs[0] * signs[1]) / ordered) if ordered else None
