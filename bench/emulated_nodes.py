"""Benchmark on emulated nodes, whose ports are slow: products, blocks and training steps beside seconds predicted before.

`--predict FILE` measures what a core does, predicts every case and writes both; nothing of the network is measured or fitted.
`--measure FILE` runs the cases of such a file in interleaved rounds, and says which claims hold. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import about, environment, note, on_ranks, save, verdict
from emulated_cases import MATRICES, Case, Facts, port_bytes, predicted, races, settings
from emulated_report import claims, figures, lines, replaced

PREDICTIONS = Path(__file__).with_name("emulated_predictions.json")
LONG, SHORT = 512, 64
FACT_RANKS = 2
BYTES, ELEMENTS = 1 << 26, 1 << 20


def main() -> None:
    """Predict or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="Write predictions to FILE.")
    parser.add_argument("--measure", type=Path, nargs="?", const=PREDICTIONS, metavar="FILE", help="Run the cases of FILE.")
    parser.add_argument("--part", action="append", help="Run these parts alone. The option may be repeated.")
    parser.add_argument("--rounds", type=int, default=7, help="Time this many interleaved rounds.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result of --measure to FILE.")
    parser.add_argument("--show", type=Path, metavar="FILE", help="Take the result in FILE in place of measuring.")
    parser.add_argument("--page", type=Path, metavar="FILE", help="Put the result between the marks of this page.")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="Draw the result into this folder.")
    parser.add_argument("--on-ranks", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks:
        on_a_rank(args.on_ranks, args.measure, args.rounds)
    elif args.predict:
        save(predictions(), args.predict)
    elif args.measure:
        result = measured(json.loads(args.measure.read_text(encoding="utf-8")), args.measure, args.part, args.rounds)
        save(result, args.json)
        show(result, args.page, args.plots)
    elif args.show:
        show(json.loads(args.show.read_text(encoding="utf-8")), args.page, args.plots)
    else:
        parser.error("give --predict FILE, --measure [FILE] or --show FILE")


def show(result: Mapping[str, Any], page: Path | None, plots: Path | None) -> None:
    """Put a result into a page, and draw its figures into a folder."""
    if page is not None:
        page.write_text(replaced(page.read_text(encoding="utf-8"), result), encoding="utf-8")
    if plots is not None:
        figures(result, plots)


def emulated(nodes: int, port: str, ranks: int, arguments: Sequence[str]) -> str:
    """What this script prints on ranks of emulated nodes. A failed job ends the script."""
    network = ["--emulate", f"nodes={nodes},port={port}", "-n", str(ranks)]
    command = [sys.executable, "-m", "summa3d", "launch", *network, __file__, *arguments]
    done = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# -- predictions --------------------------------------------------------------------------------------------------------------


def predictions() -> dict[str, Any]:
    """The facts of this machine, and the predicted seconds of every case."""
    load = os.getloadavg()[0]
    core = json.loads(on_ranks(FACT_RANKS, [__file__, "--on-ranks", "core"]).splitlines()[-1])
    facts = Facts(**core["facts"])
    note(f"a core, load {load:.1f}: {asdict(facts)}")
    found = []
    for race in races(facts):
        cases = []
        for case in race.cases:
            wire, arithmetic = predicted(case, race, facts)
            seconds = {"wire": wire, "arithmetic": arithmetic, "seconds": wire + arithmetic}
            cases.append({**asdict(case), **seconds, "port_bytes": port_bytes(case, race, facts)})
            note(f"{race.name}: {case.label}: {wire * 1e3:.0f} + {arithmetic * 1e3:.0f} ms")
        found.append({"part": race.part, "nodes": race.nodes, "port": race.port, "ranks": race.ranks, "cases": cases})
    return {"kind": "predictions", "machine": core["machine"], "load": load, "facts": asdict(facts), "races": found}


def core_facts() -> dict[str, Any]:
    """What a rank does while all work, by processor time: other work on the machine takes cores, but not speed."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from summa3d.bench.calibrate import Calibration, gelu
    from summa3d.bench.machine import machine
    from summa3d.comm.nodes import Nodes

    world = MPI.COMM_WORLD

    def least(call: Callable[[], Any], repeats: int) -> float:
        world.Barrier()
        times = []
        for _ in range(repeats):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        return float(world.allreduce(min(times), MPI.MAX))

    def rate(side: int, dtype: str) -> float:
        a, out = np.ones((side, side), dtype), np.empty((side, side), dtype)
        return 2 * side**3 / least(lambda: np.matmul(a, a, out=out), 50)

    long = {dtype: rate(LONG, dtype) for dtype in ("float64", "float32")}
    short = rate(SHORT, MATRICES)
    half = max(0.0, (long[MATRICES] - short) / (short / SHORT - long[MATRICES] / LONG))  # rate = peak · side/(side + half)
    calibration = Calibration(world)
    (block,) = calibration.layers()
    small = least(block.act, 50)
    source, target = np.ones(BYTES, np.uint8), np.empty(BYTES, np.uint8)
    memory = 2 * BYTES / least(lambda: np.copyto(target, source), 30)
    x, wide, out = torch.ones(64), torch.ones(ELEMENTS), torch.empty(ELEMENTS)
    kernel = least(lambda: [torch.add(x, x) for _ in range(100)], 50) / 100
    operations = block.sample.products + block.sample.kernels
    return {
        "facts": {
            "flops": {dtype: value * (LONG + half) / LONG for dtype, value in long.items()},
            "half": half,
            "memory": memory,
            "kernel": kernel,
            "function": max(0.0, least(lambda: gelu(wide, out), 30) / ELEMENTS - 8 / memory),
            "layer": max(0.0, small / operations - kernel),
            "cores": Nodes.of(world).total_cores,
        },
        "machine": machine(world),
    }


# -- measurement --------------------------------------------------------------------------------------------------------------


def measured(plan: Mapping[str, Any], file: Path, parts: Sequence[str] | None, rounds: int) -> dict[str, Any]:
    """Run the races of a file of predictions; print rows and claims."""
    result: dict[str, Any] = {"kind": "emulated", "rounds": rounds, "facts": plan["facts"], "races": []}
    for number, race in enumerate(plan["races"]):
        if parts and race["part"] not in parts:
            continue
        load, began = os.getloadavg()[0], time.monotonic()
        arguments = ["--measure", str(file), "--rounds", str(rounds), "--on-ranks", str(number)]
        found = json.loads(emulated(race["nodes"], race["port"], race["ranks"], arguments).splitlines()[-1])
        rows = zip(race["cases"], found["times"], found["carried"], strict=True)
        cases = [{**case, "times": times, "carried": carried} for case, times, carried in rows]
        result["machine"] = found["machine"]
        result["races"].append({**race, "load": load, "cases": cases})
        print("\n".join(lines(result["races"][-1])), flush=True)
        note(f"{time.monotonic() - began:.0f} s")
    print(about(result["machine"]))
    result["claims"] = [{"claim": claim, "holds": holds} for claim, holds in claims(result["races"])]
    for one in result["claims"]:
        print(verdict(one["claim"], one["holds"]))
    return result


def on_a_rank(what: str, file: Path, rounds: int) -> None:
    """Run on every rank: the facts of a core, or the race of this number; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    if what == "core":
        result: Mapping[str, Any] = core_facts()
    else:
        result = raced(json.loads(file.read_text(encoding="utf-8"))["races"][int(what)], rounds, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(result), flush=True)


def raced(race: Mapping[str, Any], rounds: int, world: Any) -> dict[str, Any]:
    """The seconds of each case in every round, after one that is not counted; collective."""
    from summa3d.bench.machine import machine

    names = Case.__dataclass_fields__
    with tempfile.TemporaryDirectory() as own:
        folder = world.bcast(own)
        cases = [Case(**{name: case[name] for name in names}) for case in race["cases"]]
        contenders = [CONTENDERS[case.kind](case, world, Path(folder)) for case in cases]
        times: list[list[float]] = [[] for _ in contenders]
        carried = [over_the_port(contender, world) for contender in contenders]
        for _ in range(rounds):
            for contender, taken in zip(contenders, times, strict=True):
                taken.append(contender())
        world.Barrier()
    return {"times": times, "carried": carried, "machine": machine(world, probe=False)}


def over_the_port(contender: Callable[[], float], world: Any) -> int:
    """The bytes that the busiest port carries in one direction in a run; collective."""
    from mpi4py import MPI

    world.Barrier()
    before = counters()
    world.Barrier()
    contender()
    world.Barrier()
    mine = max(after - start for after, start in zip(counters(), before, strict=True))
    return int(world.allreduce(mine, MPI.MAX))


def counters() -> list[int]:
    """Bytes that this node's port has received and sent."""
    from summa3d.launch.emulate import NIC

    folder = Path("/sys/class/net", NIC, "statistics")
    return [int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx")]


def product(case: Case, world: Any, folder: Path) -> Callable[[], float]:
    """A product with its operands; collective."""
    from summa3d.bench.clock import Clock
    from summa3d.bench.products import element
    from summa3d.comm.grid import Grid
    from summa3d.gemm.algorithms.registry import ALGORITHMS
    from summa3d.gemm.matrix import DistMatrix

    found = ALGORITHMS[case.what]
    plan = found.plan("nn", *case.sizes)
    grid = Grid(world, case.axes, case.order, case.tile)
    shapes = ((plan.a_shape, plan.a_layout), (plan.b_shape, plan.b_layout), (plan.c_shape, plan.c_layout))
    blocks = [DistMatrix.from_function(element, shape, grid, layout, MATRICES).block for shape, layout in shapes]
    executor, clock = found.executor(plan, grid), Clock(grid)
    return lambda: clock.spans(lambda: executor.run(*blocks))[0]


def block(case: Case, world: Any, folder: Path) -> Callable[[], float]:
    """The demo's block, forward and backward; collective."""
    import torch
    from emulated_cases import DEMO_BATCH, demo_model

    from summa3d.bench import blocks

    torch.autograd.set_multithreading_enabled(False)
    runner = blocks.BlockRunner(blocks.BlockEntry(case.what, case.axes), blocks.Case(demo_model(1), DEMO_BATCH), world)
    return lambda: sum(runner.seconds())


def step(case: Case, world: Any, folder: Path) -> Callable[[], float]:
    """A training step of the demo's model; collective."""
    import torch

    from summa3d.train.config import load
    from summa3d.train.loop import take_step
    from summa3d.train.prepare import prepare

    torch.autograd.set_multithreading_enabled(False)
    run = prepare(load("demo", settings(case)), world, folder / case.label.replace(" ", "-"))
    numbers = iter(range(1, 1000))

    def seconds() -> float:
        run.grid.world.barrier()
        start = time.perf_counter()
        take_step(run, next(numbers))
        run.grid.world.barrier()
        return time.perf_counter() - start

    return seconds


CONTENDERS = {"product": product, "block": block, "step": step}
"""Kind of a case → what makes its stopwatch."""


if __name__ == "__main__":
    main()
