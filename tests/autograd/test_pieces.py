"""Products in pieces with gradients: torch's on one process, the words of one piece, and the messages of the plan."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from gradients import close, operands

from summa3d.autograd import matmul, product
from summa3d.autograd.deferred import PassState, run_deferred
from summa3d.autograd.differentiable import InFlight, PiecedCuboidProduct, ShardedProduct
from summa3d.comm.axis import Axis
from summa3d.dry.place import DryPlace
from summa3d.errors import AgreementError
from summa3d.gemm import Cuboid, CuboidPlan, volume
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.algorithms.workspace import Workspace
from summa3d.gemm.pieces.arrivals import TAG, PiecedOperand, Rounds
from summa3d.gemm.pieces.behind import BehindQueue
from summa3d.gemm.pieces.executor import Summation
from summa3d.gemm.pieces.schedule import is_crosswise
from summa3d.layout import Layout, distribute, split_sizes
from summa3d.nn import Linear, initialise, scheme
from summa3d.nn.overlap import Overlap

M, N, K = 29, 23, 31
GRIDS = {2: (1, 2, 1), 4: (2, 2, 1), 6: (1, 3, 2), 8: (2, 2, 2), 12: (3, 2, 2)}
FINES = {"nn": (0, 0, 0), "nt": (1, 0, 1), "tn": (0, 1, 0), "tt": (1, 1, 1)}


def gradients(grid, plan, regather, dtype=torch.float64, state=None):
    """C, dA, dB and the bias gradient of a product in pieces, with what forward and backward moved; beside those of torch."""
    a, b, bias, dc = operands(plan)
    want = (a.T if plan.form[0] == "t" else a) @ (b.T if plan.form[1] == "t" else b) + bias
    want.backward(dc)
    columns = Layout(plan.c_layout.dims[1])
    local = [
        distribute(value.detach().to(dtype), grid, layout).requires_grad_()
        for value, layout in ((a, plan.a_layout), (b, plan.b_layout), (bias, columns))
    ]
    bound = product(plan, grid, regather, grid[plan.c_layout.dims[0]], None, InFlight(state=state))
    assert isinstance(bound, PiecedCuboidProduct) == isinstance(plan, CuboidPlan)
    with grid.ledger.watch() as forward:
        c = matmul(*local[:2], bound, local[2])
    with grid.ledger.watch() as backward:
        c.backward(distribute(dc.to(dtype), grid, plan.c_layout))
        if state is not None:
            run_deferred(state.deferred)
    found = zip((c, *(one.grad for one in local)), (want.detach(), a.grad, b.grad, bias.grad), strict=True)
    layouts = plan.c_layout, plan.a_layout, plan.b_layout, columns
    return [(*pair, layout) for pair, layout in zip(found, layouts, strict=True)], forward, backward


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_gradients_are_torchs_and_messages_those_of_the_plan(make_grid, world_size):
    grid = make_grid(**dict(zip("xyz", GRIDS[world_size], strict=True)), node_memory=False)
    for turn, (form, fines) in enumerate(FINES.items()):
        roles = [("x", "y", "z"), ("z", "x", "y")][turn % 2]
        plan, regather = CuboidPlan(form, M, N, K, *roles, *fines, pieces=2 + turn), (turn + world_size // 2) % 2 == 0
        found, forward, backward = gradients(grid, plan, regather)
        for got, want, layout in found:
            assert close(got, grid, layout, want), (plan, layout)
        at = grid.coordinates
        of_bias = volume.all_reduce(found[-1][0].numel(), plan.c_layout.dims[0], grid.shape, at)
        costs = volume.of_plan(plan, grid.shape).cost_of(at), volume.gradients(plan, grid.shape, regather).cost_of(at)
        assert (forward.words, forward.messages) == (costs[0].words, costs[0].messages), plan
        moved = costs[1].words + of_bias.words, costs[1].messages + of_bias.messages
        assert (backward.words, backward.messages) == moved, plan


@pytest.mark.mpi(sizes=(4, 8))
def test_a_nodes_memory_gradients_and_16_bits_take_the_same_path(make_grid, world_size):
    for node_memory in (True, False):
        grid = make_grid(**dict(zip("xyz", GRIDS[world_size], strict=True)), node_memory=node_memory)
        for regather, dtype in ((True, torch.float64), (False, torch.float64), (True, torch.bfloat16)):
            plan = CuboidPlan("nn", M, N, K, pieces=3)
            found, _, backward = gradients(grid, plan, regather, dtype)
            for got, want, layout in found:
                if dtype is torch.float64:
                    assert close(got, grid, layout, want)
                else:
                    whole = distribute(want, grid, layout)
                    assert (got.double() - whole).norm() <= 0.02 * whole.norm() + 1e-9
            if node_memory and dtype is torch.float64:
                one = volume.gradients(CuboidPlan("nn", M, N, K), grid.shape, regather).cost_of(grid.coordinates)
                of_bias = volume.all_reduce(found[-1][0].numel(), plan.c_layout.dims[0], grid.shape, grid.coordinates)
                assert backward.messages == one.messages + of_bias.messages


OTHERS = {
    2: [("summa", {"x": 1, "y": 2}), ("oned-column", {"y": 2}), ("oned-row", {"y": 2})],
    3: [("oned-column", {"y": 3}), ("oned-row", {"y": 3})],
    6: [("summa", {"x": 2, "y": 3})],
}


@pytest.mark.mpi(sizes=tuple(OTHERS))
def test_gradients_of_panels_and_of_sums_in_pieces_are_torchs_too(make_grid, world_size):
    """Forward and backward move the words of one piece in the messages of the plan."""
    for name, axes in OTHERS[world_size]:
        for node_memory in (False, True)[: 2 if world_size == 2 else 1]:
            grid = make_grid(**axes, node_memory=node_memory)
            for turn, form in enumerate(("nn", "nt", "tn")):
                plan = ALGORITHMS[name].plan(form, M, N, K, pieces=2 + turn)
                found, forward, backward = gradients(grid, plan, True)
                for got, want, layout in found:
                    assert close(got, grid, layout, want), (plan, layout)
                at, staged = grid.coordinates, grid.staged
                rows = plan.c_layout.dims[0]
                of_bias = volume.all_reduce(found[-1][0].numel(), rows, grid.shape, at)
                once = volume.of_plan(plan, grid.shape, staged=staged).cost_of(at)
                twice = volume.gradients(plan, grid.shape, staged=staged).cost_of(at)
                assert (forward.words, forward.messages) == (once.words, once.messages), plan
                moved = twice.words + of_bias.words, twice.messages + of_bias.messages
                assert (backward.words, backward.messages) == moved, plan
                whole = [
                    sum(cost.words for cost in of(replace(plan, pieces=1), grid.shape).costs())
                    for of in (volume.of_plan, volume.gradients)
                ]
                cut = [sum(cost.words for cost in of(plan, grid.shape).costs()) for of in (volume.of_plan, volume.gradients)]
                assert cut == whole, plan


@pytest.mark.mpi(sizes=(2,))
def test_sums_of_da_travel_while_db_is_multiplied(make_grid):
    grid, plan = make_grid(y=2, node_memory=False), ALGORITHMS["oned-column"].plan("nn", 64, 512, 512, pieces=3)
    a, b, _, dc = (whole.detach() for whole in operands(plan))
    bound = product(plan, grid)
    _, (kept_a, kept_b) = bound.forward(distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout))
    shared = bound.share(distribute(dc, grid, plan.c_layout))
    first = bound.start_grad_a(shared, kept_b)
    assert len(first._sums) == 3
    second = bound.start_grad_b(shared, kept_a)
    assert close(second.wait(), grid, plan.b_layout, a.T @ dc) and close(first.wait(), grid, plan.a_layout, dc @ b.T)
    assert first.done and first.wait() is first.wait()


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("regather", [True, False], ids=["regather", "keep"])
def test_deferred_weight_gradients_in_pieces_are_those_of_one_backward(make_grid, regather):
    grid, plan = make_grid(x=2, y=2, z=2, node_memory=False), CuboidPlan("nn", M, N, K, pieces=3)
    state = PassState()
    state.deferred = []
    found, _, _ = gradients(grid, plan, regather, state=state)
    for got, want, layout in found:
        assert close(got, grid, layout, want)


@pytest.mark.mpi(sizes=(4,))
def test_the_cells_of_da_travel_while_db_is_multiplied(make_grid):
    """dA is done on no rank before dB has begun; both are torch's though they are waited for in the other order."""
    grid, plan = make_grid(x=1, y=2, z=2, node_memory=False), CuboidPlan("nn", M, N, K, pieces=3)
    a, b, _, dc = (whole.detach() for whole in operands(plan))
    bound = product(plan, grid)
    blocks = (distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout))
    _, (kept_a, kept_b) = bound.forward(*blocks)
    shared = bound.share(distribute(dc, grid, plan.c_layout))
    first = bound.start_grad_a(shared, kept_b)
    assert not first.done
    second = bound.start_grad_b(shared, kept_a)
    assert close(second.wait(), grid, plan.b_layout, a.T @ dc) and close(first.wait(), grid, plan.a_layout, dc @ b.T)


