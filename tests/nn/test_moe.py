"""Experts on a grid are the same function as a plain torch model: the same experts of every token, losses and raw gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nn_parity import check_parity, global_weights, whole
from plain_mixtral import PlainMixtral
from scheme_table import rows_for, sequence_for, tokens_and_labels

from summa3d.errors import ConfigError
from summa3d.layout import distribute
from summa3d.nn import Batch, ModelConfig, build, scheme
from summa3d.nn.config import MixtureConfig
from summa3d.nn.experts.dispatch import ExpertPlane, plan_dispatch
from summa3d.nn.experts.moe import MoE
from summa3d.nn.layers.linear import KEPT_PRODUCTS
from summa3d.nn.parameter import initialise

# 5 experts, which no axis divides; h, heads and f are multiples of every axis that splits them; v is a prime.
CONFIG = ModelConfig(
    family="mixtral",
    layers=2,
    hidden=24,
    heads=12,
    kv_heads=12,
    ffn=12,
    sequence=12,
    vocabulary=37,
    dropout=0.1,
    norm_eps=1e-3,
    rotary_base=50.0,
    experts=5,
    experts_per_token=2,
    balance=0.3,
    moe=MixtureConfig(z_loss=0.05),
)
GRIDS: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("serial", {"x": 1})],
    2: [("oned", {"y": 2}), ("oned-sp", {"y": 2}), ("cuboid", {"z": 2})],
    3: [("summa", {"x": 3}), ("cuboid-sequence", {"y": 3})],
    4: [("cuboid", {"y": 2, "z": 2}), ("summa-transposed", {"x": 2, "y": 2}), ("cuboid", {"x": 2, "y": 2})],
    6: [("summa", {"x": 2, "y": 3})],
    8: [("tesseract", {"x": 2, "y": 2, "d": 2})],
}
BIASED = MixtureConfig(scores="sigmoid", groups=3, groups_per_token=2, bias_rate=0.1)
VARIANTS = {
    "five experts, two a token": {},
    "more experts than tokens": {"experts": 29, "experts_per_token": 1, "layers": 1},
    "sigmoid, groups and a bias": {"experts": 6, "moe": BIASED, "layers": 1},
    "all tokens to the first expert": {"experts": 3, "experts_per_token": 1},
    "a capacity, which drops tokens": {"moe": MixtureConfig(z_loss=0.05, capacity=0.6), "layers": 1},
    "tiles of three rows": {"moe": MixtureConfig(z_loss=0.05, tile=3), "layers": 1},
    "ties": {"experts": 7, "experts_per_token": 3, "balance": None, "layers": 1},
}
TIED = ("all tokens to the first expert", "ties")


def model_on(context: Any, config: ModelConfig, tied: bool, seed: int = 3) -> tuple[Any, PlainMixtral]:
    """A model and its oracle, with weights large enough that routers decide; `tied`, with routers that cannot."""
    model = build(config, context, torch.float64, seed=seed)
    weights = global_weights(model)
    for name, value in weights.items():
        if name.endswith("router.weight"):
            value *= 0.0 if tied else 20.0
            parameter = model.get_parameter(name)
            parameter.data.copy_(distribute(value, context.grid, parameter.sharding.layout))
    return model, PlainMixtral(config, weights, seed=seed)


def counts_of(model: Any) -> list[list[int]]:
    return [block.moe.counts.tolist() for block in model.blocks]


@pytest.mark.mpi(sizes=(1, 2, 4))
def test_losses_raw_gradients_and_counts_equal_plain_torch(make_grid, world_size):
    check_grids(make_grid, world_size, GRIDS[world_size][: 6 // world_size + 1])


@pytest.mark.wide
@pytest.mark.mpi(sizes=(3, 4, 6, 8))
def test_so_they_do_on_further_grids(make_grid, world_size):
    check_grids(make_grid, world_size, GRIDS[world_size])


@pytest.mark.mpi(sizes=(2, 4))
def test_tiles_of_rows_have_one_shape_and_a_sequence_the_same_bits_whatever_stands_beside_it(make_grid, world_size):
    name, axes = {2: ("cuboid", {"y": 2}), 4: ("cuboid", {"y": 2, "z": 2})}[world_size]
    context, shapes = scheme(name, make_grid(check=False, **axes)), set()
    config = replace(CONFIG, layers=1, balance=None, moe=MixtureConfig(tile=3))
    check_grids(make_grid, world_size, [(name, axes)], "tiles of three rows")
    generator = torch.Generator().manual_seed(5)
    alone, *others = torch.randint(CONFIG.vocabulary, (1 + 3 * 7, 1, 8), generator=generator)
    for dtype in (torch.float64, torch.float32):
        model = build(config, context, dtype, seed=3).eval()
        model.blocks[0].moe.router.weight.data *= 20.0
        for expert in model.blocks[0].moe.experts:
            expert.register_forward_hook(lambda module, inputs, out: shapes.add((tuple(inputs[0].shape), inputs[1])))
        with torch.no_grad():
            first, *further = (model.logits(torch.cat([alone, *others[at : at + 7]]))[0] for at in (0, 7, 14))
        assert all(torch.equal(first, other) for other in further), dtype
    parts = model.blocks[0].moe.plane.parts
    assert shapes == {((3, config.hidden // axes.get("z", 1)), 3 * parts)}


@pytest.mark.mpi(sizes=(1, 2, 3))
def test_a_capacity_drops_the_same_tokens_where_ranks_hold_parts_of_sequences(make_grid, world_size):
    name, axes = {1: ("serial", {"x": 1}), 2: ("oned-sp", {"y": 2}), 3: ("cuboid-sequence", {"y": 3})}[world_size]
    check_grids(make_grid, world_size, [(name, axes)], "a capacity, which drops tokens")


def check_grids(make_grid, world_size, grids, only=""):
    for number, (name, axes) in enumerate(grids):
        for place, (variant, change) in enumerate(VARIANTS.items()):
            if variant != only if only else (place + number + world_size) % {1: 1, 2: 3}.get(world_size, len(VARIANTS)):
                continue  # each grid of several ranks takes other variants
            context = scheme(name, make_grid(**axes))
            model, plain = model_on(context, replace(CONFIG, **change), variant in TIED)
            rows = rows_for(context)
            batch = tokens_and_labels(CONFIG, rows, sequence_for(context, 5 if change and rows > 1 else 7))
            check_parity(
                model,
                plain,
                lambda m, b=batch: m(*b, step=4, first_row=5, step_rows=9),
                lambda m, b=batch: m.loss(*b, step=4, first_row=5, step_rows=9),
                1e-10,
            )
            want = context.grid.comm.bcast(plain.counts() if context.grid.comm.rank == 0 else None)
            assert counts_of(model) == want, (name, axes, variant)
            dropped = batch[0].numel() * model.config.num_chosen - sum(want[0])
            assert (dropped > 0) == (model.config.moe.capacity is not None), (name, axes, variant)
            if variant in TIED:
                assert all(not any(of[model.config.num_chosen :]) for of in want), want


@pytest.mark.mpi(sizes=(1, 2))
def test_recomputed_layers_have_the_same_router_losses_and_bits(make_grid, world_size):
    name, axes = GRIDS[world_size][-1]
    context = scheme(name, make_grid(**axes))
    batch = tokens_and_labels(CONFIG, rows_for(context), 6)
    found = []
    for kind in ("none", "full"):
        model, _ = model_on(context, replace(CONFIG, layers=3, experts=3), tied=False)
        model.recompute(kind, 2)
        loss = model(*batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
    model.eval()
    without = build(replace(CONFIG, layers=3, experts=3, balance=None, moe=MixtureConfig()), context, torch.float64).eval()
    without.load_state_dict(model.state_dict())
    assert model(*batch).item() == without(*batch).item()


@pytest.mark.mpi(sizes=(2, 4))
def test_a_sequence_beside_100_others_has_the_experts_and_logits_that_it_has_alone(make_grid, world_size):
    """Ranks of axis ep pass other sequences beside it."""
    generator = torch.Generator().manual_seed(5)
    alone = torch.randint(CONFIG.vocabulary, (1, 8), generator=generator)
    others = torch.randint(CONFIG.vocabulary, (2, 103, 8), generator=generator)
    for name, axes in (*GRIDS[world_size][:: world_size - 1], ("serial", {"ep": world_size})):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5))[: 2 if "ep" in axes else 1]:
            context = scheme(name, make_grid(check=False, **axes))
            beside = others[context.whole.coordinates.get("ep", 0) % 2]
            experts, logits = experts_and_logits(context, dtype, torch.cat([alone, beside]))
            want_experts, want = experts_and_logits(scheme("serial"), dtype, alone)
            assert (logits[0] - want[0]).norm() <= tolerance * want.norm(), (name, axes, dtype)
            rows, columns, _ = context.residual.slices((104, 8, 24), context.grid.shape, context.grid.coordinates)
            for mine, of_layer in zip(experts, want_experts, strict=True):
                assert rows.start or torch.equal(mine[0], of_layer[0, columns]), (name, axes, dtype)


def experts_and_logits(context: Any, dtype: torch.dtype, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The experts of this rank's tokens by layer, [b, s, k], and all logits."""
    model, found = build(CONFIG, context, dtype, seed=3).eval(), []
    shape = context.residual.local_shape((*tokens.shape, CONFIG.hidden), context.grid.shape, context.grid.coordinates)[:2]
    stored = shape[::-1] if context.scheme.spec.sequence_first else shape
    for block in model.blocks:
        block.moe.router.weight.data *= 20.0
        block.moe.router.register_forward_hook(
            lambda module, inputs, routing: found.append(context.batch_first(routing.choices.view(*stored, -1)))
        )
    with torch.no_grad():
        return found, model.logits(tokens)


