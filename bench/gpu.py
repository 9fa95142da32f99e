"""Shared by the benchmark scripts for a GPU: options, the device, and times from CUDA events."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import ranks
import torch
from common import options
from mpi4py import MPI

from summa3d.comm.device.select import take_device

BUSY = 4_000_000  # cycles, some milliseconds: longer than the host takes to queue what is timed


def benchmark_parser(doc: str | None, what: str, calls: int, **sizes: int) -> argparse.ArgumentParser:
    """The parser of a script that times `calls` calls of `what` in turn with a peer; `sizes` are size options with defaults."""
    parser = options(doc, 7)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"Set the size {name}.")
    parser.add_argument("--calls", type=int, default=calls, help=f"Time this many {what} at once.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Compute there. cpu only tries the script.")
    return parser


def taken(device: str, what: str) -> str | None:
    """Make the device current and return its name; without a GPU, print a line that says so and return None."""
    if device == "cpu":
        return "cpu"
    if without_gpu(what):
        return None
    take_device(MPI.COMM_SELF)
    return torch.cuda.get_device_name()


def without_gpu(what: str) -> bool:
    """Return whether there is no CUDA device; prints a line that says so."""
    if torch.cuda.is_available():
        return False
    print(f"no GPU: {what} can only be measured on a CUDA device")
    return True


def between_events(act: Callable[[], object]) -> float:
    """Device time of a call in ms."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def milliseconds(run: Callable[[], object], repeat: int) -> list[float]:
    """Device times of `repeat` calls in ms, after three warm-up calls.

    The device gets other work before each call, so that it does not wait for the host within the call.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda._sleep(BUSY)
        times.append(between_events(run))
    return times


def seconds_each(run: Callable[[], object], calls: int, device: str) -> float:
    """Mean seconds of `calls` calls in a row, host time included where the device waits for the host."""

    def all_calls() -> None:
        for _ in range(calls):
            run()

    if device == "cpu":
        return ranks.seconds(all_calls) / calls
    torch.cuda.synchronize()
    return between_events(all_calls) / calls / 1e3


def in_turn(runs: dict[str, Callable[[], object]], args: argparse.Namespace) -> dict[str, list[float]]:
    """`seconds_each` of every run in interleaved rounds, after a warm-up round that is not counted."""
    timed = {name: partial(seconds_each, run, args.calls, args.device) for name, run in runs.items()}
    return ranks.in_turn(timed, args.rounds, 1)