@pytest.mark.mpi(sizes=(2,))
def test_ranks_whose_products_have_other_pieces_hear_of_it_before_anything_moves(comm, make_grid):
    grid = make_grid(x=1, y=2, z=1, node_memory=False)
    plan = CuboidPlan("nn", M, N, K, pieces=2 + comm.rank)
    wholes, layouts = operands(plan)[:2], (plan.a_layout, plan.b_layout)
    blocks = [distribute(whole.detach(), grid, layout) for whole, layout in zip(wholes, layouts, strict=True)]
    with grid.ledger.watch() as moved, pytest.raises(AgreementError, match=r"pieces=2.*pieces=3"):
        matmul(*blocks, product(plan, grid))
    assert moved.words == 0


@pytest.mark.mpi(sizes=(2,))
def test_where_nothing_is_cut_nothing_is_multiplied_in_slabs(make_grid, monkeypatch):
    plan, calls, accumulate = CuboidPlan("nn", 640, 384, 512, pieces=3), [], Workspace.accumulate
    monkeypatch.setattr(Workspace, "accumulate", lambda *arguments, **options: calls.append(accumulate(*arguments, **options)))
    for node_memory in (True, False):
        grid = make_grid(x=1, y=2, z=1, node_memory=node_memory)
        a, b, _, dc = (whole.detach() for whole in operands(plan))
        bound = product(plan, grid)
        _, (kept_a, kept_b) = bound.forward(distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout))
        shared = bound.share(distribute(dc, grid, plan.c_layout))
        counts = [len(calls)]
        for start, kept in ((bound.start_grad_a, kept_b), (bound.start_grad_b, kept_a)):
            start(shared, kept).wait()
            counts.append(len(calls) - sum(counts))
        assert counts == [1, 1, 1] if node_memory else min(counts) > 1
        calls.clear()


