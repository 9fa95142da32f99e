"""The 1-D products of Megatron's two linears: by columns (ranks split n) and by rows (ranks split k and sum C)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...comm.device.arrays import Array
from ...comm.prepared import Prepared
from ...layout.layout import Layout, split_sizes
from ..local.blas import seed
from .executor import Executor
from .plan import ProductPlan


@dataclass(frozen=True)
class OnedPlan(ProductPlan):
    """Base of the 1-D plans: one axis y of any size t. `sequence` splits the stored rows of A (column) or C (row) by y."""

    y: str = "y"
    sequence: bool = False

    split_dim: ClassVar[str]
    """The dim of the product that y splits: n by columns, k by rows."""

    def layout_of(self, operand: str, names: str) -> Layout:
        """The split dim by y; the operand without it whole on every rank, or with `sequence` its stored rows split by y."""
        if self.split_dim not in names:
            return Layout((self.y,) if self.sequence else (), (), names=names)
        return Layout(*(((self.y,), ()) if names[0] == self.split_dim else ((), (self.y,))), names=names)


@dataclass(frozen=True)
class OnedColumnPlan(OnedPlan):
    """A whole on every rank, or its stored rows split by y (`sequence`); B n:y; C n:y.

    Words per rank (mean): 0, or with `sequence` (t−1)/t·mk, in every form.
    """

    split_dim = "n"

    def no_reduction(self, grid_shape: Mapping[str, int]) -> bool:
        """Always true: nothing is summed over ranks."""
        return True


@dataclass(frozen=True)
class OnedRowPlan(OnedPlan):
    """A k:y; B k:y; C whole on every rank, or m:y (`sequence`).

    Words per rank (mean): 2(t−1)/t·mn, or with `sequence` (t−1)/t·mn, in every form.
    """

    split_dim = "k"


class OnedColumn(Executor):
    """The column-parallel product: all-gather A if it is split, then multiply. Nothing is summed over ranks."""

    plan: OnedColumnPlan

    def _prepare(self) -> None:
        self.axis = self.grid[self.plan.y]
        self.gather = Prepared(self.axis, "all_gather", sizes=split_sizes(self.plan.a_shape[0], self.axis.size))

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """All-gather A if its rows are split, then one local product."""
        if self.plan.sequence and self.axis.size > 1:
            a = self.gather.of(a).run(a, self.workspace.buffer("a", self.plan.a_shape, a))
        a, b = self.workspace.widened("a", a), self.workspace.widened("b", b)
        self.workspace.accumulate(a, b, self.plan.form, out, alpha, beta, self.workspace.scratch(out))


class OnedRow(Executor):
    """The row-parallel product: multiply, then all-reduce C, or reduce-scatter its rows."""

    plan: OnedRowPlan

    def _prepare(self) -> None:
        self.axis = self.grid[self.plan.y]
        self.sizes = split_sizes(self.plan.m, self.axis.size)
        self.scatter, self.sum = Prepared(self.axis, "reduce_scatter", sizes=self.sizes), Prepared(self.axis, "all_reduce")

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """One local product, then an all-reduce of C, or with `sequence` a reduce-scatter."""
        a, b = self.workspace.widened("a", a), self.workspace.widened("b", b)
        if self.plan.sequence and self.axis.size > 1:
            partial = self.workspace.buffer("partial", self.plan.c_shape, out)
            seeded = seed(partial, self.sizes, self.axis.index, out, beta)
            self.workspace.accumulate(a, b, self.plan.form, partial, alpha, seeded, self.workspace.scratch(partial))
            parts = self.workspace.buffer("parts", (self.axis.size, *out.shape), out)
            self.scatter.of(partial).run(partial, out, parts)
            return
        self.workspace.accumulate(
            a, b, self.plan.form, out, alpha, beta if self.axis.index == 0 else 0, self.workspace.scratch(out)
        )
        self.sum.of(out).run(out, out)
