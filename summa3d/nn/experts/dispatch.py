"""Where the tokens of a layer's experts go, as plain data made of counts alone: how many rows who sends to whom, in which order.

The rows of an expert, ordered by the rank that sends them and then as it stores them, are split over the expert's ranks as any
activation [m, h] is (the layout `pooled` of a scheme), however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ...layout.layout import split_sizes


@dataclass(frozen=True)
class ExpertPlane:
    """The ranks that exchange the tokens of one layer: groups that hold different experts, times parts of an expert's rows.

    A member's index is group · parts + part.

    Attributes
    ----------
    experts : the number of experts
    groups : in how many groups they are held (axis ep), each a run of consecutive experts; the runs differ by at most one, larger
        first
    splits : the sizes of the axes that split an expert's rows, coarse first

    >>> plane = ExpertPlane(5, 2, (2, 1))
    >>> plane.homes, plane.own(1), plane.members
    ((0, 0, 0, 1, 1), slice(3, 5, None), 4)
    """

    experts: int
    groups: int
    splits: tuple[int, ...]

    @cached_property
    def parts(self) -> int:
        """In how many parts an expert's rows are split."""
        return prod(self.splits)

    @property
    def members(self) -> int:
        """The number of ranks."""
        return self.groups * self.parts

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """Expert → the group that holds it."""
        sizes = split_sizes(self.experts, self.groups)
        return tuple(group for group, size in enumerate(sizes) for _ in range(size))

    def own(self, group: int) -> slice:
        """The experts of a group."""
        first = self.homes.index(group)
        return slice(first, first + self.homes.count(group))

    def extents(self, totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each part, and the one behind its last, of experts of so many rows [E]: [parts, E] each."""
        first, last = np.zeros_like(totals)[None], totals[None]
        for size in self.splits:
            index = np.arange(size)[:, None]
            even, more = np.divmod(last - first, size)
            begin = first[:, None] + index * even[:, None] + np.minimum(index, more[:, None])
            end = begin + even[:, None] + (index < more[:, None])
            first, last = begin.reshape(-1, len(totals)), end.reshape(-1, len(totals))
        return first, last


@dataclass(frozen=True)
class DispatchPlan:
    """What one member of an `ExpertPlane` sends and receives.

    Attributes
    ----------
    sent, received : the rows to and from each member
    take : which of this member's rows, sorted by expert, are sent, in the order in which they are
    place : which of the received rows, which lie as (source, expert), are next to each other as (expert, source)
    totals : the rows of each expert of the member's group, over all members
    blocks : of these, the rows that this member holds
    """

    sent: list[int]
    received: list[int]
    take: np.ndarray
    place: np.ndarray
    totals: list[int]
    blocks: list[int]


def plan_dispatch(counts: np.ndarray, plane: ExpertPlane, member: int) -> DispatchPlan:
    """The plan of a member for the rows that each member has for each expert, [members, E] of whole numbers.

    The way back is the same plan the other way round. Words received: of the rows `received` from others.

    >>> plan_dispatch(np.array([[1, 2], [0, 1]]), ExpertPlane(2, 2, ()), 1).received
    [2, 1]
    """
    group, part = divmod(member, plane.parts)
    ends = counts.cumsum(0)
    first, last = plane.extents(ends[-1])
    pieces = np.minimum(ends[:, None], last) - np.maximum((ends - counts)[:, None], first)
    pieces = pieces.clip(0)  # [source, part, expert]
    mine, own = pieces[member], counts[member]
    begins = own.cumsum() - own + mine.cumsum(0) - mine  # of a part's rows among those of this member that are sorted by expert
    held = [plane.own(index) for index in range(plane.groups)]
    take = _runs(*(np.concatenate([of[:, experts].ravel() for experts in held]) for of in (begins, mine)))
    arriving = pieces[:, part, held[group]]
    flat = arriving.ravel()
    offsets = (flat.cumsum() - flat).reshape(arriving.shape)
    return DispatchPlan(
        [int(rows) for experts in held for rows in mine[:, experts].sum(1)],
        arriving.sum(1).tolist(),
        take,
        _runs(offsets.T.ravel(), arriving.T.ravel()),
        ends[-1][held[group]].tolist(),
        arriving.sum(0).tolist(),
    )


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The whole numbers of consecutive runs, one after the other.

    >>> _runs(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    return np.repeat(starts - lengths.cumsum() + lengths, lengths) + np.arange(lengths.sum())