@pytest.mark.mpi(sizes=(4,))
def test_what_is_gathered_behind_begins_no_piece_while_what_is_waited_for_is_under_way(make_grid, monkeypatch):
    """So that a piece of it delays what is waited for, and no second one does; it moves the words of a gather."""
    grid, plan = make_grid(x=2, y=2, z=1, node_memory=False), CuboidPlan("nn", 512, 256, 384, b_fine=1, pieces=5)
    a, b = (whole.detach() for whole in operands(plan)[:2])
    blocks = distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout)
    cuboid, events = Cuboid(plan, grid), []
    receive, wait = Axis.start_receive, PiecedOperand.wait

    def noted(axis, array, source, tag=0):
        events.append("behind" if tag == TAG else "posted")
        return receive(axis, array, source, tag)

    monkeypatch.setattr(Axis, "start_receive", noted)

    def waited(operand, number):
        wait(operand, number)
        events.append("came" if operand.tag == TAG else "arrived")

    monkeypatch.setattr(PiecedOperand, "wait", waited)
    with grid.ledger.watch() as moved:
        gathered = cuboid.start_gather("b", blocks[1], behind=True)
        for _ in range(2):
            c = cuboid.run(*blocks)
        whole = gathered.wait()
    under_way = of_it = 0
    for event in events:
        under_way += {"posted": 1, "arrived": -1}.get(event, 0)
        of_it += {"behind": 1, "came": -1}.get(event, 0)
        assert event != "behind" or (under_way == 0 and of_it == 1), events
    assert events[0] == "behind" and events.count("behind") == plan.pieces and gathered.done and gathered.wait() is whole
    coarse = Layout((plan.z,), (plan.y,))
    assert torch.equal(whole, distribute(b, grid, coarse)) and close(c, grid, plan.c_layout, a @ b)
    once = volume.of_plan(plan, grid.shape).cost_of(grid.coordinates)
    of_b = volume.gather(plan.b_layout, plan.b_shape, plan.x, grid.shape, grid.coordinates)
    assert (moved.words, moved.messages) == (2 * once.words + of_b.words, 2 * once.messages + plan.pieces)


