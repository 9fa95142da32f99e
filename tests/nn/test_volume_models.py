"""Every family's step moves exactly the words and messages of its closed form, in every scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nn_oracle.volume_models import model_volume
from plain_vit import pictures
from scheme_table import FAMILIES, GRIDS, Family, rows_for, sequence_for

from summa3d.nn import ModelConfig, build, scheme

VIT = ModelConfig(family="vit", layers=1, hidden=24, heads=12, ffn=29, image=9, patch=3, channels=3, classes=7)
WITH_VIT = {**FAMILIES, "vit": Family(lambda scheme: VIT, None, pictures)}


FAMILY_NAMES = ("llama", "bert", "vit")


def grids_of(ranks: int) -> list[tuple[str, dict[str, int]]]:
    return [*GRIDS[ranks], *([("cuboid", {"x": 2, "y": 2, "z": 2})] if ranks == 8 else [])]


@pytest.mark.pairs
@pytest.mark.mpi(sizes=(2, 4, 8, 12))
@pytest.mark.parametrize("regather", [True, False], ids=["regather", "keep"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.turns
def test_a_step_moves_exactly_the_words_and_messages_of_its_formula(make_grid, world_size, family, regather):
    """Of eight ranks and more each family takes every other grid: the second has its turn where the first has not."""
    grids = grids_of(world_size)
    check(make_grid, family, regather, grids if world_size < 8 else grids[FAMILY_NAMES.index(family) % 2 :: 2])


@pytest.mark.wide
@pytest.mark.mpi(sizes=(8, 12))
@pytest.mark.parametrize("regather", [True, False], ids=["regather", "keep"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_so_it_does_on_every_grid(make_grid, world_size, family, regather):
    check(make_grid, family, regather, grids_of(world_size))


def check(make_grid: Any, family: str, regather: bool, grids: list[tuple[str, dict[str, int]]]) -> None:
    for name, axes in grids:
        on_grid = scheme(name, grid := make_grid(check=False, **axes), regather)
        config = replace(WITH_VIT[family].config(on_grid), dropout=0.0)
        if config.sequence % on_grid.residual.num_shards(1, grid.shape):
            assert family == "vit"  # an axis of 3 or 4 never splits 1 + n² positions
            continue
        sequence = config.sequence if family == "vit" else sequence_for(on_grid, config.sequence)
        model = build(config, on_grid, torch.float64)
        rows = rows_for(on_grid)
        batch = WITH_VIT[family].batch(config, rows, sequence)
        with grid.ledger.watch() as forward:
            loss = model(**batch)
        with grid.ledger.watch() as backward:
            loss.backward()
        cost = model_volume(config, on_grid, rows, sequence).step()
        for moved, said in ((forward, cost.forward), (backward, cost.backward)):
            assert (moved.words, moved.messages) == (said.words, said.messages), (name, axes)
