# A communication in flight, and what completes it. Imports transport.
# Next: collectives.py, which starts them.
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .arrays import Array
from .transport import Requests, complete


class Pending:
    """A communication in flight. `wait()` completes it and returns its result; a second call returns the same result.

    It keeps every buffer alive until then. On a device, `wait` has the caller's stream wait, and the result is there for what is
    queued on that stream afterwards; what a device still reads or writes is kept by its transport (device.Held), whether or
    not anybody waits.
    """

    def __init__(
        self, requests: Requests, finish: Callable[[], Array], account: Callable[[float, float], None], keep: Any = None
    ):
        self._requests, self._finish, self._account, self._keep = requests, finish, account, keep
        self._done = False
        self._result: Array = None

    def wait(self) -> Array:
        if not self._done:
            wall, cpu = time.perf_counter(), time.thread_time()
            if self._requests:
                complete(self._requests)
            self._result = self._finish()
            self._done = True
            self._account(time.perf_counter() - wall, time.thread_time() - cpu)
            del self._requests, self._finish, self._account, self._keep
        return self._result


def completed(result: Array) -> Pending:
    """A communication that was none: over an axis of one member."""
    return Pending([], lambda: result, lambda wall, cpu: None)