@pytest.mark.mpi(sizes=(4,))
def test_weights_that_replicas_share_move_in_the_pieces_of_their_product(make_grid):
    """ZeRO-3: B is gathered over the replicas as a whole, dB is summed over them, and the product itself moves in pieces."""
    job = make_grid(x=1, y=2, z=1, dp=2, node_memory=False)
    grid, replicas = job.part("x", "y", "z"), job["dp"]
    plan, generator = CuboidPlan("nn", M, N, K, pieces=3), torch.Generator().manual_seed(5)
    a, dc = (torch.randn((2, *shape), generator=generator, dtype=torch.float64) for shape in (plan.a_shape, plan.c_shape))
    b = torch.randn(plan.b_shape, generator=generator, dtype=torch.float64)
    sizes, mine = split_sizes(K, 2), replicas.index
    shard = distribute(b, grid, plan.b_layout).split(sizes)[mine].clone().requires_grad_()
    block = distribute(a[mine], grid, plan.a_layout).requires_grad_()
    bound = ShardedProduct(product(plan, grid), replicas, sizes, False)
    assert isinstance(bound.product, PiecedCuboidProduct)
    with grid.ledger.watch() as moved:
        c = matmul(block, shard, bound)
        c.backward(distribute(dc[mine], grid, plan.c_layout))
    assert close(c, grid, plan.c_layout, a[mine] @ b) and close(block.grad, grid, plan.a_layout, dc[mine] @ b.T)
    want = distribute(a[0].T @ dc[0] + a[1].T @ dc[1], grid, plan.b_layout).split(sizes)[mine]
    assert (shard.grad - want).norm() <= 1e-13 * want.norm()
    both = [of(plan, grid.shape).cost_of(grid.coordinates) for of in (volume.of_plan, volume.gradients)]
    own = sum(row.amounts.messages for row in moved.rows if row.axis == "y")
    assert own == sum(cost.messages for cost in both) > 6


@pytest.mark.mpi(sizes=(4,))
def test_what_is_gathered_behind_begins_no_piece_while_sums_leave(make_grid, monkeypatch):
    grid, plan = make_grid(x=2, y=1, z=2, node_memory=False), CuboidPlan("nn", 512, 256, 384, pieces=5)
    a, b = (whole.detach() for whole in operands(plan)[:2])
    blocks = {"a": distribute(a, grid, plan.a_layout), "b": distribute(b, grid, plan.b_layout)}
    cuboid, events = Cuboid(plan, grid), []
    post, send, finish = PiecedOperand.post, Rounds.send, Summation.finish

    def posted(operand, number):
        events.extend(["behind"] if operand.tag == TAG and number == len(operand._posted) else [])
        post(operand, number)

    monkeypatch.setattr(PiecedOperand, "post", posted)
    monkeypatch.setattr(Rounds, "send", lambda *given: (events.append("left"), send(*given))[1])
    monkeypatch.setattr(Summation, "finish", lambda *given: (finish(*given), events.append("summed"))[0])
    gathers = [cuboid.start_gather("b", blocks["b"], behind=True) for _ in range(3)]
    for _ in range(2):
        c = cuboid.start_in_pieces(blocks, {}, True).wait()
    assert torch.equal(gathers[2].wait(), gathers[0].wait()) and close(c, grid, plan.c_layout, a @ b)
    leaving = False
    for event in events:
        leaving = event == "left" or (leaving and event != "summed")
        assert event != "behind" or not leaving, events
    assert events.count("left") == 2 * plan.pieces and events.count("behind") == 3 * plan.pieces


