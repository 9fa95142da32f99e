"""The products' gradients, in all four forms and with permuted roles, are those of torch on one process; so are their words."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from gradients import close, operands

from summa3d.autograd import all_gather, matmul, product, reduce_scatter, sum_gradient
from summa3d.autograd.differentiable import ShardedProduct
from summa3d.comm.collective import Collective
from summa3d.errors import AgreementError
from summa3d.gemm import CuboidPlan, volume
from summa3d.layout import Layout, distribute, split_sizes

M, N, K = 29, 23, 31
ROLES = [("x", "y", "z"), ("x", "z", "y"), ("z", "x", "y")]
GRIDS = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 2, 1), 6: (1, 3, 2), 8: (2, 2, 2), 12: (3, 2, 2)}


@pytest.mark.pairs
@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("regather", [True, False], ids=["regather", "keep"])
def test_gradients_equal_torch_and_move_the_words_of_their_formula(make_grid, world_size, form, regather):
    grid = make_grid(**dict(zip("xyz", GRIDS[world_size], strict=True)))
    for roles in ROLES:
        plan = CuboidPlan(form, M, N, K, *roles)
        a, b, bias, dc = operands(plan)
        want = (a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b) + bias
        want.backward(dc)
        local_a, local_b, local_bias = (
            distribute(value.detach(), grid, layout).requires_grad_()
            for value, layout in ((a, plan.a_layout), (b, plan.b_layout), (bias, Layout((plan.y,))))
        )
        bound = product(plan, grid, regather, grid[plan.x, plan.z])
        with grid.ledger.watch() as forward:
            c = matmul(local_a, local_b, bound, local_bias)
        with grid.ledger.watch() as backward:
            c.backward(distribute(dc, grid, plan.c_layout))
        assert close(c, grid, plan.c_layout, want.detach())
        assert close(local_a.grad, grid, plan.a_layout, a.grad)
        assert close(local_b.grad, grid, plan.b_layout, b.grad)
        assert close(local_bias.grad, grid, Layout((plan.y,)), bias.grad)
        at = grid.coordinates
        assert forward.words == volume.of_plan(plan, grid.shape).words_of(at)
        bias_words = volume.all_reduce(len(local_bias), (plan.x, plan.z), grid.shape, at).words
        assert backward.words == volume.gradients(plan, grid.shape, regather).words_of(at) + bias_words


@pytest.mark.mpi(sizes=(8,))
def test_a_gradient_that_is_not_asked_for_is_not_computed(make_grid):
    grid = make_grid(x=2, y=2, z=2)
    plan = CuboidPlan("nn", M, N, K)
    a, b, _, dc = operands(plan)
    for need_a, need_b in ((True, False), (False, True)):
        local_a = distribute(a.detach(), grid, plan.a_layout).requires_grad_(need_a)
        local_b = distribute(b.detach(), grid, plan.b_layout).requires_grad_(need_b)
        c = matmul(local_a, local_b, product(plan, grid))
        with grid.ledger.watch() as moved:
            c.backward(distribute(dc, grid, plan.c_layout))
        assert (local_a.grad is None, local_b.grad is None) == (not need_a, not need_b)
        assert moved.words == volume.gradients(plan, grid.shape, True, need_a, need_b).words_of(grid.coordinates)


@pytest.mark.mpi(sizes=(8,))
def test_the_scatter_of_da_is_in_flight_while_db_is_computed(make_grid, monkeypatch):
    grid = make_grid(x=2, y=2, z=2)
    plan = CuboidPlan("nn", M, N, K)
    a, b, _, dc = operands(plan)
    events = []
    start = Collective.start

    def started(collective, *args):
        pending, label = start(collective, *args), collective.calls.label
        if collective.route.operation == "reduce_scatter":
            events.append(f"start {label}")
            wait = pending.wait
            pending.wait = lambda: (events.append(f"wait {label}"), wait())[1]
        return pending

    module = import_module("summa3d.autograd.differentiable")
    local_product = module.local
    monkeypatch.setattr(Collective, "start", started)
    monkeypatch.setattr(module, "local", lambda *args: (events.append("product"), local_product(*args))[1])
    local_a = distribute(a.detach(), grid, plan.a_layout).requires_grad_()
    local_b = distribute(b.detach(), grid, plan.b_layout).requires_grad_()
    matmul(local_a, local_b, product(plan, grid)).backward(distribute(dc, grid, plan.c_layout))
    assert events == ["product", "start y", "product", "start x", "wait y", "wait x"]


@pytest.mark.mpi(sizes=(3, 4))
def test_conjugate_collectives_have_each_others_gradients(make_grid, world_size):
    grid = make_grid(y=world_size)
    axis, n = grid["y"], 11
    sizes = split_sizes(n, world_size)
    generator = torch.Generator().manual_seed(3)
    whole, seeds = torch.randn(2, world_size, n, 5, generator=generator, dtype=torch.float64)
    start = sum(sizes[: axis.index])
    mine = slice(start, start + sizes[axis.index])

    block = whole[0, mine].clone().requires_grad_()
    gathered = all_gather(block, axis, 0, sizes)
    gathered.backward(seeds[axis.index])
    assert torch.equal(gathered.detach(), whole[0])
    assert torch.allclose(block.grad, seeds.sum(0)[mine], rtol=1e-14)

    partial = whole[axis.index].clone().requires_grad_()
    scattered = reduce_scatter(partial, axis, 0, sizes)
    scattered.backward(seeds[0, mine])
    assert torch.allclose(scattered.detach(), whole.sum(0)[mine], rtol=1e-14)
    assert torch.equal(partial.grad, seeds[0])

    copied = whole[0].clone().requires_grad_()
    sum_gradient(copied, axis).backward(seeds[axis.index])
    assert torch.allclose(copied.grad, seeds.sum(0), rtol=1e-14)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("check", [False, True])
def test_a_product_called_differently_at_its_first_use_is_an_error_on_all_ranks(comm, make_grid, check):
    grid = make_grid(x=2, y=2, z=1, check=check)
    for victim, differs in enumerate(("plan", "dtype", "bias", "gradient")):
        here = comm.rank == victim
        plan = CuboidPlan("nn", 8, 8, 12 if here and differs == "plan" else 4 + 4 * victim)
        dtype = torch.float32 if here and differs == "dtype" else torch.float64
        a, b = (
            torch.ones(layout.local_shape(shape, grid.shape, grid.coordinates), dtype=dtype) for layout, shape in plan.stored[:2]
        )
        a.requires_grad_(not (here and differs == "gradient"))
        bias = torch.ones(4, dtype=dtype) if here and differs == "bias" else None
        with pytest.raises(AgreementError, match=r"autograd\.matmul:\n"):
            matmul(a, b, product(plan, grid), bias)
    plan = CuboidPlan("nn", 8, 8, 8)
    a, b = (torch.ones(layout.local_shape(shape, grid.shape, grid.coordinates)) for layout, shape in plan.stored[:2])
    assert bool((matmul(a, b, product(plan, grid)) == 8).all())


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("replicas", [False, True])
def test_a_block_that_some_ranks_refuse_is_an_error_on_all_that_says_what_these_refuse(comm, make_grid, check, replicas):
    job = make_grid(x=1 if replicas else 2, y=2, z=1, dp=2 if replicas else 1, check=check)
    grid, plan = job.part("x", "y", "z") if replicas else job, CuboidPlan("nn", 6, 8, 4)
    a, b = (torch.ones(layout.local_shape(shape, grid.shape, grid.coordinates)) for layout, shape in plan.stored[:2])
    found, rows = product(plan, grid), b.shape[0] // 2
    if replicas:
        found, b = ShardedProduct(found, job["dp"], [rows, rows], False), b[:rows]
    refuses = comm.rank % 2 == 1
    block = torch.ones(a.shape[0] + 1, *a.shape[1:]) if refuses else a
    takes, refuse = ("rank 0", "rank 1") if replicas else ("ranks 0, 2", "ranks 1, 3")
    said = rf"autograd\.matmul:\n  refused: no on {takes}; The block of A has shape .* on {refuse}"
    with pytest.raises(AgreementError, match=said):
        matmul(block, b, found)
    assert bool((matmul(a, b, found) == 4).all())
