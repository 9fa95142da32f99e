"""Mixed grids, each with a scheme, a family and a schedule of its own: 20 clipped steps with dropout are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from small_runs import metrics_of, train_small

Settings = dict[str, Any]
RUN: Settings = {
    **{"model__layers": 5, "model__sequence": 12, "model__attention_dropout": 0.05, "train__steps": 20, "train__batch": 24},
    **{"train__accumulate": 2, "train__clip": 0.5, "train__evaluate_every": 10, "train__checkpoint_every": 0, "train__keep": 0},
}
GPT: Settings = {}
LLAMA: Settings = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
NEMOTRON: Settings = {"model__kv_heads": 2, "model__activation": "relu2"}
BERT: Settings = {"model__family": "bert", "model__vocabulary": 263}
CHUNKS: Settings = {"pipeline__schedule": "interleaved", "pipeline__chunks": 2}
V: Settings = {"pipeline__schedule": "zb-v", "pipeline__chunks": 2}
H1: Settings = {"pipeline__schedule": "zb-h1"}


def on(scheme: str, **axes: int) -> Settings:
    """A scheme on a grid."""
    return {"scheme": scheme, **{f"grid__{axis}": size for axis, size in axes.items()}}


RUNS: dict[int, list[tuple[Settings, Settings]]] = {
    2: [(GPT, {**on("serial", dp=2), "replicas__zero": 0}), (LLAMA, on("serial", pp=2) | CHUNKS), (BERT, on("serial", pp=2) | V)],
    3: [
        (LLAMA | {"model__layers": 7, "train__accumulate": 1}, on("serial", pp=3)),
        (BERT | {"model__layers": 7}, on("serial", pp=3) | H1),
        (GPT | {"model__layers": 7, "train__accumulate": 6}, on("serial", pp=3)),
        (LLAMA, {**on("serial", dp=3), "replicas__zero": 3}),
    ],
    4: [
        (BERT, on("cuboid", pp=2, x=2)),
        (GPT, {**on("serial", pp=2, dp=2), "replicas__zero": 2}),
        (LLAMA, {**on("serial", pp=2, dp=2), "replicas__zero": 3} | V),
        (GPT, on("oned-sp", pp=2, y=2)),
        (BERT, {**on("oned", pp=2, y=2), "pipeline__scatter": False} | H1),
    ],
    6: [
        (GPT, on("serial", pp=3, dp=2)),
        (BERT, {**on("oned", dp=3, y=2), "replicas__zero": 2}),
        (LLAMA | {"model__kv_heads": 3}, {**on("cuboid", pp=2, y=3), "pipeline__layers": "4,1"}),
    ],
    8: [
        (BERT, on("summa", pp=2, x=2, y=2)),
        (GPT, on("cuboid", pp=2, x=2, y=2)),
        (LLAMA, on("cuboid", pp=2, y=2, z=2) | CHUNKS),
        (BERT, on("tesseract", dp=2, x=2, y=2)),
        (GPT | {"model__heads": 12}, {**on("cuboid-sequence", dp=2, y=2, z=2), "recompute": "full"}),
        (LLAMA, {**on("cuboid", pp=2, y=2, z=2), "vectors": "diagonal"}),
        (GPT, {**on("oned", pp=4, y=2), "recompute": "full", "distribute_saved_activations": True}),
        (GPT | {"model__layers": 8, "train__accumulate": 4}, on("cuboid", pp=4, z=2) | V),
        (NEMOTRON, {**on("cuboid", pp=2, y=2, dp=2), "replicas__zero": 3}),
        (LLAMA, {**on("cuboid", dp=2, y=2, z=2), "vectors": "diagonal"}),
    ],
    9: [(BERT, on("oned", pp=3, y=3)), (GPT, {**on("summa", dp=3, x=3), "train__batch": 36})],
    12: [
        (LLAMA, on("oned", pp=3, dp=2, y=2)),
        (GPT, {**on("cuboid", pp=2, y=3, z=2), "train__batch": 36}),
        (BERT, {**on("cuboid", dp=3, pp=2, z=2), "replicas__zero": 3} | H1),
        (GPT, on("summa", pp=3, x=2, y=2)),
    ],
    16: [
        (GPT | {"model__layers": 8, "train__accumulate": 4}, on("summa", pp=4, x=2, y=2) | CHUNKS),
        (LLAMA, on("tesseract", pp=2, x=2, y=2, d=2)),
    ],
}
"""Ranks → models, each with the grid that it runs on."""


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(RUNS), timeout=900)
def test_20_clipped_steps_on_mixed_grids_are_those_of_one_rank(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    for number, (model, grid) in enumerate(RUNS[world_size]):
        alone, mixed = shared_tmp_path / f"alone{number}", shared_tmp_path / f"mixed{number}"
        settings = {**RUN, **model, **{key: value for key, value in grid.items() if key == "train__batch"}}
        if comm.rank == 0:
            alone.mkdir()
            mixed.mkdir()
            train_small(MPI.COMM_SELF, alone, scheme="serial", **settings)
        comm.Barrier()
        train_small(comm, mixed, **{**settings, **grid})
        for name in ("loss", "grad_norm", "validation_loss"):
            got, want = ([line[name] for line in metrics_of(folder) if name in line] for folder in (mixed, alone))
            assert got == pytest.approx(want, rel=1e-9), (name, model, grid)
        assert len(got) == 2
