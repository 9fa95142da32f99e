# Closed forms: the words each rank receives in a training step of a GPT, in any scheme: forward, backward and optimizer.
# Imports gemm.volume, scheme, config. Nothing is run: the ledger must equal these numbers exactly, and tests assert it.
# Next: plan/, which prices them.
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..autograd.products import gradient_plans
from ..gemm import volume_2d
from ..gemm.cuboid import CuboidPlan
from ..gemm.oned import OnedColumnPlan, OnedRowPlan
from ..gemm.plan import ProductPlan
from ..gemm.volume import Coordinates, Cost, all_reduce, block_words, gather, gradients, of_plan, scatter
from ..layout.layout import Layout
from .config import ModelConfig
from .scheme import Scheme
from .scheme_kinds import row_axes

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


def product_cost(plan: ProductPlan, grid_shape: Mapping[str, int], at: Coordinates, regather: bool = True) -> StepCost:
    """A product and both its gradients, as `autograd.products` takes them."""
    if isinstance(plan, CuboidPlan):
        return StepCost(_times(of_plan(plan, grid_shape).cost_of(at), 1), gradients(plan, grid_shape, regather).cost_of(at))
    if isinstance(plan, OnedColumnPlan):
        return StepCost(NONE, all_reduce(plan.m * plan.k, (plan.y,), grid_shape, at))
    if isinstance(plan, OnedRowPlan):
        return StepCost(all_reduce(plan.m * plan.n, (plan.y,), grid_shape, at), NONE)
    forward, *backward = (_times(volume_2d.volume(part, grid_shape).cost_of(at), 1) for part in (plan, *gradient_plans(plan)))
    return StepCost(forward, sum(backward, NONE))


@dataclass(frozen=True)
class GPTVolume:
    """The layers of a GPT priced for the rank of `scheme.grid`, which may be a `Place`: b rows of s tokens a micro-batch."""

    config: ModelConfig
    scheme: Scheme
    batch: int
    sequence: int

    @property
    def _grid(self) -> tuple[Mapping[str, int], Coordinates]:
        return self.scheme.grid.shape, self.scheme.grid.coordinates

    def linear(self, layout: Layout, k: int, n: int, form: str = "nn", bias: bool = True) -> StepCost:
        """A product with its gradients, and its bias gradient summed over the axes that split rows."""
        plan = self.scheme.plan(layout, form, self.batch * self.sequence, n, k)
        cost = product_cost(plan, *self._grid, self.scheme.regather)
        return cost + StepCost(NONE, self.vectors(self.scheme.after_linear(layout), (n,))) if bias else cost

    def vectors(self, layout: Layout, shape: tuple[int, ...], count: int = 1) -> Cost:
        """The gradients of `count` vectors along the last dim of an activation, one all-reduce over the axes that split rows."""
        own = Layout(*((),) * (len(shape) - 1), layout.dims[-1])
        return all_reduce(count * block_words(own, shape, *self._grid), row_axes(layout), *self._grid)

    def norm(self) -> StepCost:
        """2 words a row over the axes that split h, forward and backward; γ's and β's gradients over those that split rows."""
        stream = self.scheme.stream
        statistics = all_reduce(2 * self._rows(stream), stream.dims[-1], *self._grid)
        return StepCost(statistics, statistics + self.vectors(stream, (self.config.hidden,), 2))

    def linears(self) -> StepCost:
        """The four linears of a block, without their biases."""
        h, f = self.config.hidden, self.config.width
        stream, inner = self.scheme.stream, self.scheme.after_linear(self.scheme.stream)
        pairs = ((stream, h, 3 * h), (inner, h, h), (stream, h, f), (inner, f, h))
        return sum((self.linear(*pair, bias=False) for pair in pairs), StepCost(NONE, NONE))

    def block(self) -> StepCost:
        """The linears with their biases, and two norms."""
        h, f, stream = self.config.hidden, self.config.width, self.scheme.stream
        inner = self.scheme.after_linear(stream)
        biases = sum((self.vectors(layout, (n,)) for layout, n in ((inner, 3 * h), (stream, h), (inner, f), (stream, h))), NONE)
        return self.linears() + StepCost(NONE, biases) + self.norm().times(2)

    def embedding(self) -> StepCost:
        """The table gathered and what was looked up summed, as the scheme's lookup says; the positions' gradient."""
        scheme, lookup, (shape, at) = self.scheme, self.scheme.lookup, self._grid
        table, stream = scheme.table(scheme.stream), scheme.stream
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
        backward += self.vectors(stream, (self.config.sequence, self.config.hidden))
        return StepCost(_times(forward, 1), _times(backward, 1))

    def head(self) -> StepCost:
        """The tied head (NT), and the loss: a maximum and 2 words a row over the axes of v, 1 word over those of the rows."""
        layout = self.scheme.after_linear(self.scheme.stream)
        rows, columns = self._rows(layout), layout.dims[-1]
        loss = all_reduce(rows, columns, *self._grid) + all_reduce(2 * rows, columns, *self._grid)
        loss += all_reduce(1, row_axes(layout), *self._grid)
        head = self.linear(self.scheme.stream, self.config.hidden, self.config.vocabulary, "nt", bias=False)
        return head + StepCost(loss, NONE)

    def step(self, accumulate: int = 1) -> StepCost:
        """A whole step of `accumulate` micro-batches, and the gradient norm: 1 word over all ranks."""
        micro = self.embedding() + self.block().times(self.config.layers) + self.norm() + self.head()
        norm = all_reduce(1, tuple(self.scheme.grid.shape), *self._grid)
        return micro.times(accumulate) + StepCost(NONE, NONE, norm)

    def _rows(self, layout: Layout) -> int:
        return block_words(Layout(*layout.dims[:2]), (self.batch, self.sequence), *self._grid)
