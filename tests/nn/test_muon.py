"""Muon's update on whole matrices and on blocks: Newton–Schulz as torch's, and what the plan of owners says is what moves."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from plain_muon import without_bfloat16
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from summa3d.comm.grid import Place
from summa3d.comm.topology import divisors
from summa3d.errors import AgreementError, ConfigError, GridError, ShapeError
from summa3d.gemm.symmetric.plan import SymmetricPlan
from summa3d.layout import collect, distribute
from summa3d.layout.layout import Layout, Sharding
from summa3d.nn import GatedMLP, Linear, Muon, scheme
from summa3d.nn.muon.groups import GAIN, LARGEST, dealt, group_axes, group_plan, grouped
from summa3d.nn.muon.matrices import matrices_of
from summa3d.nn.muon.newton_schulz import SCALES, NewtonSchulz, averaged
from summa3d.nn.muon.orthogonalise import MatrixOwners
from summa3d.nn.muon.owners import OwnersPlan

HOW = NewtonSchulz()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(7, 7), (5, 13), (13, 5), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("how", [HOW, NewtonSchulz((2.0, -1.5, 0.5), 3, 0.25)], ids=["default", "other"])
def test_newton_schulz_of_a_batch_is_torchs_of_each(shape: tuple[int, int], how: NewtonSchulz) -> None:
    batch = torch.cat([drawn(3, *shape), torch.zeros(1, *shape, dtype=torch.float64), 1e-3 * drawn(1, *shape, seed=1)])
    before = batch.clone()
    found = how.orthogonalised(batch)
    assert torch.equal(batch, before)
    for ours, one in zip(found, batch, strict=True):
        with without_bfloat16():
            want = _zeropower_via_newtonschulz(one, how.coefficients, how.steps, how.eps)
        torch.testing.assert_close(ours, want, rtol=1e-13, atol=1e-15)
    assert not found[3].any()


def test_in_bfloat16_it_is_torchs_as_it_is() -> None:
    one = drawn(24, 40).float()
    found = HOW._replace(dtype=torch.bfloat16).orthogonalised(one[None])[0]
    want = _zeropower_via_newtonschulz(one, HOW.coefficients, HOW.steps, HOW.eps)
    assert found.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("shape", [(7, 7), (5, 13), (13, 5)])
@pytest.mark.parametrize("adjust", SCALES)
def test_the_rate_is_adjusted_as_torchs_for_the_weight_of_its_linear_layer(shape: tuple[int, int], adjust: str) -> None:
    inputs, outputs = shape
    assert 0.3 * SCALES[adjust](inputs, outputs) == _adjust_lr(0.3, adjust, torch.Size((outputs, inputs)))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_is_torchs_lerp_and_not_its_docstrings_sum(nesterov: bool) -> None:
    momentum, gradient = drawn(3, 4), drawn(3, 4, seed=1)
    mean = 0.75 * momentum + 0.25 * gradient
    found = averaged(gradient, momentum, 0.75, nesterov)
    torch.testing.assert_close(momentum, mean)
    torch.testing.assert_close(found, 0.75 * mean + 0.25 * gradient if nesterov else mean)
    assert found.data_ptr() != momentum.data_ptr()


def test_the_longest_matrices_are_dealt_first_to_whom_has_least() -> None:
    assert dealt([1, 9, 1, 4, 5], 3) == (2, 0, 1, 2, 1)
    chance = random.Random(3)
    for _ in range(50):
        work, members = [chance.randrange(1, 99) for _ in range(chance.randrange(30))], chance.randrange(1, 9)
        loads = [sum(one for one, owner in zip(work, dealt(work, members), strict=True) if owner == m) for m in range(members)]
        assert max(loads) <= sum(work) / members + max(work, default=0)


GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{"x": 1}],
    2: [{"x": 2}, {"dp": 2}],
    3: [{"y": 3}],
    4: [{"x": 2, "y": 2, "z": 1}, {"z": 2, "dp": 2}, {"d": 2, "x": 2}],
    6: [{"x": 3, "y": 2}],
    8: [{"x": 2, "y": 2, "z": 2}, {"dp": 2, "x": 2, "z": 2}],
    12: [{"x": 3, "y": 2, "dp": 2}],
}
JOINED = [(1, 1), (3, 2), (2, 3), (1, 2)]


def layouts_of(shape: dict[str, int]) -> list[Layout]:
    """Every way to give the axes to rows, to columns, or to copies; of a dim with several axes in both orders."""
    axes = [axis for axis in shape if axis != "pp"]
    found = set()
    for order in (axes, axes[::-1]):
        for roles in itertools.product("rc-", repeat=len(axes)):
            dims = ([axis for axis, role in zip(order, roles, strict=True) if role == dim] for dim in "rc")
            found.add(Layout(*map(tuple, dims)))
    return sorted(found, key=str)


def some_weights(shape: dict[str, int], many: int, seed: int) -> dict[str, tuple[Sharding, tuple[int, int]]]:
    """Weights of uneven sizes, some smaller than the grid, in layouts of all kinds, some with logical matrices."""
    chance, layouts = random.Random(seed), layouts_of(shape)
    found = {}
    for number in range(many):
        joined = chance.choice(JOINED)
        size = chance.randrange(1, 14), joined[0] * joined[1] * chance.randrange(1, 8)
        found[f"w{number}"] = Sharding(chance.choice(layouts), size), joined
    return found


def matrices(weights: dict[str, tuple[Sharding, tuple[int, int]]]) -> list[Any]:
    return [one for name, (held, joined) in weights.items() for one in matrices_of(name, held, joined)]


def counted(plan: OwnersPlan, shape: dict[str, int], member: int) -> int:
    """Words that a member receives, element by element: what it lacks of its parts, and what it holds of others'; products."""
    words = 0
    for number, matrix in enumerate(plan.matrices):
        mine = np.zeros(matrix.held.shape, bool)
        mine[matrix.held.layout.slices(matrix.held.shape, shape, plan.members[member])] = True
        mine = np.concatenate([mine[:, run] for run in matrix.columns], 1)
        assert mine.shape == matrix.shape
        computed = np.zeros(matrix.shape, int)
        for owner in plan.owners_of(number):
            part = tuple(slice(*limits) for limits in plan.part_of(owner, number))
            computed[part] += 1
            words += int((~mine[part]).sum() if owner == member else mine[part].sum())
        assert (computed == 1).all()
        if member in plan.owners_of(number) and (product := plan.products[number]):
            words += HOW.steps * product.words_of(plan.owners_of(number).index(member))
    return words


