"""Which indices of a dim each rank holds, as vectors over ranks: overlaps are exact, and need no loop over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ...comm.grid import BaseGrid
from ...layout.cyclic import BlockCyclic, Ownership
from ...layout.layout import Coordinates, Layout


class DimSplit(NamedTuple):
    """The axes that split a dim, coarse first: into nested ranges, or dealt out in blocks of `block` elements in turn."""

    axes: tuple[str, ...]
    block: int = 0

    def __str__(self) -> str:
        axes = self.axes[0] if len(self.axes) == 1 else f"({','.join(self.axes)})"
        return (f":{axes}" if self.axes else "") + (f"[{self.block}]" if self.block else "")


class RangeParts(NamedTuple):
    """One range of a dim for each rank, along the last dim of both arrays."""

    start: np.ndarray
    stop: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """Indices that each rank holds."""
        return self.stop - self.start

    def below(self, index: np.ndarray) -> np.ndarray:
        """Number of indices below `index` on each rank."""
        return np.minimum(np.maximum(index, self.start), self.stop) - self.start


class DealtParts(NamedTuple):
    """The indices of a dim that is dealt out in blocks: rank r has every `parts`-th block from `turn[r]` on; none outside."""

    extent: int
    block: int
    parts: int
    turn: np.ndarray
    inside: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """Indices that each rank holds."""
        return self.below(np.full(len(self.turn), self.extent))

    def below(self, index: np.ndarray) -> np.ndarray:
        """Number of indices below `index` on each rank."""
        rounds, rest = np.divmod(index, self.block * self.parts)
        own = np.minimum(np.maximum(rest - self.turn * self.block, 0), self.block)
        counted: np.ndarray = np.where(self.inside, rounds * self.block + own, 0)
        return counted

    def runs(self) -> RangeParts:
        """The blocks as ranges, one row for each round of dealing."""
        rounds = -(-self.extent // (self.block * self.parts))
        first = (self.turn + self.parts * np.arange(rounds)[:, None]) * self.block
        start, stop = np.minimum(first, self.extent), np.minimum(first + self.block, self.extent)
        return RangeParts(start, np.where(self.inside, stop, start))


RankParts = RangeParts | DealtParts


def overlap(mine: RankParts, other: RankParts) -> np.ndarray:
    """Indices that each rank has in both; of ranges there may be many rows."""
    if isinstance(other, RangeParts):
        return mine.below(other.stop) - mine.below(other.start)
    if isinstance(mine, RangeParts):
        return other.below(mine.stop) - other.below(mine.start)
    if (mine.block, mine.parts) == (other.block, other.parts) and np.array_equal(mine.turn, other.turn):
        return np.minimum(mine.size, other.size)
    runs = other.runs()
    total: np.ndarray = (mine.below(runs.stop) - mine.below(runs.start)).sum(0)
    return total


class RankSpace:
    """The ranks that take part in a product, as points of one grid: `points` has {} for a rank outside it."""

    def __init__(self, grid_shape: Mapping[str, int], points: Sequence[Coordinates]) -> None:
        self.shape, self.points = dict(grid_shape), points
        self.inside = np.array([bool(point) for point in points])
        self.index = {axis: np.array([point.get(axis, 0) for point in points]) for axis in self.shape}

    @classmethod
    def on(cls, grid: BaseGrid) -> RankSpace:
        """The ranks of a grid."""
        return cls(grid.shape, [grid.coordinates_of(rank) for rank in range(grid.size)])

    @classmethod
    def among_everyone(cls, grid: BaseGrid) -> RankSpace:
        """All ranks of the communicator that a grid was made on, as points of the grid."""
        return cls(grid.shape, grid.places())

    def __len__(self) -> int:
        return len(self.points)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of more than one member: those that can split."""
        return tuple(axis for axis, size in self.shape.items() if size > 1)

    def true_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one member."""
        return tuple(axis for axis in axes if self.shape[axis] > 1)

    def whole(self, extent: int) -> RangeParts:
        """A dim that nothing splits: each rank of the grid has all of it."""
        start = np.zeros(len(self.points), np.int64)
        return RangeParts(start, np.where(self.inside, extent, 0))

    def halves(self, parts: RangeParts, axis: str, held: Sequence[int] = ()) -> RangeParts:
        """The balanced split of each rank's range along an axis; `held` are the indices that have parts, by default all."""
        count, index = len(held) or self.shape[axis], self.index[axis]
        if held:
            index = np.minimum(np.searchsorted(np.array(held), index), count - 1)
        quotient, rest = np.divmod(parts.stop - parts.start, count)
        start = parts.start + index * quotient + np.minimum(index, rest)
        return RangeParts(start, start + quotient + (index < rest))

    def dealt(self, extent: int, axes: Sequence[str], block: int) -> RankParts:
        """A dim that is dealt out over axes."""
        if not axes:
            return self.whole(extent)
        index = np.zeros(len(self.points), np.int64)
        for axis in axes:
            index = index * self.shape[axis] + self.index[axis]
        return DealtParts(extent, block, prod(self.shape[axis] for axis in axes), index, self.inside)

    def held(self, layout: Ownership, shape: Sequence[int]) -> list[RankParts]:
        """Part of a tensor in `layout` on each rank, for each dim; nothing of some dim where it holds no block."""
        if isinstance(layout, BlockCyclic):
            dealt = zip(shape, layout.dims, layout.block, strict=True)
            return [self.dealt(extent, self.true_axes(axes), block) for extent, axes, block in dealt]
        holds, at = self._holders(layout), dict(layout.at)
        result: list[RankParts] = []
        for extent, axes in zip(shape, layout.dims, strict=True):
            parts = self.whole(extent)
            for axis in axes:
                parts = self.halves(parts, axis, at.get(axis, ()))
            result.append(RangeParts(parts.start, np.where(holds, parts.stop, parts.start)))
        return result

    def _holders(self, layout: Layout) -> np.ndarray:
        """Mask of the ranks that hold a block (`Layout.holds_block`)."""
        holds, at, follows = self.inside, dict(layout.at), dict(layout.follows)
        for axis in layout.root_only:
            if axis in at:
                holds = holds & np.isin(self.index[axis], at[axis])
            else:
                holds = holds & (self.index[axis] == (self.index[follows[axis]] if axis in follows else 0))
        return holds
