"""The largest job of Narayanan et al. 2021, dry: a trillion parameters on 3,072 GPUs, its words, bandwidths and checkpoint.

`python bench/ptdp_largest.py` runs the model of 128 layers, hidden size 25,600, on 8 tensor-parallel ranks × 64 stages × 6 replicas
dry, with v 1 (the released scripts) and v 2 (the text) chunks a rank, with and without the scatter of the stream, and holds its bytes
against the bandwidths and the checkpoint that the paper prints. `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mpi4py

mpi4py.rc.initialize = False  # a dry run starts no MPI

import torch  # noqa: E402
from common import verdict  # noqa: E402

from summa3d.dry.rank_classes import steps  # noqa: E402
from summa3d.train import config  # noqa: E402
from summa3d.train.dry_run import predict, setting_of, training_of  # noqa: E402

LARGEST = [
    *("model.layers=128", "model.hidden=25600", "model.heads=160", "model.sequence=2048", "model.vocabulary=51200"),
    *("scheme=oned", "grid.y=8", "grid.pp=64", "grid.dp=6", "train.batch=3072", "train.accumulate=512"),
    *("dtype=bfloat16", "recompute=full", "replicas.zero=0", "device=cpu"),
]
INTERLEAVED = ["pipeline.schedule=interleaved", "pipeline.chunks=2"]
NODE = 8
TERA = 1e12
SECONDS = 5.139051377527358e19 / (3072 * 163e12)
"""Of a step: the paper's equation (3) for this model, divided by its 163 TFLOP/s on each of 3,072 GPUs. It prints no time."""
PAPER = {"pp": 0.892, "dp": 12.9, "checkpoint": 13.8}
"""Effective bisection bandwidths of pipeline and data parallelism, TB/s, and the size of the checkpoint, TB (§5.9, §5.10)."""
BUDGET = 10.0
"""CPU seconds of a dry run."""


def total_bytes(settings: list[str]) -> dict[str, int]:
    """Bytes that all ranks receive in a step, by axis: y inside a stage, pp between stages, dp over replicas."""
    loaded, found = config.load("demo", settings), dict.fromkeys(("y", "pp", "dp"), 0)
    for _, many, step in steps(setting_of(loaded, 0, NODE), training_of(loaded)):
        for axes in step.received().values():
            for axis, received in axes.items():
                name = axis.partition("=")[0]  # the two holders of the tied table: pp=0+63
                if name in found:
                    found[name] += many * received
    return found


def measure(chunks: int, scatter: bool) -> dict[str, Any]:
    """One dry run: CPU seconds, a rank's words by axis, the bytes of all ranks, and what they are a second."""
    settings = [*LARGEST, *(INTERLEAVED if chunks > 1 else []), f"pipeline.scatter={str(scatter).lower()}"]
    begun = time.process_time()
    found = predict(config.load("demo", settings), NODE)
    seconds = time.process_time() - begun
    moved = total_bytes(settings)
    boundaries = 64 * chunks - 1
    return {
        "chunks": chunks,
        "scatter": scatter,
        "cpu_seconds": seconds,
        "parameters": found["parameters"],
        "peak": found["peak"],
        "words": {axis: max(one["words"] for one in found["stages"]) if axis == "pp" else _words(found, axis) for axis in ("y", "pp", "dp")},
        "bytes": moved,
        "all_links": {axis: moved[axis] / SECONDS / TERA for axis in ("pp", "dp")},
        "halves": moved["pp"] * (2 * chunks - 1) / boundaries / SECONDS / TERA,
        "checkpoint": {"rank": found["checkpoint"], "all": 12 * found["parameters"]},
    }
