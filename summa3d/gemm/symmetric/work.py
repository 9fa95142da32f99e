"""Who multiplies what of a symmetric product, for all ranks at once: rows, ranges of k, blocks of C and shares of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...layout.cyclic import Runs
from ...layout.layout import Coordinates
from ...layout.redistribute import BlockKey, Placement
from ..any_layout.blocks import nested_sizes
from ..any_layout.vectors import RankSpace

RING, PAIRS = "ring", "pairs"


class SymmetricWork(NamedTuple):
    """What each rank multiplies of C = X·Xᵀ, and with whom it sums. The ranks are the last dim but that of the limits.

    rows, inner : [·, ranks, 2] ranges of rows of X, and of k, that it reads, ascending; some are empty
    blocks : [·, ranks, 4] rows and columns of the blocks of C that it makes; of the first, which lies on the diagonal, the lower
        triangle
    group, place, summands : the ranks of a group make the same blocks, of other ranges of k; a rank's place among them; how many
        they are
    """

    rows: np.ndarray
    inner: np.ndarray
    blocks: np.ndarray
    group: np.ndarray
    place: np.ndarray
    summands: np.ndarray

    def members(self, rank: int) -> list[int]:
        """The ranks of the group of `rank`, by their places."""
        members = np.flatnonzero(self.group == self.group[rank])
        return [int(member) for member in members[np.argsort(self.place[members])]]

    def multiply_adds(self) -> np.ndarray:
        """Multiply-adds of each rank."""
        return elements(self.blocks).sum(0) * lengths(self.inner).sum(0)

    def shares(self) -> np.ndarray:
        """[·, ranks, 4] boxes of C that each rank owns once sums are made: rows of its group's blocks.

        The first is a square on the diagonal, of which the lower triangle is held; the second lies left of it.
        """
        first, last, left, right = np.moveaxis(self.blocks, -1, 0)
        ends = []
        for step in (self.place, self.place + 1):
            height = (last - first).astype(float)
            by_area = np.rint(height * np.sqrt(step / self.summands)).astype(np.int64)
            even = (last - first) * step // self.summands
            ends.append(first + np.where(np.arange(len(first))[:, None] == 0, by_area, even))
        begin, end = ends
        corner = np.stack([begin[0], end[0], begin[0], end[0]], -1)
        beside = np.stack([begin[0], end[0], left[0], begin[0]], -1)
        others = np.stack([begin[1:], end[1:], left[1:], right[1:]], -1)
        return np.concatenate([corner[None], beside[None], others])


def lengths(runs: np.ndarray) -> np.ndarray:
    """Indices in each range."""
    return np.asarray(runs[..., 1] - runs[..., 0])


def elements(boxes: np.ndarray) -> np.ndarray:
    """Elements of each box; of the first, its lower triangle."""
    rows, columns = boxes[..., 1] - boxes[..., 0], boxes[..., 3] - boxes[..., 2]
    sizes = rows * columns
    sizes[0] = rows[0] * (rows[0] + 1) // 2
    return np.asarray(sizes)


def _index(space: RankSpace, axes: Sequence[str]) -> np.ndarray:
    """Each rank's place on a plane."""
    index = np.zeros(len(space), np.int64)
    for axis in axes:
        index = index * space.shape[axis] + space.index[axis]
    return index


def _ends(space: RankSpace, extent: int, axes: Sequence[str]) -> np.ndarray:
    """The limits of the parts of a dim that axes split."""
    return np.cumsum([0, *nested_sizes(extent, [space.shape[axis] for axis in axes])])


