"""Count of Python and C function calls in a warm `A @ B` on 1, 2, 4 and 8 ranks, relative to the counts of two older commits.

It also prints the depth of the call stack: the frames from `DistMatrix.__matmul__` to the first in the transport, both included,
of the deepest communication in the product. At fd9d67e they are 9 with the cuboid and 11 with SUMMA.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import FrameType
from typing import Any

from common import on_ranks, verdict

SIZE = 64
WARM_UPS = 3
TRANSPORT = "/summa3d/comm/transport/"
# The largest count over ranks of sys.setprofile's events call and c_call, with MPICH and node memory.
BEFORE = {
    "0b71ce9, before plans and executors were kept": {
        1: {"cuboid x=1,y=1,z=1": 458, "summa x=1,y=1": 739},
        2: {"cuboid x=1,y=1,z=2": 575, "cuboid x=1,y=2,z=1": 561, "summa x=1,y=2": 946},
        4: {"cuboid x=2,y=1,z=2": 678, "summa x=2,y=2": 1169},
        8: {"cuboid x=2,y=2,z=2": 781, "summa x=2,y=4": 1656},
    },
    "fd9d67e, before collectives were prepared": {
        1: {"cuboid x=1,y=1,z=1": 117, "summa x=1,y=1": 118},
        2: {"cuboid x=1,y=1,z=2": 249, "cuboid x=1,y=2,z=1": 193, "summa x=1,y=2": 341},
        4: {"cuboid x=2,y=1,z=2": 328, "summa x=2,y=2": 434},
        8: {"cuboid x=2,y=2,z=2": 407, "summa x=2,y=4": 816},
    },
}
LIMITS = {1: (0.6, 1.0), 2: (0.6, 0.75), 4: (0.6, 0.75), 8: (0.6, 0.75)}
"""Ranks → the largest share of the calls of each of the commits."""
FRAMES = 8


def main() -> None:
    """Count the calls on each number of ranks, and print whether they stay below the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().on_ranks:
        return count()
    for ranks, limits in LIMITS.items():
        now = json.loads(on_ranks(ranks, [__file__, "--on-ranks"]).splitlines()[-1])
        for name, (calls, frames) in now.items():
            print(f"{ranks} rank{'s' if ranks > 1 else ''}, {name}: {calls} calls")
            for (commit, counts), limit in zip(BEFORE.items(), limits, strict=True):
                share = calls / counts[ranks][name]
                print(f"  {share:.2f} of the {counts[ranks][name]} at {commit}")
                print("  " + verdict(f"at most {limit:.2f} of them", share <= limit))
            if ranks > 1:
                print("  " + verdict(f"{frames} frames to the transport, at most {FRAMES}", frames <= FRAMES))


def count() -> None:
    """Run on every rank; rank 0 prints the largest counts of calls and of frames over ranks as JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    world, result = MPI.COMM_WORLD, {}
    for name in next(iter(BEFORE.values()))[world.size]:
        result[name] = [max(counts) for counts in zip(*world.allgather(calls_of(name, world)), strict=True)]
    if world.rank == 0:
        print(json.dumps(result))


def calls_of(name: str, world: Any) -> tuple[int, int]:
    """This rank's calls in the fourth of four products, and its frames to the transport."""
    from summa3d.cli.gemm import parse_grid
    from summa3d.comm.grid import Grid
    from summa3d.gemm import DistMatrix
    from summa3d.gemm.algorithms.registry import algorithm

    algorithm_name, shape = name.split()
    with Grid(world, parse_grid(shape)) as grid:
        plan, calls, frames = algorithm(algorithm_name).plan("nn", SIZE, SIZE, SIZE), 0, 0
        a, b = (
            DistMatrix.from_function(lambda rows, columns: rows + columns, extent, grid, layout)
            for layout, extent in plan.stored[:2]
        )
        for _ in range(WARM_UPS):
            a @ b

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls, frames
            calls += event in ("call", "c_call")
            if event == "call" and TRANSPORT in frame.f_code.co_filename:
                frames = max(frames, depth(frame))

        sys.setprofile(profile)
        a @ b
        sys.setprofile(None)
    return calls, frames


def depth(frame: FrameType | None) -> int:
    """Return the number of frames from `__matmul__` to the first of them in the transport, both included; 0 without one."""
    names: list[str] = []
    while frame is not None and frame.f_code.co_name != "__matmul__":
        names.append(frame.f_code.co_filename)
        frame = frame.f_back
    first = next((place for place, name in enumerate(reversed(names), start=2) if TRANSPORT in name), 0)
    return first if frame is not None else 0


if __name__ == "__main__":
    sys.exit(main())
