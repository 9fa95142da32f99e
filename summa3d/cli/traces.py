"""The options `--trace FILE` and `--nvtx`, which several subcommands share, and checks of numbers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..comm.profile.nvtx import Ranges

TRACE = (
    "Write {} as a trace of all ranks: products, copies and communications. Open the file in Perfetto (https://ui.perfetto.dev, "
    "Open trace file) or in chrome://tracing (Load)."
)
NVTX = (
    "Show phases and communications to a profiler as NVTX ranges, through CuPy or torch. --trace also shows them where one of "
    "these libraries is available."
)


JSON = "Write the result to FILE. - prints the result as one line instead of the table."


def rank_counts(text: str) -> list[int]:
    """Return the rank counts of an option, as "1,2,4". Raises argparse.ArgumentTypeError for other text."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rank counts; write it as 1,2,4")
    return counts


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError for options below 1."""
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1.")


def add_trace_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --trace and --nvtx to `parser`; `what` names the traced part of the command in the help text, as "some steps"."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help=TRACE.format(what))
    parser.add_argument("--nvtx", action="store_true", help=NVTX)


def check_trace_arguments(args: argparse.Namespace, comm: MPI.Intracomm) -> None:
    """Raise ConfigError, on every rank alike, where the trace cannot be written or --nvtx is given without an NVTX library.

    Collective where --trace or --nvtx is given.
    """
    from ..comm.health.agreement import agree_on_error
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
    """NVTX ranges for --nvtx, or for --trace where an NVTX library is available; else None."""
    from ..comm.profile.nvtx import nvtx, nvtx_or_none

    return nvtx() if args.nvtx else nvtx_or_none() if args.trace is not None else None
