"""Benchmark of products against ScaLAPACK's p?gemm and numpy with all cores, in interleaved rounds.

COSMA's fractions of numpy's speed, which were noted in an earlier run, are shown for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from common import HERE, bench, note, options, save, verdict
from ranks import spread
from scalapack import NotInstalled, Scalapack, Sizes, Tuned

from summa3d.bench.tables import table
from summa3d.cli.report import write
from summa3d.launcher.runtime import usable_cores

CASES = {"sq2048": (2048, 2048, 2048), "sq4096": (4096, 4096, 4096), "tall": (8192, 1024, 1024), "largek": (1024, 1024, 16384)}
DTYPES = ("float64", "float32")
OURS = "ours"
PEER = "ScaLAPACK"
WITHIN = 1.02  # at P = 1, and where COSMA reaches LEVEL, times within this factor count as equal
LEVEL = 0.95
GEOMETRIC_MEAN = 1.2
SQUARES = {2: 0.93, 4: 0.93, 8: 0.90}  # least part of numpy's speed for the squares


def arguments() -> argparse.Namespace:
    """The parsed command line."""
    parser = options(__doc__, 5, "Run this many interleaved rounds. Each round starts new jobs of every library.")
    sizes = f"Run this case: {', '.join(CASES)}, or sizes of your own. The option may be repeated. The default is all of these."
    parser.add_argument("--case", action="append", metavar="NAME|M,N,K", help=sizes)
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="Set the dtype of A, B and C. The default is both.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="P", help="Run on these rank counts.")
    parser.add_argument("--repeat", type=int, default=3, help="Time this many products in each job, after a warm-up product.")
    blocks = "Try these block sizes of ScaLAPACK: the first on every process grid, the others on the fastest grid."
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 64, 256], help=blocks)
    blas = "Use this BLAS for ScaLAPACK instead of OpenBLAS, such as libmkl_rt.so."
    parser.add_argument("--peer-blas", type=Path, metavar="FILE", help=blas)
    return parser.parse_args()


def main() -> None:
    """Run all cases, and print the table and whether the claims hold."""
    args = arguments()
    cases = dict(_case(text) for text in args.case or CASES)
    try:
        library = Scalapack(args.peer_blas)
        note("ScaLAPACK's BLAS: " + ", ".join(library.libraries))
    except NotInstalled as missing:
        library = None
        note(f"ScaLAPACK is not compared: {missing}. Ours is compared with numpy alone.")
    result: dict[str, Any] = {"kind": "versus", "peers": [OURS, PEER] if library else [OURS]}
    result["quotients"] = [f"{PEER} ÷ {OURS}"] if library else []
    result |= {"noted": ["COSMA"], "rows": [], "loads": [], "scalapack_blas": library.libraries if library else None}
    noted = json.loads((HERE / "cosma_fractions.json").read_text(encoding="utf-8"))
    case_runs = [
        CaseRun(name, sizes, dtype, ranks, library, args.blocks)
        for name, sizes in cases.items()
        for dtype in args.dtype or DTYPES
        for ranks in args.ranks
    ]
    for count in range(args.rounds):
        for case_run in case_runs:
            result["loads"].append(os.getloadavg()[0])
            result["machine"] = case_run.round(args.repeat)
            note(f"round {count + 1} of {args.rounds}: {case_run.latest()}")
    result["rows"] = [case_run.row(noted["fractions"]) for case_run in case_runs]
    result["noted_source"] = noted["source"]
    result["remarks"] = remarks(result)
    print(table(result).text())
    save(result, args.json)
    if args.json is not None:
        note(f"plot: {write(result, args.json.parent / args.json.stem, ['png'])[0]}")


def _case(text: str) -> tuple[str, Sizes]:
    if text in CASES:
        return text, CASES[text]
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise SystemExit(f"--case {text}: give {', '.join(CASES)} or three sizes such as 256,256,256")
    m, n, k = map(int, parts)
    return "×".join(parts), (m, n, k)


class CaseRun:
    """One case on P ranks: in each round, the median time of each library, and of numpy in the same job as ours."""

    def __init__(self, name: str, sizes: Sizes, dtype: str, ranks: int, library: Scalapack | None, blocks: list[int]) -> None:
        self.name, self.sizes, self.dtype, self.ranks = name, sizes, dtype, ranks
        self.threads = min(ranks, usable_cores())
        self.tuned = Tuned(library, (ranks, sizes, dtype), blocks) if library else None
        self.rounds: list[dict[str, float]] = []
        self.settings: dict[str, str] = {}
        self.blas: dict[str, Any] = {}

    def round(self, repeat: int) -> dict[str, Any]:
        """Run each library once; returns the machine as our ranks report it."""
        m, n, k = map(str, self.sizes)
        options = ["--m", m, "--n", n, "--k", k, "--dtype", self.dtype, "--rounds", str(repeat)]
        ours = bench(self.ranks, ["gemm", *options, "--numpy", str(self.threads)])
        times = {"numpy": ours["numpy"][0]["seconds"]["median"]}
        (row,) = ours["rows"]
        times[OURS] = row["seconds"]["median"]
        self.settings[OURS] = row["label"]
        if self.tuned:
            times[PEER], setting, blas = self.tuned.round(repeat)
            self.settings[PEER] = str(setting)
            self.blas = {"core_type": blas["core_type"], "gflops_per_core": blas["gflops_per_core"], "file": blas["blas"]}
        self.rounds.append(times)
        machine: dict[str, Any] = ours["machine"]
        return machine

    def latest(self) -> str:
        """The times of the latest round as text."""
        times = "  ".join(f"{peer} {seconds * 1e3:.2f} ms" for peer, seconds in self.rounds[-1].items())
        return f"{self.name} {self.dtype} P={self.ranks}  {times}"

    def row(self, noted: dict[str, dict[str, float]]) -> dict[str, Any]:
        """The row of the case: medians over the rounds of times, fractions and quotients."""
        peers = [peer for peer in self.rounds[0] if peer != "numpy"]
        quotients = {f"{PEER} ÷ {OURS}": spread(one[PEER] / one[OURS] for one in self.rounds)} if PEER in peers else {}
        cosma = noted.get(f"{self.name} {self.dtype}", {}).get(str(self.ranks))
        m, n, k = self.sizes
        return {
            **{"case": self.name, "m": m, "n": n, "k": k, "dtype": self.dtype, "ranks": self.ranks},
            **{"numpy_threads": self.threads, "numpy_seconds": median(one["numpy"] for one in self.rounds)},
            "seconds": {peer: median(one[peer] for one in self.rounds) for peer in peers},
            "fractions": {peer: median(one["numpy"] / one[peer] for one in self.rounds) for peer in peers},
            **{"quotients": quotients, "noted": {} if cosma is None else {"COSMA": cosma}},
            **{"settings": self.settings, "scalapack_blas": self.blas, "rounds": self.rounds},
        }


def remarks(result: dict[str, Any]) -> list[str]:
    """The lines below the table: threads, ScaLAPACK's BLAS, and whether the claims hold."""
    rows = result["rows"]
    cores = result["machine"]["cores"]
    lines = [f"numpy has min(P, {cores}) threads, on this machine's {cores} cores. COSMA: {result['noted_source']}."]
    blas = next((row["scalapack_blas"] for row in rows if row["scalapack_blas"]), None)
    if blas:
        speeds = [row["scalapack_blas"]["gflops_per_core"] for row in rows]
        kind = f" ({blas['core_type']})" if blas["core_type"] else ""
        lines.append(f"ScaLAPACK's BLAS: {blas['file']}{kind}, one core {median(speeds):.1f} float64 Gflop/s")
    return [*lines, *(f"{OURS}: {line}" for line in claims(rows, OURS))]


