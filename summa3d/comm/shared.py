# Blocks of one axis in one stretch of node-shared memory, so that a gather is a view and costs no copy. Imports mpi4py, numpy.
# Next: collectives.py, which recognises such a block by its address; gemm/matrix.py, which allocates them.
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import GridError
from .arrays import Array, address
from .ledger import Amounts, Ledger
from .trace import Communication


class SharedBlocks:
    """The blocks of an axis's members, one after the other along dim 0, in an MPI shared-memory window.

    `block` is this rank's part, `whole` all of them: the all-gather of `block`, without moving anything. Who reads `whole`
    calls `ready` before, once all members have written, and waits for all of them before anyone overwrites a block.
    Creating and freeing are collective over the axis, whose members must share a node.
    Raises GridError where they do not, or where the node has too little shared memory.
    """

    def __init__(
        self, comm: MPI.Intracomm, label: str, sizes: Sequence[int], rest: Sequence[int], dtype: np.typing.DTypeLike
    ) -> None:
        self.comm, self.dtype = comm, np.dtype(dtype)
        self.traced: Communication | None = None  # the view that is being read, in a trace
        _check_one_node(comm, label)
        row = prod(rest) * self.dtype.itemsize
        self.window = _allocated(comm, label, sizes, row, self.dtype.itemsize)
        segment, _ = self.window.Shared_query(next((member for member, size in enumerate(sizes) if size * row), 0))
        memory: Any = MPI.memory.fromaddress(segment.address, sum(sizes) * row) if sum(sizes) * row else bytearray()
        self.whole: np.ndarray = np.frombuffer(memory, self.dtype).reshape(sum(sizes), *rest)
        start = sum(sizes[: comm.rank])
        self.block: np.ndarray = self.whole[start : start + sizes[comm.rank]]
        self.window.Lock_all(MPI.MODE_NOCHECK)

    @property
    def address(self) -> int:
        """Where this rank's block begins: how a collective recognises it."""
        return int(self.block.__array_interface__["data"][0])

    def ready(self, barrier: Callable[[], None]) -> np.ndarray:
        """`whole`, once every member has written its block; `barrier` is the axis's."""
        self.window.Sync()
        barrier()
        self.window.Sync()
        return self.whole

    def free(self) -> None:
        """Give the memory back. `block` and `whole` must not be used afterwards."""
        self.window.Unlock_all()
        self.window.Free()


class SharedViews:
    """The part of an axis that reads the members' shared blocks where they lie."""

    size: int
    label: str
    ledger: Ledger
    _shared: dict[int, SharedBlocks]
    barrier: Callable[[], None]

    def adopt(self, blocks: SharedBlocks) -> Array:
        """Recognise the members' shared blocks from now on; returns this member's."""
        self._shared[blocks.address] = blocks
        return blocks.block

    def view_gathered(self, block: Array, words: int | None = None) -> Array | None:
        """What `all_gather` along dim 0 would give, uncopied, if `block` is adopted; else None.

        Counts `words`; by default those of all_gather. The members may not overwrite their blocks until all have called
        `release`.
        """
        shared = self._shared.get(address(block)) if self._shared else None
        if shared is None:
            return None
        return self.view(shared, shared.whole.size - shared.block.size if words is None else words)

    def view(self, shared: SharedBlocks, words: int) -> Array:
        """All members' blocks, once they are written, `words` of which this member reads from others."""
        wall, cpu = time.perf_counter(), time.thread_time()
        whole = shared.ready(self.barrier)
        seconds, cpu_seconds = time.perf_counter() - wall, time.thread_time() - cpu
        amounts = Amounts(1, words, self.size - 1, words * shared.dtype.itemsize, seconds, cpu_seconds)
        self.ledger.record("view", self.label, str(shared.dtype), amounts)
        shared.traced = self.ledger.begin("view", self.label, str(shared.dtype), amounts, wall, seconds)
        return whole

    def release(self, block: Array) -> None:
        """Return once all members have read what they need of an adopted block; of other blocks, at once."""
        shared = self._shared.get(address(block)) if self._shared else None
        if shared is not None:
            wall, cpu = time.perf_counter(), time.thread_time()
            self.barrier()
            seconds, cpu_seconds = time.perf_counter() - wall, time.thread_time() - cpu
            line = self.ledger.record("view", self.label, str(shared.dtype), Amounts())
            self.ledger.complete(line, shared.traced, seconds, cpu_seconds, seconds)

    def free(self) -> None:
        """Give back the shared memory of adopted blocks (collective)."""
        for shared in self._shared.values():
            shared.free()
        self._shared.clear()


def _check_one_node(comm: MPI.Intracomm, label: str) -> None:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    inside = node.size
    node.Free()
    if comm.allreduce(inside, MPI.MIN) < comm.size:
        raise GridError(
            f"Axis {label} = {comm.size} does not lie inside one node, so its blocks cannot share memory. "
            "Use memory that is not shared, or an order of axes that keeps this one inside a node."
        )


def _allocated(comm: MPI.Intracomm, label: str, sizes: Sequence[int], row: int, itemsize: int) -> MPI.Win:
    try:
        return MPI.Win.Allocate_shared(sizes[comm.rank] * row, itemsize, comm=comm)
    except MPI.Exception as error:
        raise GridError(
            f"Axis {label} could not be given {sum(sizes) * row:,} bytes of node-shared memory ({error}). "
            "Use memory that is not shared, or raise the size of the node's shared-memory file system."
        ) from error