@pytest.mark.mpi(sizes=(2, 4, 8))
def test_an_operand_on_its_way_is_multiplied_as_it_arrives(comm, make_grid):
    """Whatever has come of it before: none, some pieces, all. Products and words are those without, and nothing comes twice."""
    x, y, z = {2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}[comm.size]
    grid = make_grid(x=x, y=y, z=z, node_memory=False)
    for turn, (form, fines) in enumerate(FINES.items()):
        for operand, axis in (("b", "x"), ("a", "y")):
            plan = CuboidPlan(form, M, N, K, "x", "y", "z", *fines, pieces=3)
            cuboid, (a, b) = Cuboid(plan, grid), (whole.detach() for whole in operands(plan)[:2])
            blocks = {"a": distribute(a, grid, plan.a_layout), "b": distribute(b, grid, plan.b_layout)}
            plain = cuboid.start_in_pieces(blocks, {}, True).wait()
            with grid.ledger.watch() as moved:
                gather = cuboid.start_gather(operand, blocks[operand], behind=True)
                if grid[axis].size == 1:
                    assert gather.wait() is blocks[operand]
                    continue
                for _ in range(turn):
                    gather.step()
                if turn == 3:
                    gather.finish()
                started = cuboid.start_in_pieces(blocks, {operand: gather}, True)
            assert torch.equal(started.wait(), plain) and gather.done and not BehindQueue.of(grid)
            assert started.gathered[operand] is gather.wait()
            once = volume.of_plan(plan, grid.shape).cost_of(grid.coordinates)
            assert (moved.words, moved.messages) == (once.words, once.messages), plan


@pytest.mark.mpi(sizes=(4,))
def test_one_that_is_used_completes_those_before_it_and_lets_none_behind_it_begin(comm, make_grid, monkeypatch):
    """Messages of one rank to another come in the order of the queue, whatever has arrived."""
    receive, posted = Axis.start_receive, []
    monkeypatch.setattr(Axis, "start_receive", lambda axis, array, *to: (posted.append(array), receive(axis, array, *to))[1])
    grid, plan = make_grid(x=4, y=1, z=1, node_memory=False), CuboidPlan("nn", M, N, K, pieces=2)
    cuboid, (a, b) = Cuboid(plan, grid), (whole.detach() for whole in operands(plan)[:2])
    block, factors = distribute(b, grid, plan.b_layout), (1, 2, 3)
    gathers = [cuboid.start_gather("b", factor * block, behind=True) for factor in factors]
    blocks = {"a": distribute(a, grid, plan.a_layout)}
    second = cuboid.start_in_pieces(blocks, {"b": gathers[1]}, True).wait()
    assert close(second, grid, plan.c_layout, 2 * a @ b) and gathers[0].done
    assert torch.equal(gathers[2].wait(), 3 * gathers[0].wait()) and not BehindQueue.of(grid)
    arrays = [gather.operand.array.untyped_storage().data_ptr() for gather in gathers]
    numbers = [arrays.index(array.untyped_storage().data_ptr()) for array in posted]
    assert numbers == sorted(numbers) and {*numbers} == {0, 1, 2}