@pytest.mark.parametrize("splits", [(), (3,), (2, 2), (1, 2)])
def test_a_plan_of_dispatch_brings_every_row_to_its_place(splits):
    generator = np.random.default_rng(len(splits))
    for groups, experts, most in ((1, 1, 4), (2, 5, 3), (3, 4, 9), (2, 7, 1)):
        plane = ExpertPlane(experts, groups, splits)
        counts = generator.integers(0, most + 1, (plane.members, experts))
        counts[:, generator.integers(experts)] = 0
        plans = [plan_dispatch(counts, plane, member) for member in range(plane.members)]
        rows = [[(e, source, row) for e in range(experts) for row in range(counts[source, e])] for source in range(plane.members)]
        sent = []  # of each member, to each member
        for member, plan in enumerate(plans):
            order = [rows[member][at] for at in plan.take]
            assert sorted(order) == rows[member] and len(plan.sent) == plane.members
            ends = np.cumsum([0, *plan.sent])
            sent.append([order[first:last] for first, last in pairwise(ends)])
        for member, plan in enumerate(plans):
            group, part = divmod(member, plane.parts)
            assert plan.received == [len(sent[source][member]) for source in range(plane.members)]
            flat = [row for source in range(plane.members) for row in sent[source][member]]
            want = [row for e in range(experts)[plane.own(group)] for row in expert_block(rows, e, splits, part)]
            assert [flat[at] for at in plan.place] == want
            assert sum(plan.blocks) == len(want)
            assert plan.totals == counts.sum(0)[plane.own(group)].tolist()


