# What communication needs of a device, as an interface: streams, events, copies, pinned memory, NCCL. Imports arrays, timeline.
# Events order streams; nothing here waits for a whole device. Times on a device are `milliseconds` between two recorded events.
# Next: cupy_backend.py (the real one), nccl.py, cuda_aware.py, pinned.py (transports that are written with it).
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .arrays import Array
from .timeline import Span, Timed


class Event(Protocol):
    """A mark in a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has passed it; never waits."""
        ...

    def synchronize(self) -> None:
        """Block the host, and nothing else, until the stream has passed it."""
        ...


class Stream(Protocol):
    """A queue of work on a device; `ptr` is its handle."""

    @property
    def ptr(self) -> int: ...


class Backend(Protocol):
    """The device of this process. Every call returns at once, whatever the streams still have to do."""

    @property
    def nccl(self) -> Any:
        """The NCCL bindings, with the names of `cupy.cuda.nccl`; None where there are none."""
        ...

    def identity(self) -> str:
        """What tells this device from all others of all nodes."""
        ...

    def current(self, array: Array) -> Stream:
        """The stream on which the caller's work on `array` is queued: the current one of its library, on this thread."""
        ...

    def stream(self) -> Stream:
        """A new stream, which waits for no other by itself."""
        ...

    def record(self, stream: Stream, timing: bool = False) -> Event:
        """A mark behind all that `stream` holds."""
        ...

    def mark(self, event: Event, stream: Stream) -> None:
        """Record a mark anew, behind all that `stream` holds now; nobody may still wait for what it marked."""
        ...

    def milliseconds(self, start: Event, end: Event) -> float:
        """Between two marks that were recorded for timing and have been passed."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Have what `stream` is given from now on wait for `event`."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between device and pinned memory, by address, on `stream`."""
        ...

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, as bytes."""
        ...

    def buffer(self, address: int, nbytes: int) -> Any:
        """Device memory as mpi4py takes it, for an MPI that reads device pointers."""
        ...


class Held:
    """Arrays that a stream reads or writes, kept alive until it has passed a mark, whoever else has let go of them.

    Who has had the stream that the arrays came from wait for the mark may release them before: that stream's memory goes to
    nobody but what is queued on it later. Arrays are taken to come from the stream that is current when a communication begins.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Event, Sequence[Any]]] = {}  # by identity, in the order of the stream

    def hold(self, event: Event, arrays: Sequence[Any]) -> None:
        """Keep `arrays` until `event` has passed; lets go of those whose mark has, in the order of the stream."""
        while self._held and next(iter(self._held.values()))[0].done:
            self._held.pop(next(iter(self._held)))
        self._held[id(event)] = (event, arrays)

    def release(self, event: Event) -> None:
        """Let go of what is kept until `event`."""
        self._held.pop(id(event), None)

    def __len__(self) -> int:
        return len(self._held)


class Arrival(Timed):
    """A communication on a device: `wait` has the caller's stream wait for it, and leaves the host alone.

    What it reads and writes is `held` until then; where another stream waits than the one it was begun on, or where `held` is
    None because the mark is of other communications too, until it is done.
    """

    def __init__(self, backend: Backend, event: Event, array: Array, held: Held | None, *spans: Span) -> None:
        self._backend, self._event, self._array, self._held, self.spans = backend, event, array, held, spans
        self._begun_on = backend.current(array).ptr

    def wait(self) -> None:
        stream = self._backend.current(self._array)
        self._backend.wait(stream, self._event)
        if self._held is not None and stream.ptr == self._begun_on:
            self._held.release(self._event)
