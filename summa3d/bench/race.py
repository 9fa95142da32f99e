"""A race: every entry runs once a round, so that what else the machine does falls on all alike; and one more run, traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .clock import sleep_until_all_are_here

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..comm.profile.ledger import Ledger
    from ..comm.profile.nvtx import Ranges
    from ..comm.profile.trace import Trace

COMPUTE, OTHER = "compute", "other"
Span = TypeVar("Span", covariant=True)


class RaceEntry(Protocol, Generic[Span]):
    """What is timed: on its first `ranks` ranks, while the others sleep."""

    ranks: int

    def seconds(self) -> Span:
        """Seconds of one more run, over all its ranks; collective."""
        ...


def raced(entries: Sequence[RaceEntry[Span]], rounds: int, world: MPI.Intracomm) -> list[list[Span]]:
    """Seconds of every entry in `rounds` interleaved rounds, after one that is not counted; collective over `world`.

    Where ranks were idle, or will be, an entry runs once before it is timed: idle cores and cold caches make the first run of a
    product slower by a fifth.
    """
    times: list[list[Span]] = [[] for _ in entries]
    idle = False
    for _ in range(rounds + 1):
        for entry, taken in zip(entries, times, strict=True):
            partial = entry.ranks < world.size
            if idle or partial:
                sleep_until_all_are_here(world)
                entry.seconds()
            taken.append(entry.seconds())
            idle = partial
    sleep_until_all_are_here(world)
    return [taken[1:] for taken in times]


def show(ledger: Ledger, act: Callable[[], Any], whole: Trace, ranges: Ranges | None) -> None:
    """Call `act`; record its events in the trace `whole`, and show them to a profiler as `ranges`."""
    ledger.ranges = ranges
    ledger.start_trace(whole)
    act()
    ledger.stop_trace()
    ledger.ranges = None


def split(ledger: Ledger, act: Callable[[], Any], comm: MPI.Intracomm) -> dict[str, float]:
    """Split the wall seconds of one more run, as means over the ranks: arithmetic, the calls and waits of each axis, the rest.

    Collective. On a device the arithmetic is what the host spends on it, and the rest holds the device's.
    """
    from ..comm.profile.trace import Trace

    trace, start = Trace(), time.perf_counter()
    show(ledger, act, trace, None)
    whole = time.perf_counter() - start
    mine: dict[str, float] = {COMPUTE: sum(seconds for _, seconds in trace.arithmetic)}
    for communication in trace.communications:
        mine[communication.axis] = mine.get(communication.axis, 0.0) + communication.issue + communication.wait
    mine[OTHER] = max(0.0, whole - sum(mine.values()))
    ranks = comm.allgather(mine)
    return {name: sum(rank.get(name, 0.0) for rank in ranks) / comm.size for name in dict.fromkeys(chain(*ranks))}
