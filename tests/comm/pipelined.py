"""A program of 4 ranks: 2 stages of 2 ranks, one forward and one backward in turn, with sums inside each stage.

Messages between the stages are so large that MPI sends them only once the receiver has asked; between them ranks sleep in sums.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np
from mpi4py import MPI

from summa3d.comm.grid import Grid

STAGES, BATCHES, WORDS, SKEW = 2, 4, 16_000, 4


def one_forward_one_backward(stage: int) -> list[str]:
    """The order of a stage: forwards that fill the pipeline, a forward and a backward in turn, backwards that drain it."""
    first = STAGES - 1 - stage
    return ["forward"] * first + ["forward", "backward"] * (BATCHES - first) + ["backward"] * first


def step(grid: Grid, chance: random.Random) -> None:
    """One batch of micro-batches, with pauses of up to a millisecond."""
    stages, inner = grid["pp"], grid["z"]
    other, summand, sends = 1 - stages.index, np.ones(64), []
    larger = "forward" if inner.index else "backward"  # so that the two ranks of a stage are never in step
    for direction in one_forward_one_backward(stages.index):
        words, tag = WORDS * (1 if direction == larger else SKEW), int(direction == "forward")
        starts = stages.index == (direction == "backward")
        if not starts:
            received = stages.receive(np.empty(words), other, tag)
            assert received[0] == received[-1] == words
        time.sleep(chance.random() / 1000)
        assert inner.all_reduce(summand)[0] == 2
        if starts:
            sends.append(stages.start_send(np.full(words, float(words)), other, tag))
    for send in sends:
        send.wait()
    inner.all_reduce(summand)


def main() -> None:
    grid = Grid(MPI.COMM_WORLD, {"pp": STAGES, "z": 2}, order=["z", "pp"], node_memory=True)
    assert grid.staged == ("pp", "z")
    for seed in range(int(sys.argv[1])):
        step(grid, random.Random(4 * seed + MPI.COMM_WORLD.rank))
    if MPI.COMM_WORLD.rank == 0:
        print("done")


if __name__ == "__main__":
    main()
