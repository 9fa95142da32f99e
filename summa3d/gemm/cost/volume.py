"""Predicted words, messages and workspace of a product on each rank; tests compare them with the ledger exactly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..algorithms.cuboid import CuboidPlan
from ..algorithms.gradients import GRADIENTS, gradient_plans
from ..algorithms.oned import OnedPlan
from ..algorithms.plan import ProductPlan
from ..algorithms.registry import algorithm_of
from .per_rank import moves_of, plan_steps, sums_in_pieces
from .steps import Coordinates, Cost, GridShape, Volume, all_reduce, block_words, combined, gather, scatter

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
    plan: ProductPlan,
    grid_shape: GridShape,
    regather: bool = True,
    need_a: bool = True,
    need_b: bool = True,
    staged: Collection[str] = (),
) -> Volume:
    """The words and messages of dA and dB together, as `autograd` takes them; workspace is not counted.

    staged : the axes that communicate in the node's memory, whose messages are not cut in pieces

    The cuboid gathers dC once for both, gathers A and B again (`regather`) or keeps them, and scatters dA and dB. The 1-D
    products all-reduce the gradient whose inner dim is split. Others take products of their own algorithm.
    """
    plans = () if isinstance(plan, (CuboidPlan, OnedPlan)) else gradient_plans(plan)
    products = [
        of_plan(result, grid_shape, staged=staged) for result, needed in zip(plans, (need_a, need_b), strict=False) if needed
    ]

    def cost_of(at: Coordinates) -> Cost:
        if isinstance(plan, CuboidPlan):
            moves = _gathered(plan, grid_shape, at, regather, need_a, need_b, staged)
        elif isinstance(plan, OnedPlan):
            moves = _all_reduced(plan, grid_shape, at, need_a, need_b, staged)
        else:
            moves = [product.cost_of(at) for product in products]
        return replace(combined(*moves), workspace=0)

    return Volume(grid_shape, cost_of)


def _gathered(
    plan: CuboidPlan,
    grid_shape: GridShape,
    at: Coordinates,
    regather: bool,
    need_a: bool,
    need_b: bool,
    staged: Collection[str],
) -> list[Cost]:
    """dC is gathered once; each gradient's plan says what else is, and what is summed."""
    moves, gathered = [], False
    for needed, gradient, result in zip((need_a, need_b), GRADIENTS[plan.form], gradient_plans(plan), strict=True):
        if needed:
            first, second, summed = moves_of(result, grid_shape, at, staged)
            of_c, other = (first, second) if gradient.c_first else (second, first)
            moves += [summed, *([] if gathered else [of_c]), *([other] if regather else [])]
            gathered = True
    return moves or [gather(plan.c_layout, plan.c_shape, plan.z, grid_shape, at)]


def _all_reduced(
    plan: OnedPlan, grid_shape: GridShape, at: Coordinates, need_a: bool, need_b: bool, staged: Collection[str]
) -> list[Cost]:
    """The gradient whose inner dim is split is summed, in the plan's pieces where that leaves the node."""
    wanted = zip(plan.stored, GRADIENTS[plan.form], (need_a, need_b), strict=False)
    summed = [operand for operand, gradient, needed in wanted if needed and gradient.inner == plan.split_dim]
    pieces = plan.pieces if grid_shape[plan.y] > 1 and plan.y not in staged else 1
    blocks = [layout.local_shape(shape, grid_shape, at) for layout, shape in summed]
    return [cost for block in blocks for cost in sums_in_pieces(block, pieces, (plan.y,), grid_shape, at)]
