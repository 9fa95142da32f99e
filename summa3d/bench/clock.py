"""Wall time of work that all ranks of a grid do together: from the first rank's start to the last rank's end.

Ranks that outnumber cores do not start together, so no single rank can measure this time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ..comm.grid import BaseGrid
from ..comm.health import flight

NAP = 0.002  # seconds that a rank sleeps between two tests of a barrier


class Clock:
    """A stopwatch of all ranks of a grid.

    The ranks of one node read the same clock: a span lasts from the first rank's start to the last rank's end. Clocks of
    different nodes differ: across nodes, a span is the longest time that any rank measured.
    """

    def __init__(self, grid: BaseGrid) -> None:
        self.grid, self.world = grid, grid.world
        self.one_node = len(set(grid.job.nodes)) == 1

    def spans(self, *acts: Callable[[], Any]) -> list[float]:
        """Seconds of each of `acts`, run in order with a barrier before and after each; collective, equal on all ranks."""
        starts, ends = np.empty(len(acts)), np.empty(len(acts))
        for index, act in enumerate(acts):
            self.world.barrier()
            starts[index] = time.perf_counter()
            act()
            ends[index] = time.perf_counter()
            self.world.barrier()  # sleeps where the transport can: a finished rank must not take a core from the others
        if not self.one_node:
            return [float(span) for span in self._largest(ends - starts)]
        return [float(span) for span in self._largest(ends) + self._largest(-starts)]

    def _largest(self, values: np.ndarray) -> np.ndarray:
        largest = np.empty_like(values)
        self.world.comm.Allreduce(values, largest, MPI.MAX)
        return largest


def sleep_until_all_are_here(comm: MPI.Intracomm) -> None:
    """A barrier in which waiting ranks sleep and leave their cores idle; collective."""
    request = comm.Ibarrier()
    with flight.waiting_in("a barrier", "all ranks"):
        while not request.Test():
            time.sleep(NAP)
