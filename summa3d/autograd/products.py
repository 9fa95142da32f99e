# Products bound to a grid together with their gradients, each callable alone. Imports comm, gemm; needs torch.
# The set is closed: every gradient of NN, NT, TN, TT is again a product of the same algorithm, on the layouts that are there.
# Next: matmul.py, which makes of one a torch function; nn/schemes.py, which chooses it.
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..comm.axis import Axis
from ..comm.grid import Grid
from ..comm.pending import Pending, completed
from ..errors import ShapeError
from ..gemm.algorithms.cuboid import Cuboid
from ..gemm.algorithms.executor import Executor
from ..gemm.algorithms.gradients import GRADIENTS, Gradient, Gradients, gradient_plans
from ..gemm.algorithms.oned import OnedPlan
from ..gemm.algorithms.plan import ProductPlan
from ..gemm.algorithms.registry import algorithm_of
from ..gemm.algorithms.workspace import Workspace
from .ahead import Source


@dataclass(frozen=True)
class Flights:
    """What a product may leave in flight.

    source : where B comes from, for gathers ahead of it; None, none. input_gradient : whether dA's sum is in flight while dB is
    computed.
    """

    source: Source | None = None
    input_gradient: bool = True


class Product(ABC):
    """C = op(A)·op(B) (+ bias) on a grid, and its gradients, each callable alone.

    plan : sizes and layouts. rows : the plane of axes that split C's rows: over it a bias gradient is summed; None, no bias.
    flights : what may be in flight, as far as the algorithm starts it.
    Raises ShapeError for a form without gradient here.
    """

    def __init__(self, plan: ProductPlan, rows: Axis | None = None, flights: Flights = Flights()) -> None:
        if plan.form not in GRADIENTS:
            raise ShapeError(f"form {plan.form!r} has no gradient here. Forms that have: {', '.join(GRADIENTS)}.")
        self.plan, self.rows, self.flights = plan, rows, flights
        self.of_a, self.of_b = GRADIENTS[plan.form]

    @abstractmethod
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """C's block, and the operands to keep for the gradients."""

    @property
    def source(self) -> Source | None:
        """Where the B comes from that backward gathers again, ahead; None where it gathers none, or none ahead."""
        return None

    def share(self, c: Tensor) -> Tensor:
        """What both gradients take of dC, made once: dC as it is, or gathered."""
        return c

    @abstractmethod
    def start_grad_a(self, shared: Tensor, b: Tensor) -> Pending:
        """Start dA from the shared dC and B as kept; what sums it over ranks is in flight when this returns, where it can be."""

    @abstractmethod
    def start_grad_b(self, shared: Tensor, a: Tensor) -> Pending:
        """Start dB from the shared dC and A as kept."""


class Gathered(Product):
    """The cuboid's: operands gathered, the product, and a scatter; dC is gathered once for both gradients.

    `regather` keeps only the shards for backward and gathers them again: memory 1/P. Without it the gathered operands
    are kept: fewer words.
    """

    def __init__(self, cuboid: Cuboid, regather: bool = True, rows: Axis | None = None, flights: Flights = Flights()) -> None:
        super().__init__(cuboid.plan, rows, flights)
        self.cuboid, self.regather = cuboid, regather

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        self.cuboid.check(a, b)
        view = self.regather  # what is kept for backward must be a copy
        gathered = self.cuboid.gather_a(a, view), self._gathered_b(b, view, forward=True)
        partial, kept = self.cuboid.multiply(*gathered), (a, b) if self.regather else gathered
        del gathered  # before what the sum needs is there
        return self.cuboid.scatter_c(partial), kept

    def share(self, c: Tensor) -> Tensor:
        return self.cuboid.gather_c(c, view=True)

    def start_grad_a(self, shared: Tensor, b: Tensor) -> Pending:
        """The scatter along y is in flight when this returns."""
        if self.regather:
            b = self._gathered_b(b, view=True, forward=False)
        partial = local(self.cuboid.workspace, self.of_a, shared, b, self.cuboid.summand_buffer("a", shared))
        del b  # gathered, before what the sum needs is there
        return self.cuboid.start_scatter_a(partial)

    def start_grad_b(self, shared: Tensor, a: Tensor) -> Pending:
        """The scatter along x is in flight when this returns."""
        if self.regather:
            a = self.cuboid.gather_a(a, view=True)
        partial = local(self.cuboid.workspace, self.of_b, shared, a, self.cuboid.summand_buffer("b", shared))
        del a
        return self.cuboid.start_scatter_b(partial)

    @property
    def source(self) -> Source | None:
        return self.flights.source if self.cuboid.x.size > 1 and self.regather else None

    def _gathered_b(self, b: Tensor, view: bool, forward: bool) -> Tensor:
        """B gathered along x, ahead of now if it could be: into memory of its own then, as a view ends with what comes next."""
        source = self.flights.source
        if source is None or self.cuboid.x.size == 1:
            return self.cuboid.gather_b(b, view)
        gathered = source.ahead.gather(source, forward, b, self.cuboid.start_gather_b)
        return self.cuboid.gather_b(b, view) if gathered is None else self.cuboid.ledger.track(gathered)


