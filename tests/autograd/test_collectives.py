"""The gradients of collectives have gradients: first and second derivatives are those of the whole in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from summa3d.autograd.collectives import all_gather, all_reduce, broadcast_from, reduce_scatter, scatter_from, sum_gradient
from summa3d.autograd.relayout import relayout
from summa3d.layout import Layout
from summa3d.layout.layout import split_sizes

SHAPE, ROOT = (7, 3), 1


def drawn(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def derivatives(loss: Tensor, operands: list[Tensor], add_up: Callable[[Tensor], Tensor] = torch.sum) -> list[list[Tensor]]:
    """The gradients of a loss, and those of the sum of their squares; `add_up` sums a number over ranks."""
    first = torch.autograd.grad(loss, operands, create_graph=True)
    second = torch.autograd.grad(add_up(sum((grad.square().sum() for grad in first), torch.zeros(()))), operands)
    return [[grad.detach() for grad in first], list(second)]


def check(here: list[list[Tensor]], whole: list[list[Tensor]], operand: int, cut: Any) -> None:
    """First and second derivatives of this rank's operand, which is the part `cut` of an operand of the whole."""
    for order, (mine, all_of_it) in enumerate(zip(here, whole, strict=True), 1):
        want = all_of_it[operand][cut]
        assert mine[0].numel() == want.numel() and (mine[0].reshape(want.shape) - want).norm() <= 1e-13 * want.norm(), order


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "sum_gradient", "all_reduce", "scatter_from", "broadcast_from"])
def test_second_derivatives_of_a_collective_are_those_of_the_whole(make_grid, world_size, name):
    axis = make_grid(y=world_size)["y"]
    rank, sizes, every = axis.index, split_sizes(SHAPE[0], world_size), slice(None)
    start = sum(sizes[:rank])
    rows, at_root = slice(start, start + sizes[rank]), every if rank == ROOT else slice(0, 0)
    weights = [drawn(10 + member) for member in range(world_size)]

    def over_ranks(value: Tensor) -> Tensor:
        return all_reduce(value.sum()[None], axis)[0]

    # where operands are partial sums of the whole: that of each rank; cut: which part of its operand lies here; own: each rank
    # weighs all that comes out by weights of its own; else all weigh alike, of what came out the rows `out`, or every rank all
    partial, cut, run, own, out = {
        "all_gather": (False, rows, lambda x: all_gather(x, axis, 0, sizes), True, every),
        "reduce_scatter": (True, every, lambda x: reduce_scatter(x, axis, 0, sizes), False, rows),
        "sum_gradient": (False, every, lambda x: sum_gradient(x, axis), True, every),
        "all_reduce": (True, every, lambda x: all_reduce(x, axis), False, every),
        "scatter_from": (False, at_root, lambda x: scatter_from(x, axis, ROOT, sizes), False, rows),
        "broadcast_from": (False, at_root, lambda x: broadcast_from(x, axis, ROOT, SHAPE), True, every),
    }[name]
    operands = [drawn(member).requires_grad_() for member in range(world_size if partial else 1)]
    total = sum(weights, torch.zeros(())) if own else weights[0]
    whole = derivatives((total * sum(operands, torch.zeros(())) ** 3).sum(), operands)

    operand = rank if partial else 0
    block = operands[operand].detach()
    mine = block if name == "scatter_from" else block[cut]  # of which the others' counts for its shape
    mine = mine.clone().requires_grad_()
    loss = ((weights[rank] if own else weights[0])[out] * run(mine) ** 3).sum()
    here = derivatives(
        loss if name == "all_reduce" else over_ranks(loss), [mine], torch.sum if name == "sum_gradient" else over_ranks
    )
    if name == "scatter_from" and rank != ROOT:
        assert not any(grads[0].any() for grads in here)
        return
    check(here, whole, operand, cut)


@pytest.mark.mpi(sizes=(4,))
def test_second_derivatives_of_a_relayout_are_those_of_the_whole(make_grid):
    grid = make_grid(x=2, y=2)
    source, target = Layout(("x", "y"), ()), Layout(("y",), ("x",))
    cuts = [layout.slices(SHAPE, grid.shape, grid.coordinates) for layout in (source, target)]
    operand, weights = drawn(1).requires_grad_(), drawn(2)
    whole = derivatives((weights * operand**3).sum(), [operand])
    mine = operand.detach()[cuts[0]].clone().requires_grad_()

    def over_ranks(value: Tensor) -> Tensor:
        return all_reduce(value.sum()[None], grid.world)[0]

    loss = over_ranks(weights[cuts[1]] * relayout(mine, SHAPE, grid, source, target) ** 3)
    check(derivatives(loss, [mine], over_ranks), whole, 0, cuts[0])


@pytest.mark.mpi(sizes=(2,))
def test_a_product_says_that_it_has_no_second_derivative(make_grid):
    from summa3d.nn import Linear, initialise, scheme

    plan = scheme("cuboid", make_grid(y=2))
    linear = Linear(4, 6, plan, dtype=torch.float64)
    initialise(linear, plan, 1)
    x = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
