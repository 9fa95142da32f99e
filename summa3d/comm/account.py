# How an axis accounts for a communication: a line of the ledger, a span of the trace, a range for a profiler. Imports ledger,
# pending, transport.
# Next: collectives.py, whose every communication ends here.
from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from .arrays import Array, dtype_name, is_on_device
from .ledger import Amounts, Ledger
from .pending import Pending
from .ranges import Ranges
from .timeline import Timed
from .transport import Carriers, Requests

P = ParamSpec("P")


class Accounted:
    """The part of an axis that writes what its communications move, and how long they take."""

    size: int
    label: str
    comm: Any
    ledger: Ledger
    carriers: Carriers

    def _pending(
        self,
        name: str,
        words: int,
        messages: int,
        array: Array,
        requests: Requests,
        finish: Callable[[], Any],
        wall: float,
        cpu: float,
        keep: Any = None,
    ) -> Pending:
        """What was begun at `wall`, in the account; its completion is accounted for when somebody waits for it.

        On a device the seconds are those of its events, and of MPI on the host as far as the transport has it there.
        """
        issue, cpu_seconds = time.perf_counter() - wall, time.thread_time() - cpu
        carrier = self.carriers.of(array, self.comm) if is_on_device(array) else None
        seconds = issue if carrier is None else carrier.on_host(issue)
        amounts = Amounts(1, words, messages, words * array.itemsize, seconds, cpu_seconds)
        line = self.ledger.record(name, self.label, dtype_name(array), amounts)
        traced = self.ledger.begin(name, self.label, dtype_name(array), amounts, wall, issue)
        if carrier is not None:
            self.ledger.expect(line, traced, [span for one in requests if isinstance(one, Timed) for span in one.spans])

        def complete(waited: float, cpu_seconds: float) -> None:
            seconds = waited if carrier is None else carrier.on_host(waited)
            self.ledger.complete(line, traced, seconds, cpu_seconds, waited)

        if self.ledger.ranges is not None:
            return Shown(requests, finish, complete, keep, self.ledger.ranges, f"wait for {name} {self.label}")
        return Pending(requests, finish, complete, keep)


class Shown(Pending):
    """A communication whose completion a profiler shows."""

    def __init__(self, requests: Requests, finish: Any, account: Any, keep: Any, ranges: Ranges, name: str) -> None:
        super().__init__(requests, finish, account, keep)
        self._ranges, self._name = ranges, name

    def wait(self) -> Array:
        if self._done:
            return self._result
        with self._ranges.around(self._name):
            return super().wait()


def shown(
    method: Callable[Concatenate[Any, P], Pending],
) -> Callable[Concatenate[Any, P], Pending]:
    """Show to a profiler, where there is one, the call that begins a communication over an axis of more than one member."""
    name = method.__name__.removeprefix("start_").strip("_")

    @wraps(method)
    def begin(axis: Any, *args: P.args, **options: P.kwargs) -> Pending:
        if axis._node is not None:
            axis._node.check()
        ranges = axis.ledger.ranges
        if ranges is None or axis.size == 1:
            return method(axis, *args, **options)
        with ranges.around(f"{name} {axis.label}"):
            return method(axis, *args, **options)

    return begin
