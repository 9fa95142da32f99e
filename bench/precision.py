"""Comparison of the final losses of the demo in float32, bfloat16 and float16, after equal steps."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import on_ranks, verdict

CLAIM = 0.02
DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    """Train the demo in each dtype, and print whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="Train this many steps in each dtype.")
    parser.add_argument("--grid", default="2,2,2", metavar="X,Y,Z", help="Set the sizes of the grid axes x, y and z.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the summaries of the runs to FILE.")
    args = parser.parse_args()
    grid = dict(zip("xyz", map(int, args.grid.split(",")), strict=True))
    ended = {}
    for dtype in DTYPES:
        ended[dtype] = summary = _train(dtype, args.steps, grid)
        print(
            f"{dtype:<9} loss {summary['loss']:.4f} · validation {summary['validation_loss']:.4f} · "
            f"{summary['step_seconds']:.0f} s · skipped {summary['skipped_steps']} · bytes received {summary['bytes_by_dtype']}",
            flush=True,
        )
    for dtype in DTYPES[1:]:
        for key in ("loss", "validation_loss"):
            off = ended[dtype][key] / ended["float32"][key] - 1
            claim = f"{dtype} {key} within {CLAIM:.0%} of float32's after {args.steps} steps on {args.grid}"
            print(verdict(f"{claim}: {off:+.2%}", abs(off) <= CLAIM))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(ended, indent=1) + "\n")


def _train(dtype: str, steps: int, grid: dict[str, int]) -> dict[str, Any]:
    """Train the demo in `dtype` and return the summary of the run."""
    ranks = grid["x"] * grid["y"] * grid["z"]
    changes = {"dtype": dtype, "train.steps": steps, "train.keep": 0, "train.sample_tokens": 0, "train.evaluate_every": 0}
    changes |= {f"grid.{axis}": size for axis, size in grid.items()}
    assignments = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        out = on_ranks(ranks, ["-m", "summa3d", "train", "demo", "--run", folder, "--json", *assignments])
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
