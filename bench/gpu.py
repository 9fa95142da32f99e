"""What the scripts for a GPU share: options, whether there is one, times by its own events."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mpi4py import MPI

from summa3d.comm.device.select import take_device

BUSY = 4_000_000  # cycles, some milliseconds: longer than the host takes to queue what is timed


def race_parser(what: str, calls: int, **sizes: int) -> argparse.ArgumentParser:
    """The options of a script that times `calls` of `what` in turn with a peer; `sizes` are its own, with their defaults."""
    parser = argparse.ArgumentParser()
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--calls", type=int, default=calls, help=f"{what} of a time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parser.add_argument("--json", type=Path)
    return parser


def taken(device: str, what: str) -> str | None:
    """The name of the device, this process's own from now on; None, and a line that says so, without the GPU asked for."""
    if device == "cpu":
        return "cpu"
    if without_gpu(what):
        return None
    take_device(MPI.COMM_SELF)
    return torch.cuda.get_device_name()


def without_gpu(what: str) -> bool:
    """Say that `what` cannot be measured, where there is no CUDA device."""
    if torch.cuda.is_available():
        return False
    print(f"no GPU: {what} can only be measured on a CUDA device")
    return True


def milliseconds(run: Callable[[], object], repeat: int) -> list[float]:
    """The device's times of `repeat` calls, after three that are not counted.

    The device is given other work first, so that it does not wait for the host within a call.
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
    """Seconds of one of `calls` calls, one right after the other, the host's part in it where the device waits for that."""
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
    """`seconds_each` of every run in every round, in turn, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            times[name].append(seconds_each(run, calls, device))
    return {name: taken[1:] for name, taken in times.items()}
