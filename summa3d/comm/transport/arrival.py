"""A communication on a device, and the arrays that its streams use until it has completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import Array
from ..device.backend import Backend, Event
from ..profile.timeline import Span, Timed


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
        """Make the caller's stream wait for the communication; the host does not wait."""
        stream = self._backend.current(self._array)
        self._backend.wait(stream, self._event)
        if self._held is not None and stream.ptr == self._begun_on:
            self._held.release(self._event)
