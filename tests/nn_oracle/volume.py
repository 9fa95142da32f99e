"""Closed forms: the words each rank receives in a training step of a GPT, in any scheme: forward, backward and optimizer.

Nothing is run: the ledger must equal these numbers exactly, and tests assert it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from summa3d.gemm.algorithms.cuboid import CuboidPlan
from summa3d.gemm.algorithms.gradients import gradient_plans
from summa3d.gemm.algorithms.oned import OnedColumnPlan, OnedRowPlan
from summa3d.gemm.algorithms.plan import ProductPlan
from summa3d.gemm.cost.volume import Coordinates, Cost, all_reduce, block_words, gather, gradients, of_plan, scatter
from summa3d.layout.layout import Layout
from summa3d.nn.config import ModelConfig
from summa3d.nn.context import Context
from summa3d.nn.schemes.registry import row_axes
from summa3d.nn.schemes.scheme import Scheme

NONE = Cost(0, 0)


@dataclass(frozen=True)
class StepCost:
    """Words and messages that one rank receives in each phase of a step."""

    forward: Cost
    backward: Cost
    optimizer: Cost = NONE

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(self.forward + other.forward, self.backward + other.backward, self.optimizer + other.optimizer)

    def times(self, count: int) -> StepCost:
        return StepCost(_times(self.forward, count), _times(self.backward, count), _times(self.optimizer, count))

    @property
    def words(self) -> int:
        return self.forward.words + self.backward.words + self.optimizer.words


def _times(cost: Cost, count: int) -> Cost:
    return Cost(count * cost.words, count * cost.messages)


def product_cost(
    plan: ProductPlan, grid_shape: Mapping[str, int], at: Coordinates, regather: bool = True, need_a: bool = True
) -> StepCost:
    """A product and both its gradients, as `autograd.products` takes them; without `need_a`, of an input that has none."""
    if isinstance(plan, CuboidPlan):
        backward = gradients(plan, grid_shape, regather, need_a).cost_of(at)
        return StepCost(_times(of_plan(plan, grid_shape).cost_of(at), 1), backward)
    if isinstance(plan, OnedColumnPlan):
        return StepCost(NONE, all_reduce(plan.m * plan.k, (plan.y,), grid_shape, at) if need_a else NONE)
    if isinstance(plan, OnedRowPlan):
        return StepCost(all_reduce(plan.m * plan.n, (plan.y,), grid_shape, at), NONE)
    plans = (plan, *gradient_plans(plan)[0 if need_a else 1 :])
    forward, *both = (_times(of_plan(part, grid_shape).cost_of(at), 1) for part in plans)
    return StepCost(forward, sum(both, NONE))


@dataclass(frozen=True)
class GPTVolume:
    """The layers of a GPT priced for the rank of `context.grid`, which may be a `Place`: b rows of s tokens a micro-batch."""

    config: ModelConfig
    context: Context
    batch: int
    sequence: int

    @property
    def scheme(self) -> Scheme:
        return self.context.scheme

    @property
    def _grid(self) -> tuple[Mapping[str, int], Coordinates]:
        return self.context.grid.shape, self.context.grid.coordinates

    def linear(
        self,
        layout: Layout,
        k: int,
        n: int,
        form: str = "nn",
        bias: bool = True,
        rows: int | None = None,
        need_input: bool = True,
    ) -> StepCost:
        """A product with its gradients, and its bias gradient summed over the axes that split rows; rows default to b·s."""
        plan = self.scheme.plan(layout, form, self.batch * self.sequence if rows is None else rows, n, k)
        cost = product_cost(plan, *self._grid, self.context.regather, need_input)
        return cost + self.vectors(self.scheme.after_linear(layout), n) if bias else cost

    def vectors(self, layout: Layout, n: int, count: int = 1) -> StepCost:
        """`count` vectors along the last dim of an activation.

        Copied: their gradients in one all-reduce over the axes that split rows. Else each is broadcast and gathered, and its
        gradient scattered and reduced.
        """
        if self.scheme.vectors == "copied":
            return StepCost(NONE, self._summed(layout, (n,), count))
        own, (shape, at) = self.scheme.vector(layout), self._grid
        stored = Layout(*own.dims)
        block, one = block_words(stored, (n,), shape, at), StepCost(NONE, NONE)
        for axis in own.root_only:
            away, size = int(at[axis] != own.root_index(axis, at)), shape[axis]
            reduced = Cost((size - 1) * (block // size + (at[axis] < block % size)), size - 1)
            one += StepCost(Cost(away * block, away), reduced)
        for axis in own.dims[0][len(layout.dims[-1]) :]:
            one += StepCost(gather(stored, (n,), axis, shape, at), scatter(stored, (n,), axis, shape, at))
        return StepCost(_times(one.forward, count), _times(one.backward, count))

    def _summed(self, layout: Layout, shape: tuple[int, ...], count: int = 1) -> Cost:
        """The gradients of `count` tensors split as an activation's last dim, one all-reduce over the axes that split rows."""
        own = Layout(*((),) * (len(shape) - 1), layout.dims[-1])
        return all_reduce(count * block_words(own, shape, *self._grid), row_axes(layout), *self._grid)

    def norm(self, layout: Layout | None = None) -> StepCost:
        """A norm's words a row over the axes that split h, forward and backward; its vectors' gradients over those of the rows.

        Layer norm has 2 words a row and 2 vectors, RMSNorm 1 of each.
        """
        layout = layout or self.scheme.residual
        return self._statistics(layout) + self.vectors(layout, self.config.hidden, self._each)

    @property
    def _each(self) -> int:
        return 2 if self.config.architecture.norm == "layer" else 1

    def _statistics(self, layout: Layout) -> StepCost:
        statistics = all_reduce(self._each * self._rows(layout), layout.dims[-1], *self._grid)
        return StepCost(statistics, statistics)

    def _norm_vectors(self, norms: int) -> list[tuple[Layout, int, int]]:
        return [(self.scheme.residual, self.config.hidden, self._each)] * norms

    def linears(self) -> StepCost:
        """The four linears of a block, without their biases."""
        h, f = self.config.hidden, self.config.ffn_dim
        stream, inner = self.scheme.residual, self.scheme.after_linear(self.scheme.residual)
        linears = ((stream, h, 3 * h, "nn"), (inner, h, h, "nn"), (stream, h, f, "nn"), (inner, f, h, self.scheme.down_form))
        return sum((self.linear(*linear, bias=False) for linear in linears), StepCost(NONE, NONE))

    def block(self) -> StepCost:
        """The linears with their biases, and two norms."""
        h, f, stream = self.config.hidden, self.config.ffn_dim, self.scheme.residual
        inner = self.scheme.after_linear(stream)
        biases = [(inner, 3 * h, 1), (stream, h, 1), (inner, f, 1), (stream, h, 1)]
        return self.linears() + self._statistics(stream).times(2) + self.joint([*biases, *self._norm_vectors(2)])

    def joint(self, vectors: list[tuple[Layout, int, int]]) -> StepCost:
        """The vectors of a block, (layout, n, count) each: one all-reduce of all gradients that are summed over one plane."""
        if self.scheme.vectors != "copied":
            return sum((self.vectors(*vector) for vector in vectors), StepCost(NONE, NONE))
        planes: dict[tuple[str, ...], int] = {}
        for layout, n, count in vectors:
            plane = tuple(axis for axis in row_axes(layout) if self._grid[0][axis] > 1)
            planes[plane] = planes.get(plane, 0) + count * block_words(Layout(layout.dims[-1]), (n,), *self._grid)
        return StepCost(NONE, sum((all_reduce(words, plane, *self._grid) for plane, words in planes.items()), NONE))

    def small_table(self, entries: int) -> StepCost:
        """The gradient of a table that is added to the stream, such as the positions."""
        return StepCost(NONE, self._summed(self.scheme.residual, (entries, self.config.hidden)))

    def lookup(self) -> StepCost:
        """The table gathered and what was looked up summed, as the scheme's lookup says."""
        scheme, lookup, (shape, at) = self.scheme, self.scheme.lookup, self._grid
        table, stream = scheme.table(scheme.residual), scheme.residual
        whole, looked_up = (self.config.vocabulary, self.config.hidden), (self.batch, self.sequence, self.config.hidden)
        forward = backward = NONE
        for axis in lookup.gathered:
            forward += gather(table, whole, axis, shape, at)
            backward += scatter(table, whole, axis, shape, at)
        for axis in lookup.part:
            if axis in stream.axes:
                forward += scatter(stream, looked_up, axis, shape, at)
                backward += gather(stream, looked_up, axis, shape, at)
            else:
                forward += all_reduce(block_words(stream, looked_up, shape, at), (axis,), shape, at)
        backward += all_reduce(block_words(table, whole, shape, at), lookup.copies, shape, at)
        return StepCost(_times(forward, 1), _times(backward, 1))

    def loss(self, layout: Layout) -> StepCost:
        """A maximum and 2 words a row over the axes that split the classes, 1 word over those that split the rows."""
        rows, columns = self._rows(layout), layout.dims[-1]
        words = all_reduce(rows, columns, *self._grid) + all_reduce(2 * rows, columns, *self._grid)
        return StepCost(words + all_reduce(1, row_axes(layout), *self._grid), NONE)

    def embedding(self) -> StepCost:
        """Return what makes the stream: tokens and positions."""
        return self.lookup() + self.small_table(self.config.sequence)

    def head(self) -> StepCost:
        """The head (NT) and the loss."""
        stream = self.scheme.residual
        linear = self.linear(stream, self.config.hidden, self.config.vocabulary, "nt", bias=False)
        return linear + self.loss(self.scheme.after_linear(stream))

    def after_blocks(self) -> StepCost:
        """Return what reads the stream: the last norm and the head."""
        return self.norm() + self.head()

    def step(self, accumulate: int = 1) -> StepCost:
        """A whole step of `accumulate` micro-batches, and the gradient norm: 1 word over all ranks."""
        micro = self.embedding() + self.block().times(self.config.layers) + self.after_blocks()
        norm = all_reduce(1, tuple(self.context.grid.shape), *self._grid)
        return micro.times(accumulate) + StepCost(NONE, NONE, norm)

    def _rows(self, layout: Layout) -> int:
        """Rows of this rank's block of an activation [b, s, n], or [b, n]."""
        shape = (self.batch, self.sequence)[: len(layout.dims) - 1]
        return block_words(Layout(*layout.dims[:-1]), shape, *self._grid)
