"""Gradients of products of operands in any layouts are torch's on one process, each in its operand's layout."""

from __future__ import annotations

from random import Random

import numpy
import pytest
import torch
from any_layouts import random_case, stored
from distributed_gradients import block_of, check_gradients, is_block_of

from summa3d.autograd import matmul, product
from summa3d.comm.grid import Grid, Place
from summa3d.errors import GridError, ShapeError
from summa3d.gemm import plan_syrk
from summa3d.gemm.any_layout.planned import plan_any


@pytest.mark.mpi(sizes=(4, 6))
def test_random_products_have_torchs_gradients_and_move_the_words_of_their_plans(comm):
    random = Random(20 + comm.size)
    for number in range(12):
        case = random_case(random, comm.size)
        left, right = case.operands(number)
        a, b = (
            torch.from_numpy(stored(one, letter)).requires_grad_() for one, letter in zip((left, right), case.form, strict=True)
        )
        want = (a if case.form[0] == "n" else a.T) @ (b if case.form[1] == "n" else b.T)
        dc = torch.from_numpy(case._replace(k=case.n).operands(number + 100)[0])
        want.backward(dc)
        with Grid(comm, case.grids[0]) as grid:
            plan = plan_any(case.a, case.b, case.m, case.n, case.k, grid, case.c, case.form, objective=case.objective)
            bound = product(plan, grid)
            check_gradients(grid, case, plan, bound, matmul, (a, b, want, dc), comm.rank)


@pytest.mark.mpi(sizes=(4,))
def test_a_bias_and_a_gradient_that_is_not_asked_for(comm, make_grid):
    grid, generator = make_grid(x=2, y=2), torch.Generator().manual_seed(1)
    a, b, bias, dc = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 11), (11, 6), (6,), (7, 6)))
    plan = plan_any("m:x k", "k:x n", 7, 6, 11, grid, "m:x n:y")
    own_a, own_b = block_of(a, grid, "m:x k").requires_grad_(False), block_of(b, grid, "k:x n")
    own_bias = bias.tensor_split(2)[grid["y"].index].clone().requires_grad_()
    bound = product(plan, grid, rows=grid["x"])
    with grid.ledger.watch() as moved:
        c = matmul(own_a, own_b, bound, own_bias)
    assert is_block_of(c.detach(), grid, "m:x n:y", a @ b + bias) and moved.words == plan.words_of(comm.rank)
    c.backward(block_of(dc, grid, "m:x n:y").detach())
    assert own_a.grad is None and is_block_of(own_b.grad, grid, "k:x n", a.T @ dc)
    assert torch.allclose(own_bias.grad, dc.sum(0).tensor_split(2)[grid["y"].index], rtol=0, atol=1e-12)


@pytest.mark.mpi(sizes=(4,))
def test_a_plan_of_another_grid_or_of_two_or_without_gradients_is_refused(comm, make_grid):
    grid, other = make_grid(x=2, y=2), make_grid(u=4)
    with pytest.raises(GridError, match="is not the grid of the plan"):
        product(plan_any("m:x k", "k n", 4, 4, 4, Place({"x": 4, "y": 1})), grid)
    with pytest.raises(GridError, match="one of two grids"):
        product(plan_any("m:x k", "k n", 4, 4, 4, grid, b_grid=other), grid)
    with pytest.raises(ShapeError, match="no gradient for form 'cn'"):
        product(plan_any("k:x m", "k n", 4, 4, 4, grid, form="cn"), grid)
    bound = product(plan_any("m:x k", "k n", 4, 4, 4, grid), grid)
    with pytest.raises(ShapeError, match="The block of A has shape"):
        matmul(torch.zeros(3, 4), torch.zeros(4, 4), bound)


@pytest.mark.mpi(sizes=(4, 6))
@pytest.mark.parametrize("form", ["nt", "tn"])
def test_a_product_of_one_matrix_has_torchs_gradient_and_so_has_the_general_one(comm, make_grid, form):
    grid = make_grid(x=2, y=comm.size // 2)
    shape = (11, 7) if form == "nt" else (7, 11)
    a, dc = (torch.from_numpy(numpy.random.default_rng(seed).standard_normal(size)) for seed, size in ((1, shape), (2, (11, 11))))
    a.requires_grad_()
    want = a @ a.T if form == "nt" else a.T @ a
    want.backward(dc)
    for layout, to in (("0 1:x @y=1", "m n"), ("0 1:(y,x)", "m:y n"), ("0:x 1:y", None)):
        plan = plan_syrk(layout, 11, 7, grid, to, form)
        found = []
        for one in (plan, plan.general):
            own, bound = block_of(a, grid, plan.a.layout), product(one, grid)
            with grid.ledger.watch() as moved:
                c = matmul(own, own, bound)
            assert moved.words == one.words_of(comm.rank)
            c.backward(block_of(dc, grid, plan.c.layout).detach())
            assert is_block_of(c.detach(), grid, plan.c.layout, want) and is_block_of(own.grad, grid, plan.a.layout, a.grad)
            found.append(own.grad)
        assert torch.equal(*found)
    with pytest.raises(ShapeError, match="are two tensors"):
        matmul(own, own.detach().clone(), product(plan, grid))
    with pytest.raises(ShapeError, match="leaves C packed"):
        product(plan_syrk("m:x k:y", 11, 7, grid, storage="lower"), grid)
