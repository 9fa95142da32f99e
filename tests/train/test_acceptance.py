"""Replicas of a pipeline of cuboids on 16 ranks: the serial run. It goes on on any grid; each rank writes its share of it.

Starts real jobs, so that no rank waits, busily, for what others do in between.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import devices
import jobs
import pytest
from small_runs import assignments, metrics_of, tensors_of, write_corpus

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="other processes have no pretended device")

STEPS, MORE = 20, 22
SETTINGS: dict[str, Any] = {
    **{"model__layers": 6, "model__hidden": 36, "model__sequence": 8, "model__attention_dropout": 0.05},
    **{"train__batch": 32, "train__accumulate": 4, "train__clip": 0.5, "train__decay_to": 1.0, "train__evaluate_every": 0},
    **{"train__evaluate_batches": 1, "train__checkpoint_every": 0, "train__keep": 3},
}
WHOLE = {"scheme": "cuboid", "grid__pp": 2, "grid__dp": 2, "grid__y": 2, "grid__z": 2}
CHUNKS = {"pipeline__schedule": "interleaved", "pipeline__chunks": 2, "pipeline__layers": "0,1,1,1,1,1,1,0"}
SHARES: dict[str, dict[str, Any]] = {
    "zero 1": {"replicas__zero": 1},
    "zero 2": {"replicas__zero": 2, "pipeline__schedule": "zb-h1"},
    "zero 3": {"replicas__zero": 3, "pipeline__schedule": "zb-v", "pipeline__chunks": 2},
}
"""What the replicas share, and the schedule of their pipelines."""
GOES_ON: dict[str, tuple[int, dict[str, Any]]] = {
    "chunks": (4, {"scheme": "serial", "grid__pp": 4, **CHUNKS}),
    "replicas": (8, {"scheme": "summa", "grid__dp": 2, "grid__x": 2, "grid__y": 2}),
    "serial": (1, {"scheme": "serial"}),
}
"""Where the run goes on: ranks and settings."""


def train(folder: Path, ranks: int, *more: str, **changes: Any) -> None:
    """A job that trains in `folder`."""
    settings = assignments(folder / "corpus.txt", **SETTINGS, **changes)
    words = ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)], *more]
    ended = jobs.run(["-m", "summa3d", *words], ranks, timeout=900)
    assert ended.status == 0, ended.stdout + ended.stderr


@pytest.mark.wide
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_replicas_of_a_pipeline_of_cuboids_are_the_serial_run_and_go_on_on_any_grid(
    tmp_path: Path, shares: dict[str, Any]
) -> None:
    alone, staged = tmp_path / "alone", tmp_path / "staged"
    for folder in (alone, staged):
        folder.mkdir()
        write_corpus(folder / "corpus.txt")
    train(staged, 16, train__steps=STEPS, **WHOLE, **shares)
    index = json.loads((staged / "run" / "checkpoints" / f"step-{STEPS}" / "index.json").read_text())
    sizes = [entry["bytes"] for entry in index["files"].values()]
    assert len(sizes) == 16 and max(sizes) <= 1.2 * sum(sizes) / 16, sizes
    train(alone, 1, scheme="serial", train__steps=STEPS)
    train(alone, 1, "--resume", scheme="serial", train__steps=MORE)
    want, lines = tensors_of(alone / "run" / "checkpoints" / f"step-{MORE}"), metrics_of(alone)
    assert len(lines) == MORE and sum(name.startswith("optimizer.") for name in want) == 2 / 3 * len(want)
    for name, (ranks, settings) in GOES_ON.items():
        shutil.copytree(staged, tmp_path / name)
        train(tmp_path / name, ranks, "--resume", train__steps=MORE, **settings)
        found = metrics_of(tmp_path / name)
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in found] == pytest.approx([line[key] for line in lines], rel=1e-9), (name, key)
        for tensor, one in tensors_of(tmp_path / name / "run" / "checkpoints" / f"step-{MORE}").items():
            assert (one - want[tensor]).norm() <= 1e-9 * want[tensor].norm(), (name, tensor)
