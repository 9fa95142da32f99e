"""MPI on page-locked (pinned) copies of device arrays, for an MPI without CUDA and for ranks that share a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import Array, address, count, dtype_name
from ..device.backend import Backend
from ..profile.timeline import Span, Timed, Timeline
from .arrival import Held
from .call import Requests
from .flat import FlatTransport
from .host import HostTransport

SMALLEST = 1 << 12
"""Bytes of the smallest buffer; larger ones are powers of two, so that few sizes serve all."""


class Buffers:
    """Page-locked memory that is handed out again once a stream has passed the mark with which it was given back."""

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


class Copy:
    """A pinned copy of a device array, or a buffer for one: `host` is what MPI is given, `down` the D2H copy that filled it."""

    def __init__(self, memory: np.ndarray, array: Array, down: Span | None = None) -> None:
        self.memory, self.array, self.down = memory, array, down
        name = dtype_name(array)
        kind = np.dtype("float16" if name == "bfloat16" else name)  # two bytes either way: MPI carries them, nobody adds them
        self.nbytes = count(array) * kind.itemsize
        self.host = memory[: self.nbytes].view(kind)


class Staged(Timed):
    """MPI's work on pinned copies: `wait` ends it, and queues the way up; the caller's stream waits for that."""

    def __init__(self, transport: PinnedTransport, requests: Requests, sent: Copy | None, received: Copy | None) -> None:
        self.transport, self.requests, self.sent, self.received = transport, requests, sent, received
        self.begun_on = None if received is None else transport.backend.current(received.array)
        self.up = Span("up")
        downs = [copy.down for copy in (sent, received) if copy is not None and copy.down is not None]
        self.spans = (*downs, *([] if received is None else [self.up]))

    def wait(self) -> None:
        """Block the host until MPI is done, then queue the H2D copy."""
        MPI.Request.Waitall(self.requests)
        self.transport.landed(self)


class PinnedTransport(FlatTransport):
    """The host transport on page-locked copies of device arrays.

    A started communication is in MPI's hands when its call returns: the host waits, at the start, for the way down of this
    rank's part (an event of this stream), and at the end for MPI, but never for the way up. Sums are the host transport's.
    """

    def __init__(self, timeline: Timeline, limit: int | None = None) -> None:
        self.timeline, self.backend, self.host = timeline, timeline.backend, HostTransport(limit)
        self.datatype, self.operation = self.host.datatype, self.host.operation
        self.stream = self.backend.stream()
        self.held, self.buffers = Held(), Buffers(self.backend)
        self.flying: set[Staged] = set()
        self.waited = 0.0

    def sums_parts(self, array: Array) -> bool:
        """Never: the caller sums after an all-to-all, in the members' order."""
        return False

    def on_host(self, seconds: float) -> float:
        """MPI's: the way down, for which the host waits, and the way up are in the device's spans."""
        waited, self.waited = self.waited, 0.0
        return max(0.0, seconds - waited)

    def close(self) -> None:
        """Wait for the ways up that are under way."""
        self.backend.record(self.stream).synchronize()

    def all_gather(self, comm: MPI.Comm, block: Array, out: Array, counts: Sequence[int], blocking: bool) -> Requests:
        """As HostTransport's, on pinned copies."""
        sent, received = self._down(block), self._room(out)
        return self._flown(self.host.all_gather(comm, sent.host, received.host, counts, False), sent, received)

    def all_to_all(
        self,
        comm: MPI.Comm,
        array: Array,
        counts: Sequence[int],
        out: Array,
        out_counts: Sequence[int],
        blocking: bool,
        equal: bool = False,
        largest: int | None = None,
    ) -> Requests:
        """As HostTransport's, on pinned copies."""
        sent, received = self._down(array), self._room(out)
        requests = self.host.all_to_all(comm, sent.host, counts, received.host, out_counts, False, equal, largest)
        return self._flown(requests, sent, received)

    def all_reduce(self, comm: MPI.Comm, array: Array, out: Array, op: str, blocking: bool) -> Requests:
        """As HostTransport's, on pinned copies; in place, one copy serves both ways."""
        self.operation(array, op)
        sent = self._down(array)
        received = Copy(sent.memory, out, sent.down) if out is array else self._room(out)
        host = sent.host if out is array else received.host
        requests = self.host.all_reduce(comm, sent.host, host, op, False)
        return self._flown(requests, None if out is array else sent, received)

    def broadcast(self, comm: MPI.Comm, array: Array, root: int, blocking: bool) -> Requests:
        """As HostTransport's: a D2H copy on the root, H2D copies on the others."""
        mine = comm.rank == root
        held = self._down(array) if mine else self._room(array)
        requests = self.host.broadcast(comm, held.host, root, False)
        return self._flown(requests, held if mine else None, None if mine else held)

    def reduce(self, comm: MPI.Comm, array: Array, out: Array | None, op: str, root: int, blocking: bool) -> Requests:
        """As HostTransport's: D2H copies everywhere, one H2D copy on the root."""
        self.operation(array, op)
        sent = self._down(array)
        received = None if out is None else self._room(out)
        requests = self.host.reduce(comm, sent.host, None if received is None else received.host, op, root, False)
        return self._flown(requests, sent, received)

    def send(self, comm: MPI.Comm, array: Array, to: int, tag: int) -> Requests:
        """As HostTransport's, after a D2H copy."""
        sent = self._down(array)
        return self._flown(self.host.send(comm, sent.host, to, tag), sent, None)

    def receive(self, comm: MPI.Comm, array: Array, source: int, tag: int) -> Requests:
        """As HostTransport's, with an H2D copy at the end."""
        received = self._room(array)
        return self._flown(self.host.receive(comm, received.host, source, tag), None, received)

    def landed(self, staged: Staged) -> None:
        """MPI is done: give back what was sent, and queue the way up of what arrived; the caller's stream waits for it."""
        self.flying.discard(staged)
        if staged.sent is not None:
            self.buffers.give(staged.sent.memory)
        if staged.received is None:
            return
        array, memory = staged.received.array, staged.received.memory
        caller, begun_on = self.backend.current(array), staged.begun_on
        self.backend.wait(self.stream, self.backend.record(caller))  # what still reads the memory of `array` comes first
        elsewhere = begun_on if begun_on is not None and begun_on.ptr != caller.ptr else None
        if elsewhere is not None:
            self.backend.wait(self.stream, self.backend.record(elsewhere))
        start = self.timeline.start(self.stream)
        self.backend.copy(address(array), address(memory), staged.received.nbytes, self.stream)
        self.timeline.stop(start, self.stream, staged.up)
        event = self.backend.record(self.stream)
        self.backend.wait(caller, event)  # and so does whoever gets the memory of `array` next, if it came from this stream
        if elsewhere is not None:
            self.held.hold(event, (array,))
        self.buffers.give(memory, event)

    def _flown(self, requests: Requests, sent: Copy | None, received: Copy | None) -> Requests:
        staged = Staged(self, requests, sent, received)
        self.flying.add(staged)  # MPI reads and writes the copies, even if nobody waits
        return [staged]

    def _down(self, array: Array) -> Copy:
        """`array` in pinned memory; the host waits until it is there."""
        copy = self._room(array)
        self.backend.wait(self.stream, self.backend.record(self.backend.current(array)))
        start, copy.down = self.timeline.start(self.stream), Span("down")
        self.backend.copy(address(copy.memory), address(array), copy.nbytes, self.stream)
        self.timeline.stop(start, self.stream, copy.down)
        began = time.perf_counter()
        self.backend.record(self.stream).synchronize()
        self.waited += time.perf_counter() - began
        return copy

    def _room(self, array: Array) -> Copy:
        self.datatype(array)
        return Copy(self.buffers.take(count(array) * array.itemsize), array)
