"""What waiting costs a tiny training step of eight ranks, with addresses of their own and with equal ones (`setarch -R`).

Processor time, switches, where ranks sleep, and what several small collectives take beside one of their size.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import about, on_ranks, save, verdict
from step import GRID, MODELS, RANKS, STILL

SETARCH = ("setarch", "-R")
STARTS: dict[str, tuple[str, ...]] = {"own addresses": (), "equal addresses": SETARCH}
WARM_UP, CALLS = 5, 100
LIMIT = 0.9
NOT_RANDOM = 0x0040000
"""Linux's ADDR_NO_RANDOMIZE, in the personality of a process."""
PARTS, ROWS, COLUMNS = 4, 4, 32  # a joined collective's parts, and a rank's block of each


def main() -> None:
    """Start the ranks in both ways, in turn, and print what a step and what a collective takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="Start the ranks this many times in each way.")
    parser.add_argument("--steps", type=int, default=40, help="Time this many steps of each start.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.steps)
    starts = STARTS if can_equal_addresses() else {"own addresses": ()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in starts}
    for turn in range(args.rounds):
        for name in sorted(starts, reverse=turn % 2 == 0):
            said = on_ranks(RANKS, [__file__, "--steps", str(args.steps), "--on-ranks"], started_by=starts[name])
            found[name].append(json.loads(said.splitlines()[-1]))
    print(about(found["own addresses"][0]["machine"]))
    for name, rows in found.items():
        show(name, rows)
    if not all(row["equal_addresses"] for row in found.get("equal addresses", [{"equal_addresses": False}])):
        print("setarch -R does not reach the ranks here: equal addresses are not compared")
    else:
        own, equal = (median(row["step"]["cpu_ms"] for row in rows) for rows in found.values())
        print(f"equal ÷ own addresses: {equal / own:.2f} of the processor time of a step")
        print(verdict(f"at most {LIMIT} of it", equal <= LIMIT * own))
    save({"kind": "step_waits", "starts": found}, args.json)


def can_equal_addresses() -> bool:
    """Whether `setarch -R` may start programs here; containers often forbid it."""
    return shutil.which(SETARCH[0]) is not None and subprocess.run([*SETARCH, "true"], capture_output=True).returncode == 0


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print what the ranks of one kind of start took, medians over the starts."""
    step = {key: median(row["step"][key] for row in rows) for key in rows[0]["step"]}
    print(f"{name}: {step['cpu_ms']:.1f} ms of processor a rank-step, {step['switches']:.0f} switches, {step['wall_ms']:.1f} ms")
    first = rows[0]
    print("  communications and sleeps of rank 0, by axis: " + by_axis(first["communications"], first["sleeps"]))
    for operation in first["collectives"]:
        apart, joined = (median(row["collectives"][operation][way] for row in rows) for way in ("apart", "joined"))
        print(f"  {PARTS} of {operation}: {apart:.0f} µs of processor, joined with their copies {joined:.0f} µs")


def by_axis(communications: dict[str, float], sleeps: dict[str, float]) -> str:
    """Both counts as text."""
    return ", ".join(f"{axis} {count:.0f} and {sleeps.get(axis, 0):.1f}" for axis, count in communications.items())


def measure(steps: int) -> None:
    """Run on every rank: time steps, count, and time collectives apart and joined; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    import torch
    from mpi4py import MPI

    from summa3d.bench.machine import machine
    from summa3d.train.config import load
    from summa3d.train.loop import take_step
    from summa3d.train.prepare import prepare

    world = MPI.COMM_WORLD
    personality = int(Path("/proc/self/personality").read_text(encoding="ascii"), 16)
    found: dict[str, Any] = {"machine": machine(world), "equal_addresses": bool(personality & NOT_RANDOM)}
    with tempfile.TemporaryDirectory() as folder, torch.autograd.set_multithreading_enabled(False):
        run = prepare(load("demo", [*MODELS["tiny"], *GRID, *STILL]), world, Path(world.bcast(folder)) / "tiny")
        numbers = iter(range(1, 1 + WARM_UP + 2 * steps))

        def step() -> None:
            take_step(run, next(numbers))

        for _ in range(WARM_UP):
            step()
        found["step"] = taken(step, steps, world)
        with run.grid.ledger.watch() as moved:
            found["sleeps"] = sleeps(step, steps)
        calls = Counter[str]()
        for row in moved.rows:
            calls[row.axis] += row.amounts.calls
        found["communications"] = {axis: count / steps for axis, count in calls.items()}
        found["collectives"] = collectives(run.grid["x"], world)
        world.Barrier()
    if world.rank == 0:
        print(json.dumps(found))


def taken(act: Callable[[], object], times: int, world: Any) -> dict[str, float]:
    """Processor and wall milliseconds, and switches, of one `act` of a rank: means over `times` and over the ranks."""
    world.Barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(times):
        act()
    after = resource.getrusage(resource.RUSAGE_SELF)
    world.Barrier()
    wall = time.perf_counter() - start
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    mean = [world.allreduce(value) / world.size / times for value in (spent, after.ru_nvcsw - before.ru_nvcsw)]
    return {"cpu_ms": mean[0] * 1e3, "wall_ms": wall / times * 1e3, "switches": mean[1]}


def sleeps(step: Callable[[], None], steps: int) -> dict[str, float]:
    """How often this rank sleeps in a step, by axis."""
    from summa3d.comm.transport.node_memory import Flags

    counted, wait = Counter[str](), Flags.wait

    def counting(flags: Flags, flag: int, value: int) -> bool:
        slept = wait(flags, flag, value)
        counted[flags.label] += slept
        return slept

    Flags.wait = counting  # type: ignore[method-assign]
    for _ in range(steps):
        step()
    Flags.wait = wait  # type: ignore[method-assign]
    return {axis: count / steps for axis, count in counted.items()}


def collectives(axis: Any, world: Any) -> dict[str, dict[str, float]]:
    """µs of processor of PARTS small collectives, and of one of their size between the copies that join and part them."""
    import torch

    g = axis.size
    blocks = [torch.ones(ROWS, COLUMNS) for _ in range(PARTS)]
    wholes = [torch.ones(g * ROWS, COLUMNS) for _ in range(PARTS)]

    def gathered() -> list[Any]:
        together = axis.start_all_gather(torch.cat(blocks)).wait().view(g, PARTS, ROWS, COLUMNS)
        return [together[:, part].reshape(g * ROWS, COLUMNS) for part in range(PARTS)]

    def scattered() -> list[Any]:
        together = torch.cat([whole.view(g, ROWS, COLUMNS) for whole in wholes], 1).view(-1, COLUMNS)
        return list(axis.start_reduce_scatter(together).wait().split(ROWS))

    ways: dict[str, dict[str, Callable[[], object]]] = {
        "all_gather": {"apart": lambda: [axis.start_all_gather(block).wait() for block in blocks], "joined": gathered},
        "reduce_scatter": {"apart": lambda: [axis.start_reduce_scatter(whole).wait() for whole in wholes], "joined": scattered},
    }
    return {
        operation: {way: taken(act, CALLS, world)["cpu_ms"] * 1e3 for way, act in of.items()} for operation, of in ways.items()
    }


if __name__ == "__main__":
    sys.exit(main())