@pytest.mark.parametrize("ranks", GRIDS)
def test_the_words_of_the_plan_are_the_elements_that_are_lacked_and_all_ranks_have_the_same_plan(ranks: int) -> None:
    for number, shape in enumerate(GRIDS[ranks]):
        weights = some_weights(shape, 12, 17 * ranks + number)
        plans = [OwnersPlan.of(matrices(weights), Place(shape, rank), HOW) for rank in range(ranks)]
        assert all(plan.owners == plans[0].owners and plan.members == plans[0].members for plan in plans)
        for member in range(ranks):
            assert plans[0].words_of(member) == counted(plans[0], shape, member), (shape, member)


def test_each_stage_of_a_pipeline_deals_its_own_matrices() -> None:
    shape, weights = {"x": 2, "pp": 3}, {}
    for stage in range(3):
        weights[f"w{stage}"] = Sharding(Layout("k:x n").held_at({"pp": (stage,)}), (7, 5)), (1, 1)
    for rank in range(6):
        place = Place(shape, rank)
        plan = OwnersPlan.of(matrices(weights), place, HOW)
        assert [one.weight for one in plan.matrices] == [f"w{place.coordinates['pp']}"]
        assert plan.axes == ("x",) and plan.owners == (0,)
        assert plan.words_of(0) == 3 * 5 == plan.words_of(1)


