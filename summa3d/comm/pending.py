"""A communication in flight, and its completion."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .device.arrays import Array, dtype_name, is_on_device
from .health import flight
from .profile.ledger import Amounts, Ledger
from .profile.timeline import Timed
from .transport.call import Carried, Route
from .transport.progress import IN_FLIGHT, Naps

LONGEST = 1e-4
"""Seconds of processor time that a short call takes at most; what is beyond them, another process had the core."""


def cpu_seconds(naps: Naps | None, before: float, seconds: float) -> float:
    """Return the processor time of a call: by its clock, or of a short one `seconds` less those asleep, which costs less to know.

    before : the clock, or the seconds asleep, when it began
    """
    if naps is None:
        return time.thread_time() - before
    return min(seconds - naps.seconds + before, LONGEST)


class Pending:
    """A communication in flight. `wait()` completes it and returns its result; a second call returns the same result.

    Buffers stay alive until `wait` returns, or MPI has done with those of a Pending that is dropped. On a device, `wait` makes
    the caller's stream wait, and work queued on that stream afterwards sees the result; the transport keeps arrays that the
    device still uses (arrival.Held), whether or not `wait` is called. `line`, of the ledger, receives the wall and
    processor seconds of the completion. `number` is that of the communication in the flight recorder, 0 where it is not recorded.
    """

    _carried: Carried | None = None
    _result: Array = None
    lock: AbstractContextManager[None] = nullcontext()
    """That of the axis, around the completion."""

    def __init__(
        self, carried: Carried, line: Amounts, number: int, lock: AbstractContextManager[None], naps: Naps | None
    ) -> None:
        self._carried, self._account, self.number, self.lock, self._naps = carried, line.wait, number, lock, naps

    def __del__(self) -> None:
        left = self._carried
        if left is None or not left.requests or isinstance(left.requests[0], Timed):  # a device's transport keeps its own
            return
        if not left.is_complete:
            IN_FLIGHT.keep(left)

    @property
    def done(self) -> bool:
        """Return whether what is sent may be overwritten, and MPI or the device has finished; never waits.

        In a node's memory that is so at once: what is sent was copied, and `wait` may still wait for the other members.
        """
        return self._carried is None or self._carried.is_complete

    def wait(self) -> Array:
        """Complete the communication and return its result; a second call returns the same result."""
        carried = self._carried
        if carried is not None:
            wall, naps, number = time.perf_counter(), self._naps, self.number
            cpu = time.thread_time() if naps is None else naps.seconds
            if number:
                flight.mark(number, flight.WAITED_FOR)
            try:
                with self.lock:
                    self._result = carried.complete()
            except BaseException:
                flight.mark(number, flight.FAILED)
                raise
            self._carried, ended = None, time.perf_counter()
            if number:
                flight.end(number, ended)
            self._account(ended - wall, cpu_seconds(naps, cpu, ended - wall))
        return self._result


class Completed(Pending):
    """A communication that is complete: over an axis of one member, or by a blocking call."""

    def __init__(self, result: Array) -> None:
        self._carried, self._result = None, result


class Reported(Pending):
    """A communication whose start and completion the ledger records one by one: on a device, under a trace, or of a channel.

    On a device, `device_of` gives the transport that knows what of the host's seconds is communication; the device's own are
    those of its events.
    """

    _naps = None
    _line: Amounts | None = None

    def __init__(
        self, carry: Callable[[], Carried], device_of: Callable[[Array], Any], route: Route, array: Array, number: int
    ) -> None:
        self._start, cpu = time.perf_counter(), time.thread_time()
        self._carried = carried = carry()
        self._issue, cpu = time.perf_counter() - self._start, time.thread_time() - cpu
        moved, carried.moved = carried.moved, None  # what is in flight keeps only the buffers that it needs
        moved = array if moved is None else moved
        self._route, self._dtype, self.number = route, dtype_name(moved), number
        self._device = device_of(moved) if is_on_device(moved) else None
        self._amounts = Amounts(1, route.words, route.messages, route.words * moved.itemsize, self._on_host(self._issue), cpu)
        self._spans = [span for request in carried.requests if isinstance(request, Timed) for span in request.spans]

    @property
    def on_device(self) -> bool:
        """Return whether a stream waits for it, and not the host."""
        return self._device is not None

    def _on_host(self, seconds: float) -> float:
        return seconds if self._device is None else float(self._device.on_host(seconds))

    def record(self, ledger: Ledger, label: str) -> Reported:
        """Record it, once, in the ledger's current phase; `wait` then records its completion."""
        if self._line is None:
            name = self._route.operation
            about = name, label, self._dtype
            self._line = ledger.line(*about)
            self._line.add(self._amounts)
            self._traced = ledger.begin(*about, self._amounts, self._start, self._issue)
            ledger.expect(self._line, self._traced, self._spans)
            self._ledger, self._ranges, self._name = ledger, ledger.ranges, f"wait for {name} {label}"
        return self

    def wait(self) -> Array:
        """Complete the communication, inside a profiler's range of its own if the ledger has ranges."""
        with nullcontext() if self._carried is None or self._ranges is None else self._ranges.around(self._name):
            return super().wait()

    def _account(self, seconds: float, cpu_seconds: float) -> None:
        assert self._line is not None
        self._ledger.complete(self._line, self._traced, self._on_host(seconds), cpu_seconds, seconds)
