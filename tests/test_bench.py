"""The scripts of bench/ that want a GPU: without one they say so; the host's way through them works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


def run(script: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["kernels.py", "gemm_vs_cublas.py", "block_vs_compile.py"])
def test_without_a_gpu_a_script_for_one_says_so_and_claims_nothing(script):
    said = run(script, CUDA_VISIBLE_DEVICES="")
    assert said.startswith("no GPU: ") and "hold" not in said.lower()


def test_the_race_against_cublas_can_be_tried_on_the_host(tmp_path):
    said = run("gemm_vs_cublas.py", "--device", "cpu", "--size", "64", "--rounds", "1", "--json", str(tmp_path / "race.json"))
    rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert [(row["library"], row["dtype"]) for row in rows] == [("numpy", "float64"), ("torch", "bfloat16"), ("torch", "float64")]
    assert all(row["difference"] < 1e-2 and row["share"] > 0 for row in rows) and "hold" not in said.lower()
