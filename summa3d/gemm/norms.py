"""Norms of a distributed tensor; every element counts once, copies do not."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, sqrt

import numpy as np

from ..comm.device.arrays import Array, is_torch, quiet, to_host
from ..errors import ShapeError
from ..layout.layout import Layout
from .distributed import Distributed

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
        mine = np.sum(np.square(values)) if _counts(matrix) else 0.0
        return sqrt(_sum(matrix, np.array([mine]), _splitting(matrix, range(len(matrix.shape))))[0])
    if order == 1:
        values = _sum(matrix, np.sum(values, axis=0), matrix.layout.dims[0])
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


def _splitting(matrix: Distributed, dims: Iterable[int]) -> tuple[str, ...]:
    """The axes over which the values of these dims differ: those that split them, and those along which one rank hosts them."""
    return (*(axis for dim in dims for axis in matrix.layout.dims[dim]), *matrix.layout.root_only)


def _counts(matrix: Distributed) -> bool:
    """Whether this rank's block counts: of those that several indices of a root-only axis hold, the first."""
    layout, at = matrix.layout, matrix.grid.coordinates
    return not isinstance(layout, Layout) or all(at[axis] == layout.root_index(axis, at) for axis in layout.root_only)


def _sum(matrix: Distributed, values: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
    return np.asarray(matrix.grid[axes].all_reduce(values)) if axes else values


def _largest(matrix: Distributed, values: np.ndarray) -> float:
    """The largest of all ranks' values; nan if one is nan, which MPI's max might drop."""
    mine = np.array([np.max(values) if values.size else 0.0])
    axes = _splitting(matrix, range(len(matrix.shape)))
    return float(np.max(matrix.grid[axes].all_gather(mine) if axes else mine))
