"""A Llama on a grid is the same function as a plain torch model, whole kv heads on a rank or pieces of one."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import pytest
import torch
from nn_oracle.volume_models import model_volume
from nn_parity import check_parity, global_weights
from plain_llama import PlainLlama
from torch import Tensor

from summa3d.errors import GridError, LayoutError
from summa3d.nn import ModelConfig, build, scheme
from summa3d.nn.context_parallel.options import ContextOptions
from summa3d.nn.layers.rotary import Rotary, angles_of

# 12 heads of 6, 4 or 2 kv heads; f is a multiple of every axis used here; v and s are primes.
CONFIG = ModelConfig(
    family="llama",
    layers=2,
    hidden=72,
    heads=12,
    kv_heads=2,
    ffn=36,
    sequence=11,
    vocabulary=37,
    dropout=0.1,
    attention_dropout=0.2,
    norm_eps=1e-3,
    rotary_base=50.0,
)
# (x, y, z), kv_heads: whole kv heads on a rank (2 on y=1, 2; 4 on y=2; 6 on y=3), or pieces of one (2 on y=4, 6; 1 on y=2, 3).
GRIDS = {
    1: [((1, 1, 1), 2)],
    2: [((1, 2, 1), 2), ((1, 1, 2), 12), ((2, 1, 1), 6)],
    3: [((1, 3, 1), 1), ((1, 3, 1), 6)],
    4: [((1, 4, 1), 2), ((2, 2, 1), 4), ((1, 2, 2), 1)],
    8: [((2, 2, 2), 4), ((1, 4, 2), 2)],
    12: [((1, 6, 2), 2), ((2, 3, 2), 6)],
}


def batch_for(x: int, y: int, z: int) -> tuple[Tensor, Tensor]:
    rows = lcm(x * y, x * z)
    tokens, labels = torch.randint(0, CONFIG.vocabulary, (2, rows, 9), generator=torch.Generator().manual_seed(rows))
    labels[0, :3] = -100
    return tokens, labels


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_loss_and_every_raw_gradient_equal_plain_torch(make_grid, world_size):
    check(make_grid, GRIDS[world_size][: 1 if world_size == 12 else None])


@pytest.mark.wide
@pytest.mark.mpi(sizes=(12,))
def test_so_they_do_on_every_grid_of_twelve_ranks(make_grid):
    check(make_grid, GRIDS[12])


def check(make_grid: Any, grids: list[tuple[tuple[int, int, int], int]]) -> None:
    for (x, y, z), kv_heads in grids:
        config = replace(CONFIG, kv_heads=kv_heads)
        model = build(config, scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64, seed=3)
        plain = PlainLlama(config, global_weights(model), seed=3)
        tokens, labels = batch_for(x, y, z)
        check_parity(
            model,
            plain,
            lambda m, t=tokens, n=labels: m(t, n, step=4, first_row=5),
            lambda m, t=tokens, n=labels: m.loss(t, n, 4, 5),
            1e-10,
        )


@pytest.mark.mpi(sizes=(1, 8))
def test_fused_attention_is_the_same_function(make_grid, world_size):
    x, y, z = {1: (1, 1, 1), 8: (1, 4, 2)}[world_size]
    config = replace(CONFIG, attention_dropout=0.0)
    model = build(config, scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64)
    tokens, labels = batch_for(x, y, z)
    check_parity(
        model, PlainLlama(config, global_weights(model)), lambda m: m(tokens, labels), lambda m: m.loss(tokens, labels), 1e-10
    )


LLAMA3 = {"rotary_scaling": "llama3", "rotary_factor": 4.0, "rotary_low": 0.5, "rotary_high": 2.5, "rotary_context": 30}


@pytest.mark.mpi(sizes=(1, 4, 8))
@pytest.mark.parametrize("scaling", [{"rotary_scaling": "linear", "rotary_factor": 2.5}, LLAMA3], ids=["linear", "llama3"])
@pytest.mark.turns
def test_a_tied_head_and_stretched_positions_are_those_of_plain_torch(make_grid, world_size, scaling):
    name, axes = {1: ("serial", {"x": 1}), 4: ("summa", {"x": 2, "y": 2}), 8: ("cuboid", {"x": 2, "y": 2, "z": 2})}[world_size]
    grid = make_grid(**axes)
    config = replace(CONFIG, tied_head=True, kv_heads=4, **scaling)
    model = build(config, scheme(name, grid), torch.float64)
    assert not any(name.startswith("head") for name, _ in model.named_parameters())
    tokens, labels = batch_for(2, 2, 2)
    plain = PlainLlama(config, global_weights(model))
    check_parity(model, plain, lambda m: m(tokens, labels), lambda m: m.loss(tokens, labels), 1e-10)
    with grid.ledger.watch() as moved:
        model(tokens, labels).backward()
    step = model_volume(config, model.context, *tokens.shape).step()
    assert moved.words == step.forward.words + step.backward.words


def test_llama3_slows_slow_pairs_leaves_fast_ones_and_blends_between():
    config = replace(CONFIG, rotary_base=50.0)
    ratio = angles_of(16, replace(config, **LLAMA3)) / angles_of(16, config)
    assert ratio[0] == 1 and ratio[-1] == 0.25 and sum(0.25 < value < 1 for value in ratio.tolist()) >= 2


@pytest.mark.mpi(sizes=(4,))
def test_next_logits_are_those_of_the_whole_model(make_grid):
    config = replace(CONFIG, kv_heads=1)
    model = build(config, scheme("cuboid", make_grid(x=1, y=2, z=2)), torch.float64).eval()
    plain = PlainLlama(config, global_weights(model))
    plain.at(0, 0, training=False)
    tokens, _ = batch_for(1, 2, 2)
    want = plain.logits(tokens)[:, -1]
    assert (model.next_logits(tokens) - want).norm() <= 1e-10 * want.norm()


@pytest.mark.mpi(sizes=(8,))
def test_the_stream_is_gathered_once_for_q_and_kv_and_once_for_gate_and_up(make_grid):
    x, y, z = 1, 4, 2
    grid = make_grid(x=x, y=y, z=z)
    model = build(replace(CONFIG, layers=1), scheme("cuboid", grid), torch.float64)
    tokens, labels = batch_for(x, y, z)
    with grid.ledger.watch() as moved:
        model(tokens, labels)
    b, s, h, f, d, v = len(tokens), 9, CONFIG.hidden, CONFIG.ffn_dim, 6, CONFIG.vocabulary
    e, kv, ranks = b * s * h, 2 * CONFIG.num_kv_heads * d, x * y * z
    joined = (y - 1) * e + (z - 1) * b * s * (h + kv)
    out = (z - 1) * e + (y - 1) * e
    feed_forward = (y - 1) * e + (z - 1) * b * s * 2 * f + (z - 1) * b * s * f + (y - 1) * e
    head = (y - 1) * e + (z - 1) * b * s * v
    linears = joined + out + feed_forward + head
    pieces = ranks * (b // (x * z)) * s * kv // y  # two ranks share a kv head: each receives the other's piece
    embedding = (y - 1) * e
    norms = sum(all_reduced(b // (x * y) * s, z, i) for i in range(z)) * x * y * 3
    rows = b // (x * z) * s
    loss = x * z * sum(all_reduced(rows, y, i) + all_reduced(2 * rows, y, i) for i in range(y))
    loss += y * sum(all_reduced(1, x * z, i) for i in range(x * z))
    assert sum(grid.comm.allgather(moved.words)) == linears + pieces + embedding + norms + loss


def all_reduced(n: int, size: int, index: int) -> int:
    """Words that member `index` of `size` receives when n are all-reduced."""
    return n + (size - 2) * (n // size + (index < n % size)) if size > 1 else 0


@pytest.mark.mpi(sizes=(8,))
def test_kv_heads_that_contexts_cannot_exchange_are_named_with_what_would_fit(make_grid):
    grid, contexts = make_grid(cp=2, y=4), ContextOptions(kind="heads", fold=False)
    with pytest.raises(LayoutError) as raised:
        build(replace(CONFIG, heads=24, hidden=144, kv_heads=6, sequence=12), scheme("cuboid", grid, contexts=contexts))
    for text in ("kv_heads 6", "4 shards", "y=4", "'heads'", "fit heads 24: 4, 8, 12, 24"):
        assert text in str(raised.value)


@pytest.mark.mpi(sizes=(6,))
def test_a_run_of_an_axis_is_its_consecutive_members(make_grid):
    grid = make_grid(x=1, y=6, z=1)
    run = grid.contiguous_sub_axis(("y",), 3)
    assert (run.size, run.index) == (3, grid.rank % 3)
    got = run.all_gather(torch.tensor([grid.rank]))
    assert got.tolist() == [rank for rank in range(6) if rank // 3 == grid.rank // 3]
    assert grid.contiguous_sub_axis(("y",), 3) is run
    with pytest.raises(GridError, match="1, 2, 3, 6"):
        grid.contiguous_sub_axis(("y",), 4)


def test_a_dry_run_computes_no_rotary_tables():
    rotary: Any = Rotary(16, ModelConfig(family="llama", hidden=32, heads=2))
    rotary.angles = range(8)  # of which there is a number, and no multiple
    tables = rotary._table((range(7), range(9, 12)), torch.bfloat16, torch.device("meta"))
    assert {(one.shape, one.dtype, one.device.type) for one in tables} == {((10, 8), torch.bfloat16, "meta")}
