"""CUDA-aware MPI: the host transport on device pointers, once the caller's stream has finished writing them."""

from __future__ import annotations

import time
from typing import Any

from ..device.arrays import Array, address, count
from ..device.backend import Backend
from .host import HostTransport


class DeviceMemory:
    """Consecutive elements of device memory, which mpi4py takes by address; a slice of it is one too."""

    def __init__(self, backend: Backend, address: int, length: int, itemsize: int) -> None:
        self.backend, self.address, self.length, self.itemsize = backend, address, length, itemsize

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> DeviceMemory:
        start, stop, _ = part.indices(self.length)
        return DeviceMemory(self.backend, self.address + start * self.itemsize, max(0, stop - start), self.itemsize)


class CudaAwareTransport(HostTransport):
    """MPI straight on device memory. The host waits for the caller's stream before each call, and inside MPI for its end.

    MPI knows no streams: what an array holds must have been written, and nothing may still read what MPI will overwrite, when
    MPI is called. So the host waits for an event of the caller's stream, and of no other. What MPI has written when it is
    done is there for whatever is queued afterwards.
    """

    def __init__(self, backend: Backend, limit: int | None = None) -> None:
        super().__init__(limit)
        self.backend = backend
        self.stream = backend.stream()

    def memory(self, array: Array) -> DeviceMemory:
        """The memory of `array`; blocks the host until the caller's stream has finished."""
        began = time.perf_counter()
        self.backend.record(self.backend.current(array)).synchronize()
        self.waited += time.perf_counter() - began
        return DeviceMemory(self.backend, address(array), count(array), array.itemsize)

    def buffer(self, memory: Any) -> Any:
        """`memory` as a CUDA array, which mpi4py reads."""
        return self.backend.buffer(memory.address, memory.length * memory.itemsize)

    def copy(self, target: Any, source: Any) -> None:
        """Copy on a stream of its own, and wait for it: MPI's part of the same array may be written at the same time."""
        self.backend.copy(target.address, source.address, source.length * source.itemsize, self.stream)
        self.backend.record(self.stream).synchronize()
