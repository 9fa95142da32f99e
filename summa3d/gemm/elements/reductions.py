"""Sums, means, extremes, traces and diagonals of a distributed matrix; every element counts once, copies do not."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod
from typing import Any

import numpy as np

from ...comm.device.arrays import Array, cast, contiguous, dtype_name, empty, is_torch, library_of, quiet
from ...errors import ShapeError
from ...layout.redistribute import common_runs, indices
from ..distributed import Distributed, Matrix
from .counting import along, counts, counts_at, is_whole_dtype, splitting, wide_dtype, widened, without


@quiet
def total(matrix: Distributed) -> Any:
    """The sum of all elements, a Python number on every rank, taken in `wide_dtype`. A word over the axes that split them."""
    matrix.check_block()
    return total_of(matrix, matrix.block)


@quiet
def trace(matrix: Distributed) -> Any:
    """The sum of the diagonal, as `total`."""
    matrix.check_block()
    return total_of(matrix, _diagonal_here(matrix))


def mean(matrix: Distributed) -> Any:
    """The mean of all elements, as `total`. Raises ShapeError where there are none."""
    _check_some(matrix, "mean", prod(matrix.shape))
    return total(matrix) / prod(matrix.shape)


@quiet
def extreme(matrix: Distributed, name: str) -> Any:
    """The max or min of all elements, a Python number on every rank, nan where one is nan. Moves g − 1 words of g ranks."""
    matrix.check_block()
    _check_inside(matrix)
    _check_some(matrix, name, prod(matrix.shape))
    block, axes = matrix.block, splitting(matrix.layout)
    wide = _ordered(block, name)
    result: Array = library_of(block).full((1,), _bound(wide, name), dtype=wide, **_place(block))
    if prod(block.shape):
        result = widened(getattr(block, name)().reshape(1))
    return getattr(matrix.grid[axes].all_gather(contiguous(result)) if axes else result, name)().item()


@quiet
def sum_along(matrix: Matrix, dim: int) -> Matrix:
    """The sums over `dim`, whose size becomes 1, in the layout `without` it.

    Sums are taken in `wide_dtype` and rounded once to the matrix's dtype; those of whole numbers stay wide.
    """
    _check_dim(dim, "sum")
    wide = wide_dtype(matrix.block)
    result = line_sums(matrix, dim)
    return _line(matrix, result if is_whole_dtype(wide) else cast(result, matrix.block), dim)


@quiet
def mean_along(matrix: Matrix, dim: int) -> Matrix:
    """The means over `dim`, as `sum_along`; of whole numbers in float64. Raises ShapeError where there is nothing to take."""
    _check_dim(dim, "mean")
    _check_some(matrix, "mean", matrix.shape[dim])
    result = line_sums(matrix, dim)
    if is_whole_dtype(result.dtype):
        result = result.double() if is_torch(result) else result.astype(np.float64)
        return _line(matrix, result / matrix.shape[dim], dim)
    return _line(matrix, cast(result / matrix.shape[dim], matrix.block), dim)


@quiet
def extreme_along(matrix: Matrix, dim: int, name: str) -> Matrix:
    """The max or min over `dim`, whose size becomes 1, in the layout `without` it; nan where one is nan.

    Moves the words of an all-reduce, of floats twice: a nan, which MPI's max may drop, travels as a flag beside the values.
    """
    _check_dim(dim, name)
    _check_some(matrix, name, matrix.shape[dim])
    block, library = matrix.block, library_of(matrix.block)
    wide = _ordered(block, name)
    bound = _bound(wide, name)
    values = library.full(_line_shape(matrix, dim), bound, dtype=wide, **_place(block))
    if matrix.layout.holds_block(matrix.grid.coordinates) and block.shape[dim]:
        values = widened(getattr(library, f"a{name}")(block, dim)).reshape(values.shape)
    if is_whole_dtype(wide):
        return _line(matrix, cast(_reduced(matrix, dim, values, name), block), dim)
    is_nan = library.isnan(values)
    flagged = library.stack([library.where(is_nan, bound, values), library.where(is_nan, -bound, bound)])
    result = _reduced(matrix, dim, flagged, name)
    return _line(matrix, cast(library.where(result[1] == -bound, float("nan"), result[0]), block), dim)


def diagonal(matrix: Distributed) -> Array:
    """The diagonal, one dim, on every rank. Moves, per rank, the words of it that come from others.

    Each element travels once, from the first of the ranks that hold it. Raises GridError on a rank outside the grid.
    """
    matrix.check_block()
    _check_inside(matrix)
    grid, axes, own = matrix.grid, splitting(matrix.layout), contiguous(_diagonal_here(matrix))
    points = [grid.coordinates_of(rank) for rank in grid.topology.members(axes, grid.coordinates)]
    parts = [_diagonal_at(matrix, point)[0] for point in points if counts_at(matrix, point)]
    lengths = iter(parts)
    sizes = [len(next(lengths)) if counts_at(matrix, point) else 0 for point in points]
    gathered = grid[axes].all_gather(own if counts(matrix) else own[:0], sizes=sizes) if axes else own
    whole = empty((min(matrix.shape),), matrix.block)
    whole[np.concatenate(parts)] = gathered
    return whole


def _diagonal_at(matrix: Distributed, coordinates: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the diagonal's elements of the rank there: their global indices, and their rows and columns in its block."""
    rows, columns = matrix.layout.runs(matrix.shape, matrix.grid.shape, coordinates)
    in_rows, in_columns = map(indices, common_runs(rows, columns))
    return indices(rows)[in_rows], in_rows, in_columns


