"""Gradients of products of tensors by letters: torch's own of the whole tensors, in the layouts of the operands."""

from __future__ import annotations

from random import Random

import pytest
import torch
from any_layouts import random_lettered
from distributed_gradients import block_of, check_gradients

from summa3d.autograd import EinsumProduct, einsum
from summa3d.comm.grid import Grid
from summa3d.errors import AgreementError, GridError, ShapeError
from summa3d.gemm import plan_any, plan_einsum


@pytest.mark.mpi(sizes=(2, 4, 6))
def test_random_products_have_torchs_gradients_and_move_the_words_of_their_plans(comm):
    random = Random(40 + comm.size)
    for number in range(8):
        case = random_lettered(random, comm.size)
        kind = torch.complex128 if number % 4 == 0 else torch.float64
        turn = 1 + 2j if kind == torch.complex128 else 1
        a, b = ((turn * torch.from_numpy(one)).to(kind).requires_grad_() for one in case.operands(number))
        want = torch.einsum(case.subscripts, a, b)
        dc = torch.randn(want.shape, generator=torch.Generator().manual_seed(number), dtype=kind)
        want.backward(dc)
        with Grid(comm, case.grids[0]) as grid:
            name = str(kind).removeprefix("torch.")
            plan = plan_einsum(case.subscripts, case.a, case.b, case.extents, grid, case.c, name, case.objective)
            bound = EinsumProduct(plan, grid)
            check_gradients(grid, case, plan, bound, einsum, (a, b, want, dc), comm.rank)


@pytest.mark.mpi(sizes=(2,))
def test_a_gradient_that_is_not_asked_for_moves_nothing_and_what_cannot_be_is_refused(comm, make_grid):
    grid, other = make_grid(x=2), make_grid(u=2)
    sizes = {"b": 3, "m": 4, "n": 5, "k": 2}
    bound = EinsumProduct(plan_einsum("bmk,bkn->bmn", "b:x m k", "b k:x n", sizes, grid), grid)
    a, b = (block_of(torch.ones(shape), grid, layout) for shape, layout in (((3, 4, 2), "b:x m k"), ((3, 2, 5), "b k:x n")))
    c = einsum(a.detach(), b, bound)
    with grid.ledger.watch() as moved:
        c.sum().backward()
    assert moved.words == bound.plans[1].words_of(comm.rank) and b.grad.shape == b.shape
    with pytest.raises(ShapeError, match="takes it"):
        EinsumProduct(plan_any("m:x k", "k n", 4, 4, 4, grid), grid)
    with pytest.raises(GridError, match="one of two grids"):
        EinsumProduct(plan_einsum("bmk,bkn->bmn", "b m k", "b k n", sizes, grid, b_grid=other), grid)
    with pytest.raises(ShapeError, match="The block of A has shape"):
        einsum(torch.zeros(3, 4), b, bound)
    with pytest.raises(ShapeError, match="take torch's tensors"):
        einsum(a.detach().numpy(), b, bound)
    with pytest.raises(AgreementError, match=r"(?s)do not agree on autograd.einsum.*gradients of a, b"):
        einsum(a.detach().requires_grad_(comm.rank == 0), b, bound)
