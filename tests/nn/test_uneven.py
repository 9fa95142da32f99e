"""Sizes that no axis divides: whole heads, groups, sequences and positions, more on some ranks than on others, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nn_parity import check_parity, global_weights
from plain_gpt import PlainGPT
from plain_llama import PlainLlama
from serial_runs import FEW, check_against_serial

from summa3d.dry.rank_classes import classes
from summa3d.dry.step import Setting
from summa3d.nn import ModelConfig, build, scheme

GPT = ModelConfig(layers=2, hidden=91, heads=7, ffn=53, sequence=11, vocabulary=101, dropout=0.1, attention_dropout=0.2)
LLAMA = replace(GPT, family="llama", hidden=98, rotary_base=50.0, norm_eps=1e-3)
BATCH = 5
# ranks → scheme, grid: each axis splits heads, groups, batch, sequence, hidden, ffn or vocabulary into unlike parts.
GRIDS: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("serial", {"x": 1})],
    2: [("oned", {"y": 2}), ("oned-sp", {"y": 2}), ("summa", {"x": 2, "y": 1}), ("cuboid", {"z": 2})],
    3: [("oned", {"y": 3}), ("cuboid", {"x": 3}), ("cuboid-sequence", {"y": 3})],
    4: [
        ("summa", {"x": 2, "y": 2}),
        ("summa-transposed", {"x": 2, "y": 2}),
        ("cuboid", {"y": 2, "z": 2}),
        ("cuboid", {"x": 2, "y": 2}),
        ("cuboid-sequence", {"x": 2, "y": 2}),
    ],
    6: [("cuboid", {"x": 2, "y": 3}), ("cuboid-sequence", {"y": 3, "z": 2}), ("summa", {"x": 3, "y": 2}), ("cuboid", {"x": 6})],
    8: [("tesseract", {"x": 2, "y": 2, "d": 2}), ("cuboid", {"x": 2, "y": 2, "z": 2}), ("oned", {"y": 8})],
}


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("config", [GPT, replace(LLAMA, kv_heads=7), replace(LLAMA, kv_heads=1)], ids=["gpt2", "kv7", "kv1"])
def test_loss_and_every_raw_gradient_equal_plain_torch(make_grid, world_size, config):
    tokens, labels = torch.randint(0, config.vocabulary, (2, BATCH, 11), generator=torch.Generator().manual_seed(3))
    labels[0, :3] = -100
    plain = PlainGPT if config.family == "gpt2" else PlainLlama
    for name, axes in GRIDS[world_size]:
        stored = {"cuboid": "diagonal" if axes.get("y") == axes.get("z") else "copied", "summa": "root-only"}
        vectors = stored.get(name, "copied") if world_size in (4, 6) else "copied"
        model = build(config, scheme(name, make_grid(**axes), vectors=vectors), torch.float64, seed=3)
        check_parity(
            model,
            plain(config, global_weights(model), seed=3),
            lambda m: m(tokens, labels, step=4, first_row=5),
            lambda m: m.loss(tokens, labels, 4, 5),
            1e-10,
        )


def test_ranks_of_unlike_heads_are_of_two_classes_where_all_columns_are_even() -> None:
    model = replace(LLAMA, kv_heads=7, ffn=56, vocabulary=96, sequence=12)
    assert classes(Setting(model, 4, "oned", {"y": 2})) == {0: 1, 1: 1}
    assert classes(Setting(replace(model, kv_heads=1), 4, "oned", {"y": 2})) == {0: 1, 1: 1}
    assert classes(Setting(replace(model, hidden=96, heads=8, kv_heads=8), 4, "oned", {"y": 2})) == {0: 2}


SIZES = {"model__heads": 7, "model__hidden": 91, "model__ffn": 53, "model__sequence": 11, "train__batch": 20, **FEW}
RUNS: dict[int, list[dict[str, Any]]] = {
    4: [{"grid__dp": 2, "grid__y": 2, "replicas__zero": 3}],
    8: [
        {"grid__pp": 2, "grid__dp": 2, "grid__x": 2, "replicas__zero": 1, "model__layers": 2},
        {"scheme": "cuboid-sequence", "grid__dp": 2, "grid__x": 2, "grid__y": 2, "replicas__zero": 2, "model__family": "llama"},
    ],
}


@pytest.mark.mpi(sizes=tuple(RUNS), timeout=300)
def test_a_run_of_unlike_parts_is_that_of_one_rank(comm, world_size, shared_tmp_path):
    for number, changes in enumerate(RUNS[world_size]):
        rotary = {"model__hidden": 98, "model__kv_heads": 7} if "model__family" in changes else {}
        check_against_serial(comm, shared_tmp_path / str(number), {**SIZES, **rotary}, 1e-9, train__sample_tokens=3, **changes)
