"""MPI on page-locked (pinned) copies of device arrays, for an MPI without CUDA and for ranks that share a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..device.arrays import Array, address, count, dtype_name
from ..device.arrival import Held
from ..device.backend import Backend
from ..profile.timeline import Span, Timed, Timeline
from .call import Counts, Requests, are_done, wait_for
from .flat import FlatTransport
from .host import HostTransport

SMALLEST = 1 << 12
"""Bytes of the smallest buffer; larger ones are powers of two, so that few sizes serve all."""


class Buffers:
    """A pool of page-locked buffers. A buffer is reused once a stream has passed the event with which it was given back."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._free: dict[int, list[np.ndarray]] = {}
        self._leaving: list[tuple[Any, np.ndarray]] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> np.ndarray:
        """At least `nbytes`, as bytes."""
        self._collect()
        size = max(SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
        if self._free.get(size):
            return self._free[size].pop()
        self.nbytes += size
        return self._backend.pinned(size)

    def give(self, memory: np.ndarray, event: Any = None) -> None:
        """Take it back, to be used again after `event`."""
        if event is None:
            self._free.setdefault(len(memory), []).append(memory)
        else:
            self._leaving.append((event, memory))

    def _collect(self) -> None:
        leaving, self._leaving = self._leaving, []
        for event, memory in leaving:
            self.give(memory, None if event.done else event)


class PinnedCopy:
    """A pinned copy of a device array, or a buffer for one: `host` is passed to MPI, `d2h` is the span of its D2H copy."""

    def __init__(self, memory: np.ndarray, array: Array, d2h: Span | None = None) -> None:
        self.memory, self.array, self.d2h = memory, array, d2h
        name = dtype_name(array)
        kind = np.dtype("float16" if name == "bfloat16" else name)  # two bytes either way: MPI moves them, and never adds them
        self.nbytes = count(array) * kind.itemsize
        self.host = memory[: self.nbytes].view(kind)


class PinnedTransfer(Timed):
    """MPI's work in flight on pinned copies. `wait` completes it and queues the H2D copy, for which the caller's stream waits."""

    def __init__(
        self, transport: PinnedTransport, requests: Requests, sent: PinnedCopy | None, received: PinnedCopy | None
    ) -> None:
        self.transport, self.requests, self.sent, self.received = transport, requests, sent, received
        self.begun_on = None if received is None else transport.backend.current(received.array)
        self.h2d = Span("H2D copy")
        d2h_copies = [copy.d2h for copy in (sent, received) if copy is not None and copy.d2h is not None]
        self.spans = (*d2h_copies, *([] if received is None else [self.h2d]))

    @property
    def done(self) -> bool:
        """Return whether MPI is done."""
        return are_done(self.requests)

    def wait(self) -> None:
        """Block the host until MPI is done, then queue the H2D copy."""
        wait_for(self.requests)
        self.transport.arrived(self)


class PinnedTransport(FlatTransport):
    """The host transport on page-locked copies of device arrays.

    A started communication has been passed to MPI when its call returns: at the start the host waits for the D2H copy of this
    rank's part (an event of this stream), at the end for MPI, but never for the H2D copy. Sums are the host transport's.
    """

    def __init__(self, timeline: Timeline, limit: int | None = None) -> None:
        self.timeline, self.backend, self.host = timeline, timeline.backend, HostTransport(limit)
        self.datatype, self.operation = self.host.datatype, self.host.operation
        self.stream = self.backend.stream()
        self.held, self.buffers = Held(), Buffers(self.backend)
        self.in_flight: set[PinnedTransfer] = set()

    def close(self) -> None:
        """Wait for the H2D copies in flight."""
        self.backend.record(self.stream).synchronize()

    def all_gather(self, comm: MPI.Comm, block: Array, out: Array, counts: Sequence[int], blocking: bool) -> Requests:
        """As HostTransport's, on pinned copies."""
        sent, received = self._to_host(block), self._pinned(out)
        return self._started(self.host.all_gather(comm, sent.host, received.host, counts, False), sent, received)

    def all_to_all(self, comm: MPI.Comm, array: Array, out: Array, counts: Counts, blocking: bool) -> Requests:
        """As HostTransport's, on pinned copies."""
        sent, received = self._to_host(array), self._pinned(out)
        return self._started(self.host.all_to_all(comm, sent.host, received.host, counts, False), sent, received)

    def all_reduce(self, comm: MPI.Comm, array: Array, out: Array, op: str, blocking: bool) -> Requests:
        """As HostTransport's, on pinned copies; in place, one copy serves both ways."""
        self.operation(array, op)
        sent = self._to_host(array)
        received = PinnedCopy(sent.memory, out, sent.d2h) if out is array else self._pinned(out)
        host = sent.host if out is array else received.host
        requests = self.host.all_reduce(comm, sent.host, host, op, False)
        return self._started(requests, None if out is array else sent, received)

    def broadcast(self, comm: MPI.Comm, array: Array, root: int, blocking: bool) -> Requests:
        """As HostTransport's: a D2H copy on the root, H2D copies on the others."""
        mine = comm.rank == root
        held = self._to_host(array) if mine else self._pinned(array)
        requests = self.host.broadcast(comm, held.host, root, False)
        return self._started(requests, held if mine else None, None if mine else held)

    def reduce(self, comm: MPI.Comm, array: Array, out: Array | None, op: str, root: int, blocking: bool) -> Requests:
        """As HostTransport's: D2H copies everywhere, one H2D copy on the root."""
        self.operation(array, op)
        sent = self._to_host(array)
        received = None if out is None else self._pinned(out)
        requests = self.host.reduce(comm, sent.host, None if received is None else received.host, op, root, False)
        return self._started(requests, sent, received)

    def send(self, comm: MPI.Comm, array: Array, to: int, tag: int) -> Requests:
        """As HostTransport's, after a D2H copy."""
        sent = self._to_host(array)
        return self._started(self.host.send(comm, sent.host, to, tag), sent, None)

    def receive(self, comm: MPI.Comm, array: Array, source: int, tag: int) -> Requests:
        """As HostTransport's, with an H2D copy at the end."""
        received = self._pinned(array)
        return self._started(self.host.receive(comm, received.host, source, tag), None, received)

    def arrived(self, transfer: PinnedTransfer) -> None:
        """Give back the buffer that MPI has sent; queue the H2D copy of the received one, and make the caller's stream wait."""
        self.in_flight.discard(transfer)
        if transfer.sent is not None:
            self.buffers.give(transfer.sent.memory)
        if transfer.received is None:
            return
        array, memory = transfer.received.array, transfer.received.memory
        caller, begun_on = self.backend.current(array), transfer.begun_on
        self.backend.wait(self.stream, self.backend.record(caller))  # what still reads the memory of `array` comes first
        elsewhere = begun_on if begun_on is not None and begun_on.ptr != caller.ptr else None
        if elsewhere is not None:
            self.backend.wait(self.stream, self.backend.record(elsewhere))
        start = self.timeline.start(self.stream)
        self.backend.copy(address(array), address(memory), transfer.received.nbytes, self.stream)
        self.timeline.stop(start, self.stream, transfer.h2d)
        event = self.backend.record(self.stream)
        self.backend.wait(caller, event)  # and so does the next user of the memory of `array`, if it came from this stream
        if elsewhere is not None:
            self.held.hold(event, (array,))
        self.buffers.give(memory, event)

    def _started(self, requests: Requests, sent: PinnedCopy | None, received: PinnedCopy | None) -> Requests:
        transfer = PinnedTransfer(self, requests, sent, received)
        self.in_flight.add(transfer)  # MPI reads and writes the copies, even if `wait` is never called
        return [transfer]

    def _to_host(self, array: Array) -> PinnedCopy:
        """`array` in pinned memory; the host waits for the D2H copy."""
        copy = self._pinned(array)
        self.backend.wait(self.stream, self.backend.record(self.backend.current(array)))
        start, copy.d2h = self.timeline.start(self.stream), Span("D2H copy")
        self.backend.copy(address(copy.memory), address(array), copy.nbytes, self.stream)
        self.timeline.stop(start, self.stream, copy.d2h)
        began = time.perf_counter()
        self.backend.record(self.stream).synchronize()
        self.waited += time.perf_counter() - began
        return copy

    def _pinned(self, array: Array) -> PinnedCopy:
        self.datatype(array)
        return PinnedCopy(self.buffers.take(count(array) * array.itemsize), array)