def check_orthogonalised(owners: MatrixOwners, grid: Any, weights: dict[str, Any]) -> None:
    """Blocks of what is orthogonalised are those of whole matrices, and what went in stays; words and messages are the plan's."""
    wholes = {name: drawn(*held.shape, seed=place) for place, (name, (held, _)) in enumerate(weights.items())}
    blocks = {name: wholes[name][held.slices(grid)].clone() for name, (held, _) in weights.items()}
    before = {name: block.clone() for name, block in blocks.items()}
    with grid.ledger.watch() as moved:
        found = owners.orthogonalised(blocks)
    amounts, here = [row.amounts for row in moved.rows], owners.axis.index
    assert sum(one.words for one in amounts) == owners.plan.words_of(here)
    assert sum(one.messages for one in amounts) == owners.plan.messages_of(here)
    for name, (held, joined) in weights.items():
        want = torch.empty_like(wholes[name])
        for matrix in matrices_of(name, held, joined):
            columns = torch.cat([torch.arange(run.start, run.stop) for run in matrix.columns])
            want[:, columns] = HOW.orthogonalised(wholes[name][None, :, columns])[0]
        torch.testing.assert_close(found[name], want[held.slices(grid)], rtol=1e-11, atol=1e-13)
        assert torch.equal(blocks[name], before[name])


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("many", [12, 1])
@pytest.mark.turns
def test_blocks_of_what_owners_orthogonalise_are_those_of_whole_matrices(make_grid, world_size: int, many: int) -> None:
    """In any layouts, copies too; words and messages are the plan's, as integers."""
    for number, shape in enumerate(GRIDS[world_size]):
        grid = make_grid(**shape)
        weights = some_weights(shape, many, 31 * world_size + number)
        check_orthogonalised(MatrixOwners(matrices(weights), grid, HOW), grid, weights)


@pytest.mark.parametrize("ranks", [4, 6])
def test_the_words_of_groups_are_the_elements_that_are_lacked_beside_those_of_products_and_norms(ranks: int) -> None:
    for number, shape in enumerate(GRIDS[ranks]):
        weights = some_weights(shape, 3, 5 * ranks + number)
        for size in divisors(ranks)[1:]:
            plan = OwnersPlan.of(matrices(weights), Place(shape), HOW, "float64", size)
            assert plan.size == size and sorted(one for group in plan.groups for one in group) == [*range(ranks)]
            norms = 0
            for member in range(ranks):
                norms += plan.words_of(member) - counted(plan, shape, member)
            assert norms == sum(2 * (size - 1) * plan.owners.count(group) for group in range(len(plan.groups)))


@pytest.mark.mpi(sizes=(2, 4, 6))
def test_groups_of_every_size_orthogonalise_as_one_rank_does(make_grid, world_size: int) -> None:
    """Matrices in any layouts, wide and high, of fewer rows than ranks too; words and messages are the plan's, as integers."""
    for number, shape in enumerate(GRIDS[world_size][:1]):
        grid = make_grid(**shape)
        for size in divisors(world_size)[1:]:
            weights = some_weights(shape, 2, 41 * world_size + number + size)
            check_orthogonalised(MatrixOwners(matrices(weights), grid, HOW, torch.float64, size), grid, weights)


def test_groups_are_of_the_size_of_fewest_predicted_seconds() -> None:
    """Of all that divide the ranks; one, where there are matrices enough, where they are small, or where no more ranks help."""
    sizes = set()
    for shapes, members in [
        ([(1024, 4096)], 4),
        ([(1500, 700), (1500, 700)], 6),
        ([(2000, 2000)] * 3 + [(400, 900)] * 2, 8),
        ([(24, 96), (24, 24)], 4),
        ([(600, 600)] * 16, 4),
    ]:
        found = grouped(shapes, members, HOW, "float32")
        every = {size: grouped(shapes, members, HOW, "float32", size) for size in divisors(members)}
        assert found == every[found.size] and members < LARGEST
        for size, other in every.items():
            assert found.seconds <= other.seconds or other.seconds > GAIN * every[1].seconds, (shapes, size)
        sizes.add(found.size)
    assert sizes == {1, 2, 3, 4}
    plan = group_plan(1024, 4096, 4, "float32")
    assert isinstance(plan.gram, SymmetricPlan) and plan.update.max_multiply_adds == 1024 * 1024 * 1024
    assert plan.multiply_adds < 0.8 * (2 * 1024 * 1024 * 4096 + 1024**3) / 4
    for name in plan.axes:
        assert {name: plan.axes[name]}.items() <= group_axes(name).items()


@pytest.mark.mpi(sizes=(4,))
def test_what_all_ranks_hold_whole_is_not_collected(make_grid) -> None:
    grid = make_grid(dp=4)
    held = Sharding(Layout("k n"), (6, 5))
    owners = MatrixOwners([one for name in "abc" for one in matrices_of(name, held)], grid, HOW)
    with grid.ledger.watch() as moved:
        owners.orthogonalised({name: drawn(6, 5) for name in "abc"})
    assert owners.plan.messages_of(0) == 3 and [row.collective for row in moved.rows] == ["all_to_all"]
    assert sum(row.amounts.words for row in moved.rows) == (3 if grid.rank == 3 else 2) * 30


