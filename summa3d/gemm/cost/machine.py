"""A machine model of six numbers, and the predicted time of a product on it: coarse, to compare algorithms."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dtypes import Dtype
from ..local.blas import accumulate

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Machine:
    """A machine as one rank sees it while all ranks work. The defaults are one core of a server and its share of a network.

    flops : float64 operations per second of a large local product
    half : the side at which a dim costs a local product half its speed; s rows run at s/(s + half)
    byte_time : seconds per byte received
    latency : seconds per message
    memory_time : seconds per byte read or written in memory: packing, and the sums of a reduce-scatter
    cores : cores that the ranks share; None gives each rank its own
    node : the ranks share one node's memory (comm/transport/node.py), where the cuboid's gathered operands are read in place
    """

    flops: float = 50e9
    half: float = 8
    byte_time: float = 1e-9
    latency: float = 2e-6
    memory_time: float = 1e-10
    cores: int | None = None
    node: bool = False

    def crowding(self, ranks: int) -> float:
        """By how much ranks slow each other down: ranks per core, at least 1."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def product(self, m: float, n: float, k: float, dtype: Dtype) -> float:
        """Seconds of one local product."""
        slowdown = 1.0
        for extent in (m, n, k):
            if extent <= 0:
                return 0.0
            slowdown *= (extent + self.half) / extent
        return dtype.flops * m * n * k / (self.flops * dtype.speed) * slowdown

    def transfer(self, gathered: float, reduced: float, messages: float, dtype: Dtype) -> float:
        """Seconds to receive words: copied once where gathered; where reduced also read, added, and written."""
        passes = 3 * self.memory_time * reduced + self.memory_time * gathered
        return dtype.nbytes * (self.byte_time * (gathered + reduced) + passes) + self.latency * messages

    def node_transfer(self, copied: float, reduced: float, messages: float, dtype: Dtype) -> float:
        """Seconds of `transfer` through a node buffer: own words are copied into a slot, summands are read, added and written."""
        return dtype.nbytes * self.memory_time * (2 * copied + 3 * reduced) + self.latency * messages


def calibrate(comm: MPI.Intracomm | None = None, seconds: float = 0.3) -> Machine:
    """Measure this machine (collective over `comm`, all ranks busy at once); the same result, of the slowest rank, on all.

    Without `comm` one rank has the machine to itself, and communication is a copy in memory.
    """
    budget = seconds / 5
    large, small = _product_rate(512, budget), _product_rate(64, budget)
    half = max(1.0, 64 * ((large / small) ** (1 / 3) - 1))
    memory_time = _seconds(_copy(1 << 22), budget) / (2 << 22)
    byte_time, latency = memory_time, 1e-6
    if comm is not None and comm.size > 1:
        latency = _seconds(_gather(comm, 8), budget, comm) / (comm.size - 1)
        nbytes = 1 << 19
        byte_time = max(0.0, _seconds(_gather(comm, nbytes), budget, comm) / ((comm.size - 1) * nbytes) - latency / nbytes)
    mine = np.array([1 / large, half, byte_time, latency, memory_time])
    if comm is not None and comm.size > 1:
        from mpi4py import MPI

        comm.Allreduce(MPI.IN_PLACE, mine, MPI.MAX)
    per_flop, half, byte_time, latency, memory_time = (float(value) for value in mine)
    return Machine(1 / per_flop, half, byte_time, latency, memory_time)


def _product_rate(side: int, budget: float) -> float:
    a, out = np.ones((side, side)), np.empty((side, side))
    return 2 * side**3 / _seconds(lambda: accumulate(a, a, "nn", out), budget)


def _copy(nbytes: int) -> Callable[[], Any]:
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    return lambda: np.copyto(target, source)


def _gather(comm: MPI.Intracomm, nbytes: int) -> Callable[[], Any]:
    part, whole = np.ones(nbytes, np.uint8), np.empty(nbytes * comm.size, np.uint8)
    return lambda: comm.Allgather(part, whole)


def _seconds(call: Callable[[], Any], budget: float, comm: MPI.Intracomm | None = None) -> float:
    """Median seconds of a call, repeated for about `budget` seconds and as often on every rank."""
    call()
    start = time.perf_counter()
    call()
    repeats = int(min(200, max(3, budget / max(time.perf_counter() - start, 1e-7))))
    if comm is not None:
        repeats = comm.bcast(repeats)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)