def _diagonal_here(matrix: Distributed) -> Array:
    _, rows, columns = _diagonal_at(matrix, matrix.grid.coordinates)
    return matrix.block[rows, columns]


def total_of(matrix: Distributed, elements: Array) -> Any:
    """The sum of some of each rank's elements over all ranks, whose copies count once."""
    _check_inside(matrix)
    wide, axes = wide_dtype(elements), splitting(matrix.layout)
    mine = library_of(elements).zeros(1, dtype=wide, **_place(elements))
    if counts(matrix):
        mine = elements.sum(dtype=wide).reshape(1)
    return (matrix.grid[axes].all_reduce(mine) if axes else mine).item()


def line_sums(matrix: Distributed, dim: int) -> Array:
    """The sums over `dim` in `wide_dtype`."""
    matrix.check_block()
    block, wide = matrix.block, wide_dtype(matrix.block)
    values = library_of(block).zeros(_line_shape(matrix, dim), dtype=wide, **_place(block))
    if matrix.layout.holds_block(matrix.grid.coordinates):
        values = block.sum(dim, dtype=wide).reshape(values.shape)
    return _reduced(matrix, dim, values, "sum")


def _reduced(matrix: Distributed, dim: int, values: Array, op: str) -> Array:
    """This rank's values and those of the ranks that hold other parts of the same lines along `dim`."""
    axes = along(matrix.layout, dim)
    return matrix.grid[axes].all_reduce(contiguous(values), op) if axes and matrix.grid.inside else values


def _line_shape(matrix: Distributed, dim: int) -> tuple[int, ...]:
    """The shape of this rank's block of one line in place of `dim`."""
    shape = (1, matrix.shape[1]) if dim == 0 else (matrix.shape[0], 1)
    return without(matrix.layout, dim).local_shape(shape, matrix.grid.shape, matrix.grid.coordinates)


def _line(matrix: Matrix, block: Array, dim: int) -> Matrix:
    shape = (1, matrix.shape[1]) if dim == 0 else (matrix.shape[0], 1)
    return matrix.with_block(block, without(matrix.layout, dim), shape)


def _place(block: Array) -> dict[str, Any]:
    """Keyword arguments that place a new array on the block's device."""
    return {"device": block.device} if is_torch(block) else {}


def _ordered(block: Array, name: str) -> Any:
    """`wide_dtype` of what has a largest element. Raises ShapeError for complex numbers."""
    if dtype_name(block).startswith("complex"):
        raise ShapeError(f"{name} of a {dtype_name(block)} matrix: complex numbers have no order. Take abs(A), A.real or A.imag.")
    return wide_dtype(block)


def _bound(wide: Any, name: str) -> float:
    """Bound on all elements: of a max the least number, of a min the largest."""
    if not is_whole_dtype(wide):
        return -inf if name == "max" else inf
    limits = np.iinfo(str(wide).removeprefix("torch."))
    return int(limits.min if name == "max" else limits.max)


def _check_dim(dim: int, name: str) -> None:
    if isinstance(dim, bool) or dim not in (0, 1):
        raise ShapeError(f"{name} over dim {dim!r}: a matrix has the dims 0 (over its rows) and 1 (over its columns).")


def _check_some(matrix: Distributed, name: str, extent: int) -> None:
    if not extent:
        raise ShapeError(f"{name} of a {matrix.shape[0]}×{matrix.shape[1]} matrix: there is no element to take.")


def _check_inside(matrix: Distributed) -> None:
    """Raise GridError on a rank outside the grid, which takes no part in what the grid's ranks find."""
    if not matrix.grid.inside:
        matrix.grid.world  # noqa: B018
