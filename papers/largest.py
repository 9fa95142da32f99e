"""The largest job of Narayanan et al. 2021, dry: a trillion parameters on 3,072 GPUs, its words, bandwidths and checkpoint.

`python -m papers.largest` runs the model of 128 layers and hidden size 25,600 dry, on 8 tensor-parallel ranks × 64 stages × 6
replicas, with 1 chunk a rank (the released scripts) and 2 (the text), with and without the scatter of the stream. The bytes stand
beside the bandwidths and the checkpoint that the paper prints. `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import mpi4py

mpi4py.rc.initialize = False  # a dry run starts no MPI

import torch  # noqa: E402

from summa3d.dry.rank_classes import steps  # noqa: E402
from summa3d.train import config  # noqa: E402
from summa3d.train.dry_run import setting_of, training_of  # noqa: E402

LARGEST = [
    *("model.layers=128", "model.hidden=25600", "model.heads=160", "model.sequence=2048", "model.vocabulary=51200"),
    *("scheme=oned", "grid.y=8", "grid.pp=64", "grid.dp=6", "train.batch=3072", "train.accumulate=512"),
    *("dtype=bfloat16", "recompute=full", "replicas.zero=0", "device=cpu"),
]
CASES = {
    "v 1, naive": ["pipeline.scatter=false"],
    "v 1, scatter": [],
    "v 2, naive": ["pipeline.schedule=interleaved", "pipeline.chunks=2", "pipeline.scatter=false"],
    "v 2, scatter": ["pipeline.schedule=interleaved", "pipeline.chunks=2"],
}
AXES = ("y", "pp", "dp")
NODE, REPLICAS = 8, 6
TERA = 1e12
SECONDS = 5.139051377527358e19 / (3072 * 163e12)
"""Of a step, 102.6: the FLOPs of the paper's equation (3) at its 163 TFLOP/s on each of 3,072 GPUs. It prints no time."""
PIPELINE, DATA, CHECKPOINT = 0.892, 12.9, 13.8
"""The paper's effective bisection bandwidths in TB/s (§5.9), and its checkpoint in TB (§5.10)."""
BUDGET, CLOSE = 10.0, 0.15


def measure(changes: list[str]) -> dict[str, Any]:
    """One dry run: its CPU seconds; words of the rank that receives most and bytes of all ranks, by axis; peak; checkpoint."""
    begun = time.process_time()
    loaded = config.load("demo", [*LARGEST, *changes])
    setting = setting_of(loaded, 0, NODE)
    words, received, peak, checkpoint, parameters = Counter[str](), Counter[str](), 0, 0, 0
    for _, many, step in steps(setting, training_of(loaded)):
        for by_phase, found in ((step.words(), words), (step.received(), received)):
            totals = Counter[str]()
            for axes in by_phase.values():
                totals.update(axes)  # "pp=0+63", the sum of the tied table, has a line of its own
            for axis in AXES:
                found[axis] = max(words[axis], totals[axis]) if found is words else found[axis] + many * totals[axis]
        peak, checkpoint, parameters = max(peak, step.peak), max(checkpoint, step.checkpoint), step.elements
    assert setting.stages is not None
    edges = list(pairwise(setting.stages.homes))
    across = sum((one < 32) != (other < 32) for one, other in edges)
    return {
        "cpu_seconds": time.process_time() - begun,
        "parameters": parameters,
        "words": dict(words),
        "bytes": dict(received),
        "peak": peak,
        "checkpoint": checkpoint,
        "pipeline": received["pp"] / SECONDS / TERA,
        "pipeline_halves": received["pp"] * across / len(edges) / SECONDS / TERA,
        "data": received["dp"] / SECONDS / TERA,
        "data_halves": received["dp"] * 2 / REPLICAS / SECONDS / TERA,
    }


def main() -> None:
    """Print what each case moves, and what it is a second."""
    parser = argparse.ArgumentParser(prog="python -m papers.largest", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    file = parser.parse_args().json
    torch.set_num_threads(1)
    rows = {name: measure(changes) for name, changes in CASES.items()}
    print(f"{'':<14}{'CPU s':>7}{'GiB a rank':>12}" + "".join(f"{'words on ' + axis:>20}{'TB in all':>11}" for axis in AXES))
    for name, row in rows.items():
        moved = "".join(f"{row['words'][axis]:>20,}{row['bytes'][axis] / TERA:>11,.1f}" for axis in AXES)
        print(f"{name:<14}{row['cpu_seconds']:>7.1f}{row['peak'] / 2**30:>12.1f}{moved}")
    print(f"\nTB/s in a step of {SECONDS:.1f} s (paper: pipeline {PIPELINE}, data {DATA})")
    print(f"{'':<14}{'pipeline':>10}{'of halves':>11}{'data':>8}{'of halves':>11}")
    for name, row in rows.items():
        print(f"{name:<14}{row['pipeline']:>10.3f}{row['pipeline_halves']:>11.3f}{row['data']:>8.3f}{row['data_halves']:>11.3f}")
    best = rows["v 2, scatter"]
    alone, stored = best["bytes"]["dp"] / TERA / DATA, 12 * best["parameters"] / TERA
    print(f"data: at {DATA} TB/s, all bytes take {alone:.1f} s, {alone / SECONDS:.1%} of the step")
    print(f"checkpoint: {best['checkpoint'] / 1e9:.2f} GB of the fullest rank, {stored:.1f} TB in all (paper: {CHECKPOINT})")
    claims = {
        f"each dry run takes at most {BUDGET:.0f} s of CPU": all(row["cpu_seconds"] <= BUDGET for row in rows.values()),
        f"with 2 chunks and the scatter, all messages of the pipeline are within {CLOSE:.0%} of {PIPELINE} TB/s": (
            abs(best["pipeline"] / PIPELINE - 1) <= CLOSE
        ),
        f"a checkpoint is within {CLOSE:.0%} of {CHECKPOINT} TB": abs(stored / CHECKPOINT - 1) <= CLOSE,
    }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    if file:
        file.write_text(json.dumps({"kind": "ptdp_largest", "seconds": SECONDS, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(claims.values()))


if __name__ == "__main__":
    main()
