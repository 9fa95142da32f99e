# What all algorithms share: the plan of a product (plain data) and the executor that runs it with persistent workspace.
# Imports layout, comm, blas, workspace. An algorithm adds three layouts, a rule for its grids, and one method `_multiply`.
# Next: summa.py, oned.py (algorithms), algorithms.py (all of them by name), volume_2d.py (what they cost).
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, TypeVar

import numpy as np

from ..comm.arrays import Array, contiguous, dtype_name, empty, is_contiguous, is_on_device, kind_of
from ..comm.grid import Grid
from ..comm.topology import describe
from ..errors import GridError, ShapeError
from ..layout.layout import Layout
from ..libraries import library
from .blas import LETTERS, accumulation_like
from .operands import check_apart, check_dtype, check_factor, is_whole
from .workspace import Workspace

Plan = TypeVar("Plan", bound="ProductPlan")


@dataclass(frozen=True)
class ProductPlan(ABC):
    """C (m×n) = op(A)·op(B), op(A) m×k. `form` names op for A and B: n (none), t (transpose), c (conjugate transpose).

    The other fields, in each algorithm, are the grid axes in its roles and its options. Raises ShapeError for a form or a size
    that cannot be.
    """

    form: str
    m: int
    n: int
    k: int

    transposes: ClassVar[bool] = False
    """Whether form tt is (B·A) by nn and one transpose of the result; else it is computed as it stands."""

    def __post_init__(self) -> None:
        if len(self.form) != 2 or any(letter not in LETTERS for letter in self.form):
            raise ShapeError(
                f"form {self.form!r} is not two of the letters n (as is), t (transpose), c (conjugate transpose), such as nt."
            )
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            if not is_whole(size) or size < 0:
                raise ShapeError(f"{name} is {size!r}; sizes are whole numbers of at least 0.")

    @property
    @abstractmethod
    def a_layout(self) -> Layout: ...

    @property
    @abstractmethod
    def b_layout(self) -> Layout: ...

    @property
    @abstractmethod
    def c_layout(self) -> Layout: ...

    @staticmethod
    @abstractmethod
    def grids(ranks: int) -> list[dict[str, int]]:
        """The grids of exactly this many ranks, roles as axis names, that the algorithm can use."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The grid axes in the roles x, y, …, in the order of the fields."""
        return tuple(str(getattr(self, role)) for role in self.roles())

    @classmethod
    def roles(cls) -> tuple[str, ...]:
        """The names of the fields that hold axes: those of one letter after form, m, n, k."""
        return tuple(field.name for field in fields(cls) if len(field.name) == 1 and field.name not in "mnk")

    @property
    def a_shape(self) -> tuple[int, int]:
        return (self.m, self.k) if self.form[0] == "n" else (self.k, self.m)

    @property
    def b_shape(self) -> tuple[int, int]:
        return (self.k, self.n) if self.form[1] == "n" else (self.n, self.k)

    @property
    def c_shape(self) -> tuple[int, int]:
        return (self.m, self.n)

    @cached_property
    def spread(self) -> frozenset[str]:
        """The axes that split A, B and C each."""
        return self.a_layout.axes & self.b_layout.axes & self.c_layout.axes

    @property
    def by_transpose(self) -> bool:
        """Whether the product is taken as the transpose of (B·A)."""
        return self.transposes and "n" not in self.form

    def sums_once(self, grid_shape: Mapping[str, int]) -> bool:
        """Whether every element of C comes of one product on one rank, so that nothing is summed after it was rounded."""
        return False

    def swapped(self: Plan) -> Plan:
        """The plan of B·A, whose transpose is the product asked for."""
        return replace(self, form="nn", m=self.n, n=self.m)

    def check_axes(self, grid_shape: Mapping[str, int]) -> None:
        """Raise GridError unless the grid has an axis for each role."""
        for role, axis in zip(self.roles(), self.axes, strict=True):
            if axis not in grid_shape:
                raise GridError(
                    f"{self.name} needs an axis {role}; the plan names it {axis!r}, the grid has {describe(grid_shape)}."
                )

    def check_grid(self, grid_shape: Mapping[str, int]) -> None:
        """Raise GridError, naming the grids that would work, unless the algorithm can use this one."""
        self.check_axes(grid_shape)
        own = {role: grid_shape[axis] for role, axis in zip(self.roles(), self.axes, strict=True)}
        ranks = prod(own.values())
        if own not in self.grids(ranks):
            raise GridError(misfit(self.name, own, self.grids))

    @property
    def name(self) -> str:
        return type(self).__name__.removesuffix("Plan")


