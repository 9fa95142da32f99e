"""The MPI requests in flight of this process, and what lets MPI progress: a rank that sleeps in node memory, and a thread."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from mpi4py import MPI

CROWD = 64
"""Number of requests above which completed ones are removed."""
REST = 0.00005
"""Seconds that a rank sleeps at a time while it waits for MPI, which would poll."""
PROBE_PERIOD = 0.003
"""Seconds between two probes of the progress thread: a socket's buffer is full or empty about as soon."""
PROBE_TAG = 4711
"""The tag of its probes, which no message has."""


class Movable(Protocol):
    """What is in flight: an MPI request, or what stands for one."""

    def Get_status(self) -> bool:
        """Return whether it has completed; moves it, and never waits."""


class Left(Protocol):
    """A communication, with its arrays."""

    @property
    def is_complete(self) -> bool:
        """Return whether MPI has done with it."""


class RequestsInFlight:
    """The requests of this process that MPI may not have completed yet.

    MPI moves most messages only while their process is inside MPI. A rank that sleeps elsewhere must therefore test its requests
    now and then, or a peer waits for ever for a message that this rank has started to send. Testing does not complete a request
    or take its error from its owner. Progress is per process: one object serves all axes of all grids.
    """

    def __init__(self) -> None:
        self._requests: list[Movable] = []
        self._left: list[Left] = []
        self._crowd = CROWD

    def add(self, requests: Sequence[Movable]) -> None:
        """Remember what has been begun."""
        self._requests += requests
        if len(self._requests) > self._crowd:
            self._requests = [request for request in self._requests if request != MPI.REQUEST_NULL]
            self._crowd = max(CROWD, 2 * len(self._requests))

    def keep(self, left: Left) -> None:
        """Keep the arrays of a communication that nobody waits for any more until MPI has done with them."""
        self._left = [item for item in self._left if not item.is_complete]
        self._left.append(left)

    def advance(self) -> bool:
        """Let MPI work on what is in flight; whether something still is."""
        if self._requests:
            self._requests = [request for request in self._requests if not is_done(request)]
        return bool(self._requests)


def is_done(request: Movable) -> bool:
    """Return whether MPI has completed a request, or failed in it: the owner's wait raises the error."""
    try:
        return request.Get_status()
    except MPI.Exception:
        return True


def doze(done: Callable[[], bool]) -> None:
    """Return once something is done that `done` also moves, asleep meanwhile: MPI's own wait takes a core."""
    while not done():
        time.sleep(REST)


class ProgressThread:
    """A thread that makes MPI progress every few milliseconds while the main thread computes (asynchronous progress).

    Local products make MPI progress between slabs; buckets are in flight during whole layers, whose other operations do not.
    A probe (MPI_Iprobe on the world) progresses all requests of the process and touches none, so that each has one owner.
    The thread needs MPI.THREAD_MULTIPLE, with which a grid initializes MPI, and sleeps while nothing is in flight.
    """

    def __init__(self, probe: Callable[..., bool] = MPI.COMM_WORLD.Iprobe) -> None:
        self._probe = probe
        self._in_flight, self._started = 0, False
        self._wanted = threading.Event()

    def begin(self, by_mpi: bool = True) -> None:
        """Count a collective that has started. by_mpi : whether MPI progresses it; of others the thread need not start."""
        self._in_flight += 1
        if not by_mpi or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return
        self._wanted.set()
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="MPI progress", daemon=True).start()
            atexit.register(self._wanted.clear)  # before MPI is finalized

    def end(self) -> None:
        """Count a collective that is waited for."""
        self._in_flight -= 1
        if not self._in_flight:
            self._wanted.clear()

    def _run(self) -> None:
        while self._wanted.wait():
            time.sleep(PROBE_PERIOD)
            if self._wanted.is_set() and not MPI.Is_finalized():
                with suppress(MPI.Exception):  # a failed request raises in its own wait
                    self._probe(tag=PROBE_TAG)


class Naps:
    """The seconds that this rank has slept in the calls of an axis."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


IN_FLIGHT = RequestsInFlight()
PROGRESS = ProgressThread()
