"""Every algorithm whose products close under differentiation.

Gradients are torch's, words their formula's, each callable alone.
"""

from __future__ import annotations

import pytest
import torch
from gradients import close, operands
from nn_oracle.volume import product_cost

from summa3d.autograd import all_reduce, matmul, product, scatter_from
from summa3d.autograd.deferred import PassState
from summa3d.autograd.differentiable import InFlight
from summa3d.autograd.prefetch import Prefetcher, PrefetchSource
from summa3d.blas_library import BlasRule
from summa3d.comm.transport.host import HostTransport
from summa3d.comm.transport.node import ALL_REDUCE_LIMIT
from summa3d.errors import ShapeError
from summa3d.gemm.algorithms.cuboid import CuboidPlan
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.algorithms.workspace import Workspace
from summa3d.layout import collect, distribute, split_sizes

M, N, K = 29, 23, 31
GRIDS = {
    2: {"oned-column": {"y": 2}, "oned-row": {"y": 2}, "summa": {"x": 2, "y": 1}, "tesseract": {"x": 1, "y": 1, "d": 2}},
    4: {"oned-column": {"y": 4}, "oned-row": {"y": 4}, "summa": {"x": 2, "y": 2}, "cannon": {"x": 2, "y": 2}},
    6: {"summa": {"x": 3, "y": 2}},
    8: {"agarwal": {"x": 2, "y": 2, "z": 2}, "tesseract": {"x": 2, "y": 2, "d": 2}, "oned-row": {"y": 8}},
    12: {"summa": {"x": 3, "y": 4}, "tesseract": {"x": 2, "y": 2, "d": 3}},
}
OPEN = {("tesseract", "tt")}
"""What does not close: the gradients would need copies on every depth of what is split there."""


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_gradients_equal_torch_and_move_the_words_of_their_formula(make_grid, world_size, form):
    for name, axes in GRIDS[world_size].items():
        if (name, form) in OPEN:
            continue
        grid, plan = make_grid(**axes), ALGORITHMS[name].plan(form, M, N, K)
        a, b, _, dc = operands(plan)
        want = (a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b)
        want.backward(dc)
        local_a, local_b = (
            distribute(value.detach(), grid, layout).requires_grad_()
            for value, layout in ((a, plan.a_layout), (b, plan.b_layout))
        )
        bound = product(plan, grid)
        with grid.ledger.watch() as forward:
            c = matmul(local_a, local_b, bound)
        with grid.ledger.watch() as backward:
            c.backward(distribute(dc, grid, plan.c_layout))
        assert close(c, grid, plan.c_layout, want.detach()), name
        assert close(local_a.grad, grid, plan.a_layout, a.grad), name
        assert close(local_b.grad, grid, plan.b_layout, b.grad), name
        cost = product_cost(plan, grid.shape, grid.coordinates)
        assert (forward.words, forward.messages) == (cost.forward.words, cost.forward.messages), name
        assert (backward.words, backward.messages) == (cost.backward.words, cost.backward.messages), name


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("name", ["oned-column", "summa"])
def test_each_gradient_is_callable_alone(make_grid, name):
    grid, plan = make_grid(**GRIDS[4][name]), ALGORITHMS[name].plan("nn", M, N, K)
    a, b, _, dc = operands(plan)
    (a @ b).backward(dc)
    bound = product(plan, grid)
    local_a, local_b, local_c = (
        distribute(value.detach(), grid, layout)
        for value, layout in ((a, plan.a_layout), (b, plan.b_layout), (dc, plan.c_layout))
    )
    shared = bound.share(local_c)
    assert close(bound.start_grad_b(shared, local_a).wait(), grid, plan.b_layout, b.grad)
    assert close(bound.start_grad_a(shared, local_b).wait(), grid, plan.a_layout, a.grad)


@pytest.mark.mpi(sizes=(3,))
def test_a_large_sum_of_a_columns_dx_goes_through_the_nodes_memory_and_not_through_mpi(make_grid, monkeypatch):
    grid, rows = make_grid(y=3, node_memory=True), ALL_REDUCE_LIMIT // 8 // K + 1
    plan = ALGORITHMS["oned-column"].plan("nn", rows, N, K)
    a, b, _, dc = operands(plan)
    (a @ b).backward(dc)
    local_b, local_c = distribute(b.detach(), grid, plan.b_layout), distribute(dc, grid, plan.c_layout)
    monkeypatch.delattr(HostTransport, "all_reduce")
    bound = product(plan, grid)
    with grid.ledger.watch() as moved:
        got = bound.start_grad_a(bound.share(local_c), local_b).wait()
    assert close(got, grid, plan.a_layout, a.grad)
    own = rows * K // 3 + (grid["y"].index < rows * K % 3)
    assert (moved.words, moved.messages) == (rows * K + own, 4)


