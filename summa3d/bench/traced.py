"""One more run of a benchmark, for a trace and a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..comm.profile.ledger import Ledger
    from ..comm.profile.nvtx import Ranges
    from ..comm.profile.trace import Trace

COMPUTE, OTHER = "compute", "other"


def show(ledger: Ledger, act: Callable[[], Any], whole: Trace, ranges: Ranges | None) -> None:
    """Call `act`; record its events in the trace `whole`, and show them to a profiler as `ranges`."""
    ledger.ranges = ranges
    ledger.start_trace(whole)
    act()
    ledger.stop_trace()
    ledger.ranges = None


def split(ledger: Ledger, act: Callable[[], Any], comm: MPI.Intracomm) -> dict[str, float]:
    """Where the wall seconds of one more run go, as means over the ranks: arithmetic, the calls and waits of each axis, the rest.

    Collective. On a device the arithmetic is what the host spends on it, and the rest holds the device's.
    """
    from ..comm.profile.trace import Trace

    trace, start = Trace(), time.perf_counter()
    show(ledger, act, trace, None)
    whole = time.perf_counter() - start
    mine: dict[str, float] = {COMPUTE: sum(seconds for _, seconds in trace.arithmetic)}
    for one in trace.communications:
        mine[one.axis] = mine.get(one.axis, 0.0) + one.issue + one.wait
    mine[OTHER] = max(0.0, whole - sum(mine.values()))
    ranks = comm.allgather(mine)
    return {name: sum(rank.get(name, 0.0) for rank in ranks) / comm.size for name in dict.fromkeys(chain(*ranks))}
