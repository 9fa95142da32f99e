"""A communication in flight, and its completion."""

from __future__ import annotations

import time
from collections.abc import Callable

from .arrays import Array
from .profile.nvtx import Ranges
from .transport.call import Carried


class Pending:
    """A communication in flight. `wait()` completes it and returns its result; a second call returns the same result.

    Buffers stay alive until `wait` returns. On a device, `wait` makes the caller's stream wait, and work queued on that stream
    afterwards sees the result; the transport keeps arrays that the device still uses (arrival.Held), whether or not `wait` is
    called. `account(wall, cpu)` receives the wall and processor seconds of the completion.
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
            self._result = carried.complete()
            self._carried = None
            self._account(time.perf_counter() - wall, time.thread_time() - cpu)
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
    """A completed communication over an axis of one member: nothing was sent."""

    def __init__(self, result: Array) -> None:
        self._carried, self._result = None, result
