"""The MPI requests in flight of this process. A rank that sleeps in node memory asks MPI about them, so that they progress."""

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


PERIOD = 0.003
"""Seconds between two times that MPI moves what is in flight behind layers: a socket takes about as much at once."""
QUIET = 4711
"""The tag of a message that nobody sends."""


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


class Mover:
    """A thread that lets MPI move what is in flight every few milliseconds, while this process computes.

    Products let MPI do so between their slabs; what is in flight behind whole layers would stop in torch's other operations,
    and in a product of one rank. The thread asks for a message of the world that nobody sends: no request has two owners. It
    runs where MPI was started with MPI.THREAD_MULTIPLE, as a grid starts it, and sleeps where nothing is in flight.
    """

    def __init__(self, ask: Callable[..., bool] = MPI.COMM_WORLD.Iprobe) -> None:
        self._ask = ask
        self._many, self._begun = 0, False
        self._wanted = threading.Event()

    def begin(self, by_mpi: bool = True) -> None:
        """Know of a communication in flight. by_mpi : whether it is MPI that moves it."""
        self._many += 1
        if not by_mpi or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return
        self._wanted.set()
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="mover", daemon=True).start()
            atexit.register(self._wanted.clear)  # before MPI is finalized

    def end(self) -> None:
        """Know that one of them is waited for."""
        self._many -= 1
        if not self._many:
            self._wanted.clear()

    def _run(self) -> None:
        while self._wanted.wait():
            time.sleep(PERIOD)
            if self._wanted.is_set() and not MPI.Is_finalized():
                with suppress(MPI.Exception):  # whoever waits for a message learns of its error
                    self._ask(tag=QUIET)


class Naps:
    """The seconds that this rank has slept in the calls of an axis."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


IN_FLIGHT = RequestsInFlight()
MOVER = Mover()
