"""What a dry run costs: CPU seconds beyond importing torch, and memory, of models up to a trillion parameters on 3,072 ranks.

`python bench/dry_run.py` runs each case in a process of its own, without MPI_Init, and prints a line each with its budget;
`--json` prints the same as one line of JSON. Exit 1 where a budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

GPT3 = ["model.layers=96", "model.hidden=12288", "model.heads=96", "model.sequence=2048", "model.vocabulary=51200"]
TRILLION = ["model.layers=128", "model.hidden=25600", "model.heads=160", "model.sequence=2048", "model.vocabulary=51200"]
CASES: dict[str, tuple[list[str], float]] = {
    "demo": (["grid.x=2", "grid.y=2", "grid.z=2"], 2.0),
    "175B on 1,024 ranks": (
        [*GPT3, "grid.x=16", "grid.y=8", "grid.z=8", "train.batch=1024", "dtype=bfloat16", "recompute=full"],
        5.0,
    ),
    "1T on 3,072 ranks": (
        [
            *TRILLION,
            "grid.x=48",
            "grid.y=8",
            "grid.z=8",
            "train.batch=3072",
            "train.accumulate=8",
            "dtype=bfloat16",
            "recompute=full",
        ],
        10.0,
    ),
}
"""Case → what it changes of the demo's configuration, and its budget in CPU seconds."""
MEMORY = 1 << 30
"""Bytes that any of them may take."""
PROGRAM = """
import mpi4py; mpi4py.rc.initialize = False
import json, resource, sys, time
import torch
torch.set_num_threads(1)
begun = time.process_time()
from summa3d.train import config
from summa3d.train.dry_run import predict
found = predict(config.load("demo", [*sys.argv[1:], "device=cpu"]), 1)
seconds = time.process_time() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "memory": peak, "parameters": found["parameters"], "peak": found["peak"]}))
"""


def measure() -> list[dict[str, Any]]:
    """One row a case."""
    rows = []
    for name, (changes, budget) in CASES.items():
        done = subprocess.run([sys.executable, "-c", PROGRAM, *changes], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        rows.append({"case": name, "budget": budget, **json.loads(done.stdout)})
    return rows


def main() -> None:
    """Print what each case takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    as_json = parser.parse_args().json
    rows = measure()
    if as_json:
        print(json.dumps({"kind": "dry_run", "rows": rows}))
    else:
        print(f"{'case':<22}{'parameters':>22}{'CPU s':>8}{'budget':>8}{'MiB':>8}{'GiB a rank':>12}")
        for row in rows:
            sizes = f"{row['memory'] / 2**20:>8.0f}{row['peak'] / 2**30:>12.2f}"
            print(f"{row['case']:<22}{row['parameters']:>22,}{row['seconds']:>8.2f}{row['budget']:>8.1f}{sizes}")
    sys.exit(any(row["seconds"] > row["budget"] or row["memory"] > MEMORY for row in rows))


if __name__ == "__main__":
    main()
