"""Times on a device: pairs of events in its streams, read once the device has passed them.

Only `settle` and `tie` make the host wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..device.backend import Backend, Event, Stream

TRIES = 5  # events that are compared with the host's clock; the fastest one ties the clocks


class Span:
    """What a stream does between two marks, for one communication or product.

    share : the fraction of its seconds that `account` receives, where several communications are queued as one.
    account : receives the name, the seconds, the seconds times `share`, and the start on the host's clock (None where the
        clocks are not tied).
    """

    def __init__(self, name: str) -> None:
        self.name, self.share = name, 1.0
        self.account: Callable[[str, float, float, float | None], None] | None = None


class Timed:
    """A request of a device transport, with what its stream does for it."""

    spans: tuple[Span, ...] = ()


class Timeline:
    """The marks of one ledger's device. Marks that have been read are recorded again.

    device : None, CuPy's, when the first mark is wanted.
    error : how far times on the host's clock may be off, in seconds, since the clocks were tied.
    """

    def __init__(self, device: Backend | None = None) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._free: list[Event] = []
        self._waiting: deque[tuple[Event, Event, tuple[Span, ...]]] = deque()
        self._base: tuple[Event, float] | None = None
        self._wants_base = self.used = False
        self.error = 0.0

    @property
    def backend(self) -> Backend:
        """The device; CuPy's is made at the first use. Raises ConfigError where CuPy is not installed."""
        if self._device is None:
            from ..device.cupy import CupyBackend

            self._device = CupyBackend()
        return self._device

    def start(self, stream: Stream) -> Event:
        """A mark behind what `stream` holds; reads those pairs that have been passed."""
        self.collect()
        if self._wants_base and self._base is None:
            self.tie()
        self.used = True
        return self._mark(stream)

    def stop(self, start: Event, stream: Stream, *spans: Span) -> None:
        """The second mark: what `stream` was given since `start` is the work of `spans`."""
        self._waiting.append((start, self._mark(stream), spans))

    def collect(self) -> None:
        """Read the pairs that have been passed, in the order of their recording; never waits."""
        while self._waiting and self._waiting[0][1].done:
            self._read(*self._waiting.popleft())

    def settle(self) -> None:
        """Wait until all marks have been passed, and read them."""
        while self._waiting:
            start, end, spans = self._waiting.popleft()
            end.synchronize()
            self._read(start, end, spans)

    def follow(self) -> None:
        """Report the start of spans from now on; ties the clocks now, or at the first mark if there was none yet."""
        self._wants_base = True
        if self.used:
            self.tie()

    def forget(self) -> None:
        """Stop reporting the start of spans."""
        self._wants_base, self._base = False, None

    def tie(self) -> None:
        """Tie the device's clock to the host's by an event on an idle stream, for which the host waits.

        The event was passed between the host's call and its return: `error` is half of that time. What the clocks drift apart
        since then is not in it, nor the resolution of the device's (half a microsecond, and 2⁻²⁴ of the time since the tie).
        """
        self._stream = self._stream or self.backend.stream()
        self.error = float("inf")
        for _ in range(TRIES):
            before = time.perf_counter()
            event = self.backend.record(self._stream, timing=True)
            event.synchronize()
            after = time.perf_counter()
            if (after - before) / 2 < self.error:
                self.error, self._base = (after - before) / 2, (event, (before + after) / 2)

    def _mark(self, stream: Stream) -> Event:
        if not self._free:
            return self.backend.record(stream, timing=True)
        event = self._free.pop()
        self.backend.mark(event, stream)
        return event

    def _read(self, start: Event, end: Event, spans: tuple[Span, ...]) -> None:
        seconds = self.backend.milliseconds(start, end) / 1e3
        began = None if self._base is None else self._base[1] + self.backend.milliseconds(self._base[0], start) / 1e3
        self._free += [start, end]
        for span in spans:
            if span.account is not None:  # a communication that raised before it was begun has none
                span.account(span.name, seconds, seconds * span.share, began)
