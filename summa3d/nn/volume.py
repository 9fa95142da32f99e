# Closed forms: the words each rank receives in a training step of a GPT on a cuboid, forward, backward and optimizer.
# Imports gemm.volume, config. Nothing is run: the ledger must equal these numbers exactly, and tests assert it.
# Next: plan/, which prices them.
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..gemm.cuboid import CuboidPlan
from ..gemm.volume import Coordinates, Cost, all_reduce, block_words, gather, gradients, of_plan, scatter
from ..layout.layout import Layout
from .config import ModelConfig

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


@dataclass(frozen=True)
class GPTVolume:
    """The layers of a GPT on a grid, priced for the rank at `at`: b rows of s tokens a micro-batch."""

    config: ModelConfig
    batch: int
    sequence: int
    grid_shape: Mapping[str, int]
    at: Coordinates
    regather: bool = True

    def linear(self, k: int, n: int, roles: tuple[str, str, str], form: str = "nn", bias: bool = True) -> StepCost:
        """A product with its gradients, and its bias gradient summed over the axes that split rows."""
        x, y, z = roles
        plan = CuboidPlan(form, self.batch * self.sequence, n, k, x, y, z)
        forward = of_plan(plan, self.grid_shape).cost_of(self.at)
        backward = gradients(plan, self.grid_shape, self.regather).cost_of(self.at)
        if bias:
            backward += self.vectors(Layout((y,)), (n,), (x, z))
        return StepCost(_times(forward, 1), backward)

    def vectors(self, layout: Layout, shape: tuple[int, ...], rows: tuple[str, ...], count: int = 1) -> Cost:
        """The gradients of `count` vectors, one all-reduce over the axes that split rows."""
        return all_reduce(count * block_words(layout, shape, self.grid_shape, self.at), rows, self.grid_shape, self.at)

    def norm(self) -> StepCost:
        """2 words a row over z, forward and backward; γ's and β's gradients over (x, y)."""
        statistics = all_reduce(2 * self._rows(("x", "y")), ("z",), self.grid_shape, self.at)
        return StepCost(statistics, statistics + self.vectors(Layout(("z",)), (self.config.hidden,), ("x", "y"), 2))

    def block(self) -> StepCost:
        """qkv and up enter with roles (x, y, z); proj and down return with y and z exchanged."""
        h, f = self.config.hidden, self.config.width
        enter, leave = ("x", "y", "z"), ("x", "z", "y")
        linears = self.linear(h, 3 * h, enter) + self.linear(h, h, leave) + self.linear(h, f, enter) + self.linear(f, h, leave)
        return linears + self.norm().times(2)

    def embedding(self) -> StepCost:
        """The table gathered along x and the looked-up rows scattered along y; positions summed over (x, y)."""
        b, s, h, v = self.batch, self.sequence, self.config.hidden, self.config.vocabulary
        table, stream = Layout(("y", "x"), ("z",)), Layout(("x", "y"), (), ("z",))
        shape = self.grid_shape
        forward = gather(table, (v, h), "x", shape, self.at) + scatter(stream, (b, s, h), "y", shape, self.at)
        backward = gather(stream, (b, s, h), "y", shape, self.at) + scatter(table, (v, h), "x", shape, self.at)
        backward += self.vectors(Layout((), ("z",)), (self.config.sequence, h), ("x", "y"))
        return StepCost(_times(forward, 1), _times(backward, 1))

    def head(self) -> StepCost:
        """The tied head (NT), and the loss: a maximum and 2 words a row over y, 1 word over (x, z)."""
        rows = self._rows(("x", "z"))
        loss = all_reduce(rows, ("y",), self.grid_shape, self.at) + all_reduce(2 * rows, ("y",), self.grid_shape, self.at)
        loss += all_reduce(1, ("x", "z"), self.grid_shape, self.at)
        head = self.linear(self.config.hidden, self.config.vocabulary, ("x", "y", "z"), "nt", bias=False)
        return head + StepCost(loss, NONE)

    def step(self, accumulate: int = 1) -> StepCost:
        """A whole step of `accumulate` micro-batches, and the gradient norm: 1 word over all ranks."""
        micro = self.embedding() + self.block().times(self.config.layers) + self.norm() + self.head()
        norm = all_reduce(1, tuple(self.grid_shape), self.grid_shape, self.at)
        return micro.times(accumulate) + StepCost(NONE, NONE, norm)

    def _rows(self, axes: tuple[str, ...]) -> int:
        return block_words(Layout(axes, ()), (self.batch, self.sequence), self.grid_shape, self.at)
