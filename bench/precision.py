"""Comparison of the final losses of the demo in float32, bfloat16 and float16, after equal steps."""

from __future__ import annotations

import tempfile
from math import prod
from typing import Any

from common import conclude, from_ranks, options, save

CLAIM = 0.02
DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    """Train the demo in each dtype, and print whether the claims hold."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="Train this many steps in each dtype.")
    parser.add_argument("--grid", default="2,2,2", metavar="X,Y,Z", help="Set the sizes of the grid axes x, y and z.")
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
    within = f"within {CLAIM:.0%} of float32's after {args.steps} steps on {args.grid}"
    for dtype in DTYPES[1:]:
        off = {key: ended[dtype][key] / ended["float32"][key] - 1 for key in ("loss", "validation_loss")}
        conclude((f"{dtype} {key} {within}: {by:+.2%}", abs(by) <= CLAIM) for key, by in off.items())
    save(ended, args.json)


def _train(dtype: str, steps: int, grid: dict[str, int]) -> dict[str, Any]:
    """Train the demo in `dtype` and return the summary of the run."""
    changes = {"dtype": dtype, "train.steps": steps, "train.keep": 0, "train.sample_tokens": 0, "train.evaluate_every": 0}
    changes |= {f"grid.{axis}": size for axis, size in grid.items()}
    assignments = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        train = ("-m", "summa3d", "train", "demo", "--run", folder, "--json")
        summary: dict[str, Any] = from_ranks(prod(grid.values()), *train, *assignments)
    return summary


if __name__ == "__main__":
    main()
