"""What carries the calls of an axis: each is recorded, carried by a transport, and counted in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from .axis_lock import AxisLock
from .checks import Checks
from .device.arrays import Array, copy_into, dtype_name
from .health import flight
from .health.failure import check_comm
from .pending import Completed, Pending, Reported, cpu_seconds
from .profile.ledger import Amounts
from .transport.call import Members, Route
from .transport.transports import Transports

NOTHING = np.empty(0)
Settle = Callable[..., Route]
"""Checks a call, of an array, into another one or None, with a workspace or None, and options; gives its route."""


class Calls:
    """The calls of one axis, once they are checked; its lock is around each.

    Attributes
    ----------
    transports : what carries them; those of a freed axis refuse. checks : what compares them over the members.
    """

    def __init__(
        self, members: Members, transports: Transports, lock: AxisLock, checks: Checks, records: flight.AxisRecords
    ) -> None:
        self.size, self.index, self.label, self.ledger = members.size, members.index, members.label, members.ledger
        self.transports, self.lock, self.checks, self.records = transports, lock, checks, records
        self._comm, self._barrier = members.comm, Route("barrier", False, 0, 0)

    def complete(
        self, settle: Settle, array: Array, into: Array | None = None, parts: Array | None = None, *options: Any
    ) -> Array:
        """Carry a blocking call, and record it in the ledger once it is complete."""
        if self.size == 1:
            return alone(array, into)
        with self.lock:
            route = settle(array, into, parts, *options) if options else settle(array, into, parts)  # Python inlines the latter
            if self.ledger.by_steps or route.on_device:
                pending = self._by_steps(route, array, into, True, parts)
                pending.lock = Pending.lock  # this call has the axis's
                return pending.wait()
            naps, wall = route.naps, time.perf_counter()
            cpu = time.thread_time() if naps is None else naps.seconds
            number = self.records.begin(route, array, wall, flight.WAITED_FOR)
            try:
                carried = self.transports.carry(route, array, into, True, parts)
                result = carried.complete()
            except BaseException as error:
                self._failed(number, error)
                raise
            ended = time.perf_counter()
            flight.end(number, ended)
            moved = carried.moved
            self._record(route, array if moved is None else moved, ended - wall, cpu_seconds(naps, cpu, ended - wall))
            return result

    def begin(self, settle: Settle, array: Array, into: Array | None = None, parts: None = None, *options: Any) -> Pending:
        """Carry a call; `wait` of the returned Pending records its completion."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            route = settle(array, into, parts, *options) if options else settle(array, into, parts)
            if self.ledger.by_steps or route.on_device:
                return self._by_steps(route, array, into, False)
            naps, wall = route.naps, time.perf_counter()
            cpu = time.thread_time() if naps is None else naps.seconds
            number = self.records.begin(route, array, wall, flight.BEGUN)
            try:
                carried = self.transports.carry(route, array, into, False)
            except BaseException as error:
                self._failed(number, error)
                raise
            moved, carried.moved = carried.moved, None  # what is in flight keeps only the buffers that it needs
            moved = array if moved is None else moved
            seconds = time.perf_counter() - wall
            line = self._record(route, moved, seconds, cpu_seconds(naps, cpu, seconds))
            return Pending(carried, line, number, self.lock, naps)

    def _by_steps(self, route: Route, array: Array, into: Array | None, blocking: bool, parts: Array | None = None) -> Pending:
        """Carry a call on a device, or under a ledger that traces: inside an NVTX range if the ledger has ranges."""
        ledger = self.ledger
        number = self.records.begin(route, array, time.perf_counter(), flight.BEGUN)
        try:
            with nullcontext() if ledger.ranges is None else ledger.ranges.around(f"{route.operation} {self.label}"):
                carry = partial(self.transports.carry, route, array, into, blocking, parts)
                pending = Reported(carry, self.transports.of, route, array, number).record(ledger, self.label)
        except BaseException as error:
            self._failed(number, error)
            raise
        pending.lock = self.lock
        return pending

    def meet(self) -> None:
        """Carry a barrier, which the ledger does not count."""
        number = self.records.begin(self._barrier, NOTHING, time.perf_counter(), flight.WAITED_FOR)
        try:
            self.checks.barrier()
            self.transports.barrier()
        except BaseException as error:
            self._failed(number, error)
            raise
        flight.end(number, time.perf_counter())

    def _failed(self, number: int, error: BaseException) -> None:
        """Record that a call has failed. Raises GridError for MPI's error about a communicator that is gone."""
        flight.mark(number, flight.FAILED)
        if isinstance(error, MPI.Exception):
            check_comm(self._comm, f"axis {self.label}")

    def _record(self, route: Route, moved: Array, seconds: float, cpu_seconds: float) -> Amounts:
        """Add a call to its line of the ledger, which the route keeps by phase; returns the line."""
        key = self.ledger.current_phase, moved.dtype
        line = route.lines.get(key)
        if line is None:
            line = route.lines[key] = self.ledger.line(route.operation, self.label, dtype_name(moved))
        words = route.words
        line.calls += 1  # spelled out, because every collective passes here
        line.words += words
        line.messages += route.messages
        line.bytes += words * moved.itemsize
        line.seconds += seconds
        line.cpu_seconds += cpu_seconds
        return line


def alone(array: Array, into: Array | None) -> Array:
    """Return the result of a collective over an axis of one member."""
    return array if into is None or into is array else copy_into(into, array)