class Own(torch.nn.Module):
    """Someone's own module of two layers of ours, and weights for it."""

    def __init__(self, on_grid: Any) -> None:
        super().__init__()
        self.first = GatedMLP(12, 18, on_grid, dtype=torch.float64)
        self.second = Linear(12, 20, on_grid, dtype=torch.float64)
        for place, p in enumerate(self.parameters()):
            p.data.copy_(distribute(drawn(*p.sharding.shape, seed=place), p.grid, p.sharding.layout))

    def matrices(self) -> list[Any]:
        return [p for p in self.parameters() if p.decay]


SCHEMES = {
    1: ("serial", {"x": 1}),
    3: ("oned", {"y": 3}),
    4: ("summa", {"x": 2, "y": 2}),
    6: ("cuboid", {"x": 1, "y": 2, "z": 3}),
    8: ("tesseract", {"x": 2, "y": 2, "d": 2}),
}


@pytest.mark.mpi(sizes=tuple(SCHEMES))
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_the_optimizer_of_ones_own_module_is_torchs_on_whole_matrices(make_grid, world_size: int, adjust: str | None) -> None:
    """Groups have rates of their own; a weight that has no gradient in some steps is left alone in them."""
    name, axes = SCHEMES[world_size]
    grid = make_grid(**axes)
    matrices = Own(scheme(name, grid)).matrices()
    theirs = [torch.nn.Parameter(collect(p.data, grid, p.sharding.layout, p.sharding.shape).T.clone()) for p in matrices]

    def groups(of: list[Any]) -> list[dict[str, Any]]:
        return [{"params": of[:2], "lr": 0.03}, {"params": of[2:], "lr": 0.1, "weight_decay": 0.0, "nesterov": False}]

    settings: dict[str, Any] = {"momentum": 0.8, "weight_decay": 0.4, "ns_steps": 4, "adjust_lr_fn": adjust}
    ranks = {3: 3, 4: 4, 6: 2}.get(world_size) if adjust else None
    ours, reference = Muon(groups(matrices), **settings, ranks=ranks), torch.optim.Muon(groups(theirs), **settings)
    for step in range(5):
        for place, (p, other) in enumerate(zip(matrices, theirs, strict=True)):
            gradient = drawn(*p.sharding.shape, seed=10 * step + place)
            p.grad, other.grad = distribute(gradient, grid, p.sharding.layout), gradient.T.clone()
            if (place, step) in ((1, 2), (3, 0)):
                p.grad = other.grad = None
        ours.step()
        with without_bfloat16():
            reference.step()
    for p, other in zip(matrices, theirs, strict=True):
        torch.testing.assert_close(
            collect(p.data, grid, p.sharding.layout, p.sharding.shape).T, other.data, rtol=1e-11, atol=1e-12
        )


@pytest.mark.mpi(sizes=(2,))
def test_what_muon_cannot_take_is_refused_on_all_ranks(make_grid) -> None:
    on_grid = scheme("oned", make_grid(y=2))
    own, halves = Own(on_grid), Linear(4, 6, on_grid, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"parameter 1 \(20,\).*AdamW"):
        Muon([own.second.weight, own.second.bias])
    with pytest.raises(ShapeError, match=r"parameter 1 \(3, 4\)"):
        Muon([own.second.weight, torch.nn.Parameter(torch.zeros(3, 4))])
    with pytest.raises(GridError, match="belongs to a layer"):
        Muon([torch.nn.Parameter(torch.zeros(3, 4))])
    with pytest.raises(ConfigError, match="master weights in float32"):
        Muon([halves.weight])
    with pytest.raises(ConfigError, match="original, match_rms_adamw"):
        Muon(own.matrices(), adjust_lr_fn="rms")
    with pytest.raises(ConfigError, match="1 to 99 steps"):
        Muon(own.matrices(), ns_steps=100)
    with pytest.raises(ConfigError, match="lr is -1"):
        Muon(own.matrices(), lr=-1)
    with pytest.raises(ConfigError, match=r"3 ranks compute a matrix together.*Sizes that do: 1, 2"):
        Muon(own.matrices(), ranks=3)
    with pytest.raises(AgreementError, match="ranks"):
        Muon(own.matrices(), ranks=1 + on_grid.grid.rank)
    with pytest.raises(AgreementError, match="parameters"):
        Muon(own.matrices()[on_grid.grid.rank :])
