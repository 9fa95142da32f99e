"""The 1-D products of Megatron's two linears: by columns (ranks split n) and by rows (ranks split k and sum C)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ...comm.axis import Axis
from ...comm.device.arrays import Array
from ...comm.prepared import Prepared
from ...layout.layout import Layout
from ..local.blas import seed
from ..pieces.executor import PiecedProduct
from ..pieces.slabs import start_sums
from .checks import check_pieces
from .cuboid import CuboidPlan, Moves, moves_of
from .executor import Executor
from .plan import ProductPlan

ALONE = {"x": "no x", "y": "no y", "z": "no z"}
"""The axes of one member that stand for those roles of a cuboid which a 1-D product does not have."""


@dataclass(frozen=True)
class OnedPlan(ProductPlan):
    """Base of the 1-D plans: one axis y of any size t. `sequence` splits the stored rows of A (column) or C (row) by y.

    `pieces` cuts what moves between nodes into so many, which travel while others are multiplied: the same words, more messages.
    Raises ShapeError for a number of pieces that is no whole number of at least 1.
    """

    y: str = "y"
    sequence: bool = False
    pieces: int = 1

    takes_grains = True
    split_dim: ClassVar[str]
    """The dim of the product that y splits: n by columns, k by rows."""
    cuboid_role: ClassVar[str]
    """The role of y in the cuboid that the product is with `sequence`: A is gathered along y, C summed along z."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pieces(self.pieces)

    def as_cuboid(self) -> CuboidPlan:
        """The cuboid of 1×t×1, or 1×1×t, that the product is with `sequence`; its other axes are of `ALONE`."""
        x, y, z = (self.y if role == self.cuboid_role else ALONE[role] for role in "xyz")
        m, n, k = self.grains  # what y splits of the rows is the fine split of the cuboid's
        grains = ((1, *m) if m else m, n, k)
        return CuboidPlan(self.form, self.m, self.n, self.k, x, y, z, pieces=self.pieces, grains=grains)

    def cut(self, axis: Axis, array: Array) -> bool:
        """Return whether what moves of arrays like this one along y leaves the node, and is cut."""
        return self.pieces > 1 and axis.size > 1 and not axis.offers_views(array)

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

    split_dim, cuboid_role = "n", "y"

    def no_reduction(self, grid_shape: Mapping[str, int]) -> bool:
        """Always true: nothing is summed over ranks."""
        return True


@dataclass(frozen=True)
class OnedRowPlan(OnedPlan):
    """A k:y; B k:y; C whole on every rank, or m:y (`sequence`).

    Words per rank (mean): 2(t−1)/t·mn, or with `sequence` (t−1)/t·mn, in every form.
    """

    split_dim, cuboid_role = "k", "z"


def with_alone(of_axes: Mapping[str, int], value: int) -> dict[str, int]:
    """The sizes, or coordinates, of a grid's axes, and those of `ALONE`."""
    return {**of_axes, **dict.fromkeys(ALONE.values(), value)}


class OnedExecutor(Executor):
    """Base of the 1-D executors: the product of a plan with `sequence`, in pieces, is that of a cuboid."""

    plan: OnedPlan

    def _multiply_in_pieces(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        plan, shape, at, moves = self._cuboid
        PiecedProduct(plan, shape, at, self.workspace, moves).start({"a": a, "b": b}, out, alpha, beta).wait()

    @cached_property
    def _cuboid(self) -> tuple[CuboidPlan, dict[str, int], dict[str, int], dict[str, Moves]]:
        grid, plan = self.grid, self.plan.as_cuboid()
        shape, at = with_alone(grid.shape, 1), with_alone(grid.coordinates, 0)
        axes = [grid[plan_axis] if plan_axis in grid.shape else grid[()] for plan_axis in plan.axes]
        return plan, shape, at, moves_of(plan, axes, shape, at)


class OnedColumn(OnedExecutor):
    """The column-parallel product: all-gather A if it is split, then multiply. Nothing is summed over ranks."""

    plan: OnedColumnPlan

    def _prepare(self) -> None:
        self.axis = self.grid[self.plan.y]
        self.gather = Prepared(
            self.axis, "all_gather", sizes=self.plan.parts(self.plan.a_names[0], self.plan.a_shape[0], self.axis.size)
        )

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """All-gather A if its rows are split, then one local product."""
        if self.plan.sequence and self.plan.cut(self.axis, a):
            self._multiply_in_pieces(a, b, out, alpha, beta)
            return
        if self.plan.sequence and self.axis.size > 1:
            a = self.gather.of(a).run(a, self.workspace.buffer("a", self.plan.a_shape, a))
        a, b = self.workspace.widened("a", a), self.workspace.widened("b", b)
        self.workspace.accumulate(a, b, self.plan.form, out, alpha, beta, self.workspace.scratch(out))


class OnedRow(OnedExecutor):
    """The row-parallel product: multiply, then all-reduce C, or reduce-scatter its rows."""

    plan: OnedRowPlan

    def _prepare(self) -> None:
        self.axis = self.grid[self.plan.y]
        self.sizes = self.plan.parts("m", self.plan.m, self.axis.size)
        self.scatter, self.sum = Prepared(self.axis, "reduce_scatter", sizes=self.sizes), Prepared(self.axis, "all_reduce")

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """One local product, then an all-reduce of C, or with `sequence` a reduce-scatter."""
        if self.plan.sequence and self.plan.cut(self.axis, a):
            self._multiply_in_pieces(a, b, out, alpha, beta)
            return
        a, b = self.workspace.widened("a", a), self.workspace.widened("b", b)
        if self.plan.sequence and self.axis.size > 1:
            partial = self.workspace.buffer("partial", self.plan.c_shape, out)
            seeded = seed(partial, self.sizes, self.axis.index, out, beta)
            self.workspace.accumulate(a, b, self.plan.form, partial, alpha, seeded, self.workspace.scratch(partial))
            parts = self.workspace.buffer("parts", (self.axis.size, *out.shape), out)
            self.scatter.of(partial).run(partial, out, parts)
            return
        scratch, beta = self.workspace.scratch(out), beta if self.axis.index == 0 else 0
        if not self.plan.cut(self.axis, out):
            self.workspace.accumulate(a, b, self.plan.form, out, alpha, beta, scratch)
            self.sum.of(out).run(out, out)
            return
        start_sums(self.axis, self.workspace, self.plan.form, a, b, out, self.plan.pieces, alpha, beta, scratch).wait()
