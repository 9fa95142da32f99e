"""The interface of a device as communication uses it: streams, events, copies, pinned memory, NCCL.

Events order streams; no call waits for a whole device. `milliseconds` between two recorded events are times on the device.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .arrays import Array


class Event(Protocol):
    """A mark in a stream."""

    @property
    def done(self) -> bool:
        """Return whether the stream has passed it; never waits."""

    def synchronize(self) -> None:
        """Block the host, and nothing else, until the stream has passed it."""


class Stream(Protocol):
    """A queue of work on a device."""

    @property
    def ptr(self) -> int:
        """The handle of the stream, as CUDA calls take it."""


class Backend(Protocol):
    """The device of this process. Every call returns at once, whatever the streams still have to do."""

    @property
    def nccl(self) -> Any:
        """The NCCL bindings, with the names of `cupy.cuda.nccl`; None where there are none."""

    def identity(self) -> str:
        """A name that is unique among all devices of all nodes."""

    def current(self, array: Array) -> Stream:
        """The stream on which the caller's work on `array` is queued: the current one of its library, on this thread."""

    def stream(self) -> Stream:
        """A new stream, which waits for no other by itself."""

    def record(self, stream: Stream, timing: bool = False) -> Event:
        """A mark behind all that `stream` holds."""

    def mark(self, event: Event, stream: Stream) -> None:
        """Record a mark anew, behind all that `stream` holds now; no stream may still wait for its earlier recording."""

    def milliseconds(self, start: Event, end: Event) -> float:
        """Between two marks that were recorded for timing and have been passed."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Have what `stream` is given from now on wait for `event`."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between device and pinned memory, by address, on `stream`."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, as bytes."""

    def buffer(self, address: int, nbytes: int) -> Any:
        """Device memory as mpi4py takes it, for an MPI that reads device pointers."""
