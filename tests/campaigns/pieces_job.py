"""Products in pieces, again and again, on ranks of which one strikes between two pieces; started by pieces.py.

HOW WHO COUNT SEED: at the COUNT-th local product of rank WHO, it is killed or stopped, or raises; or only (`delays`) every rank
sleeps now and then before one. If COUNT is odd, a rank that is killed is long in ending. The file `at` receives the time, and
`rankN` each rank's process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from summa3d import Grid
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.algorithms.workspace import Workspace
from summa3d.gemm.pieces.arrivals import GatheredBehind
from summa3d.layout import collect, distribute

SIZES = (211, 197, 193)
ROUNDS, SLEEP = 3, 0.002
SLOW = 256 << 20
"""Bytes that are freed in the end of a rank that is long in ending."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Between(Exception):
    """What a rank raises between two pieces."""


def strike(how: str, slow: bool) -> None:
    if how == "kill" and slow:  # MPI's launcher hears of the end before the lowest descriptor is closed, which takes long
        file = os.memfd_create("slow")
        os.posix_fallocate(file, 0, SLOW)
        os.dup2(file, 0)
        os.close(file)
    Path("at").write_text(str(time.time()))
    if how in SIGNALS:
        os.kill(os.getpid(), SIGNALS[how])
    raise Between("between two pieces")


def plant(how: str, who: bool, count: int, chance: random.Random) -> None:
    """Have this rank strike at its `count`-th local product, or sleep before some."""
    accumulate, calls = Workspace.accumulate, [0]

    def between(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if how == "delays" and chance.random() < 0.3:
            time.sleep(SLEEP * chance.random())
        if how != "delays" and who and calls[0] == count:
            strike(how, slow=count % 2 == 1)
        accumulate(*arguments, **options)

    Workspace.accumulate = between  # type: ignore[method-assign]


def products(size: int) -> list[tuple[str, dict[str, int], str, dict[str, Any]]]:
    """Algorithm, grid, form and options of products whose messages are cut: each operand moves in one of them."""
    square = {"x": size // 2, "y": 2} if size % 2 == 0 else {"x": 1, "y": size}
    return [
        ("cuboid", {"x": 1, "y": size, "z": 1}, "nn", {}),
        ("cuboid", {"x": square["x"], "y": 1, "z": square["y"]}, "tn", {"b_fine": 1}),
        ("summa", square, "nn", {}),
        ("summa", square, "nt", {}),
        ("oned-row", {"y": size}, "nn", {}),
    ]


def ahead(executor: Any, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Two products whose B is on its way before they begin, that of the second behind the first."""
    gathers = [executor.start_gather("b", b, behind=True) for _ in range(2)]
    ready = [gather if isinstance(gather, GatheredBehind) else gather.wait() for gather in gathers]
    return [executor.start_in_pieces({"a": a}, {"b": gather}, True).wait() for gather in ready]


def main() -> None:
    how, who, count, seed = sys.argv[1], *map(int, sys.argv[2:5])
    world = MPI.COMM_WORLD
    Path(f"rank{world.rank}").write_text(str(os.getpid()))
    plant(how, world.rank == who, count, random.Random(seed * 64 + world.rank))
    random_numbers, (m, n, k), wrong = np.random.default_rng(seed), SIZES, 0
    for name, shape, form, options in products(world.size):
        plan = ALGORITHMS[name].plan(form, m, n, k, pieces=5, **options)
        a, b = (random_numbers.integers(-9, 10, extents).astype(float) for extents in (plan.a_shape, plan.b_shape))
        want = (a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b)
        with Grid(world, shape, node_memory=False) as grid:
            executor = ALGORITHMS[name].executor(plan, grid)
            blocks = distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout)
            for _ in range(ROUNDS):
                for c in (executor.run(*blocks), *(ahead(executor, *blocks) if name == "cuboid" else ())):
                    wrong += not np.array_equal(collect(c, grid, plan.c_layout, plan.c_shape), want)
    if world.rank == 0:
        print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
