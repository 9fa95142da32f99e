"""Processor time of planning products of operands in any layouts: one grid and two of up to 64 ranks, and a grid of 2,048."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
from common import verdict

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from any_layouts import grids_of, random_layout

CASES = 300
MOST_RANKS = 64
LIMITS = {"one grid": (5.0, 20.0), "two grids": (5.0, 20.0), "2,048 ranks": (100.0, 100.0)}
"""Milliseconds of the median and of 95 % of the cases."""
EXTENTS = (64, 257, 1024, 4096)


def main() -> None:
    """Plan random products, and print whether the times stay below the limits."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from summa3d.comm.grid import Place
    from summa3d.gemm import plan_any

    random = Random(7)
    grids = [grid for ranks in range(2, MOST_RANKS + 1) for grid in grids_of(ranks)]
    for name, limits in LIMITS.items():
        times = []
        for _ in range(CASES if name != "2,048 ranks" else 20):
            shape = random.choice(grids) if name != "2,048 ranks" else {"x": 8, "y": 16, "z": 16}
            grid = other = Place(shape)
            axes = shape
            if name == "two grids":
                axes = random.choice([dict(zip("uvw", each.values(), strict=True)) for each in grids_of(grid.size)])
                other = Place(axes, order="".join(random.sample("uvw", 3)))
            m, n, k = (random.choice(EXTENTS) for _ in range(3))
            a, b, c = (random_layout(random, each) for each in (shape, axes, shape))
            began = time.process_time()
            plan_any(a, b, m, n, k, grid, c, b_grid=other)
            times.append(1e3 * (time.process_time() - began))
        median, most = np.median(times), np.quantile(times, 0.95)
        print(f"{name}, {len(times)} cases: median {median:.2f} ms, 95 % {most:.2f} ms, longest {max(times):.2f} ms")
        print("  " + verdict(f"at most {limits[0]:g} and {limits[1]:g} ms", median <= limits[0] and most <= limits[1]))


if __name__ == "__main__":
    sys.exit(main())
