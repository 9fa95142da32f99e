# How long something takes that all ranks of a grid do together: from when the first begins until the last has finished.
# Imports comm. Ranks that outnumber the cores do not begin together: no rank's own clock tells it.
# Next: contest.py, blocks.py, gemm.py, which measure with it.
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ..comm.grid import Grid


class Clock:
    """A stopwatch of all ranks of a grid.

    The ranks of one node read the same clock: a span is from the first rank's start to the last rank's end, which a rank that got
    its core late cannot tell alone. Across nodes clocks differ, and a span is the longest that any rank saw.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.world = grid, grid.world
        self.one_node = len(set(grid.nodes)) == 1

    def spans(self, *acts: Callable[[], Any]) -> list[float]:
        """Seconds of each act, one after the other, all ranks waiting for each other before each (collective); equal on all."""
        starts, ends = np.empty(len(acts)), np.empty(len(acts))
        for index, act in enumerate(acts):
            self.world.barrier()
            starts[index] = time.perf_counter()
            act()
            ends[index] = time.perf_counter()
            self.world.barrier()  # asleep where that is possible: who has finished must not slow the others down
        if not self.one_node:
            return [float(span) for span in self._largest(ends - starts)]
        return [float(span) for span in self._largest(ends) + self._largest(-starts)]

    def _largest(self, values: np.ndarray) -> np.ndarray:
        largest = np.empty_like(values)
        self.world.comm.Allreduce(values, largest, MPI.MAX)
        return largest
