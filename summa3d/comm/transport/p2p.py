"""Point-to-point messages under the collectives, for arrays that are larger than an MPI count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

EXCHANGE_TAG = 32767  # the largest that every MPI offers; users' tags start at 0


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
