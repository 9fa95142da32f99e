"""Benchmark of a 2048³ float64 product on the grid 2,2,2 (8 ranks) against numpy's product with two threads in the same run."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from common import about, bench, conclude, note, options, save
from ranks import in_range

GRID, RANKS, THREADS = "x=2,y=2,z=2", 8, 2
LIMIT = 1.2


def main() -> None:
    """Run the benchmark in several jobs, and print whether the claim holds."""
    parser = options(__doc__, 7, "Time this many interleaved rounds in each job.")
    parser.add_argument("--size", type=int, default=2048, help="Set m, n and k.")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="Set the dtype of A, B and C.")
    parser.add_argument("--runs", type=int, default=3, help="Start this many jobs, one after the other.")
    args = parser.parse_args()
    size = str(args.size)
    product = ["--m", size, "--n", size, "--k", size, "--dtype", args.dtype, "--rounds", str(args.rounds)]
    runs: list[dict[str, Any]] = []
    for run in range(args.runs):
        runs.append(bench(RANKS, ["gemm", *product, "--numpy", str(THREADS), "--entry", f"cuboid:{GRID}"]))
        note(f"run {run + 1} of {args.runs}, load {os.getloadavg()[0]:.1f}")
    print(about(runs[-1]["machine"]))
    for place, row in enumerate(runs[0]["rows"]):
        ours = [run["rows"][place]["seconds"]["median"] for run in runs]
        numpy = [run["numpy"][0]["seconds"]["median"] for run in runs]
        ratios = [1 / run["rows"][place]["speed_over_numpy"] for run in runs]
        print(
            f"{row['label']}, {size}³ {args.dtype}: {median(ours) * 1e3:.1f} ms; "
            f"numpy, {THREADS} threads: {median(numpy) * 1e3:.1f} ms; "
            f"ratio {in_range(ratios, 3)}"
        )
        conclude([(f"within {LIMIT}× of numpy's time in the same run", median(ratios) <= LIMIT)])
    save({"kind": "vs_numpy", "runs": runs}, args.json)


if __name__ == "__main__":
    main()
