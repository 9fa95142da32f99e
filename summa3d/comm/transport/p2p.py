"""Point-to-point messages: those that a user sends, and those under collectives of arrays larger than an MPI count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mpi4py import MPI

from ...errors import AgreementError
from .progress import REST, is_done

CODES, HEADER = 16, 14
"""MPI's tags for each tag of a user, one for each dtype, so that messages of two dtypes never meet; that of channels' headers."""
EXCHANGE_TAG = 32767  # the largest that every MPI offers, and no dtype's: no user's message meets it
LOOKS = 200
"""Looks at a message before its receiver sleeps."""
GRACE, SLOWEST = 0.5, 10e6
"""Seconds, and bytes a second, in which the awaited message still arrives when a later one of another dtype is here before it."""


def pieces(n: int, limit: int) -> list[slice]:
    """Consecutive slices of at most `limit` elements that cover n; one empty slice for n = 0."""
    return [slice(start, min(start + limit, n)) for start in range(0, max(n, 1), limit)]


def exchange(
    comm: MPI.Comm, sends: Sequence[Any], receives: Sequence[Any], kind: MPI.Datatype, limit: int, buffer: Callable[[Any], Any]
) -> list[MPI.Request]:
    """Start sending sends[i] to member i and receiving receives[i] from it, for all members but this one.

    Both are flat memory, which `buffer` gives to mpi4py.
    """
    others = [member for member in range(comm.size) if member != comm.rank]
    requests = []
    for source in others:
        parts = pieces(len(receives[source]), limit)
        requests += [comm.Irecv([buffer(receives[source][part]), kind], source, EXCHANGE_TAG) for part in parts]
    for target in others:
        parts = pieces(len(sends[target]), limit)
        requests += [comm.Isend([buffer(sends[target][part]), kind], target, EXCHANGE_TAG) for part in parts]
    return requests


@dataclass(eq=False)
class Arriving:
    """A receive that has been posted, of an array in pieces. `wait` raises AgreementError for another message than it awaits.

    MPI itself takes fewer elements without a word, and reinterprets those of another dtype.

    requests : of the pieces, in order. sizes : the elements of each. source, tag : whose message, and the user's tag.
    kinds : name → datatype of all that can be sent, in the order of their codes. dtype : the name of the awaited one.
    """

    comm: MPI.Comm
    requests: list[MPI.Request]
    sizes: Sequence[int]
    source: int
    tag: int
    kinds: dict[str, MPI.Datatype]
    dtype: str
    _refused_at: float = math.inf

    @property
    def done(self) -> bool:
        """Return whether `wait` would return at once; never waits."""
        return all(map(is_done, self.requests))

    def wait(self) -> None:
        """Return once the message has arrived; the receiver sleeps meanwhile."""
        status, kind = MPI.Status(), self.kinds[self.dtype]
        for number, (request, size) in enumerate(zip(self.requests, self.sizes, strict=True)):
            try:
                self._complete(request, status)
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                self._refuse(number, f"more than {size} elements", error)
            if size and status.Get_count(kind) != size:
                self._refuse(number, f"{status.Get_count(kind)} elements")

    def _complete(self, request: MPI.Request, status: MPI.Status) -> None:
        for _ in range(LOOKS):
            if request.Test(status):
                return
        while not request.Test(status):
            self._look()
            time.sleep(REST)

    def _look(self) -> None:
        """Take a message of another dtype that has this one's tag, so that its sender is not left waiting, and raise.

        Not at once: a small message that was sent after a large one arrives first.
        """
        status = MPI.Status()
        for code, (name, kind) in enumerate(self.kinds.items()):
            if name != self.dtype and self.comm.Iprobe(self.source, self.tag * CODES + code, status):
                own = sum(self.sizes) * self.kinds[self.dtype].Get_size()
                self._refused_at = min(self._refused_at, time.monotonic() + GRACE + own / SLOWEST)
                if time.monotonic() < self._refused_at:
                    return
                nbytes = status.Get_count(MPI.BYTE)
                self.comm.Recv([bytearray(nbytes), MPI.BYTE], self.source, self.tag * CODES + code)
                self._refuse(-1, f"{nbytes // kind.Get_size()} elements of {name}")

    def _refuse(self, number: int, sent: str, error: MPI.Exception | None = None) -> NoReturn:
        """Take back the receives behind that of this number, which would write into the array later, and raise."""
        for request in self.requests[number + 1 :]:
            request.Cancel()
            request.Wait()
        raise AgreementError(
            f"member {self.source} has sent {sent} with tag {self.tag}; this member awaits {sum(self.sizes)} of {self.dtype}."
        ) from error