def expert_block(rows: list[Any], expert: int, splits: tuple[int, ...], part: int) -> list[Any]:
    """The rows of an expert, by source, that a part holds: split by each axis in turn, larger parts first."""
    block = [row for of in rows for row in of if row[0] == expert]
    for size, index in zip(splits, np.unravel_index(part, splits) if splits else (), strict=True):
        lengths = [len(block[at::size]) for at in range(size)]
        block = block[sum(lengths[:index]) : sum(lengths[: index + 1])]
    return block


@pytest.mark.mpi(sizes=(2, 4))
def test_a_layer_moves_the_words_of_its_formula_given_the_counts(make_grid, world_size):
    for number, (name, axes) in enumerate(GRIDS[world_size]):
        grid = make_grid(check=False, **axes)
        context = scheme(name, grid)
        capacity = float(CONFIG.experts) if number == 1 else None  # which drops nothing
        config = replace(CONFIG, balance=None, moe=MixtureConfig(capacity=capacity))
        layer = MoE(config, context, 0.02, torch.float64)
        initialise(layer, context, 3)
        layer.router.weight.data *= 50
        rows, s, h, experts = rows_for(context), sequence_for(context, 7), config.hidden, config.experts
        whole_x = torch.randn(rows, s, h, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
        x = context.as_stored(distribute(whole_x, context.grid, context.residual)).requires_grad_()
        logits = whole(layer, "router.weight", layer.router.weight.data)
        batch = Batch(rows, s)
        layer(x, batch).sum().backward()  # whose first calls are compared
        control = grid.ledger.control
        with grid.ledger.watch() as moved:
            layer(x, batch).sum().backward()
        assert grid.ledger.control == control
        alone = expert_words(layer, context)
        columns, plane = context.columns(context.residual), context.rows(context.residual)
        local = x.numel() // x.shape[-1]
        chosen = (whole_x @ logits).topk(config.experts_per_token).indices
        travelled = arrivals(context, chosen, rows, s)
        width = x.shape[-1]
        want = (plane.size - 1) * experts + 2 * travelled * width
        want += all_reduced(local * experts, columns) + all_reduced(local * config.experts_per_token, columns)
        want += all_reduced(layer.router.weight.numel(), plane)
        if capacity and context.residual.dims[1]:
            split = context.grid[context.residual.dims[1]]
            want += (split.size - 1) * local // (s // split.size) * experts
        assert moved.words == want + alone, (name, axes)
        assert travelled or plane.size == 1 or context.grid.comm.rank


def all_reduced(n: int, axis: Any) -> int:
    """Words that this member receives when n are all-reduced."""
    return n + (axis.size - 2) * (n // axis.size + (axis.index < n % axis.size)) if axis.size > 1 else 0


def expert_words(layer: MoE, context: Any) -> int:
    """Words of the experts' own products, each run alone on as many rows."""
    total = 0
    for expert, count in zip(layer.experts, layer.counts.tolist(), strict=True):
        if count:
            shape = context.scheme.pooled.local_shape((count, layer.config.hidden), context.grid.shape, context.grid.coordinates)
            with context.grid.ledger.watch() as moved:
                expert(torch.ones(shape, dtype=torch.float64, requires_grad=True), count).sum().backward()
            total += moved.words
    return total


def arrivals(context: Any, chosen: torch.Tensor, b: int, s: int) -> int:
    """Rows that this rank receives from others, out and back: those of its parts of experts, and those of its own tokens."""
    grid, layout, plane = context.grid, context.residual, context.rows(context.residual)
    places = [place for place in (grid.coordinates_of(rank) for rank in range(grid.size)) if on_my_plane(grid, plane, place)]
    places.sort(key=lambda place: [place[axis] for axis in plane.names])
    found = 0
    for expert in range(CONFIG.experts or 0):
        sources = []
        for member, place in enumerate(places):
            rows, columns, _ = layout.slices((b, s, CONFIG.hidden), grid.shape, place)
            sources += [member] * int((chosen[rows, columns] == expert).sum())
        for member, place in enumerate(places):
            (part, *_) = context.scheme.pooled.slices((len(sources), CONFIG.hidden), grid.shape, place)
            found += sum(source != member and plane.index in (source, member) for source in sources[part])
    return found


def on_my_plane(grid: Any, plane: Any, place: dict[str, int]) -> bool:
    return all(place[axis] == grid.coordinates[axis] for axis in grid.shape if axis not in plane.names)


@pytest.mark.mpi(sizes=(2,))
def test_products_of_other_row_counts_are_compared_once_and_kept_up_to_a_bound(make_grid):
    context = scheme("cuboid", make_grid(check=False, y=2))
    layer = MoE(replace(CONFIG, balance=None, moe=MixtureConfig()), context, 0.02, torch.float64)
    initialise(layer, context, 3)
    layer(torch.ones(2, 3, 24, dtype=torch.float64), Batch(4, 3))
    expert, control = layer.experts[int(layer.counts.argmax())], context.grid.ledger.control
    for rows in range(2, 40, 2):
        expert(torch.ones(rows // 2, 24, dtype=torch.float64), rows)
    assert context.grid.ledger.control == control
    assert all(
        product._cached.cache_info().currsize == KEPT_PRODUCTS for product in (expert.joined._product, expert.down._product)
    )


@pytest.mark.wide
@pytest.mark.mpi(sizes=(2,))
def test_memory_is_flat_over_a_thousand_steps_of_changing_loads(make_grid):
    """Routers are drawn anew for each step; products of all other numbers of rows, kept, would take 1.5 MiB."""
    context, generator = scheme("cuboid", make_grid(check=False, ep=2)), torch.Generator().manual_seed(5)
    layer = MoE(replace(CONFIG, balance=None, moe=MixtureConfig()), context, 0.02, torch.float64)
    initialise(layer, context, 3)
    held, loads = [], set()
    for step in range(1000):
        layer.router.weight.data.normal_(generator=generator)
        layer(torch.randn(4, 127, 24, generator=generator, dtype=torch.float64), Batch(4, 127)).sum().backward()
        layer.zero_grad()
        loads.add(tuple(layer.counts.tolist()))
        if step in (199, 999):
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE)
    assert len(loads) > 990 and held[1] - held[0] < 1 << 20, held  # bytes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts_per_token": 6}, ["experts_per_token is 6", "experts = 5", "1 to 5"]),
        ({"experts": 0}, ["model.experts is 0"]),
        ({"balance": -1.0}, ["model.balance is -1.0"]),
        ({"moe": {"groups": 2}}, ["model.moe.groups is 2", "model.experts = 5", "1, 5"]),
        ({"moe": {"groups": 5, "groups_per_token": 6}}, ["groups_per_token is 6", "1 to 5"]),
        ({"moe": {"groups": 5, "groups_per_token": 1}}, ["groups_per_token is 1", "experts_per_token = 2", "2 to 5"]),
        ({"moe": {"scores": "relu"}}, ["'relu'", "softmax, sigmoid"]),
        ({"moe": {"bias_rate": -0.1}}, ["model.moe.bias_rate is -0.1"]),
        ({"moe": {"capacity": 0.0}}, ["model.moe.capacity is 0.0", "above 0"]),
        ({"family": "llama", "balance": None}, ["model.experts is 5", "llama", "mixtral"]),
    ],
)
def test_what_no_router_can_do_is_refused_by_name(change, says):
    with pytest.raises(ConfigError) as raised:
        replace(CONFIG, **{**change, **({"moe": MixtureConfig(**change["moe"])} if "moe" in change else {})})
    for text in says:
        assert text in str(raised.value)


def test_a_table_of_experts_needs_experts():
    with pytest.raises(ConfigError, match="llama has no experts"):
        ModelConfig(family="llama", moe=MixtureConfig(z_loss=0.1))
