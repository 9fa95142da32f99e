"""The base of all plans: the form, sizes, layouts and grids of a product. Plain data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from math import prod
from typing import Any, ClassVar, TypeVar

from ...comm.topology import describe, grids_of
from ...errors import GridError, ShapeError
from ...layout.layout import Layout, split_sizes
from ..local.blas import OPS
from .checks import is_whole

Plan = TypeVar("Plan", bound="ProductPlan")
Grains = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


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
    grains: Grains = field(default=((), (), ()), kw_only=True)
    """For m, n and k, the items that the axes which split them keep whole, coarse first (`split_sizes`); () for elements."""

    takes_grains: ClassVar[bool] = False
    """Whether an axis may split its dim into items that stay whole."""
    transposes: ClassVar[bool] = False
    """Whether form tt is (B·A) by nn and one transpose of the result; else it is computed as it stands."""

    def __post_init__(self) -> None:
        if not isinstance(self.form, str) or len(self.form) != 2 or any(letter not in OPS for letter in self.form):
            raise ShapeError(
                f"form {self.form!r} is not two of the letters n (as is), t (transpose), c (conjugate transpose), such as nt."
            )
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            if not is_whole(size) or size < 0:
                raise ShapeError(f"{name} is {size!r}; sizes are whole numbers of at least 0.")
        if any(self.grains) and not self.takes_grains:
            raise ShapeError(f"{self.name} splits sizes in elements; grains {self.grains} are for products of layers.")
        for role in self.roles():
            axis = getattr(self, role)
            if not isinstance(axis, str):
                raise ShapeError(f"{axis!r} is no axis of a grid; a plan names one for each of its roles, such as 'x'.")

    @abstractmethod
    def layout_of(self, operand: str, names: str) -> Layout:
        """Layout of an operand (a, b or c) as it is stored, whose dims have these `names`."""

    @cached_property
    def a_layout(self) -> Layout:
        """Layout of A as it is stored."""
        return self._grained("a", self.a_names)

    @cached_property
    def b_layout(self) -> Layout:
        """Layout of B as it is stored."""
        return self._grained("b", self.b_names)

    @cached_property
    def c_layout(self) -> Layout:
        """Layout of C as it is stored."""
        return self._grained("c", "mn")

    def _grained(self, operand: str, names: str) -> Layout:
        layout = self.layout_of(operand, names)
        return layout.grained(*map(self.grains_of, names)) if any(self.grains) else layout

    def grains_of(self, dim: str) -> tuple[int, ...]:
        """Numbers of indices that the axes which split m, n or k keep together."""
        return self.grains["mnk".index(dim)]

    def grain(self, dim: str, level: int) -> int:
        """Number of indices kept together by the axis that splits m, n or k at this level, 0 for the coarse one."""
        grains = self.grains_of(dim)
        return grains[level] if level < len(grains) else 1

    def parts(self, dim: str, extent: int, parts: int, level: int = 0) -> list[int]:
        """The sizes into which an axis of so many `parts` splits `extent` elements of m, n or k."""
        return split_sizes(extent, parts, self.grain(dim, level))

    @classmethod
    def grids(cls, ranks: int) -> list[dict[str, int]]:
        """The grids of exactly this many ranks, roles as axis names, that the algorithm can use: by default every one."""
        return grids_of(ranks, cls.roles())

    @property
    def axes(self) -> tuple[str, ...]:
        """The grid axes in the roles x, y, …, in the order of the fields."""
        return tuple(str(getattr(self, role)) for role in self.roles())

    @classmethod
    @cache
    def roles(cls) -> tuple[str, ...]:
        """The names of the fields that hold axes: those of one letter after form, m, n, k."""
        return tuple(field.name for field in fields(cls) if len(field.name) == 1 and field.name not in "mnk")

    @property
    def a_names(self) -> str:
        """The names of A's dims, as A is stored."""
        return "mk" if self.form[0] == "n" else "km"

    @property
    def b_names(self) -> str:
        """The names of B's dims, as B is stored."""
        return "kn" if self.form[1] == "n" else "nk"

    @property
    def a_shape(self) -> tuple[int, int]:
        """Rows and columns of A as it is stored."""
        return (self.m, self.k) if self.form[0] == "n" else (self.k, self.m)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Rows and columns of B as it is stored."""
        return (self.k, self.n) if self.form[1] == "n" else (self.n, self.k)

    @property
    def c_shape(self) -> tuple[int, int]:
        """Rows and columns of C as it is stored."""
        return (self.m, self.n)

    @property
    def stored(self) -> tuple[tuple[Layout, tuple[int, int]], ...]:
        """The layout and shape of A, B and C, as each is stored."""
        return (self.a_layout, self.a_shape), (self.b_layout, self.b_shape), (self.c_layout, self.c_shape)

    @cached_property
    def split_by_all(self) -> frozenset[str]:
        """The axes that split A, B and C each."""
        return self.a_layout.axes & self.b_layout.axes & self.c_layout.axes

    @property
    def by_transpose(self) -> bool:
        """Return whether the product is taken as the transpose of (B·A)."""
        return self.transposes and "n" not in self.form

    def no_reduction(self, grid_shape: Mapping[str, int]) -> bool:
        """Return whether one product on one rank makes each element of C, so that nothing is summed after rounding."""
        return False

    def gradient_roles(self, dims: str) -> dict[str, Any]:
        """Role → axis, and other fields, of a gradient's plan, whose m, n, k are `dims` of this product; empty: all stay."""
        return {}

    def swapped(self: Plan) -> Plan:
        """The plan of B·A, whose transpose is the product asked for."""
        m, n, k = self.grains
        return replace(self, form="nn", m=self.n, n=self.m, grains=(n, m, k))

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
        if own not in self.grids(prod(own.values())):
            raise GridError(misfit(self.name, own, self.grids))

    @property
    def name(self) -> str:
        """Name of the algorithm in messages."""
        return type(self).__name__.removesuffix("Plan")


def misfit(name: str, own: Mapping[str, int], grids: Callable[[int], list[dict[str, int]]]) -> str:
    """Reason why `own` is no grid of the algorithm `name`, and the grids that are."""
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