def misfit(name: str, own: Mapping[str, int], grids: Callable[[int], list[dict[str, int]]]) -> str:
    """Why `own` is no grid of the algorithm `name`, and which would be."""
    ranks = prod(own.values())
    if grids(ranks):
        fits = " · ".join(describe(grid) for grid in grids(ranks))
        return f"{name} cannot use the grid {describe(own)}. Its grids of {ranks} ranks: {fits}."
    fits = " · ".join(f"{count} ({describe(grids(count)[0])})" for count in counts_near(ranks, grids))
    return f"{name} cannot use {ranks} ranks (grid {describe(own)}). Rank counts near it that it can use: {fits}."


def counts_near(ranks: int, grids: Callable[[int], list[dict[str, int]]]) -> list[int]:
    """The rank counts nearest to `ranks` that have grids, at most four, in order."""
    fits = [count for count in range(1, 8 * ranks + 1) if grids(count)]
    return sorted(sorted(fits, key=lambda count: abs(count - ranks))[:4])


class Product(ABC):
    """A plan bound to a grid. `run` may be called any number of times; the workspace is allocated by the first call only."""

    def __init__(self, plan: ProductPlan, grid: Grid, workspace: Workspace | None = None) -> None:
        plan.check_grid(grid.shape)
        library()  # one that cannot be used is an error here, on every rank, before any communication
        self.plan, self.grid, self.sums_once = plan, grid, plan.sums_once(grid.shape)
        self.workspace = workspace or Workspace(grid)
        self.a_block, self.b_block, self.c_block = (
            layout.local_shape(shape, grid.shape, grid.coordinates)
            for layout, shape in ((plan.a_layout, plan.a_shape), (plan.b_layout, plan.b_shape), (plan.c_layout, plan.c_shape))
        )
        if plan.by_transpose:
            from .transpose import Transposed

            self.transposed = Transposed(self, grid)
        else:
            self._prepare()

    def run(self, a: Array, b: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> Array:
        """C = α·op(A)·op(B) + β·C.

        Parameters
        ----------
        a, b : this rank's blocks, layouts and shapes as the plan says, in any memory order (others than C cost a copy)
        out : the block of C, optional, overwritten in place; needed for β ≠ 0

        Returns the block of C. Words, messages and workspace are those of the algorithm's closed form (algorithms.py).
        16-bit floats are multiplied and summed over ranks in float32, and rounded once; on the host their operands are copied to
        float32, on a device they are read as they are, and C is written as it is where `plan.sums_once`.
        Raises ShapeError where a, b, out, α or β is not what the plan expects, or out overlaps a or b, before any communication.
        """
        self.check(a, b, out, alpha, beta)
        a, b = contiguous(a), contiguous(b)
        if out is None:
            out = empty(self.c_block, a)
        like = a[:0] if self.sums_once and is_on_device(a) else accumulation_like(a)
        if out.dtype == like.dtype and is_contiguous(out):
            self._execute(a, b, out, alpha, beta)
            return out
        target = self.workspace.buffer("c", self.c_block, like) if out.dtype != like.dtype else empty(self.c_block, like)
        if beta != 0:
            self.workspace.copy(target, out)
        self._execute(a, b, target, alpha, beta)
        return self.workspace.copy(out, target)

    def check(self, a: Array, b: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> None:
        """Raise ShapeError unless the blocks have the plan's shapes and one dtype, α and β suit it, and C lies apart."""
        check_dtype(a)
        dtype, kind = a.dtype, kind_of(a)
        for name, array, expected in (("A", a, self.a_block), ("B", b, self.b_block), ("C", out, self.c_block)):
            if array is None:
                continue
            if tuple(array.shape) != expected:
                raise ShapeError(
                    f"The block of {name} has shape {tuple(array.shape)}; {self.plan} expects {expected} on this rank."
                )
            if array.dtype != dtype:
                raise ShapeError(f"{name} has dtype {array.dtype}, A has {dtype}; a product takes one dtype, of one library.")
            if kind_of(array) != kind:
                raise ShapeError(f"{name} is an array of {kind_of(array)}, A of {kind}; a product takes one library and memory.")
        if out is None and beta != 0:
            raise ShapeError(f"beta = {beta} needs the block of C that it scales: pass out.")
        for name, factor in (("alpha", alpha), ("beta", beta)):
            check_factor(name, factor, dtype_name(a))
        if out is not None:
            check_apart(out, a, "A")
            check_apart(out, b, "B")

    def _execute(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        if dtype_name(a).startswith("int"):
            alpha, beta = int(alpha), int(beta)
        if self.plan.by_transpose:
            self.transposed.run(a, b, out, alpha, beta)
        else:
            self._multiply(a, b, out, alpha, beta)

    @abstractmethod
    def _prepare(self) -> None:
        """Bind axes and extents."""

    @abstractmethod
    def _multiply(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """out = α·op(A)·op(B) + β·out; a, b are C-ordered, out is C-ordered and of the dtype that sums are taken in."""


def square_root(count: int) -> int | None:
    """The whole root of a square; None for other numbers."""
    root = round(float(np.sqrt(count)))
    return root if root * root == count else None
