"""Predicted words, messages and workspace of a product on each rank; tests compare them with the ledger exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ..algorithms.cuboid import CuboidPlan
from ..algorithms.gradients import GRADIENTS, Gradients, gradient_plans
from ..algorithms.oned import OnedPlan
from ..algorithms.plan import ProductPlan
from ..algorithms.registry import algorithm_of
from .per_rank import plan_steps
from .steps import Coordinates, Cost, GridShape, Volume, all_reduce, block_words, gather, scatter, without

__all__ = [
    "Coordinates",
    "Cost",
    "Volume",
    "all_reduce",
    "block_words",
    "cuboid",
    "gather",
    "gradients",
    "of_plan",
    "plan_steps",
    "scatter",
    "without",
]


def of_plan(
    plan: ProductPlan, grid_shape: GridShape, dtype: str = "float64", staged: Collection[str] = (), device: bool = False
) -> Volume:
    """The cost of an executor's `run` for C-ordered blocks of `dtype`, on every rank, whatever the algorithm of `plan`.

    Parameters
    ----------
    staged : the axes that communicate in the node's memory (`Grid.staged`): the cuboid then needs less workspace
    device : whether the operands lie on a device, which multiplies 16-bit floats without copies in float32

    Mean words are those of the plan's table; workspace is in words of `dtype`. Raises GridError where the algorithm cannot use
    the grid.
    """
    return algorithm_of(plan).volume(plan, grid_shape, dtype, staged, device)


def cuboid(m: int, n: int, k: int, grid_shape: GridShape, form: str = "nn") -> Volume:
    """The cost of the cuboid product C (m×n) = op(A)·op(B) on the axes x, y, z of `grid_shape`."""
    return of_plan(CuboidPlan(form, m, n, k), grid_shape)


def gradients(
    plan: ProductPlan, grid_shape: GridShape, regather: bool = True, need_a: bool = True, need_b: bool = True
) -> Volume:
    """The words and messages of dA and dB together, as `autograd` takes them; workspace is not counted.

    The cuboid gathers dC once for both, gathers A and B again (`regather`) or keeps them, and scatters dA and dB. The 1-D
    products all-reduce the gradient whose inner dim is split. Others take products of their own algorithm.
    """
    cost_of = COSTS[algorithm_of(plan).gradients](plan, grid_shape, regather, need_a, need_b)
    return Volume(grid_shape, lambda at: replace(cost_of(at), workspace=0))


GradientCost = Callable[[Coordinates], Cost]


def _gathered(plan: CuboidPlan, grid_shape: GridShape, regather: bool, need_a: bool, need_b: bool) -> GradientCost:
    def cost_of(at: Coordinates) -> Cost:
        a, b, _ = plan_steps(plan, grid_shape, at)
        total = gather(plan.c_layout, plan.c_shape, plan.z, grid_shape, at)
        if need_a:
            total += scatter(plan.a_layout, plan.a_shape, plan.y, grid_shape, at)
            total += b if regather else Cost(0, 0)
        if need_b:
            total += scatter(plan.b_layout, plan.b_shape, plan.x, grid_shape, at)
            total += a if regather else Cost(0, 0)
        return total

    return cost_of


def _all_reduced(plan: OnedPlan, grid_shape: GridShape, regather: bool, need_a: bool, need_b: bool) -> GradientCost:
    wanted = zip(plan.stored, GRADIENTS[plan.form], (need_a, need_b), strict=False)
    summed = [operand for operand, gradient, needed in wanted if needed and gradient.inner == plan.split_dim]

    def cost_of(at: Coordinates) -> Cost:
        words = (block_words(*operand, grid_shape, at) for operand in summed)
        return sum((all_reduce(count, (plan.y,), grid_shape, at) for count in words), Cost(0, 0))

    return cost_of


def _as_products(plan: ProductPlan, grid_shape: GridShape, regather: bool, need_a: bool, need_b: bool) -> GradientCost:
    wanted = zip(gradient_plans(plan), (need_a, need_b), strict=True)
    volumes = [of_plan(found, grid_shape) for found, needed in wanted if needed]
    return lambda at: sum((volume.cost_of(at) for volume in volumes), Cost(0, 0))


COSTS: dict[Gradients, Callable[[Any, GridShape, bool, bool, bool], GradientCost]] = {
    Gradients.GATHERED: _gathered,
    Gradients.ALL_REDUCED: _all_reduced,
    Gradients.PRODUCTS: _as_products,
}
