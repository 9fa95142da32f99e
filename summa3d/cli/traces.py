# `--trace FILE` and `--nvtx`, the same for every command that has them. May import comm.
# Next: comm/profile/trace.py (what is written), comm/profile/nvtx.py (what a profiler shows).
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..comm.profile.ledger import Ledger
    from ..comm.profile.nvtx import Ranges
    from ..comm.profile.trace import Trace

TRACE = (
    "write {} as a trace of all ranks: products, copies and communications; open it in Perfetto (https://ui.perfetto.dev, "
    "Open trace file) or chrome://tracing (Load)"
)
NVTX = (
    "show phases and communications to a profiler as NVTX ranges, by CuPy or torch; with --trace they are shown where they can be"
)


def add_trace_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """`what` says what is traced."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help=TRACE.format(what))
    parser.add_argument("--nvtx", action="store_true", help=NVTX)


def check_trace_arguments(args: argparse.Namespace, comm: MPI.Intracomm) -> None:
    """Raise ConfigError, on every rank alike, unless the file can be written and NVTX, where it is asked for, is there.

    Collective where there is something to check.
    """
    from ..comm.failure import agree_on_error
    from ..comm.profile.nvtx import nvtx
    from ..comm.profile.trace import check_file

    if args.trace is None and not args.nvtx:
        return
    error: Exception | None = None
    try:
        if args.trace is not None:
            check_file(args.trace)
        if args.nvtx:
            nvtx()
    except ConfigError as caught:
        error = caught
    agree_on_error(comm, error)


def ranges_for(args: argparse.Namespace) -> Ranges | None:
    """NVTX ranges where they are asked for, or where there is a trace and a library that has them."""
    from ..comm.profile.nvtx import nvtx, nvtx_or_none

    return nvtx() if args.nvtx else nvtx_or_none() if args.trace is not None else None


def show(ledger: Ledger, act: Callable[[], Any], whole: Trace, ranges: Ranges | None) -> None:
    """Do `act` with what it does in the trace `whole`, and shown to a profiler by `ranges`."""
    ledger.ranges = ranges
    ledger.start_trace(whole)
    act()
    ledger.stop_trace()
    ledger.ranges = None
