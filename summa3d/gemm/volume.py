# Closed forms: words, messages and workspace of a product, for each rank, before it runs. Imports layout; no communication.
# Words are those received (DESIGN §1). The ledger must equal them exactly; tests assert it.
# Next: nn/volume.py, which adds up the products of a transformer.
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from ..comm.arrays import HALVES
from ..layout.layout import Layout
from .cuboid import CuboidPlan

Coordinates = Mapping[str, int]


@dataclass(frozen=True)
class Cost:
    """What one rank moves and needs: words received, messages received, words of peak workspace."""

    words: int
    messages: int
    workspace: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.words + other.words, self.messages + other.messages, max(self.workspace, other.workspace))


@dataclass(frozen=True)
class Volume:
    """The cost of an operation on every rank of a grid; `cost_of` gives one rank's."""

    grid_shape: Mapping[str, int]
    cost_of: Callable[[Coordinates], Cost]

    def costs(self) -> list[Cost]:
        """One cost per rank, coordinates counted with the last axis fastest."""
        return [self.cost_of(coordinates) for coordinates, _ in Layout().blocks((), self.grid_shape)]

    def words_of(self, coordinates: Coordinates) -> int:
        return self.cost_of(coordinates).words

    def messages_of(self, coordinates: Coordinates) -> int:
        return self.cost_of(coordinates).messages

    def workspace_of(self, coordinates: Coordinates) -> int:
        """Words of workspace; times the bytes of a word, the peak that the ledger tracks."""
        return self.cost_of(coordinates).workspace

    @property
    def max_words(self) -> int:
        return max(cost.words for cost in self.costs())

    @property
    def mean_words(self) -> Fraction:
        return Fraction(sum(cost.words for cost in self.costs()), prod(self.grid_shape.values()))


def without(layout: Layout, axis: str) -> Layout:
    """The layout after a gather along `axis`."""
    return Layout(*([name for name in axes if name != axis] for axes in layout.dims))


def block_words(layout: Layout, shape: tuple[int, ...], grid_shape: Mapping[str, int], at: Coordinates) -> int:
    """Elements of the block at a rank."""
    return prod(layout.local_shape(shape, grid_shape, at))


def gather(layout: Layout, shape: tuple[int, ...], axis: str, grid_shape: Mapping[str, int], at: Coordinates) -> Cost:
    """An all-gather along `axis`: the gathered block less the rank's own; the workspace is the gathered block."""
    size = grid_shape[axis]
    if size == 1:
        return Cost(0, 0)
    gathered = block_words(without(layout, axis), shape, grid_shape, at)
    return Cost(gathered - block_words(layout, shape, grid_shape, at), size - 1, gathered)


def scatter(layout: Layout, shape: tuple[int, ...], axis: str, grid_shape: Mapping[str, int], at: Coordinates) -> Cost:
    """A reduce-scatter along `axis` into `layout`: (g−1) times the rank's own block; the workspace is the g parts summed."""
    size = grid_shape[axis]
    if size == 1:
        return Cost(0, 0)
    own = block_words(layout, shape, grid_shape, at)
    return Cost((size - 1) * own, size - 1, size * own)


def all_reduce(n: int, axes: tuple[str, ...], grid_shape: Mapping[str, int], at: Coordinates) -> Cost:
    """An all-reduce of n words over the plane of `axes`: n + (g−2)·n_r."""
    size, index = 1, 0
    for axis in axes:
        size, index = size * grid_shape[axis], index * grid_shape[axis] + at[axis]
    if size == 1:
        return Cost(0, 0)
    return Cost(n + (size - 2) * (n // size + (index < n % size)), 2 * (size - 1))


def plan_steps(plan: CuboidPlan, grid_shape: Mapping[str, int], at: Coordinates) -> tuple[Cost, Cost, Cost]:
    """Gather A along y, gather B along x, scatter C along z."""
    return (
        gather(plan.a_layout, plan.a_shape, plan.y, grid_shape, at),
        gather(plan.b_layout, plan.b_shape, plan.x, grid_shape, at),
        scatter(plan.c_layout, plan.c_shape, plan.z, grid_shape, at),
    )


def of_plan(
    plan: CuboidPlan,
    grid_shape: Mapping[str, int],
    dtype: str = "float64",
    staged: Collection[str] = (),
    device: bool = False,
) -> Volume:
    """The cost of `Cuboid.run`: mean words [(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ); workspace in words of `dtype`.

    Workspace: the gathered A and B, the partial C and the Z parts to be summed; an axis of size 1 needs none of its own, nor does
    an operand that is read in the node's memory: one whose axis is `staged` (`Grid.staged`), if its fine split lies on its rows.
    16-bit floats add A, B and C in float32, on a `device` C alone where Z > 1; dtypes that no BLAS adds to C in place, with β ≠ 0
    and Z = 1, a product (not counted here, since it depends on β).
    """
    dtype = str(dtype)
    half = dtype in HALVES
    wide = 2 if half else 1

    def cost_of(at: Coordinates) -> Cost:
        a, b, c = plan_steps(plan, grid_shape, at)
        words, messages = a.words + b.words + c.words, a.messages + b.messages + c.messages
        m, n, k = Layout((plan.x,), (plan.y,), (plan.z,)).local_shape((plan.m, plan.n, plan.k), grid_shape, at)
        operands = ((a, plan.a_fine, plan.y), (b, plan.b_fine, plan.x))
        workspace = sum(0 if fine == 0 and axis in staged else step.workspace for step, fine, axis in operands)
        if grid_shape[plan.z] > 1 and plan.z not in staged:
            workspace += wide * (c.workspace + m * n)
        if half and not device:
            workspace += wide * (m * k + k * n)
        if half and not (device and plan.sums_once(grid_shape)):
            workspace += wide * block_words(plan.c_layout, plan.c_shape, grid_shape, at)
        return Cost(words, messages, workspace)

    return Volume(grid_shape, cost_of)


def cuboid(m: int, n: int, k: int, grid_shape: Mapping[str, int], form: str = "nn") -> Volume:
    """The cost of the cuboid product C (m×n) = op(A)·op(B) on the axes x, y, z of `grid_shape`."""
    return of_plan(CuboidPlan(form, m, n, k), grid_shape)


def gradients(
    plan: CuboidPlan, grid_shape: Mapping[str, int], regather: bool, need_a: bool = True, need_b: bool = True
) -> Volume:
    """The cost of dA and dB together: dC gathered once for both, A and B gathered again or kept, dA and dB scattered."""

    def cost_of(at: Coordinates) -> Cost:
        a, b, _ = plan_steps(plan, grid_shape, at)
        total = gather(plan.c_layout, plan.c_shape, plan.z, grid_shape, at)
        if need_a:
            total += scatter(plan.a_layout, plan.a_shape, plan.y, grid_shape, at)
            total += b if regather else Cost(0, 0)
        if need_b:
            total += scatter(plan.b_layout, plan.b_shape, plan.x, grid_shape, at)
            total += a if regather else Cost(0, 0)
        return Cost(total.words, total.messages)

    return Volume(grid_shape, cost_of)
