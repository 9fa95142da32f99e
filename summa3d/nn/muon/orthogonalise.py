"""Orthogonalise matrices of which ranks hold blocks: they go to their owners, are computed there, and come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ...comm.device.arrays import dtype_name
from ...comm.grid import BaseGrid
from ...layout.redistribute import Piece, put, taken
from .group_product import GroupProduct
from .matrices import LogicalMatrix
from .newton_schulz import NewtonSchulz
from .owners import OwnersPlan

BATCH = 1 << 24
"""Elements of a batch of matrices of one shape, at most: larger matrices fill the cores one by one, with less workspace."""


class Message:
    """The pieces that a rank sends, or receives, in one all-to-all: ordered by the other rank, then by matrix.

    sizes : words of each rank of the plane. slots : matrix → its pieces, and where each lies in the buffer
    """

    def __init__(self, pieces: Iterable[tuple[int, int, Piece]], members: int) -> None:
        self.sizes, self.slots, self.words = [0] * members, dict[int, list[tuple[Piece, slice]]](), 0
        for other, number, piece in sorted(pieces, key=lambda item: item[:2]):
            self.sizes[other] += piece.words
            self.slots.setdefault(number, []).append((piece, slice(self.words, self.words + piece.words)))
            self.words += piece.words


class MatrixOwners:
    """An `OwnersPlan` on this rank of a grid; making it is collective over the ranks of a stage of a pipeline.

    Memory of a step, in words: what `orthogonalised` returns; a rank's parts of the matrices that it owns three times, and of the
    largest batch of them twice more, beside the Gram matrices twice. Of a group, the workspace of its products instead.
    """

    def __init__(
        self,
        matrices: Sequence[LogicalMatrix],
        grid: BaseGrid,
        how: NewtonSchulz,
        dtype: torch.dtype = torch.float32,
        ranks: int | None = None,
    ) -> None:
        self.how = how
        self.plan = plan = OwnersPlan.of(matrices, grid, how, dtype_name(torch.empty(0, dtype=how.dtype or dtype)), ranks)
        self.axis = grid[plan.axes]
        here, members, every = self.axis.index, self.axis.size, range(len(plan.owners))
        own = plan.owned_by(here)
        collected = [(piece.sender, number, piece) for number in own for piece in plan.collected(here, number)]
        self._kept = {number: piece for sender, number, piece in collected if sender == here}
        self._takes = Message((item for item in collected if item[0] != here), members)
        given = ((piece.receiver, number, piece) for number in every for piece in plan.sent_by(here, number))
        self._gives = Message((item for item in given if item[0] != here), members)
        got = ((piece.receiver, number, piece) for number in every for piece in plan.held_by(here, number))
        self._gets = Message((item for item in got if item[0] != here), members)
        delivered = ((piece.sender, number, piece) for number in own for piece in plan.delivered(here, number))
        self._returns = Message((item for item in delivered if item[0] != here), members)
        self._parts = {number: plan.part_of(here, number) for number in own}
        self._batches = _batches([(number, plan.matrices[number].shape) for number in own])
        self._group = GroupProduct(plan, grid, here) if plan.size > 1 and own else None

    @torch.no_grad()
    def orthogonalised(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's blocks of the orthogonalised matrices, by weight, from its blocks of the stage's weights; collective.

        They have the dtype that is computed in, in which the matrices travel too. Moves `OwnersPlan.words_of` words.
        """
        if not self.plan.matrices:
            return {}
        like = next(iter(blocks.values()))
        like = like.new_empty(0, dtype=self.how.dtype or like.dtype)
        names = {number: matrix.weight for number, matrix in enumerate(self.plan.matrices)}
        arrived = self._exchange(self.plan.collects, self._gives, self._takes, lambda number: blocks[names[number]], like)
        result = {name: torch.empty_like(block, dtype=like.dtype) for name, block in blocks.items()}
        compute = self._alone if self._group is None else self._together
        results = compute({number: blocks[names[number]] for number in self._parts}, arrived, like)
        del arrived
        for number, part in results.items():
            if number in self._kept:
                put(result[names[number]], self._kept[number].take, taken(part, self._kept[number].put))
        returned = self._exchange(self.plan.returns, self._returns, self._gets, results.__getitem__, like, from_matrix=True)
        for number, slots in self._gets.slots.items():
            for piece, slot in slots:
                put(result[names[number]], piece.take, returned[slot].view(piece.shape))
        return result

    def _alone(self, blocks: Mapping[int, Tensor], arrived: Tensor, like: Tensor) -> dict[int, Tensor]:
        """The results of whole matrices, which this rank owns alone, in batches of a shape."""
        results = dict[int, Tensor]()
        for batch in self._batches:
            whole = like.new_empty(len(batch), *self.plan.matrices[batch[0]].shape)
            for matrix, number in zip(whole, batch, strict=True):
                self._fill(matrix, number, blocks[number], arrived)
            results |= zip(batch, self.how.orthogonalised(whole).unbind(), strict=True)
            del whole
        return results

    def _together(self, blocks: Mapping[int, Tensor], arrived: Tensor, like: Tensor) -> dict[int, Tensor]:
        """This rank's parts of the results of its group's matrices."""
        assert self._group is not None
        parts = dict[int, Tensor]()
        for number, part in self._parts.items():
            parts[number] = like.new_empty(*(last - first for first, last in part))
            self._fill(parts[number], number, blocks[number], arrived)
        return self._group.orthogonalised(parts)

    def _fill(self, part: Tensor, number: int, block: Tensor, arrived: Tensor) -> None:
        """Put together a part of a matrix of what this rank holds and what has arrived."""
        if number in self._kept:
            put(part, self._kept[number].put, taken(block, self._kept[number].take))
        for piece, slot in self._takes.slots.get(number, ()):
            put(part, piece.put, arrived[slot].view(piece.shape))

    def _exchange(
        self,
        moves: bool,
        gives: Message,
        takes: Message,
        source: Callable[[int], Tensor],
        like: Tensor,
        from_matrix: bool = False,
    ) -> Tensor:
        """Send the pieces of each matrix's source; returns what arrives. Where nothing moves, there is no message."""
        if not moves:
            return like
        packed = self.axis.ledger.track(like.new_empty(gives.words))
        for number, slots in gives.slots.items():
            for piece, slot in slots:
                packed[slot] = taken(source(number), piece.put if from_matrix else piece.take).reshape(-1)
        arrived: Tensor = self.axis.all_to_all(packed, sizes=gives.sizes, receive_sizes=takes.sizes)
        return self.axis.ledger.track(arrived)


def _batches(mine: Sequence[tuple[int, tuple[int, int]]]) -> list[list[int]]:
    """The matrices of each shape, in batches of `BATCH` elements at most, or of one matrix."""
    result = []
    for shape, same in itertools.groupby(sorted(mine, key=lambda item: item[1]), key=lambda item: item[1]):
        numbers, many = [number for number, _ in same], max(1, BATCH // prod(shape))
        result += [numbers[first : first + many] for first in range(0, len(numbers), many)]
    return result
