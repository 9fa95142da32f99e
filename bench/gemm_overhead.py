"""Overhead of a 64×64×64 product on 2 ranks over the bare MPI collective and numpy product that it contains, in µs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import about, overhead, save, verdict

SIZE = 64
GRIDS = ({"x": 1, "y": 1, "z": 2}, {"x": 1, "y": 2, "z": 1})
LIMIT = 30.0  # µs
WARM_UPS = 50


def main() -> None:
    """Measure the overhead on each grid, and print whether it stays below the limit."""
    what = "Time this many calls of each variant, in turn."
    result, file = overhead(__file__, __doc__, 2, "--calls", 1000, what, measure)
    print(about(result["machine"]))
    for row in result["rows"]:
        grid = ",".join(str(size) for size in row["grid"].values())
        bare = ", ".join(f"{name} {taken:.1f}" for name, taken in row["bare_us"].items())
        print(f"{grid}: ours {row['ours_us']:.1f} µs; bare: {bare}; {row['overhead_us']:.1f} µs more than the fastest")
        print("  " + verdict(f"at most {LIMIT:.0f} µs more, median of {result['calls']} calls", row["overhead_us"] <= LIMIT))
    save(result, file)


def measure(calls: int) -> None:
    """Run on every rank: time our product and the bare calls on each grid, in turn; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    from summa3d.bench.machine import machine
    from summa3d.bench.products import sleep_until_all_are_here

    world = MPI.COMM_WORLD
    found = machine(world)
    sleep_until_all_are_here(world)
    rows = [compare(world, grid, calls) for grid in GRIDS]
    if world.rank == 0:
        print(json.dumps({"kind": "overhead", "machine": found, "calls": calls, "rows": rows}))


def compare(world: Any, grid: dict[str, int], calls: int) -> dict[str, Any]:
    """Median times on one grid in µs, the largest over ranks; collective."""
    from summa3d.bench.products import Problem, ProductEntry, ProductRunner

    runner = ProductRunner(ProductEntry("cuboid", grid, Problem(SIZE, SIZE, SIZE)), world)
    contenders: dict[str, Callable[[], Any]] = {"ours": runner.run, **bare(world, runner, grid)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in range(calls + WARM_UPS):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
            if call >= WARM_UPS:
                times[name].append(taken)
    medians = {name: max(world.allgather(median(taken))) * 1e6 for name, taken in times.items()}
    ours = medians.pop("ours")
    runner.free()
    return {"grid": grid, "ours_us": ours, "bare_us": medians, "overhead_us": ours - min(medians.values())}


def bare(comm: Any, runner: Any, grid: dict[str, int]) -> dict[str, Callable[[], Any]]:
    """The collective and the product that ours contains, as bare calls of mpi4py and numpy into preallocated arrays."""
    import numpy as np

    a, b, c = runner.a.block.copy(), runner.b.block.copy(), np.empty_like(runner.c.block)
    if grid["y"] == 2:
        gathered = np.empty((SIZE, SIZE))

        def gather() -> None:
            comm.Allgather(a, gathered)
            np.matmul(gathered, b, out=c)

        return {"Allgather + matmul": gather}
    partial, parts = np.empty((SIZE, SIZE)), np.empty((2, SIZE // 2, SIZE))

    def reduce_scatter() -> None:
        np.matmul(a, b, out=partial)
        comm.Reduce_scatter_block(partial, c)

    def all_to_all() -> None:
        np.matmul(a, b, out=partial)
        comm.Alltoall(partial, parts)
        np.add(parts[0], parts[1], out=c)

    return {"matmul + Reduce_scatter_block": reduce_scatter, "matmul + Alltoall + add": all_to_all}


if __name__ == "__main__":
    sys.exit(main())
