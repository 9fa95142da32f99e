"""The whole stack through its command line, on whatever MPI this environment has: a product, and training equal to serial."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest

STEPS = 5
# Small and in float64, dropout on: the claim is equality, not learning.
SETTINGS = {
    "dtype": "float64",
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.sequence": 32,
    "model.dropout": 0.1,
    "train.batch": 8,
    "train.steps": STEPS,
    "train.seed": 1,
    "train.evaluate_batches": 1,
    "train.sample_tokens": 1,
}


def train(folder: Path, ranks: int, grid: dict[str, int]) -> list[dict[str, float]]:
    """Train the demo for STEPS steps and return its metrics, one dict a step."""
    scheme = {"scheme": "cuboid", **{f"grid.{axis}": size for axis, size in grid.items()}} if grid else {"scheme": "serial"}
    settings = [part for key, value in {**SETTINGS, **scheme}.items() for part in ("--set", f"{key}={value}")]
    ended = jobs.run(["-m", "summa3d", "train", "demo", "--run", str(folder), *settings], ranks, timeout=300)
    assert ended.status == 0, ended.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] <= STEPS and "loss" in line]


def test_a_product_on_a_cube_of_eight_ranks_equals_the_serial_one() -> None:
    arguments = ["--m", "67", "--n", "41", "--k", "101", "--grid", "x=2,y=2,z=2", "--check", "--json"]
    ended = jobs.run(["-m", "summa3d", "gemm", *arguments], 8)
    assert ended.status == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["relative_error"] < 1e-14
    assert result["words_per_rank"] == result["words_per_rank_formula"]


def test_five_steps_of_the_demo_on_a_cube_lose_as_the_serial_run_does(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    serial = train(tmp_path / "serial", 1, {})
    cube = train(tmp_path / "cube", 8, {"x": 2, "y": 2, "z": 2})
    assert len(serial) == len(cube) == STEPS
    for one, other in zip(serial, cube, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-9)
