"""One more run of a benchmark, for a trace and a profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..comm.profile.ledger import Ledger
    from ..comm.profile.nvtx import Ranges
    from ..comm.profile.trace import Trace


def show(ledger: Ledger, act: Callable[[], Any], whole: Trace, ranges: Ranges | None) -> None:
    """Call `act`; record its events in the trace `whole`, and show them to a profiler as `ranges`."""
    ledger.ranges = ranges
    ledger.start_trace(whole)
    act()
    ledger.stop_trace()
    ledger.ranges = None
