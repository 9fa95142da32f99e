"""Benchmark of A·Aᵀ of one matrix beside the general product of the same layouts: times, words and multiply-adds."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from common import conclude, itself, options, save
from ranks import started, tell

LAYOUTS = ("m:x k:y", "m:(x,y) k")
TIME, WORK, SMALL_WORK = 0.62, 0.52, 0.56
"""Shares of the general product that whole and packed take at most: its time, its multiply-adds, and those at n = 37."""


def main() -> None:
    """Run the benchmark on 4 ranks, print the figures and whether the claims hold; of 3×3 ranks those of the plan alone."""
    parser = options(__doc__, 7)
    parser.add_argument("--size", type=int, default=4096, help="Multiply matrices of this many rows and columns.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.size, args.rounds)
    from summa3d.comm.grid import Place
    from summa3d.gemm import plan_syrk

    print(
        f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {args.size}² float64, medians of {args.rounds} rounds' quotients"
    )
    rows, claims = itself(4), []
    for layout, row in zip(LAYOUTS, rows, strict=True):
        seconds = row["seconds"]
        for name in ("whole", "packed"):
            quotients = [mine / other for mine, other in zip(seconds[name], seconds["general"], strict=True)]
            words = row["measured_words"][name] / row["measured_words"]["general"]
            share, spread = median(quotients), f"{min(quotients):.2f}–{max(quotients):.2f}"
            print(f"2×2, A {layout}, {name}: {share:.2f} ({spread}) of the time, {words:.2f} of the busiest rank's words")
            claims.append((f"A {layout}, {name}: at most {TIME} of the time", share <= TIME))
    for side, n in ((2, 37), (2, args.size), (3, 37), (3, args.size)):
        for storage in ("full", "lower"):
            plan = plan_syrk(LAYOUTS[0], n, n, Place({"x": side, "y": side}), storage=storage)
            work, words = plan.max_multiply_adds / plan.general.max_multiply_adds, plan.words / plan.general.words
            print(f"{side}×{side}, n = {n}, {storage}: {work:.3f} of the multiply-adds, {words:.3f} of the words, by {plan.way}")
            most = SMALL_WORK if n == 37 else WORK
            claims.append((f"{side}×{side}, n = {n}, {storage}: at most {most} of the multiply-adds", work <= most))
    conclude(claims)
    save({"kind": "symmetric", "rows": rows}, args.json)


def measure(size: int, rounds: int) -> None:
    """Run on every rank; rank 0 prints what is measured in each layout as JSON."""
    world, rows = started(), list[dict[str, Any]]()
    from summa3d.bench.products import race_symmetric
    from summa3d.cli.gemm import element
    from summa3d.comm.grid import Grid
    from summa3d.gemm import DistMatrix

    with Grid(world, {"x": 2, "y": 2}) as grid:
        for layout in LAYOUTS:
            a = DistMatrix.from_function(element("float64"), (size, size), grid, layout)
            rows.append(race_symmetric(a, "nt", rounds))
    tell(world, rows)


if __name__ == "__main__":
    main()