@pytest.mark.mpi(sizes=(2,))
def test_a_set_of_products_that_does_not_close_is_refused(make_grid):
    with pytest.raises(ShapeError, match="gradient of A of Tesseract"):
        product(ALGORITHMS["tesseract"].plan("tt", M, N, K), make_grid(x=1, y=1, d=2))
    with pytest.raises(ShapeError, match="no gradient for form"):
        product(ALGORITHMS["summa"].plan("nc", M, N, K), make_grid(x=1, y=2))
    with pytest.raises(ShapeError, match="CuboidPlan"):
        product(ALGORITHMS["oned-row"].plan("nn", M, N, K, sequence=True), make_grid(y=2))


@pytest.mark.mpi(sizes=(3, 4))
def test_a_sum_that_all_use_alike_has_their_gradient_and_a_scatter_has_the_roots(make_grid, world_size):
    grid = make_grid(y=world_size)
    axis, sizes = grid["y"], split_sizes(11, world_size)
    whole, seeds = torch.randn(2, world_size, 11, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = slice(sum(sizes[: axis.index]), sum(sizes[: axis.index + 1]))

    partial = whole[axis.index].clone().requires_grad_()
    total = all_reduce(partial, axis)
    total.backward(seeds[0])
    assert torch.allclose(total.detach(), whole.sum(0), rtol=1e-14) and torch.equal(partial.grad, seeds[0])

    root = world_size - 1
    held = whole[axis.index].clone().requires_grad_()
    with grid.ledger.watch() as forward:
        part = scatter_from(held, axis, root, sizes)
    with grid.ledger.watch() as backward:
        part.backward(seeds[0, mine])
    assert torch.equal(part.detach(), whole[root, mine])
    assert torch.equal(held.grad, seeds[0] if axis.index == root else torch.zeros(11, 5, dtype=torch.float64))
    own = 5 * sizes[axis.index]
    assert (forward.words, backward.words) == ((0, 55 - own) if axis.index == root else (own, 0))


@pytest.mark.mpi(sizes=(4,))
def test_the_sum_of_a_columns_dx_is_in_flight_while_dw_is_computed(make_grid, monkeypatch):
    grid, plan = make_grid(y=4), ALGORITHMS["oned-column"].plan("nn", M, N, K)
    a, b, _, dc = operands(plan)
    events = []
    start, multiply = type(grid["y"]).start_all_reduce, Workspace.multiply

    def started(axis, *args, **kwargs):
        pending = start(axis, *args, **kwargs)
        events.append("start")
        wait = pending.wait
        pending.wait = lambda: (events.append("wait"), wait())[1]
        return pending

    monkeypatch.setattr(type(grid["y"]), "start_all_reduce", started)
    monkeypatch.setattr(Workspace, "multiply", lambda *args: (events.append("product"), multiply(*args))[1])
    local_a, local_b = (distribute(v.detach(), grid, x).requires_grad_() for v, x in ((a, plan.a_layout), (b, plan.b_layout)))
    matmul(local_a, local_b, product(plan, grid)).backward(distribute(dc, grid, plan.c_layout))
    assert events == ["product", "product", "start", "product", "wait"]
    assert collect(local_b.grad, grid, plan.b_layout, plan.b_shape).shape == plan.b_shape


@pytest.mark.mpi(sizes=(2,))
def test_backward_prefetches_b_where_it_gathers_it_again_alone(make_grid):
    """Elsewhere a source would hold B's block, or gather what is there."""
    source = PrefetchSource(Prefetcher(1, PassState()), tuple, torch.stack)
    for axes, regather, wanted in (({"x": 2}, True, source), ({"x": 2}, False, None), ({"y": 2}, True, None)):
        plan = ALGORITHMS["cuboid"].plan("nn", M, N, K)
        grid = make_grid(**{"x": 1, "y": 1, "z": 1, **axes})
        assert product(plan, grid, regather, in_flight=InFlight(source)).source is wanted


@pytest.mark.parametrize(("form", "rows", "torchs"), [("nn", 37, True), ("nt", 37, True), ("nn", 41, False), ("nt", 41, False)])
@pytest.mark.mpi(sizes=(1,))
def test_on_one_rank_torch_multiplies_what_its_rule_leaves_to_it_and_gradients_are_torchs(make_grid, form, rows, torchs):
    n, k = 29, 31
    grid = make_grid(x=1, y=1, z=1)
    grid.job.blas = BlasRule("another", "asked for", {"float64": 40 * n * k})
    of = product(CuboidPlan(form, rows, n, k), grid)
    generator = torch.Generator().manual_seed(2)
    a, b, bias, gradient = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((1, rows, k), (k, n) if form == "nn" else (n, k), (n,), (1, rows, n))
    )
    c = matmul(a, b, of, bias)
    assert ("_Matmul" in repr(c.grad_fn)) is not torchs
    want = a @ (b if form == "nn" else b.t()) + bias
    found, wanted = (torch.autograd.grad(one, (a, b, bias), gradient) for one in (c, want))
    assert all((one - other).norm() <= 1e-13 * other.norm() for one, other in zip((c, *found), (want, *wanted), strict=True))
