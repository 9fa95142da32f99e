"""The executor of a plan: checks blocks and dtypes, then multiplies in persistent workspace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ...blas_library import library
from ...comm.device.arrays import Array, contiguous, dtype_name, empty, is_contiguous, is_on_device, place_of
from ...comm.grid import BaseGrid
from ...errors import ShapeError
from ..local.blas import accumulation_like
from .checks import agree_on_out, check_operands, check_out
from .plan import ProductPlan
from .transpose import Transposed
from .workspace import Workspace

Multiply = Callable[[Array, Array, Array, Any, Any], None]


class Executor(ABC):
    """A plan bound to a grid. `run` may be called any number of times; the workspace is allocated by the first call only."""

    multiply_into: Multiply
    """(a, b, out, α, β): out = α·op(A)·op(B) + β·out; all are C-ordered, out is of the dtype that sums are taken in."""

    def __init__(self, plan: ProductPlan, grid: BaseGrid, workspace: Workspace | None = None) -> None:
        plan.check_grid(grid.shape)
        library()  # one that cannot be used is an error here, on every rank, before any communication
        self.plan, self.grid, self.no_reduction = plan, grid, plan.no_reduction(grid.shape)
        self.workspace = workspace or Workspace(grid)
        self._likes: dict[Any, Array] = {}  # of blocks that were checked, an empty array as their products are summed in
        self.a_block, self.b_block, self.c_block = (
            layout.local_shape(shape, grid.shape, grid.coordinates) for layout, shape in plan.stored
        )
        if plan.by_transpose:
            self.multiply_into = Transposed(type(self)(plan.swapped(), grid, self.workspace), plan, grid).run
        else:
            self._prepare()

    def run(self, a: Array, b: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> Array:
        """C = α·op(A)·op(B) + β·C.

        Parameters
        ----------
        a, b : this rank's blocks, layouts and shapes as the plan says, in any memory order (others than C cost a copy)
        out : the block of C, optional, overwritten in place; needed for β ≠ 0

        Returns the block of C. Words, messages and workspace are those of the algorithm's closed form (`volume.of_plan`).
        16-bit floats are multiplied and summed over ranks in float32, and rounded once; on the host their operands are copied to
        float32, on a device they are read as they are, and C is written as it is where `plan.no_reduction`.
        Raises ShapeError where a, b, out, α or β is not what the plan expects, or out overlaps a or b or is read-only, before any
        communication: on the ranks where it is so, which on a grid that checks agree on `out`, as those of `matmul` always do.
        """
        plain = _is_plain(out, alpha, beta)
        like = self._likes.get(_kind(a, b)) if plain else None
        if like is None:
            self.check(a, b, out, alpha, beta)
            like = self._accumulation_like(a)
            if dtype_name(a).startswith("int"):
                alpha, beta = int(alpha), int(beta)
        a, b = contiguous(a), contiguous(b)
        if out is None:
            out = empty(self.c_block, a)
        if out.dtype == like.dtype and (plain or is_contiguous(out)):
            self.multiply_into(a, b, out, alpha, beta)
            return out
        target = self.workspace.buffer("c", self.c_block, like) if out.dtype != like.dtype else empty(self.c_block, like)
        if beta != 0:
            self.workspace.copy(target, out)
        self.multiply_into(a, b, target, alpha, beta)
        return self.workspace.copy(out, target)

    def check(self, a: Array, b: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> None:
        """Raise ShapeError unless the blocks have the plan's shapes and one dtype, α and β suit it, and C lies apart."""
        if (plain := _is_plain(out, alpha, beta)) and _kind(a, b) in self._likes:
            return
        blocks = (("A", a, self.a_block), ("B", b, self.b_block), ("C", out, self.c_block))
        check_operands(blocks, self.check_block, alpha, beta)
        if out is not None:
            if self.grid.job.check:
                agree_on_out(self.grid.comm, out, a, b)
            else:
                check_out(out, a, b)
        if plain:
            self._likes[_kind(a, b)] = self._accumulation_like(a)

    def check_block(self, name: str, array: Array, expected: tuple[int, ...]) -> None:
        """Raise ShapeError unless the block of an operand has the plan's shape."""
        if tuple(array.shape) != expected:
            raise ShapeError(f"The block of {name} has shape {tuple(array.shape)}; {self.plan} expects {expected} on this rank.")

    def _accumulation_like(self, a: Array) -> Array:
        """An empty array, with memory of its own, of the dtype in which products of arrays like `a` are summed here."""
        empty_like = empty((0, 0), a)
        return empty_like if self.no_reduction and is_on_device(a) else accumulation_like(empty_like)

    @abstractmethod
    def _prepare(self) -> None:
        """Bind axes and extents."""


def _is_plain(out: Array | None, alpha: Any, beta: Any) -> bool:
    """Return whether C is A·B in new memory."""
    return out is None and type(alpha) is type(beta) is int and alpha == 1 and beta == 0


def _kind(a: Array, b: Array) -> tuple[Any, ...]:
    """Key that blocks which were checked once share."""
    return a.shape, a.dtype, place_of(a), b.shape, b.dtype, place_of(b)