@pytest.mark.mpi(sizes=(2, 4))
def test_before_long_arithmetic_all_pieces_may_be_under_way_where_nothing_else_moves(comm, make_grid):
    grid = make_grid(x=2, y=comm.size // 2, z=1, node_memory=False)
    plan = CuboidPlan("nn", M, N, K, pieces=4)
    cuboid, block = Cuboid(plan, grid), distribute(operands(plan)[1].detach(), grid, plan.b_layout)
    gathers = [cuboid.start_gather("b", block, behind=True) for _ in range(2)]
    BehindQueue.of(grid).fill()
    assert [gather.operand.has_started for gather in gathers][comm.size // 4 :] == ([True, True] if comm.size == 2 else [False])
    assert torch.equal(gathers[1].wait(), gathers[0].wait())


@pytest.mark.mpi(sizes=(2, 4))
def test_the_weights_gradient_comes_first_where_its_sum_alone_moves_between_nodes(comm, make_grid, monkeypatch):
    """So that its sum is in flight behind the input's gradient."""
    for node_memory in (False, True):
        grid = make_grid(x=2, y=comm.size // 2, z=1, node_memory=node_memory)
        plan, order, start = CuboidPlan("nn", M, N, K, pieces=2), list[str](), PiecedCuboidProduct._start

        def noted(bound, executor, *given, order=order, start=start):
            order.append("a" if executor is bound._grad_a else "b")
            return start(bound, executor, *given)

        monkeypatch.setattr(PiecedCuboidProduct, "_start", noted)
        found, _, _ = gradients(grid, plan, True)
        monkeypatch.undo()
        assert all(close(got, grid, layout, want) for got, want, layout in found)
        assert order == (["b", "a"] if comm.size == 2 and not node_memory else ["a", "b"])


@pytest.mark.parametrize(
    ("axes", "per_node"), [({"x": 3, "y": 2}, 3), ({"x": 4, "y": 3}, 4), ({"x": 2, "y": 2}, 3), ({"x": 2, "y": 2}, 2)]
)
def test_all_ranks_take_the_same_gradient_first_where_nodes_cut_a_grid_unevenly(axes, per_node):
    """Though some lines of an axis lie in a node, and others do not."""
    grids = [DryPlace({**axes, "z": 1}, rank, ranks_per_node=per_node) for rank in range(prod(axes.values()))]
    first = [product(CuboidPlan("nn", M, N, K, pieces=4), grid).takes_weight_first for grid in grids]
    assert first == [axes == {"x": 2, "y": 2} and per_node == 2] * len(grids)


@pytest.mark.mpi(sizes=(2,))
def test_a_weight_on_its_way_is_gathered_whole_where_fewer_rows_cut_it_otherwise(make_grid):
    """A product of few rows has pieces along the split dim, one of many across it: the prefetch was begun for the last one."""
    found = {}
    for ahead in (0, 1):
        context = scheme("cuboid", make_grid(x=2, y=1, z=1, node_memory=False), overlap=Overlap(ahead, pieces=8))
        net = torch.nn.Sequential(Linear(64, 64, context), Linear(64, 1024, context))
        initialise(net, context, 3)
        if context.prefetcher is not None:
            context.prefetcher.follow(net)
        generator, cut = torch.Generator().manual_seed(1), []
        for rows in (2048, 2048, 2, 2, 2048):
            x = torch.randn(1, rows, 64, generator=generator).requires_grad_()
            y = net(x)
            y.square().sum().backward()
            cut.append(is_crosswise(net[1]._product(2 * rows).plan, "b", context.grid.shape))
            found.setdefault(ahead, []).append([y.detach(), x.grad, *(one.grad.clone() for one in net.parameters())])
            net.zero_grad(set_to_none=True)
    assert len({*cut}) == 2
    for mine, want in zip(found[1], found[0], strict=True):
        assert all(map(torch.equal, mine, want))


@pytest.mark.mpi(sizes=(2,))
def test_a_weight_on_its_way_holds_what_is_gathered_and_what_is_under_way(make_grid):
    """In float32 only while it is multiplied, and of columns the pieces that travel."""
    grid, plan = make_grid(x=2, y=1, z=1, node_memory=False), CuboidPlan("nn", 64, 512, 64, pieces=8)
    assert is_crosswise(plan, "b", grid.shape)
    cuboid, block = Cuboid(plan, grid), distribute(torch.ones(plan.b_shape, dtype=torch.bfloat16), grid, plan.b_layout)
    gather = cuboid.start_gather("b", block, behind=True)
    gather.finish()
    assert gather.operand.workspace.nbytes == 2 * 512 * 64
    assert torch.equal(gather.wait(), torch.ones(plan.b_shape, dtype=torch.bfloat16))
    c = cuboid.start_in_pieces(
        {"a": torch.ones(32, 64, dtype=torch.bfloat16)}, {"b": cuboid.start_gather("b", block, behind=True)}, True
    )
    assert torch.equal(c.wait(), torch.full((32, 512), 64, dtype=torch.bfloat16))
