"""What executes the plan of a symmetric product: one exchange of A, products of half of C, sums in groups, and completion."""

from __future__ import annotations

from typing import Any

from ...blas_library import library
from ...comm.device.arrays import Array, cast, detached, dtype_name, empty, quiet
from ...comm.grid import BaseGrid
from ...errors import GridError, ShapeError
from ...layout.redistribute import Exchange
from ..algorithms.checks import check_operands
from ..algorithms.workspace import Workspace
from ..any_layout.executor import written
from ..local.blas import accumulation_like
from ..local.triangle import accumulate_lower, conjugate, pack_lower
from .completion import Completion
from .plan import SymmetricPlan
from .work import PAIRS, elements


class SymmetricProduct:
    """A `SymmetricPlan` bound to its grid. `run` may be called any number of times; it keeps no workspace."""

    def __init__(self, plan: SymmetricPlan, grid: BaseGrid) -> None:
        if plan.space.points != [grid.coordinates_of(rank) for rank in range(grid.size)]:
            raise GridError(f"{grid} is not the grid of {plan!r}.")
        library()  # one that cannot be used is an error here, on every rank, before any communication
        self.plan, self.grid, self.axis, here = plan, grid, grid.ranked, grid.ranked.index
        self.fetch = Exchange([plan.fetch], self.axis)
        self.a_block = plan.a.placement((plan.space,)).local_shape(plan.a.shape, here)
        self.members = plan.work.members(here)
        if plan.way == PAIRS:  # what is sent to others first, in their order; what stays last
            self.members = [*sorted(member for member in self.members if member != here), here]
        self.boxes = [plan.shares[:, member].tolist() for member in self.members]
        self.sizes = [int(elements(plan.shares[:, member]).sum()) for member in self.members]
        self.starts: dict[int, int] = {}  # where each range of rows begins in what is read of A
        at = 0
        for start, stop in plan.work.rows[:, here].tolist():
            self.starts[start] = at if stop > start else self.starts.get(start, at)
            at += stop - start
        self.plane = grid[plan.y] if plan.sums and plan.way != PAIRS else None
        self.completion: Completion | None = None
        if plan.c is not None:
            self.completion = Completion(plan.shares, plan.c.placement((plan.space,)), plan.n, self.axis)
            self.completes = bool(plan.received["c"].any())
            self.c_block = self.completion.shape

    def check(self, a: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> None:
        """Raise ShapeError unless the blocks have the plan's shapes and one dtype, and α and β suit it."""
        blocks = [("A", a, self.a_block)]
        check_operands([*blocks, ("C", out, self.c_block if out is not None else ())], self.check_block, alpha, beta)

    def check_block(self, name: str, array: Array, expected: tuple[int, ...]) -> None:
        """Raise ShapeError unless the block of a matrix has the shape that its layout gives here."""
        if tuple(array.shape) != expected:
            raise ShapeError(
                f"The block of {name} has shape {tuple(array.shape)}; {self.plan!r} expects {expected} on this rank."
            )

    @quiet
    def run(self, a: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0, conjugates: bool = False) -> Array:
        """α·op(A)·op(A)ᵀ + β·C of this rank's blocks, conjugates first; the block of C, `out` where it is given.

        Words and messages are those of the plan. 16-bit floats are multiplied and summed over ranks in float32 and rounded
        once: before C is completed, or where β·C is added after it.
        """
        assert self.completion is not None
        hermitian = self.plan.is_hermitian
        factor = alpha if hermitian and isinstance(alpha, complex) else 1  # α·H is Hermitian for real α alone
        share = self.share(a, 1 if factor is alpha else alpha, conjugates)
        if share.dtype != a.dtype and beta == 0:
            share = self.axis.ledger.track(cast(share, a))
        c = self.completion.run(share, self.completes, hermitian)
        if factor is alpha and alpha != 1:
            c *= alpha
        return written(c, a, out, int(beta) if dtype_name(a).startswith("int") else beta)

    @quiet
    def share(self, a: Array, alpha: Any = 1, conjugates: bool = False) -> Array:
        """This rank's share of α·op(A)·op(A)ᵀ, packed, in the dtype that sums are taken in."""
        share = self._summed(self._made(detached(a)))
        if conjugates:
            share = conjugate(share)
        if alpha != 1:
            share *= int(alpha) if dtype_name(a).startswith("int") else alpha
        return share

    def _made(self, a: Array) -> Array:
        """The blocks that this rank makes, packed as the shares of its group one after the other."""
        workspace, form, track = Workspace(self.grid, stays=False), self.plan.form, self.axis.ledger.track
        read = self.fetch.kept(a)
        if self.fetch.moves:
            read = track(empty(self.fetch.shape, a))
            self.fetch.run(a, read)
        read = workspace.widened("a", read)
        made, at = track(empty((sum(self.sizes),), accumulation_like(a))), 0
        for boxes in self.boxes:
            for number, (top, bottom, left, right) in enumerate(boxes):
                rows, columns = bottom - top, right - left
                size = rows * columns if number else rows * (rows + 1) // 2
                part = made[at : at + size]
                own = self._rows(read, top, rows) if size else made
                if size and number:
                    workspace.accumulate(own, self._rows(read, left, columns), form, part.reshape(rows, columns))
                elif size:
                    square = track(empty((rows, rows), made))
                    with self.axis.ledger.product(own, own, form, square, rows * (rows + 1) // 2):
                        accumulate_lower(own, form, square)
                    pack_lower(square, part)
                at += size
        return made

    def _rows(self, read: Array, start: int, count: int) -> Array:
        """Rows of X, as they are stored: of A, or with form tn columns."""
        first = max(known for known in self.starts if known <= start)
        at = self.starts[first] + start - first
        return read[:, at : at + count] if self.plan.turned else read[at : at + count]

    def _summed(self, made: Array) -> Array:
        """This rank's share of its group's sum. Words: (members − 1) times the share."""
        if self.plane is not None:
            return self.axis.ledger.track(self.plane.reduce_scatter(made, 0, self.sizes))
        if not self.plan.sums:
            return made
        own, others = self.sizes[-1], self.members[:-1]
        sizes, receive_sizes = [0] * self.axis.size, [0] * self.axis.size
        for member, size in zip(others, self.sizes, strict=False):
            sizes[member], receive_sizes[member] = size, own
        share = made[len(made) - own :]
        arrived = self.axis.all_to_all(made[: len(made) - own], sizes=sizes, receive_sizes=receive_sizes)
        self.axis.ledger.track(arrived)
        for number in range(len(others)):
            share += arrived[number * own : (number + 1) * own]
        return share
