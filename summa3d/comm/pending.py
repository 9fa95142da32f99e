"""A communication in flight, and its completion."""

from __future__ import annotations

import time
from collections.abc import Callable

from .arrays import Array
from .profile.nvtx import Ranges
from .transport.call import Carried, complete


class Pending:
    """A communication in flight. `wait()` completes it and returns its result; a second call returns the same result.

    It keeps every buffer alive until then. On a device, `wait` has the caller's stream wait, and the result is there for what is
    queued on that stream afterwards; what a device still reads or writes is kept by its transport (arrival.Held), whether or
    not anybody waits. `account` is told the seconds that completing it took, by the clock and of the processor.
    """

    def __init__(self, carried: Carried, account: Callable[[float, float], None]) -> None:
        self._carried: Carried | None = carried
        self._account = account
        self._result: Array = None

    def wait(self) -> Array:
        """Complete the communication and return its result; a second call returns the same result."""
        carried = self._carried
        if carried is not None:
            wall, cpu = time.perf_counter(), time.thread_time()
            if carried.requests:
                complete(carried.requests)
            self._result = carried.finish()
            self._carried = None
            self._account(time.perf_counter() - wall, time.thread_time() - cpu)
            del self._account
        return self._result


class Shown(Pending):
    """A communication whose completion a profiler shows."""

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
    """A communication that was none: over an axis of one member."""

    def __init__(self, result: Array) -> None:
        self._carried, self._result = None, result


def completed(result: Array) -> Pending:
    """A communication that was none, with its result."""
    return Completed(result)
