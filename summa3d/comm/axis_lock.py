"""Who is inside an axis: one call of one thread at a time, and none after a call that was broken off."""

from __future__ import annotations

import os
import threading
from _thread import allocate_lock, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

from mpi4py import MPI

from ..errors import GridError, Summa3dError
from .health.failure import not_a_rank, said
from .transport.transports import Transports

if TYPE_CHECKING:
    from typing_extensions import Self


class OfThisProcess:
    """What lives in the processes of a job alone: it cannot be pickled, and its copy, inside a deep copy, is itself."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise GridError(
            f"{self!r} belongs to the processes of this job, and cannot be pickled, nor can what holds it.\n"
            "  A matrix is saved by to_file, a model by the arrays of its state_dict."
        )


class AxisLock:
    """A context around each call over an axis. Raises GridError at its start if a call is already inside, or was broken off.

    A second thread, or a signal handler, that enters while a call is inside would mix its numbers with those of that call: it
    is refused, and the axis is broken. An error other than ours inside a call, an interrupt included, breaks it as well: this
    member's part may be missing. Through the node's memory the other members raise GridError too; through MPI they wait.

    label : the axis, in messages. transports : those of the axis, which know whether a member has failed, and tell the others.
    """

    __slots__ = ("__weakref__", "_holder", "_lock", "_refusal", "label", "transports")

    def __init__(self, label: str, transports: Transports) -> None:
        self.label, self.transports = label, transports
        self._lock, self._holder, self._refusal = allocate_lock(), 0, ""
        LOCKS.add(self)

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            self._refuse()
        self._holder = get_ident()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Summa3dError):
            self._break(error)
        if not self._refusal:
            self._lock.release()

    @property
    def is_broken(self) -> bool:
        """Return whether a call of this member was broken off: messages may be left that nobody receives."""
        return bool(self._refusal)

    def _refuse(self) -> NoReturn:
        """Raise the GridError of a broken axis, which a call inside another one makes it."""
        if not self._refusal:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            holder, mine = (names.get(ident, str(ident)) for ident in (self._holder, get_ident()))
            if holder == mine:
                how = f"{mine} began a call inside another one, as a signal handler or a finalizer may"
            else:
                how = f"{mine} began a call while {holder} was in one; threads need a grid each, or take turns"
            self._break(GridError(how))
        self.transports.check()
        raise GridError(self._refusal)

    def _break(self, error: BaseException) -> None:
        """Refuse all further calls: the lock stays taken. The first error is the reason."""
        if not self._refusal:
            self._refusal = (
                f"axis {self.label} is broken: rank {MPI.COMM_WORLD.rank} failed in a communication ({said(error)}).\n"
                "  Its members are out of step, and it communicates no more. Free the grid and make another."
            )
            self.transports.fail(error)

    def forked(self) -> None:
        """Refuse all calls of a process that was forked from a rank: they would be taken for the rank's."""
        self._lock.acquire(False)
        self._refusal = f"axis {self.label}: {not_a_rank()}"


LOCKS: WeakSet[AxisLock] = WeakSet()
"""Those of all axes of this process."""


def _in_fork() -> None:
    for lock in list(LOCKS):
        lock.forked()


os.register_at_fork(after_in_child=_in_fork)
