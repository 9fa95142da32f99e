"""Shared by the benchmark scripts for a GPU: options, the device, and times from CUDA events."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mpi4py import MPI

from summa3d.comm.device.select import take_device

BUSY = 4_000_000  # cycles, some milliseconds: longer than the host takes to queue what is timed


def benchmark_parser(what: str, calls: int, **sizes: int) -> argparse.ArgumentParser:
    """The parser of a script that times `calls` calls of `what` in turn with a peer; `sizes` are size options with defaults."""
    parser = argparse.ArgumentParser()
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"Set the size {name}.")
    parser.add_argument("--calls", type=int, default=calls, help=f"Time this many {what} at once.")
    parser.add_argument("--rounds", type=int, default=7, help="Time this many rounds, after a warm-up round that is not counted.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Compute there. cpu only tries the script.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
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
    """Whether there is no CUDA device; prints a line that says so."""
    if torch.cuda.is_available():
        return False
    print(f"no GPU: {what} can only be measured on a CUDA device")
    return True


def milliseconds(run: Callable[[], object], repeat: int) -> list[float]:
    """Device times of `repeat` calls in ms, after three warm-up calls.

    The device gets other work before each call, so that it does not wait for the host within the call.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def seconds_each(run: Callable[[], object], calls: int, device: str) -> float:
    """Mean seconds of `calls` calls in a row, host time included where the device waits for the host."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def in_turn(runs: dict[str, Callable[[], object]], calls: int, rounds: int, device: str) -> dict[str, list[float]]:
    """`seconds_each` of every run in interleaved rounds, after a warm-up round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            times[name].append(seconds_each(run, calls, device))
    return {name: taken[1:] for name, taken in times.items()}
