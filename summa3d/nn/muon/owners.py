"""Which rank orthogonalises which matrix, and what each sends and receives of it: plain data, known before a run."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...comm.grid import BaseGrid
from ...layout.layout import Layout, Sharding
from ...layout.redistribute import Piece, common_runs
from .matrices import LogicalMatrix
from .newton_schulz import NewtonSchulz

Extent = tuple[tuple[int, int], tuple[int, int]]
"""The rows and columns of a weight that a rank holds: first, and one behind the last."""


@dataclass(frozen=True)
class OwnersPlan:
    """Whole matrices on owners: one all-to-all brings them there, one brings the results back to all who hold a block.

    The longest products are dealt first, each to the rank that has least to compute. An owner receives each element once: it
    takes its own, and of equal copies those of one holder, in turns. Every rank computes the same plan.

    Attributes
    ----------
    matrices : the matrices, of weights that a rank of the plane holds
    axes, members : the plane, all axes but a pipeline's, and the coordinates of its ranks, in its order
    shape : axis name → size, of the whole grid
    owners : the index in the plane of each matrix's owner
    """

    matrices: tuple[LogicalMatrix, ...]
    axes: tuple[str, ...]
    members: tuple[Mapping[str, int], ...]
    shape: Mapping[str, int]
    owners: tuple[int, ...]

    @classmethod
    def of(cls, matrices: Sequence[LogicalMatrix], grid: BaseGrid, how: NewtonSchulz) -> OwnersPlan:
        """The plan of those matrices that this rank's stage of a pipeline holds; without one, of all."""
        axes = tuple(axis for axis in grid.shape if axis != "pp")
        points = itertools.product(*(range(grid.shape[axis]) for axis in axes))
        members = tuple({**grid.coordinates, **dict(zip(axes, point, strict=True))} for point in points)
        held = tuple(one for one in matrices if _is_of_stage(one.held.layout, grid.coordinates))
        owners = dealt([how.flops(*one.shape) for one in held], len(members))
        return cls(held, axes, members, grid.shape, owners)

    def block_of(self, member: int, number: int) -> Extent | None:
        """The rows and columns that a member holds of a matrix's weight; None where it holds nothing."""
        return self._blocks_of(self.matrices[number].held)[member]

    def holders_of(self, number: int) -> dict[Extent, list[int]]:
        """Each block of a matrix's weight, and the members that hold it."""
        held = self.matrices[number].held
        if held not in self._holders:
            found = self._holders[held] = {}
            for member, block in enumerate(self._blocks_of(held)):
                if block is not None:
                    found.setdefault(block, []).append(member)
        return self._holders[held]

    def sender_of(self, number: int, block: Extent) -> int:
        """The member that gives a block of a matrix to its owner: itself, if it holds it, else one of the holders."""
        owner, holders = self.owners[number], self.holders_of(number)[block]
        return owner if owner in holders else holders[number % len(holders)]

    def collected(self, number: int) -> Iterator[Piece]:
        """The pieces that make a matrix on its owner."""
        for block in self.holders_of(number):
            yield from self._piece(number, block, self.sender_of(number, block))

    def held(self, number: int) -> Iterator[Piece]:
        """The pieces of a matrix that members hold, copies too: each gets that part of the result."""
        for block, holders in self.holders_of(number).items():
            for holder in holders:
                yield from self._piece(number, block, holder)

    def owned_by(self, member: int) -> list[int]:
        """The matrices that a member owns."""
        return [number for number, owner in enumerate(self.owners) if owner == member]

    def held_by(self, member: int, number: int) -> Iterator[Piece]:
        """The piece of a matrix that a member holds, if there is one."""
        block = self.block_of(member, number)
        if block is not None:
            yield from self._piece(number, block, member)

    def sent_by(self, member: int, number: int) -> Iterator[Piece]:
        """The piece of a matrix that a member gives to its owner, if there is one: of several with copies, one does."""
        block = self.block_of(member, number)
        if block is not None and self.sender_of(number, block) == member:
            yield from self._piece(number, block, member)

    def words_of(self, member: int) -> int:
        """Words that a member receives in a step: what it lacks of its matrices, and its blocks of the results of others'."""
        own = (piece for number in self.owned_by(member) for piece in self.collected(number))
        others = (piece for number, owner in enumerate(self.owners) if owner != member for piece in self.held_by(member, number))
        return sum(piece.words for piece in own if piece.sender != member) + sum(piece.words for piece in others)

    def messages_of(self, member: int) -> int:
        """Messages that a member receives in a step: those of two all-to-alls; of one or none, where others move nothing."""
        return (self.collects + self.returns) * (len(self.members) - 1)

    @cached_property
    def collects(self) -> bool:
        """Whether any owner lacks elements of a matrix."""
        return any(piece.sender != piece.receiver for number in range(len(self.owners)) for piece in self.collected(number))

    @cached_property
    def returns(self) -> bool:
        """Whether a member holds a block of a matrix that it does not own."""
        return any(piece.sender != piece.receiver for number in range(len(self.owners)) for piece in self.held(number))

    @cached_property
    def _blocks(self) -> dict[Sharding, list[Extent | None]]:
        return {}

    @cached_property
    def _holders(self) -> dict[Sharding, dict[Extent, list[int]]]:
        return {}

    def _blocks_of(self, held: Sharding) -> list[Extent | None]:
        if held not in self._blocks:
            found: list[Extent | None] = []
            for at in self.members:
                rows, columns = held.layout.slices(held.shape, self.shape, at)
                block = (rows.start, rows.stop), (columns.start, columns.stop)
                found.append(block if rows.start < rows.stop and columns.start < columns.stop else None)
            self._blocks[held] = found
        return self._blocks[held]

    def _piece(self, number: int, block: Extent, holder: int) -> Iterator[Piece]:
        """The piece of a matrix that lies in a holder's block, as it sends it: where it lies there, and in the matrix."""
        rows, columns = block
        take, put = common_runs((slice(*columns),), self.matrices[number].columns)
        if take:
            yield Piece(holder, self.owners[number], ((slice(0, rows[1] - rows[0]),), take), ((slice(*rows),), put))


def dealt(work: Sequence[int], members: int) -> tuple[int, ...]:
    """Who takes each piece of work: the largest first, each to the member that has least so far, of equals the first.

    >>> dealt([3, 5, 3, 4], 2)
    (1, 0, 0, 1)
    """
    loads = [(0, member) for member in range(members)]
    owners = [0] * len(work)
    for number in sorted(range(len(work)), key=lambda one: -work[one]):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + work[number], owners[number]))
    return tuple(owners)


def _is_of_stage(layout: Layout, at: Mapping[str, int]) -> bool:
    """Whether the stage of a pipeline that lies there holds a tensor; without a pipeline, it does."""
    return "pp" not in layout.root_only or at["pp"] in dict(layout.at).get("pp", (0,))
