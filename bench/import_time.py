"""Time of `import summa3d.gemm` after numpy and mpi4py have been imported."""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

from common import environment, verdict

LIMIT = 0.15  # s
BEFORE = "import numpy\nfrom mpi4py import MPI\n"
CLOCKS = "time.perf_counter(), time.process_time()"
TIMED = f"import time\nwall, cpu = {CLOCKS}\nimport summa3d.gemm\nlater, used = {CLOCKS}\nprint(later - wall, used - cpu)"


def main() -> None:
    """Measure the import in fresh processes, and print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11, help="Start this many processes, after one that is not counted.")
    args = parser.parse_args()
    times, processor = zip(*[_seconds() for _ in range(args.runs + 1)][1:], strict=True)
    spread = f"{median(times):.3f} s [{min(times):.3f}–{max(times):.3f}]"
    print(f"import summa3d.gemm after numpy and mpi4py: {spread}, of them {median(processor):.3f} s of processor time")
    print(verdict(f"at most {LIMIT} s, median of {args.runs}", median(times) <= LIMIT))


def _seconds() -> tuple[float, float]:
    done = subprocess.run([sys.executable, "-c", BEFORE + TIMED], env=environment(), capture_output=True, text=True, check=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


if __name__ == "__main__":
    main()
