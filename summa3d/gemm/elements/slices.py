"""Parts of a distributed matrix by ranges of its rows and columns: read as a matrix of their own, and overwritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from operator import index
from typing import Any, cast

import numpy as np

from ...comm.device.arrays import dtype_name, empty, is_writable
from ...comm.grid import BaseGrid, agree_on_call
from ...comm.health.agreement import agree_on_error
from ...errors import ShapeError
from ...layout.cyclic import Ownership, Runs
from ...layout.layout import Coordinates
from ...layout.redistribute import Exchange, Placement, Redistribution, check_common
from ..distributed import Distributed, Matrix, check_kind
from .elementwise import scalar_of
from .reductions import total_of

IndexRanges = tuple[range, range]


@dataclass(frozen=True)
class SlicedOwnership:
    """Who holds which elements of a part of a matrix: `ranges` of its rows and columns, numbered anew, where `layout` has them.

    whole : the shape of the matrix.
    """

    layout: Ownership
    whole: tuple[int, ...]
    ranges: IndexRanges

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes that split each dim of the matrix."""
        return self.layout.dims

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split some dim."""
        return self.layout.axes

    @property
    def root_only(self) -> tuple[str, ...]:
        """The axes along which some indices hold nothing."""
        return self.layout.root_only

    def holds_block(self, coordinates: Coordinates) -> bool:
        """Return whether the rank holds a block of the matrix."""
        return self.layout.holds_block(coordinates)

    def runs(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[Runs, ...]:
        """Per dim, the ranges of the part's own indices that the rank holds, ascending."""
        return tuple(tuple(part for part, _ in pieces) for pieces in self._pieces(grid_shape, coordinates))

    def local_shape(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[int, ...]:
        """The rows and columns of the part that the rank holds."""
        return tuple(sum(part.stop - part.start for part, _ in pieces) for pieces in self._pieces(grid_shape, coordinates))

    def index(self, grid: BaseGrid) -> tuple[Any, ...]:
        """The index of the part's elements in this rank's block, in the part's order: slices, or an open mesh."""
        dims = [[inside for _, inside in pieces] for pieces in self._pieces(grid.shape, grid.coordinates)]
        if all(len(insides) < 2 and (not insides or insides[0].step > 0) for insides in dims):
            return tuple(
                slice(item.start, item.stop, item.step) for item in (insides[0] if insides else range(0) for insides in dims)
            )
        return np.ix_(
            *(np.concatenate([np.asarray(inside, np.int64) for inside in insides] or [np.arange(0)]) for insides in dims)
        )

    def _pieces(self, grid_shape: Mapping[str, int], coordinates: Coordinates) -> list[list[tuple[slice, range]]]:
        runs = self.layout.runs(self.whole, grid_shape, coordinates)
        return [_pieces(own, taken) for own, taken in zip(runs, self.ranges, strict=True)]


def _pieces(runs: Runs, taken: range) -> list[tuple[slice, range]]:
    """Of the indices `taken` in a rank's runs: where they are in the part, ascending, and where in the rank's storage.

    >>> _pieces((slice(2, 5), slice(8, 11)), range(9, 1, -2))
    [(slice(0, 1, None), range(4, 2, -2)), (slice(3, 4, None), range(1, -1, -2))]
    """
    step, count, result, stored = abs(taken.step), len(taken), [], 0
    first = min(taken[0], taken[-1]) if taken else 0
    for run in runs:
        low, high = (min(max(0, -((first - edge) // step)), count) for edge in (run.start, run.stop))
        if low < high:
            start = stored + first + low * step - run.start
            inside = range(start, start + (high - low - 1) * step + 1, step)
            result.append((slice(low, high), inside) if taken.step > 0 else (slice(count - high, count - low), inside[::-1]))
        stored += run.stop - run.start
    return result if taken.step > 0 else result[::-1]


def part(matrix: Matrix, key: Any) -> Any:
    """``A[key]``: a matrix in A's layout, split evenly anew; of two whole numbers the element, a number on every rank."""
    ranges, is_element = ranges_of(key, matrix.shape)
    matrix.check_block()
    block = matrix.block[sliced(matrix, ranges).index(matrix.grid)]
    if is_element:
        return total_of(matrix, block)
    grid, shape = matrix.grid, (len(ranges[0]), len(ranges[1]))
    out = empty(matrix.layout.local_shape(shape, grid.shape, grid.coordinates), block)
    if grid.inside:
        agree_on_call(grid, "A[…]", {"shape": matrix.shape, "layout": str(matrix.layout), **_facts(matrix, ranges)}, grid.ranked)
        Exchange([plan_of(matrix, key)], grid.ranked).run(block, out)
    return matrix.with_block(out, matrix.layout, shape)


def put_part(matrix: Distributed, key: Any, value: Any) -> None:
    """``A[key] = value``: a scalar in each element, or a matrix of the part's shape, which is brought to where A has the part."""
    ranges, _ = ranges_of(key, matrix.shape)
    matrix.check_block()
    if matrix.shown.conjugated:
        raise ShapeError("A[…] = B: A is the conjugate of a matrix, which shows that matrix's elements and cannot be written.")
    shape, own, grid = (len(ranges[0]), len(ranges[1])), sliced(matrix, ranges), matrix.grid
    is_matrix = isinstance(value, Distributed)
    if is_matrix:
        check_kind(matrix, value, "No A[…] = B", one_grid=False)
        check_common(grid, value.grid)
        if value.shape != shape:
            raise ShapeError(f"A[…] is {shape[0]}×{shape[1]}, and B {value.shape[0]}×{value.shape[1]}; sizes must be equal.")
    elif not isinstance(value, Number):
        raise TypeError(f"A[…] = a {type(value).__name__}: it takes a number, or a DistMatrix, as from_global makes.")
    result: Any = None if is_matrix else scalar_of(matrix, value, "=")
    other = value.grid if is_matrix else grid
    if not (grid.inside or other is not grid):
        return
    axis, on = (grid.ranked, Placement.on) if other is grid else (grid.everyone, Placement.among_everyone)
    problem = None if is_writable(matrix.block) else "A[…] = B: the block of A is read-only."
    agree_on_error(axis.comm, None if problem is None else ShapeError(problem))
    if is_matrix:
        facts = {"shape": matrix.shape, "layout": str(matrix.layout), "B": str(value.layout), "grid": repr(other)}
        agree_on_call(grid, "A[…] = B", {**facts, **_facts(matrix, ranges)}, axis)
        plan = Redistribution(shape, on(other, value.layout), on(grid, cast(Ownership, own)))
        result = empty(plan.target.local_shape(shape, axis.index), matrix.block)
        Exchange([plan], axis).run(value.block, result)
    matrix.block[own.index(grid)] = result


def sliced(matrix: Distributed, ranges: IndexRanges) -> SlicedOwnership:
    """Elements of each rank of a part of a matrix."""
    return SlicedOwnership(matrix.layout, matrix.shape, ranges)


def plan_of(matrix: Distributed, key: Any) -> Redistribution:
    """The redistribution that ``A[key]`` is: the words that each rank receives."""
    ranges, _ = ranges_of(key, matrix.shape)
    own = cast(Ownership, sliced(matrix, ranges))
    shape = (len(ranges[0]), len(ranges[1]))
    return Redistribution(shape, Placement.on(matrix.grid, own), Placement.on(matrix.grid, matrix.layout))


def ranges_of(key: Any, shape: tuple[int, ...]) -> tuple[IndexRanges, bool]:
    """The rows and columns that a key of one or two indices names, as numpy reads them; and whether both are whole numbers.

    A whole number keeps its dim, 1 wide: a matrix has two. Raises ShapeError for other keys, and for an index that A lacks.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) > 2:
        raise ShapeError(f"A[{len(keys)} indices]: a matrix has two dims, A[rows, columns].")
    names = ("rows", "columns")[: len(keys)]
    ranges = [_range_of(item, extent, name) for item, extent, name in zip(keys, shape, names, strict=False)]
    rows, columns = (*ranges, range(shape[1]))[:2]
    return (rows, columns), len(keys) == 2 and not any(isinstance(key, slice) for key in keys)


def _range_of(key: Any, extent: int, name: str) -> range:
    try:
        if isinstance(key, slice):
            return range(*key.indices(extent))
        at = index(key) if not isinstance(key, (bool, np.bool_)) else None
    except (TypeError, ValueError) as error:
        raise ShapeError(f"A[…]: {name} {key!r}: {error}. A range start:stop:step or a whole number is taken.") from error
    if at is None or not -extent <= at < extent:
        raise ShapeError(f"A[…]: {name} {key!r} is none of the matrix's {extent} {name}, 0 to {extent - 1}.")
    at %= extent
    return range(at, at + 1)


def _facts(matrix: Distributed, ranges: IndexRanges) -> dict[str, Any]:
    return {"dtype": dtype_name(matrix.block), "rows": ranges[0], "columns": ranges[1]}
