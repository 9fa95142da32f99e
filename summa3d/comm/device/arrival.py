"""A communication on a device, and the arrays that its streams use until it has completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..profile.timeline import Span, Timed
from .arrays import Array
from .backend import Backend, Event


class Held:
    """Arrays that a stream reads or writes, kept alive until the stream has passed an event.

    They may be released earlier once the stream that allocated them waits for the event: its allocator reuses their memory only
    for work queued on that stream later. The allocating stream is taken to be the current one when a communication begins.
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

    Its arrays are `held` until that wait. They are held until the communication has completed if another stream than the one
    of its start waits, or if `held` is None, since the event then belongs to other communications too.
    """

    def __init__(self, backend: Backend, event: Event, array: Array, held: Held | None, *spans: Span) -> None:
        self._backend, self._event, self._array, self._held, self.spans = backend, event, array, held, spans
        self._begun_on = backend.current(array).ptr

    @property
    def done(self) -> bool:
        """Return whether the device has passed it."""
        return self._event.done

    def wait(self) -> None:
        """Make the caller's stream wait for the communication; the host does not wait."""
        stream = self._backend.current(self._array)
        self._backend.wait(stream, self._event)
        if self._held is not None and stream.ptr == self._begun_on:
            self._held.release(self._event)
