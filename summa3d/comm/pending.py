"""A communication in flight, and its completion."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .device.arrays import Array, dtype_name, is_on_device
from .health import flight
from .profile.ledger import Amounts, Ledger
from .profile.nvtx import Ranges
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
    device still uses (arrival.Held), whether or not `wait` is called. `account(wall, cpu)` receives the wall and processor
    seconds of the completion. `number` is that of the communication in the flight recorder, 0 where it is not recorded.
    """

    _carried: Carried | None = None
    lock: AbstractContextManager[None] = nullcontext()
    """That of the axis, around the completion."""

    def __init__(
        self,
        carried: Carried,
        account: Callable[[float, float], None],
        number: int = 0,
        lock: AbstractContextManager[None] = lock,
        naps: Naps | None = None,
    ) -> None:
        self._carried, self._account, self.number, self.lock, self._naps = carried, account, number, lock, naps
        self._result: Array = None

    def __del__(self) -> None:
        left = self._carried
        if left is None or not left.requests or isinstance(left.requests[0], Timed):  # a device's transport keeps its own
            return
        if not left.is_complete:
            IN_FLIGHT.keep(left)

    @property
    def done(self) -> bool:
        """Whether what is sent may be overwritten, and MPI or the device has finished; never waits.

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
                flight.failed(number)
                raise
            self._carried, ended = None, time.perf_counter()
            if number:
                flight.end(number, ended)
            self._account(ended - wall, cpu_seconds(naps, cpu, ended - wall))
            del self._account
        return self._result


class Shown(Pending):
    """A communication whose `wait` is an NVTX range."""

    def __init__(self, carried: Carried, account: Callable[[float, float], None], ranges: Ranges, name: str) -> None:
        super().__init__(carried, account)
        self._ranges, self._name = ranges, name

    def wait(self) -> Array:
        """Complete the communication inside a profiler range of its own."""
        if self._carried is None:
            return self._result
        with self._ranges.around(self._name):
            return super().wait()


class Completed(Pending):
    """A communication that is complete: over an axis of one member, or by a blocking call."""

    def __init__(self, result: Array) -> None:
        self._carried, self._result = None, result


class Begun:
    """A communication that `carry` has begun, not yet in the ledger.

    On a device, `device_of` gives the transport that knows what of the host's seconds is communication; the device's own are
    those of its events.
    """

    __slots__ = ("carried", "cpu_seconds", "device", "dtype", "issue", "itemsize", "route", "seconds", "start")

    def __init__(self, carry: Callable[[], Carried], device_of: Callable[[Array], Any], route: Route, array: Array) -> None:
        self.start, cpu = time.perf_counter(), time.thread_time()
        self.carried, self.route = carry(), route
        self.issue, self.cpu_seconds = time.perf_counter() - self.start, time.thread_time() - cpu
        moved, self.carried.moved = self.carried.moved, None  # what is in flight keeps only the buffers that it needs
        moved = array if moved is None else moved
        self.dtype, self.itemsize = dtype_name(moved), moved.itemsize
        self.device = device_of(moved) if is_on_device(moved) else None
        self.seconds = self.issue if self.device is None else self.device.on_host(self.issue)

    def recorded(self, ledger: Ledger, label: str) -> Pending:
        """Record it in the ledger's current phase; `wait` of the returned Pending records its completion."""
        route, name, device = self.route, self.route.operation, self.device
        amounts = Amounts(1, route.words, route.messages, route.words * self.itemsize, self.seconds, self.cpu_seconds)
        line = ledger.line(name, label, self.dtype)
        line.add(amounts)
        traced = ledger.begin(name, label, self.dtype, amounts, self.start, self.issue)
        if device is not None:
            ledger.expect(line, traced, [span for one in self.carried.requests if isinstance(one, Timed) for span in one.spans])

        def account(waited: float, cpu_seconds: float) -> None:
            ledger.complete(line, traced, waited if device is None else device.on_host(waited), cpu_seconds, waited)

        if ledger.ranges is None:
            return Pending(self.carried, account)
        return Shown(self.carried, account, ledger.ranges, f"wait for {name} {label}")
