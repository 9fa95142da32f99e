"""What executes a plan of a product in any layouts: redistributions, one local product, a sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...blas_library import library
from ...comm.device.arrays import Array, cast, copy_into, detached, dtype_name, empty, is_half, widen
from ...comm.grid import BaseGrid
from ...comm.topology import describe
from ...errors import GridError, ShapeError
from ...layout.redistribute import Exchange, put
from ..algorithms.checks import check_operands
from ..algorithms.workspace import Workspace
from ..local.blas import accumulation_like, add
from ..local.strides import OTHER_OP
from .blocks import nested_sizes, ownership_of
from .matrices import multiply_each
from .plan import AnyPlan
from .workspace import DIRECT, SCATTERED


class AnyProduct:
    """An `AnyPlan` bound to the grids of its spaces. `run` may be called any number of times; it keeps no workspace.

    What this rank sends and receives is worked out here. The redistributions of A, B and C travel over all ranks, and are
    counted in the ledger of the first grid; the sum over the axes of k in that of the grid that computes.
    """

    def __init__(self, plan: AnyPlan, grids: Sequence[BaseGrid]) -> None:
        for space, grid in zip(plan.spaces, grids, strict=True):
            points = grid.places() if len(grids) > 1 else [grid.coordinates_of(rank) for rank in range(grid.size)]
            if points != space.points:
                raise GridError(f"{grid} is not the grid of the plan, which is one of {describe(space.shape)} and its order.")
        library()  # one that cannot be used is an error here, on every rank, before any communication
        self.plan, self.grid = plan, grids[plan.grid]
        axis = grids[0].ranked if len(grids) == 1 else grids[0].everyone
        self.axis, self.ledger = axis, axis.ledger
        self.fetches = [[Exchange([fetch], axis) for fetch in panel] for panel in plan.fetches]
        self.delivery = Exchange(plan.deliveries, axis) if plan.deliveries else None
        self.a_block, self.b_block, self.c_block = (
            item.placement(plan.spaces).local_shape(item.shape, axis.index) for item in (plan.a, plan.b, plan.c)
        )
        own = plan.split_of(plan.c.names)
        point, names = (self.grid.shape, self.grid.coordinates), plan.c.names
        self.shape = ownership_of(own, plan.c.shape, names).local_shape(plan.c.shape, *point)
        axes, kind = plan.inner_axes, plan.how.kind
        self.plane = self.grid[axes] if kind == SCATTERED and self.grid.inside else None
        self.fine = plan.how.dim
        self.sizes = nested_sizes(self.shape[self.fine], [self.grid.shape[axis] for axis in axes])

    def check(self, a: Array, b: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> None:
        """Raise ShapeError unless the blocks have the plan's shapes and one dtype, and α and β suit it."""
        blocks = (("A", a, self.a_block), ("B", b, self.b_block), ("C", out, self.c_block))
        check_operands(blocks, self.check_block, alpha, beta)

    def check_block(self, name: str, array: Array, expected: tuple[int, ...]) -> None:
        """Raise ShapeError unless the block of a matrix has the shape that its layout gives here."""
        if tuple(array.shape) != expected:
            raise ShapeError(
                f"The block of {name} has shape {tuple(array.shape)}; {self.plan!r} expects {expected} on this rank."
            )

    def run(self, a: Array, b: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> Array:
        """C = α·op(A)·op(B) + β·C of this rank's blocks; the block of C, `out` where it is given.

        Words and messages are those of the plan. 16-bit floats are multiplied and summed over ranks in float32 and rounded
        once: before C is delivered, or where β·C is added after it.
        """
        if dtype_name(a).startswith("int"):
            alpha, beta = int(alpha), int(beta)
        c = self._summand(a, b, alpha)
        if self.plane is not None:
            c = self._kept_until(self.delivery is not None or c.dtype != a.dtype, self._scattered(c))
        if c.dtype != a.dtype and beta == 0 and self.plan.how.kind != DIRECT:
            c = self._kept_until(self.delivery is not None, cast(c, a))
        if self.delivery is not None:
            c = self._added(c) if self.plan.how.kind == DIRECT else self._delivered(c)
        return written(c, a, out, beta)

    def _kept_until(self, is_workspace: bool, array: Array) -> Array:
        """Count an array as workspace, if it is no result."""
        return self.ledger.track(array) if is_workspace else array

    def _summand(self, a: Array, b: Array, alpha: Any) -> Array:
        """This rank's summand of its part of C, times α, in the dtype that sums are taken in."""
        workspace, view, operands = Workspace(self.grid, stays=False), self.plan.views[2], (detached(a), detached(b))
        made = None
        for panel in self.fetches:
            pairs = zip(range(2), panel, operands, strict=True)
            made = self._multiplied(workspace, [self._matrices(*pair) for pair in pairs], made, alpha)
        assert made is not None
        summand, product = made
        if view.is_copied:
            workspace.copy(view.turned(summand), product)
        return summand

    def _multiplied(
        self, workspace: Workspace, matrices: list[Array], made: tuple[Array, Array] | None, alpha: Any
    ) -> tuple[Array, Array]:
        """The summand, and the array that products are made in, its dims turned: `made`, with this panel's product added."""
        (left, right), view = matrices, self.plan.views[2]
        beta = 0 if made is None else 1
        if made is None:
            like = accumulation_like(empty((0,), left))
            is_workspace = self.plane is not None or self.delivery is not None or like.dtype != left.dtype
            summand = self._kept_until(is_workspace, empty(self.shape, like))
            turned = view.turned(summand)
            made = summand, self.ledger.track(empty(turned.shape, like)) if view.is_copied else turned
        left, right = workspace.widened("a", left), workspace.widened("b", right)
        form = self.plan.form or "".join("t" if view.is_turned else "n" for view in self.plan.views[:2])
        if view.is_turned:
            left, right, form = right, left, OTHER_OP[form[1]] + OTHER_OP[form[0]]
        multiply_each(workspace, left, right, form, view.matrices(made[1]), alpha, beta)
        return made

    def _matrices(self, operand: int, fetch: Exchange, block: Array) -> Array:
        """An operand's matrices that this rank multiplies, of one panel."""
        view, fetched = self.plan.views[operand], self._fetched(fetch, block)
        turned = view.turned(fetched)
        if view.is_copied:
            turned = copy_into(self.ledger.track(empty(turned.shape, block)), turned)
        return view.matrices(turned)

    def _fetched(self, fetch: Exchange, block: Array) -> Array:
        """An operand's block that this rank multiplies; a view of its own block where nothing moves."""
        if not fetch.moves:
            return fetch.kept(block)
        fetched = self.ledger.track(empty(fetch.shape, block))
        fetch.run(block, fetched)
        return fetched

    def _scattered(self, summand: Array) -> Array:
        """This rank's part of the sum over the axes of k. Words: (Z−1) times the part."""
        assert self.plane is not None
        return self.plane.reduce_scatter(summand, self.fine, self.sizes)

    def _delivered(self, c: Array) -> Array:
        """The block of C in its output layout."""
        assert self.delivery is not None
        delivered = empty(self.delivery.shape, c)
        self.delivery.run(c, delivered)
        return delivered

    def _added(self, summand: Array) -> Array:
        """The same where summands travel: each rank adds its part of all, in the order of the ranks along the axes of k."""
        assert self.delivery is not None
        shape, total = self.delivery.shape, None
        is_result = dtype_name(summand) == self.plan.dtype.name
        for pieces in self.delivery.pieces(summand):
            part = self._kept_until(total is not None or not is_result, empty(shape, summand))
            for piece, elements in pieces:
                put(part, piece.put, elements)
            if total is None:
                total = part
            else:
                add(part, total, 1)
            del part  # else it would live beside the next one
        return total


def written(c: Array, like: Array, out: Array | None, beta: Any) -> Array:
    """C in the dtype of `like`; in `out` where that is given, with β times what `out` held, which β = 0 does not read."""
    if out is None:
        return c if c.dtype == like.dtype else cast(c, like)
    if beta == 0:
        return copy_into(out, c)
    if is_half(out):
        total = widen(out)
        add(c, total, beta)
        return copy_into(out, total)
    add(c, out, beta)
    return out