class Line(Product):
    """The two 1-D products, by columns and by rows: blocks as they lie; an inner dim that the axis splits is all-reduced.

    By columns (n split) that is dA's, by rows (k split) C's; dB's never. Nothing is gathered, so there is nothing to gather
    again. The sequence-parallel pair is the cuboid of 1×t×1.
    """

    def __init__(self, plan: OnedPlan, grid: Grid, rows: Axis | None = None, flights: Flights = Flights()) -> None:
        super().__init__(plan, rows, flights)
        if plan.sequence:
            raise ShapeError("A sequence-parallel 1-D product has its gradients as the cuboid of 1×t×1: take a CuboidPlan.")
        self.executor = algorithm_of(plan).executor(plan, grid)
        self.axis = grid[plan.y]
        self.split = plan.split_dim

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        self.executor.check(a, b)
        c = self.executor.workspace.multiply(a, b, self.plan.form)
        return self.axis.all_reduce(c, into=c) if self.split == "k" else c, (a, b)

    def start_grad_a(self, shared: Tensor, b: Tensor) -> Pending:
        """The sum along y, if there is one, is in flight when this returns."""
        return self._start_sum(local(self.executor.workspace, self.of_a, shared, b), self.of_a.inner)

    def start_grad_b(self, shared: Tensor, a: Tensor) -> Pending:
        return self._start_sum(local(self.executor.workspace, self.of_b, shared, a), self.of_b.inner)

    def _start_sum(self, partial: Tensor, inner: str) -> Pending:
        return self.axis.start_all_reduce(partial, into=partial, in_order=True) if inner == self.split else completed(partial)


class Executed(Product):
    """Any algorithm whose gradients are products of its own: SUMMA, Tesseract, Agarwal's. The shards are kept, and nothing else.

    `workspace` may be shared by any number of products of one grid: each is complete when it returns.
    Raises ShapeError where the set does not close: a gradient would not lie as the operand does.
    """

    def __init__(self, plan: ProductPlan, grid: Grid, rows: Axis | None = None, workspace: Workspace | None = None) -> None:
        super().__init__(plan, rows)
        self.grid, self.workspace = grid, workspace or Workspace(grid)
        self.a_plan, self.b_plan = gradient_plans(plan)
        self._executor = self._bound(plan)

    @cached_property
    def _grad_a(self) -> Executor:
        return self._bound(self.a_plan)

    @cached_property
    def _grad_b(self) -> Executor:
        return self._bound(self.b_plan)

    def _bound(self, plan: ProductPlan) -> Executor:
        return algorithm_of(plan).executor(plan, self.grid, self.workspace)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self._executor.run(a, b), (a, b)

    def start_grad_a(self, shared: Tensor, b: Tensor) -> Pending:
        """Complete when this returns: the algorithm sums as it goes."""
        return completed(self._grad_a.run(*self.of_a.ordered(shared, b)))

    def start_grad_b(self, shared: Tensor, a: Tensor) -> Pending:
        """Complete when this returns."""
        return completed(self._grad_b.run(*self.of_b.ordered(shared, a)))


def product(
    plan: ProductPlan,
    grid: Grid,
    regather: bool = True,
    rows: Axis | None = None,
    workspace: Workspace | None = None,
    flights: Flights = Flights(),
) -> Product:
    """The product of `plan` on `grid` with its gradients, whatever the algorithm.

    `regather` matters to those that gather, `flights` to those that start what they wait for afterwards.
    """
    return PRODUCTS[algorithm_of(plan).gradients](plan, grid, regather, rows, workspace, flights)


PRODUCTS: dict[Gradients, Callable[..., Product]] = {
    Gradients.GATHERED: lambda plan, grid, regather, rows, _, flights: Gathered(Cuboid(plan, grid), regather, rows, flights),
    Gradients.ALL_REDUCED: lambda plan, grid, _regather, rows, _, flights: Line(plan, grid, rows, flights),
    Gradients.PRODUCTS: lambda plan, grid, _regather, rows, workspace, _: Executed(plan, grid, rows, workspace),
}


def local(workspace: Workspace, gradient: Gradient, c: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """A gradient's product on this rank, in `out` if given."""
    return workspace.multiply(*gradient.ordered(c, other), gradient.form, out)
