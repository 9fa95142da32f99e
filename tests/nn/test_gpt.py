"""A GPT on a grid is the same function as a plain torch model: loss, every raw gradient, and the words it moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm
from typing import Any

import pytest
import torch
from nn_oracle.volume import GPTVolume
from nn_parity import check_parity, global_weights
from pairs import turns
from plain_gpt import PlainGPT
from torch import Tensor

from summa3d.comm.grid import Place
from summa3d.layout import distribute
from summa3d.nn import GPT, ModelConfig, scheme

# 12 heads and h = 24 are divided by every axis used here; v, f and s are primes that none divides.
CONFIG = ModelConfig(layers=2, hidden=24, heads=12, ffn=29, sequence=11, vocabulary=37, dropout=0.1, attention_dropout=0.2)
GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(1, 3, 1), (3, 1, 1), (1, 1, 3)],
    4: [(2, 2, 1), (1, 2, 2), (2, 1, 2)],
    8: [(2, 2, 2), (1, 2, 4), (4, 1, 2)],
    12: [(2, 3, 2), (3, 2, 2)],
}
STEP, FIRST_ROW = 4, 5


def batch_for(x: int, y: int, z: int) -> tuple[Tensor, Tensor]:
    rows = lcm(x * y, x * z) * (2 if x * y * z < 8 else 1)
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = torch.randint(0, CONFIG.vocabulary, (2, rows, 9), generator=generator)
    labels[0, :3] = -100
    return tokens, labels


Case = tuple[tuple[int, int, int], bool]


def cases(ranks: int, first: bool, rest: bool) -> list[Case]:
    """Every grid with `regather` or without, in turn from `first` on, of twelve ranks one grid; `rest`: all other cases."""
    chosen = turns(GRIDS[ranks], (first, not first))[: 1 if ranks == 12 else None]
    return [case for case in product(GRIDS[ranks], (True, False)) if (case in chosen) is not rest]


def check_against_plain_torch(
    grid: Any, shape: tuple[int, int, int], regather: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model = GPT(CONFIG, scheme("cuboid", grid, regather), dtype, seed=3)
    plain = PlainGPT(CONFIG, global_weights(model), seed=3)
    tokens, labels = batch_for(*shape)
    check_parity(
        model,
        plain,
        lambda model: model(tokens, labels, step=STEP, first_row=FIRST_ROW),
        lambda plain: plain.loss(tokens, labels, STEP, FIRST_ROW),
        tolerance,
    )


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["turns", "rest"])
def test_loss_and_every_raw_gradient_equal_plain_torch(make_grid, world_size, rest):
    for shape, regather in cases(world_size, True, rest):
        x, y, z = shape
        check_against_plain_torch(make_grid(x=x, y=y, z=z), shape, regather, torch.float64, 1e-10)


@pytest.mark.mpi(sizes=(8,))
def test_float32_gradients_equal_plain_torch(make_grid):
    check_against_plain_torch(make_grid(x=2, y=2, z=2), (2, 2, 2), True, torch.float32, 2e-5)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(27,))
def test_one_cube_of_27_ranks(make_grid):
    check_against_plain_torch(make_grid(x=3, y=3, z=3), (3, 3, 3), True, torch.float64, 1e-10)


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 8, 12))
def test_weights_are_the_same_on_every_grid(make_grid, world_size):
    serial = dict(GPT(CONFIG, scheme("serial"), torch.float64, seed=3).named_parameters())
    for x, y, z in GRIDS[world_size]:
        grid = make_grid(x=x, y=y, z=z)
        for name, parameter in GPT(CONFIG, scheme("cuboid", grid), torch.float64, seed=3).named_parameters():
            assert torch.equal(parameter.data, distribute(serial[name].data, grid, parameter.sharding.layout)), name
    blocks = serial["blocks.0.mlp.up.weight"].data.chunk(2)
    assert not torch.equal(blocks[0], blocks[1])


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 8, 12))
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["turns", "rest"])
def test_a_step_moves_exactly_the_words_of_its_formula(make_grid, world_size, rest):
    for (x, y, z), regather in cases(world_size, False, rest):
        grid = make_grid(x=x, y=y, z=z)
        model = GPT(CONFIG, scheme("cuboid", grid, regather), torch.float64)
        tokens, labels = batch_for(x, y, z)
        with grid.ledger.watch() as forward:
            loss = model(tokens, labels)
        with grid.ledger.watch() as backward:
            loss.backward()
        cost = GPTVolume(CONFIG, model.context, *tokens.shape).step()
        assert (forward.words, forward.messages) == (cost.forward.words, cost.forward.messages)
        assert (backward.words, backward.messages) == (cost.backward.words, cost.backward.messages)


@pytest.mark.parametrize(("x", "y", "z"), [(2, 2, 2), (2, 3, 2)])
def test_a_blocks_linears_move_the_mean_words_of_the_design(x, y, z):
    config = replace(CONFIG, ffn=4 * CONFIG.hidden)
    b, s, h = lcm(x * y, x * z), 7, config.hidden
    totals = [0, 0, 0]
    for rank in range(x * y * z):
        kept, regathered = (
            GPTVolume(config, scheme("cuboid", Place({"x": x, "y": y, "z": z}, rank), regather), b, s).linears()
            for regather in (False, True)
        )
        for index, cost in enumerate((kept.forward, kept.backward, regathered.backward)):
            totals[index] += cost.words
    e = b * s * h
    assert totals[0] == totals[1] == (y - 1) * 4 * e + (z - 1) * 12 * e + (x - 1) * 12 * h * h
    assert totals[2] == 6 * (y - 1) * e + 17 * (z - 1) * e + 24 * (x - 1) * h * h


@pytest.mark.mpi(sizes=(1, 4, 8))
def test_next_logits_are_those_of_the_whole_model(make_grid, world_size):
    x, y, z = {1: (1, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2)}[world_size]
    model = GPT(CONFIG, scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64).eval()
    serial = GPT(CONFIG, scheme("serial"), torch.float64).eval()
    tokens, _ = batch_for(x, y, z)
    assert torch.allclose(model.next_logits(tokens), serial.next_logits(tokens), rtol=1e-12, atol=1e-14)
