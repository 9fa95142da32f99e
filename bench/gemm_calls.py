"""Count of Python and C function calls in a warm `A @ B`, relative to the counts at 0b71ce9, on 1, 2, 4 and 8 ranks."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from common import on_ranks, verdict

SIZE = 64
LIMIT = 0.6
# The largest count over ranks of sys.setprofile's events call and c_call, with MPICH and node memory.
BEFORE = {
    1: {"cuboid x=1,y=1,z=1": 458, "summa x=1,y=1": 739},
    2: {"cuboid x=1,y=1,z=2": 575, "cuboid x=1,y=2,z=1": 561, "summa x=1,y=2": 946},
    4: {"cuboid x=2,y=1,z=2": 678, "summa x=2,y=2": 1169},
    8: {"cuboid x=2,y=2,z=2": 781, "summa x=2,y=4": 1656},
}


def main() -> None:
    """Count the calls on each number of ranks, and print whether they stay below the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().on_ranks:
        return count()
    for ranks, before in BEFORE.items():
        now = json.loads(on_ranks(ranks, [__file__, "--on-ranks"]).splitlines()[-1])
        for name, calls in before.items():
            print(f"{ranks} ranks, {name}: {now[name]} calls, {calls} before: {now[name] / calls:.2f}")
            print("  " + verdict(f"at most {LIMIT:.2f} of them", now[name] <= LIMIT * calls))


def count() -> None:
    """Run on every rank; rank 0 prints the largest counts over ranks as JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    world, result = MPI.COMM_WORLD, {}
    for name in BEFORE[world.size]:
        result[name] = max(world.allgather(calls_of(name, world)))
    if world.rank == 0:
        print(json.dumps(result))


def calls_of(name: str, world: Any) -> int:
    """This rank's calls in the fourth of four products."""
    from summa3d.cli.gemm import parse_grid
    from summa3d.comm.grid import Grid
    from summa3d.gemm import DistMatrix
    from summa3d.gemm.algorithms.registry import algorithm

    found, shape = name.split()
    with Grid(world, parse_grid(shape)) as grid:
        plan, calls = algorithm(found).plan("nn", SIZE, SIZE, SIZE), 0
        a, b = (
            DistMatrix.from_function(lambda rows, columns: rows + columns, extent, grid, layout)
            for layout, extent in plan.stored[:2]
        )
        for _ in range(3):
            a @ b

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(profile)
        a @ b
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    sys.exit(main())
