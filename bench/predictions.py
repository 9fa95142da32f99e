"""Benchmark of predictions: this machine is calibrated, and blocks and products are predicted before they are raced on it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import about, bench, conclude, on_ranks, options, save

RANKS = 8
SCHEMES = ("oned", "oned-sp", "summa", "cuboid")
BLOCKS = {"a block of h = 512": ("--hidden", "512", "--heads", "8"), "a block of h = 256": ("--hidden", "256", "--heads", "8")}
PRODUCTS = ((1536, 1536, 1536), (2048, 512, 2048), (512, 512, 8192))
ALIKE = 0.7
"""Kendall's tau of the order of predictions and of measured times, over the pairs of each race, is at least this."""


def main() -> None:
    """Calibrate, race, and print how far off predictions are and whether their order is that of the times."""
    parser = options(__doc__, 5, "Time this many interleaved rounds of each race.")
    parser.add_argument("--cluster", metavar="FILE", help="Predict with this description in place of a new calibration.")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        cluster = args.cluster or str(Path(folder) / "here.toml")
        if args.cluster is None:
            print(on_ranks(RANKS, ["-m", "summa3d", "bench", "calibrate", "--write", cluster]))
        races = {name: race(words, cluster, args.rounds) for name, words in arguments().items()}
    print(about(next(iter(races.values()))["machine"]))
    errors, orders = [], []
    for name, result in races.items():
        found = result["prediction"]
        errors += [abs(error) for error in found["errors"]]
        count = len(found["errors"])
        orders.append((found["kendall"], count * (count - 1) / 2))
        far = max(map(abs, found["errors"]))
        print(f"{name}: {count} rows, median error {found['median_error']:.0%}, largest {far:.0%}, tau {found['kendall']:.2f}")
    tau = sum(order * pairs for order, pairs in orders) / sum(pairs for _, pairs in orders)
    print(f"all {len(errors)} rows: median error {median(errors):.0%}, largest {max(errors):.0%}; load {load:.1f} at the start")
    conclude([(f"Kendall's tau over the pairs of each race ≥ {ALIKE}; {tau:.2f}", tau >= ALIKE)])
    save({"kind": "predictions", "load": load, "tau": tau, "median_error": median(errors), "races": races}, args.json)


def arguments() -> dict[str, list[str]]:
    """Name of a race → arguments of `summa3d bench`."""
    schemes = [part for name in SCHEMES for part in ("--scheme", name)]
    found = {name: ["block", *schemes, "--batch", "8", "--sequence", "256", *sizes] for name, sizes in BLOCKS.items()}
    for m, n, k in PRODUCTS:
        sizes = ["--m", str(m), "--n", str(n), "--k", str(k)]
        found[f"{m}×{n}×{k} on 1 to {RANKS} ranks"] = ["strong", *sizes, "--ranks", "1,2,3,4,5,6,7,8"]
    return found


def race(arguments: list[str], cluster: str, rounds: int) -> dict[str, Any]:
    """The result of one race, whose rows are predicted on a cluster; prints them."""
    result = bench(RANKS, [*arguments, "--rounds", str(rounds), "--cluster", cluster])
    for row, error in zip(result["rows"], result["prediction"]["errors"], strict=True):
        seconds = row["seconds"].get("both", row["seconds"])["median"]
        print(f"{row['label']:32} measured {seconds * 1e3:9.2f} ms, predicted {row['predicted'] * 1e3:9.2f} ms, {error:+.0%}")
    return result


if __name__ == "__main__":
    main()
