"""From the shares of a symmetric matrix's half to blocks in any layout: elements and their mirror images, in one all-to-all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from ...comm.axis import Axis
from ...comm.device.arrays import Array, empty
from ...layout.cyclic import Runs
from ...layout.redistribute import Placement, common_runs, put, taken
from ..local.triangle import conjugate, put_transposed, unpack_lower
from .work import elements


class Mirrored(NamedTuple):
    """Elements of a box of C that one rank owns and a rank's block wants: as they are, or as the mirror image.

    box : its number. take : the ranges of its rows and columns. put : those of the block, in the order of `take`
    """

    box: int
    is_mirrored: bool
    take: tuple[Runs, Runs]
    put: tuple[Runs, Runs]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns as they are owned."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self.take)

    @property
    def words(self) -> int:
        """Its elements."""
        rows, columns = self.shape
        return rows * columns


class Completion:
    """The shares of a plan (`SymmetricPlan.shares`) bound to an axis of all ranks and to the output layout of C.

    Words: those of this rank's block of C that it does not own, the mirror images of what it owns included.
    """

    def __init__(self, shares: np.ndarray, target: Placement, n: int, axis: Axis) -> None:
        here, self.axis = axis.index, axis
        self.shape = target.local_shape((n, n), here)
        self._own = shares[:, here].tolist()
        self._starts = [0, *np.cumsum(elements(shares[:, here])).tolist()]

        @cache
        def common(start: int, stop: int, dim: int, rank: int) -> tuple[Runs, Runs]:
            return common_runs((slice(start, stop),), target.runs((n, n), rank)[dim])

        def pieces(owner: int, receiver: int) -> Iterator[Mirrored]:
            for number, (top, bottom, left, right) in enumerate(shares[:, owner].tolist()):
                if top == bottom or left == right:
                    continue
                for is_mirrored in (False, True) if number else (False,):
                    rows = common(top, bottom, int(is_mirrored), receiver)
                    columns = common(left, right, int(not is_mirrored), receiver)
                    if rows[0] and columns[0]:
                        yield Mirrored(number, is_mirrored, (rows[0], columns[0]), (rows[1], columns[1]))

        ranks = range(axis.size)
        self._kept = list(pieces(here, here))
        self._gives = [list(pieces(here, rank)) if rank != here else [] for rank in ranks]
        self._takes = [list(pieces(rank, here)) if rank != here else [] for rank in ranks]
        self._sizes = [sum(piece.words for piece in gives) for gives in self._gives]
        self._receive_sizes = [sum(piece.words for piece in takes) for takes in self._takes]

    def run(self, share: Array, moves: bool, hermitian: bool) -> Array:
        """This rank's block of C. moves : whether any rank lacks elements (`SymmetricPlan.received`)."""
        boxes, track = self._boxes(share, hermitian), self.axis.ledger.track
        block = empty(self.shape, share)
        if moves:
            sent, at = track(empty((sum(self._sizes),), share)), 0
            for gives in self._gives:
                for piece in gives:
                    sent[at : at + piece.words].reshape(piece.shape)[...] = taken(boxes[piece.box], piece.take)
                    at += piece.words
            arrived, at = track(self.axis.all_to_all(sent, sizes=self._sizes, receive_sizes=self._receive_sizes)), 0
            del sent
            for takes in self._takes:
                for piece in takes:
                    _place(block, piece, arrived[at : at + piece.words].reshape(piece.shape), hermitian)
                    at += piece.words
        for piece in self._kept:
            _place(block, piece, taken(boxes[piece.box], piece.take), hermitian)
        return block

    def _boxes(self, share: Array, hermitian: bool) -> list[Array]:
        """The boxes that this rank owns as matrices: the square on the diagonal whole, the others as views."""
        boxes = []
        for number, (top, bottom, left, right) in enumerate(self._own):
            part = share[self._starts[number] : self._starts[number + 1]]
            if number:
                boxes.append(part.reshape(bottom - top, right - left))
            else:
                square = self.axis.ledger.track(empty((bottom - top, right - left), share))
                unpack_lower(part, square, hermitian)
                boxes.append(square)
        return boxes


def _place(block: Array, piece: Mirrored, part: Array, hermitian: bool) -> None:
    """Put elements where a block wants them."""
    if not piece.is_mirrored:
        put(block, piece.put, part)
    elif all(len(runs) == 1 for runs in piece.put):
        put_transposed(block[piece.put[1][0], piece.put[0][0]], part, hermitian)
    else:
        put(block, piece.put[::-1], conjugate(part.T, hermitian))