def claims(rows: list[dict[str, Any]], own: str) -> list[str]:
    """One line for each claim that the cases of this run can test."""
    lines = []
    against = [row for row in rows if f"{PEER} ÷ {own}" in row["quotients"]]
    if against:
        quotients = {_name(row): (row["quotients"][f"{PEER} ÷ {own}"]["median"], row["ranks"]) for row in against}
        behind = [name for name, (quotient, ranks) in quotients.items() if quotient * (WITHIN if ranks == 1 else 1) < 1]
        mean = geometric_mean(quotient for quotient, _ in quotients.values())
        lines.append(verdict(f"ahead of ScaLAPACK in every case (P = 1: within 2 %){_but(behind)}", not behind))
        said = f"geometric mean over ScaLAPACK ≥ {GEOMETRIC_MEAN}: {mean:.2f} ({len(quotients)} cases)"
        lines.append(verdict(said, mean >= GEOMETRIC_MEAN))
    squares = [row for row in rows if row["m"] == row["n"] == row["k"] and row["ranks"] in SQUARES]
    if squares:
        low = [_name(row) for row in squares if row["fractions"][own] < SQUARES[row["ranks"]]]
        bars = ", ".join(f"{bar} at P = {ranks}" for ranks, bar in SQUARES.items())
        lines.append(verdict(f"squares reach {bars} of numpy's speed{_but(low)}", not low))
    noted = [row for row in rows if "COSMA" in row["noted"]]
    if noted:
        less = [_name(row) for row in noted if _below_cosma(row["fractions"][own], row["noted"]["COSMA"])]
        lines.append(verdict(f"at or above COSMA's noted fraction of numpy's speed{_but(less)}", not less))
    return lines


def _below_cosma(own: float, cosma: float) -> bool:
    return own * (WITHIN if cosma >= LEVEL else 1) < cosma


def _but(names: list[str]) -> str:
    return f", except {'; '.join(names)}" if names else ""


def _name(row: dict[str, Any]) -> str:
    return f"{row['case']} {row['dtype']} P={row['ranks']}"


if __name__ == "__main__":
    main()
