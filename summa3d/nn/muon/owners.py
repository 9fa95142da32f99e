"""Which ranks orthogonalise which matrix, and what each sends and receives of it: plain data, known before a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...comm.grid import BaseGrid
from ...layout.cyclic import Runs
from ...layout.layout import Layout, Sharding
from ...layout.redistribute import Piece, common_runs
from .groups import Extent, GroupPlan, group_plan, grouped, norm_words
from .matrices import LogicalMatrix
from .newton_schulz import NewtonSchulz


@dataclass(frozen=True)
class OwnersPlan:
    """Matrices on owners, a rank or a group of ranks each: one all-to-all brings them there, one brings the results back.

    The longest products are dealt first, each to the owner that has least to compute. Of its part of a matrix, the whole where it
    owns it alone, a rank receives each element once: it takes its own, and of equal copies those of one holder, in turns. A group
    computes as its `GroupPlan` says. Every rank computes the same plan.

    Attributes
    ----------
    matrices : the matrices, of weights that a rank of the plane holds
    axes, members : the plane, all axes but a pipeline's, and the coordinates of its ranks, in its order
    shape : axis name → size, of the whole grid
    groups : the members of each group, by their places in it
    owners : the number of each matrix's group
    products : how a group computes each matrix; None, one rank does
    """

    matrices: tuple[LogicalMatrix, ...]
    axes: tuple[str, ...]
    members: tuple[Mapping[str, int], ...]
    shape: Mapping[str, int]
    groups: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]
    products: tuple[GroupPlan | None, ...]
    how: NewtonSchulz

    @classmethod
    def of(
        cls,
        matrices: Sequence[LogicalMatrix],
        grid: BaseGrid,
        how: NewtonSchulz,
        dtype: str = "float32",
        ranks: int | None = None,
    ) -> OwnersPlan:
        """The plan of those matrices that this rank's stage of a pipeline holds; without one, of all.

        dtype : what is computed in. ranks : of a group; None, the quickest number as `grouped` predicts. Raises ConfigError for a
        number that does not divide the stage's.
        """
        axes = tuple(axis for axis in grid.shape if axis != "pp")
        points = itertools.product(*(range(grid.shape[axis]) for axis in axes))
        members = tuple({**grid.coordinates, **dict(zip(axes, point, strict=True))} for point in points)
        held = tuple(matrix for matrix in matrices if _is_of_stage(matrix.held.layout, grid.coordinates))
        result = grouped([item.shape for item in held], len(members), how, dtype, ranks)
        order, size = list(range(len(members))), result.size
        if size > 1:  # neighbours compute together
            order.sort(key=lambda member: grid.rank_of(members[member]))
        groups = tuple(tuple(order[first : first + size]) for first in range(0, len(order), size))
        products = tuple(group_plan(*sorted(item.shape), size, dtype) if size > 1 else None for item in held)
        return cls(held, axes, members, grid.shape, groups, result.owners, products, how)

    # -- who holds and computes what ------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])

    def group_of(self, member: int) -> int:
        """The number of a member's group."""
        return next(number for number, group in enumerate(self.groups) if member in group)

    def owned_by(self, member: int) -> list[int]:
        """The matrices that a member computes, or a part of them."""
        own = self.group_of(member)
        return [number for number, owner in enumerate(self.owners) if owner == own]

    def owners_of(self, number: int) -> tuple[int, ...]:
        """The members that compute a matrix."""
        return self.groups[self.owners[number]]

    def part_of(self, member: int, number: int) -> Extent:
        """The rows and columns of a matrix that one of its owners computes with."""
        (inputs, outputs), product = self.matrices[number].shape, self.products[number]
        if product is None:
            return (0, inputs), (0, outputs)
        short, long = product.part_of(self.owners_of(number).index(member))
        return (short, long) if inputs <= outputs else (long, short)

    def block_of(self, member: int, number: int) -> Extent | None:
        """The rows and columns that a member holds of a matrix's weight; None where it holds nothing."""
        return self._blocks_of(self.matrices[number].held)[member]

    def holders_of(self, number: int) -> dict[Extent, list[int]]:
        """Each block of a matrix's weight, and the members that hold it."""
        held = self.matrices[number].held
        if held not in self._holders:
            result = self._holders[held] = {}
            for member, block in enumerate(self._blocks_of(held)):
                if block is not None:
                    result.setdefault(block, []).append(member)
        return self._holders[held]

    def sender_of(self, number: int, block: Extent, owner: int) -> int:
        """The member that gives a block of a matrix to an owner: itself, if it holds it, else one of the holders."""
        holders = self.holders_of(number)[block]
        return owner if owner in holders else holders[number % len(holders)]

    # -- what moves, as pieces: where they lie in a holder's block, and in an owner's part ------------------------------------

    def collected(self, member: int, number: int) -> Iterator[Piece]:
        """The pieces that make a member's part of a matrix that it owns, from who gives them."""
        for block in self.holders_of(number):
            yield from self._piece(number, block, self.sender_of(number, block, member), member)

    def delivered(self, member: int, number: int) -> Iterator[Piece]:
        """The pieces of a member's part of a matrix that others or itself hold, copies too: each gets that part of the result."""
        for block, holders in self.holders_of(number).items():
            for holder in holders:
                yield from self._piece(number, block, holder, member)

    def held_by(self, member: int, number: int) -> Iterator[Piece]:
        """The pieces of a matrix that a member holds, for each owner."""
        block = self.block_of(member, number)
        if block is not None:
            for owner in self.owners_of(number):
                yield from self._piece(number, block, member, owner)

    def sent_by(self, member: int, number: int) -> Iterator[Piece]:
        """Those of them that it gives to the owners: of several members with copies, one does."""
        block = self.block_of(member, number)
        for piece in self.held_by(member, number):
            if block is not None and self.sender_of(number, block, piece.receiver) == member:
                yield piece

    # -- what it costs ------------------------------------------------------------------------------------------------------

    def words_of(self, member: int) -> int:
        """Words that a member receives in a step: of its parts, of its blocks of others' results, and while it computes."""
        own, place = self.owned_by(member), self.groups[self.group_of(member)].index(member)
        taken = (piece for number in own for piece in self.collected(member, number))
        given = (piece for number in range(len(self.owners)) for piece in self.held_by(member, number))
        moved = sum(piece.words for piece in taken if piece.sender != member)
        moved += sum(piece.words for piece in given if piece.receiver != member)
        products = sum(product.words_of(place) for number in own if (product := self.products[number]))
        return moved + self.how.steps * products + norm_words(len(own), self.size, place)

    def messages_of(self, member: int) -> int:
        """Messages that a member receives in a step: of at most two all-to-alls, those in which anything moves; of products."""
        own, place = self.owned_by(member), self.groups[self.group_of(member)].index(member)
        products = sum(product.messages_of(place) for number in own if (product := self.products[number]))
        norms = 2 * (self.size - 1) * bool(own)
        return (self.collects + self.returns) * (len(self.members) - 1) + self.how.steps * products + norms

    @cached_property
    def collects(self) -> bool:
        """Return whether any owner lacks elements of a matrix."""
        return any(piece.sender != piece.receiver for number, owner in self._owned() for piece in self.collected(owner, number))

    @cached_property
    def returns(self) -> bool:
        """Return whether a member holds elements of a matrix that it does not compute."""
        return any(piece.sender != piece.receiver for number, owner in self._owned() for piece in self.delivered(owner, number))

    def _owned(self) -> Iterator[tuple[int, int]]:
        """Each matrix and each of its owners."""
        return ((number, owner) for number in range(len(self.owners)) for owner in self.owners_of(number))

    @cached_property
    def _blocks(self) -> dict[Sharding, list[Extent | None]]:
        return {}

    @cached_property
    def _holders(self) -> dict[Sharding, dict[Extent, list[int]]]:
        return {}

    def _blocks_of(self, held: Sharding) -> list[Extent | None]:
        if held not in self._blocks:
            blocks: list[Extent | None] = []
            for at in self.members:
                rows, columns = held.layout.slices(held.shape, self.shape, at)
                block = (rows.start, rows.stop), (columns.start, columns.stop)
                blocks.append(block if rows.start < rows.stop and columns.start < columns.stop else None)
            self._blocks[held] = blocks
        return self._blocks[held]

    def _piece(self, number: int, block: Extent, holder: int, owner: int) -> Iterator[Piece]:
        """The piece that lies in a holder's block and in an owner's part of a matrix, as the holder sends it."""
        (first, last), columns = block
        (top, bottom), (left, right) = self.part_of(owner, number)
        start, stop = max(first, top), min(last, bottom)
        take, put = common_runs((slice(*columns),), _between(self.matrices[number].columns, left, right))
        if start < stop and take:
            rows = (slice(start - first, stop - first),), (slice(start - top, stop - top),)
            yield Piece(holder, owner, (rows[0], take), (rows[1], put))


def _between(runs: Runs, first: int, last: int) -> Runs:
    """The indices of ranges from the `first` on and before the `last`, counted in their order.

    >>> _between((slice(0, 4), slice(9, 12)), 3, 5)
    (slice(3, 4, None), slice(9, 10, None))
    """
    result, before = [], 0
    for run in runs:
        start, stop = max(run.start, run.start + first - before), min(run.stop, run.start + last - before)
        if start < stop:
            result.append(slice(start, stop))
        before += run.stop - run.start
    return tuple(result)


def _is_of_stage(layout: Layout, at: Mapping[str, int]) -> bool:
    """Return whether the stage of a pipeline that lies there holds a tensor; without a pipeline, it does."""
    return "pp" not in layout.root_only or at["pp"] in dict(layout.at).get("pp", (0,))
