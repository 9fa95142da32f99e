"""Form tt for algorithms that lack it: B·A by form nn, then one exchange that transposes, counted in the ledger."""

from __future__ import annotations

from typing import Any, Protocol

from ...comm.device.arrays import Array, dtype_name, is_torch, library_of
from ...comm.grid import BaseGrid
from ...layout.distribute import world_ranks
from ...layout.redistribute import Piece, Placement, Redistribution
from ..local.blas import add
from .plan import ProductPlan
from .workspace import Workspace


class Untransposed(Protocol):
    """The executor of B·A by form nn."""

    plan: ProductPlan
    workspace: Workspace
    c_block: tuple[int, ...]

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """out = α·A·B + β·out."""


class Transposed:
    """C = (B·A)ᵀ: B·A into workspace, then point-to-point messages of the pieces that other ranks need, stored transposed.

    Words: those of C's block that the rank does not hold after the inner product. Messages: one from each rank that holds some.
    Workspace: the block of B·A, what is sent, what is received, and a conjugate of each operand whose op is c.
    """

    def __init__(self, inner: Untransposed, plan: ProductPlan, grid: BaseGrid) -> None:
        self.inner, self.plan, self.workspace = inner, plan, inner.workspace
        layout = self.inner.plan.c_layout.transposed()
        moves = Redistribution(plan.c_shape, Placement.on(grid, layout), Placement.on(grid, plan.c_layout))
        self.kept, self.sent, self.received = moves.kept_by(grid.rank), moves.sent_by(grid.rank), moves.received_by(grid.rank)
        self.world = grid.world
        self.member = {rank: member for member, rank in enumerate(world_ranks(grid))}

    def run(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """out = α·op(A)·op(B) + β·out."""
        left, right = self._plain("b", b, self.plan.form[1]), self._plain("a", a, self.plan.form[0])
        transposed = self.workspace.buffer("transposed", self.inner.c_block, out)  # [n/y, m/x] before, [m, n] in view
        self.inner.multiply_into(left, right, transposed, alpha, 0)
        if self.world.size > 1:
            self.world.open_device(transposed)
        arriving = self._pieces("received", self.received, out)
        leaving = self._pieces("sent", self.sent, out)
        pending = [
            self.world.start_receive(block, self.member[piece.sender])
            for piece, block in zip(self.received, arriving, strict=True)
        ]
        for piece, block in zip(self.sent, leaving, strict=True):
            self.workspace.copy(block, transposed.T[_box(piece.take)])
            pending.append(self.world.start_send(block, self.member[piece.receiver]))
        if self.kept:
            add(transposed.T[_box(self.kept.take)], out[_box(self.kept.put)], beta)
        for communication in pending:
            communication.wait()
        for piece, block in zip(self.received, arriving, strict=True):
            add(block, out[_box(piece.put)], beta)

    def _plain(self, name: str, block: Array, letter: str) -> Array:
        """The operand, conjugated into workspace where its op is c."""
        if letter != "c" or not dtype_name(block).startswith("complex"):
            return block
        conjugate = self.workspace.buffer(f"conjugate {name}", block.shape, block)
        if is_torch(block):
            conjugate.copy_(block.conj())
        else:
            library_of(block).conjugate(block, out=conjugate)
        return conjugate

    def _pieces(self, name: str, pieces: list[Piece], like: Array) -> list[Array]:
        """A contiguous block of workspace for each piece."""
        memory, start, blocks = self.workspace.buffer(name, (sum(piece.words for piece in pieces),), like), 0, []
        for piece in pieces:
            blocks.append(memory[start : start + piece.words].reshape(piece.shape))
            start += piece.words
        return blocks


def _box(runs: tuple[tuple[slice, ...], ...]) -> tuple[slice, ...]:
    return tuple(part[0] for part in runs)
