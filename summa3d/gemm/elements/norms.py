"""Norms of a distributed tensor; every element counts once, copies do not."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np

from ...comm.device.arrays import Array, is_torch, quiet, to_host
from ...errors import ShapeError
from ..distributed import Distributed
from .counting import counts, splitting
from .reductions import line_sums

NORMS = ("fro", "max", 1, inf)


@quiet
def norm(matrix: Distributed, order: str | float = "fro") -> float:
    """‖A‖: Frobenius, the largest magnitude; of matrices the largest column sum (1) or row sum (inf); accumulated in float64.

    Moves a few words, or for 1 and inf the sums of this rank's columns or rows, over the axes that split the matrix.
    """
    if order not in NORMS:
        raise ShapeError(f"norm {order!r} is not one of {', '.join(map(repr, NORMS))}.")
    if order in (1, inf) and len(matrix.shape) != 2:
        raise ShapeError(f"norm {order!r} is one of matrices; of shape {matrix.shape} there are 'fro' and 'max'.")
    matrix.check_block()
    if order == inf:
        return norm(matrix.T, 1)
    values = magnitudes(matrix.block)
    if order == "fro":
        mine = np.sum(np.square(values)) if counts(matrix) else 0.0
        axes = splitting(matrix.layout)
        return sqrt(matrix.grid[axes].all_reduce(np.array([mine]))[0] if axes else mine)
    if order == 1:
        values = line_sums(matrix.with_block(values, matrix.layout), 0)
    return _largest(matrix, values)


def magnitudes(block: Array) -> np.ndarray:
    """|block| in float64, as a numpy array. Raises ShapeError for what are no numbers."""
    if is_torch(block):
        return np.asarray(block.detach().abs().double().cpu().numpy())
    block = to_host(block)
    try:
        return np.abs(block.astype(np.complex128 if np.iscomplexobj(block) else np.float64))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"A norm is one of numbers; the block's dtype is {block.dtype}.") from error


def _largest(matrix: Distributed, values: np.ndarray) -> float:
    """The largest of all ranks' values; nan if one is nan, which MPI's max might drop."""
    mine = np.array([np.max(values) if values.size else 0.0])
    axes = splitting(matrix.layout)
    return float(np.max(matrix.grid[axes].all_gather(mine) if axes else mine))