def ring(space: RankSpace, x: Sequence[str], y: Sequence[str], n: int, k: int) -> SymmetricWork:
    """X in parts of rows over x and of k over y: part i meets itself and the next ⌊parts/2⌋, in a circle.

    Of an even number of parts the last meeting is one of two parts that meet twice: each multiplies half of the rows of one.
    """
    ends, i, parts = _ends(space, n, x), _index(space, x), prod(space.shape[axis] for axis in x)
    first, last = ends[:-1], ends[1:]
    middle = (first + last + 1) // 2
    j = (i + np.arange(parts // 2 + 1)[:, None]) % parts
    blocks = np.stack([first[i] + 0 * j, last[i] + 0 * j, first[j], last[j]], -1)
    if parts % 2 == 0:
        early = i < parts // 2
        blocks[-1, :, 0] = np.where(early, blocks[-1, :, 0], middle[i])
        blocks[-1, :, 3] = np.where(early, middle[j[-1]], blocks[-1, :, 3])
    inner, place = _ends(space, k, y), _index(space, y)
    work = SymmetricWork(
        np.take_along_axis(blocks[..., 2:], np.argsort(blocks[..., 2], 0, kind="stable")[..., None], 0),
        np.stack([inner[place], inner[place + 1]], -1)[None],
        blocks, i, place, np.full(len(space), prod(space.shape[axis] for axis in y)),
    )  # fmt: skip
    return _inside(work, space)


def pairs(space: RankSpace, x: Sequence[str], y: Sequence[str], z: Sequence[str], n: int, k: int) -> SymmetricWork:
    """X in parts of rows over x and of k over (z,y), x and y of one size q: (x,y) and (y,x) make C_xy of half of z's part each.

    A rank off the diagonal takes the part of k that it holds, its partner the other one, and of all others half each.
    """
    q, ends = prod(space.shape[axis] for axis in x), _ends(space, n, x)
    a, b, c = (_index(space, axes) for axes in (x, y, z))
    high, low, same = np.maximum(a, b), np.minimum(a, b), a == b
    fine = _ends(space, k, (*z, *y))
    inner = []
    for j in range(q):
        start, stop = fine[c * q + j], fine[c * q + j + 1]
        half, upper = (start + stop + 1) // 2, (a < b) ^ ((j + c) % 2 == 1)
        whole = same | (j == b)
        stop, start = np.where(whole | upper, stop, half), np.where(whole | ~upper, start, half)
        inner.append(np.stack([start, np.where(~same & (j == a), start, stop)], -1))
    rows = np.stack([np.stack([ends[low], ends[low + 1]], -1), np.stack([ends[high], ends[np.where(same, high, high + 1)]], -1)])
    block = np.concatenate([rows[1], rows[0]], -1)
    corner = np.concatenate([rows[0], rows[0]], -1)
    blocks = np.stack([np.where(same[:, None], corner, 0), np.where(same[:, None], 0, block)])
    summed = prod(space.shape[axis] for axis in z)
    place, summands = c + np.where(a < b, summed, 0), summed * np.where(same, 1, 2)
    return _inside(SymmetricWork(rows, np.stack(inner), blocks, high * q + low, place, summands), space)


def _inside(work: SymmetricWork, space: RankSpace) -> SymmetricWork:
    """Nothing for the ranks outside the grid."""
    here = space.inside[:, None]
    return work._replace(rows=work.rows * here, inner=work.inner * here, blocks=work.blocks * here)


class GatheredParts(Placement):
    """Where what ranks read of X lies, before they multiply it: its rows, and ranges of k; turned, X is stored as k×n."""

    def __init__(self, work: SymmetricWork, points: Sequence[Coordinates], turned: bool) -> None:
        self.points = points
        self.parts = [tuple(_runs(runs[:, rank]) for runs in (work.rows, work.inner)) for rank in range(len(points))]
        self.parts = [pair[::-1] if turned else pair for pair in self.parts]
        self.keys = [self._flat(rank) if point else None for rank, point in enumerate(points)]
        self.holders: dict[BlockKey, list[int]] = {}
        for rank, key in enumerate(self.keys):
            if key is not None:
                self.holders.setdefault(key, []).append(rank)

    def _flat(self, rank: int) -> BlockKey:
        return tuple(tuple(limit for run in runs for limit in (run.start, run.stop)) for runs in self.parts[rank])

    def runs(self, shape: Sequence[int], rank: int) -> tuple[Runs, ...]:
        """Per dim, the ranges of indices that `rank` reads."""
        return self.parts[rank]

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of what `rank` reads."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self.parts[rank])


def _runs(limits: Any) -> Runs:
    """Ranges as slices, those that adjoin as one."""
    result: list[slice] = []
    for start, stop in limits.tolist():
        if start == stop:
            continue
        if result and result[-1].stop == start:
            result[-1] = slice(result[-1].start, stop)
        else:
            result.append(slice(start, stop))
    return tuple(result)
