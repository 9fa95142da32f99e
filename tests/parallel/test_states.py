"""The states of parameters: where weights, gradients and moments lie on a grid with replicas, and an optimizer of shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from nn_parity import gradient_norm
from scheme_table import GPT2, next_tokens

from summa3d.comm.grid import Place
from summa3d.layout import Layout, collect
from summa3d.layout.layout import Sharding
from summa3d.nn import build, scheme
from summa3d.nn.gradients import norm_and_votes
from summa3d.nn.parameter import new_parameter
from summa3d.parallel.states import Shardings, replicas_of, states_of
from summa3d.train.config import TrainConfig
from summa3d.train.optimizer import MOMENTS, AdamW


def test_without_zero_all_states_lie_as_the_weight_is_used():
    used = Sharding(Layout("h:z n"), (8, 4))
    for found in (Shardings.of(used), Shardings.of(used, ("dp",)), Shardings.of(used, (), zero=1)):
        assert found == Shardings(used, used, used, used)


def test_zero_1_shards_the_moments_and_the_weights_that_16_bit_copies_are_made_of():
    used = Sharding(Layout("h:z n"), (8, 4))
    sharded = used.sharded_over(("dp", "cp"))
    assert Shardings.of(used, ("dp", "cp"), zero=1) == Shardings(used, used, used, sharded)
    assert Shardings.of(used, ("dp", "cp"), zero=1, halves=True) == Shardings(used, sharded, used, sharded)


def test_zero_2_shards_gradients_as_well_and_zero_3_weights():
    used = Sharding(Layout("h:z n"), (8, 4))
    sharded = used.sharded_over(("dp",))
    assert Shardings.of(used, ("dp",), zero=2) == Shardings(used, used, sharded, sharded)
    assert Shardings.of(used, ("dp",), zero=3) == Shardings(used, sharded, sharded, sharded)


def test_replicas_are_the_outer_axes_that_hold_copies():
    grid = Place({"z": 2, "dp": 3, "cp": 2, "ep": 2, "pp": 2})
    of = lambda layout: replicas_of(Sharding(Layout(layout), (8, 4)), grid)  # noqa: E731
    assert of("h:z n") == of("h:z n @pp=1") == ("dp", "cp", "ep")
    assert of("h:z n @ep=1,pp=0") == ("dp", "cp")
    assert replicas_of(Sharding(Layout("h:z n"), (8, 4)), Place({"z": 2, "dp": 1, "pp": 2})) == ()


@pytest.mark.parametrize("zero", [0, 1])
def test_the_parts_that_replicas_update_cover_every_weight_once(zero):
    """Also vectors that are shorter than the replicas are many: some update nothing."""
    axes = {"z": 2, "dp": 5, "pp": 2}
    seen: dict[str, torch.Tensor] = {}
    for rank in range(20):
        place = Place(axes, rank)
        on_grid = scheme("cuboid", place)
        module = torch.nn.Module()
        stage = on_grid.on(pp=(1,))
        module.vector = new_parameter(stage, Layout(("z",)), (7,), ("constant", 0.0), torch.float32, False)
        module.matrix = new_parameter(on_grid, Layout((), ("z",)), (11, 4), ("constant", 0.0), torch.float32, True)
        for state in states_of(module, place, zero):
            state.parameter.data.zero_()
            state.parameter.grad = torch.ones_like(state.parameter)
            state.weight.add_(state.gradient)  # in place: a view of what layers use
            total = seen.setdefault(state.name, torch.zeros(state.shardings.used.shape))
            total[state.shardings.used.slices(place)] += state.parameter.data
    copies = {"vector": 1, "matrix": 2}
    for name, total in seen.items():
        assert (total == copies[name] * (1 if zero else 5)).all(), name


def test_two_stages_that_hold_a_table_count_and_write_a_part_of_it_each():
    seen, most = torch.zeros(7, 4), 0
    for rank in range(12):
        place, module = Place({"z": 2, "dp": 3, "pp": 2}, rank), torch.nn.Module()
        tied = scheme("cuboid", place).on(pp=(0, 1))
        module.table = new_parameter(tied, Layout("v h:z"), (7, 4), ("constant", 0.0), torch.float32, True)
        (state,) = states_of(module, place, 1)
        part = state.shardings.share.slices(place)
        seen[part] += state.shardings.counts
        most = max(most, seen[part].shape[0])
    assert (seen == 1).all() and most == 2  # of 7 rows, which 3 replicas of 2 stages divide


@pytest.mark.mpi(sizes=(6,))
def test_sharded_moments_give_the_weights_and_the_norm_of_whole_ones(make_grid):
    """Two steps on three replicas, which hold equal gradients; then each part is taken from the replica that updated it."""
    grid = make_grid(z=2, dp=3)
    batch = next_tokens(GPT2, 4, 12)
    weights, norms = [], []
    for zero in (0, 1):
        model = build(GPT2, scheme("cuboid", grid), torch.float64, seed=3)
        states = states_of(model, grid, zero)
        optimizer = AdamW(states, TrainConfig(weight_decay=0.3))
        for step in range(2):
            model.zero_grad()
            model(**batch, step=step, count=40).backward()
            norms.append(norm_and_votes(optimizer.counted_gradients(), grid)[0])
            assert norms[-1] == pytest.approx(gradient_norm(model.parameters(), grid), rel=1e-12)
            optimizer.step(1e-2, 0.5)
            for state in states:
                whole = collect(state.weight, grid, state.shardings.moments.layout, state.shardings.moments.shape)
                state.parameter.data.copy_(whole[state.shardings.used.slices(grid)])
        weights.append([p.data.clone() for p in model.parameters()])
        held = sum(moment.numel() for moment in itertools.chain(*(optimizer.moments[kind].values() for kind in MOMENTS)))
        used = 2 * sum(p.numel() for p in model.parameters())
        assert held == used if zero == 0 else abs(held - used / 3) <= 2 * len(states)
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-12)
    assert all(torch.equal(whole, sharded) for whole, sharded in zip(*weights, strict=True))
