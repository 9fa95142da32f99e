"""Benchmark on emulated nodes, whose ports are slow: products, blocks and training steps beside seconds predicted before.

`--predict FILE` measures what a core does, predicts every case and writes both; nothing of the network is measured or fitted.
`--measure FILE` runs the cases of such a file in interleaved rounds, and says which claims hold. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import about, conclude, from_nodes, from_ranks, note, options, save
from emulated_cases import MATRICES, Case, Facts, port_bytes, predicted, races, settings
from emulated_report import claims, figures, replaced, table
from ranks import in_turn, on_machine, seconds, started, tell, training

PREDICTIONS = Path(__file__).with_name("emulated_predictions.json")
LONG, SHORT = 512, 64
FACT_RANKS = 2
BYTES, ELEMENTS = 1 << 26, 1 << 20


def main() -> None:
    """Predict or measure."""
    parser = options(__doc__, 7)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="Write predictions to FILE.")
    parser.add_argument("--measure", type=Path, nargs="?", const=PREDICTIONS, metavar="FILE", help="Run the cases of FILE.")
    parser.add_argument("--part", action="append", help="Run these parts alone. The option may be repeated.")
    parser.add_argument("--show", type=Path, metavar="FILE", help="Take the result in FILE in place of measuring.")
    parser.add_argument("--page", type=Path, metavar="FILE", help="Put the result between the marks of this page.")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="Draw the result into this folder.")
    parser.add_argument("--race", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks:
        on_a_rank(args.race, args.measure, args.rounds)
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


# -- predictions --------------------------------------------------------------------------------------------------------------


def predictions() -> dict[str, Any]:
    """The facts of this machine, and the predicted seconds of every case."""
    load = os.getloadavg()[0]
    core = from_ranks(FACT_RANKS, __file__, "--on-ranks")
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


def core_facts(world: Any) -> dict[str, Any]:
    """Measure what a rank does while all work, by processor time: other work on the machine takes cores, but not speed."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from summa3d.bench.calibrate import Calibration, gelu
    from summa3d.comm.nodes import Nodes

    def least(call: Callable[[], Any], repeats: int) -> float:
        world.Barrier()
        return float(world.allreduce(min(seconds(call, time.thread_time) for _ in range(repeats)), MPI.MAX))

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
        "flops": {dtype: value * (LONG + half) / LONG for dtype, value in long.items()},
        **{"half": half, "memory": memory, "kernel": kernel},
        "function": max(0.0, least(lambda: gelu(wide, out), 30) / ELEMENTS - 8 / memory),
        "layer": max(0.0, small / operations - kernel),
        "cores": Nodes.of(world).total_cores,
    }


# -- measurement --------------------------------------------------------------------------------------------------------------


def measured(plan: Mapping[str, Any], file: Path, parts: Sequence[str] | None, rounds: int) -> dict[str, Any]:
    """Run the races of a file of predictions; print rows and claims."""
    result: dict[str, Any] = {"kind": "emulated", "rounds": rounds, "facts": plan["facts"], "races": []}
    for number, race in enumerate(plan["races"]):
        if parts and race["part"] not in parts:
            continue
        load, began = os.getloadavg()[0], time.monotonic()
        arguments = __file__, "--measure", file, "--rounds", rounds, "--on-ranks", "--race", number
        found = from_nodes(race["nodes"], race["port"], *arguments, ranks=race["ranks"])
        rows = zip(race["cases"], found["times"], found["carried"], strict=True)
        cases = [{**case, "times": times, "carried": carried} for case, times, carried in rows]
        result["machine"] = found["machine"]
        result["races"].append({**race, "load": load, "cases": cases})
        print(table(result["races"][-1]).text(), flush=True)
        note(f"{time.monotonic() - began:.0f} s")
    print(about(result["machine"]))
    found = [*claims(result["races"])]
    conclude(found)
    return result | {"claims": [{"claim": claim, "holds": holds} for claim, holds in found]}


def on_a_rank(number: int | None, file: Path, rounds: int) -> None:
    """Run on every rank: the facts of a core, or the race of this number; rank 0 prints JSON."""
    if number is None:
        world, found = on_machine()
        return tell(world, {"facts": core_facts(world), "machine": found})
    world = started()
    tell(world, raced(json.loads(file.read_text(encoding="utf-8"))["races"][number], rounds, world))


def raced(race: Mapping[str, Any], rounds: int, world: Any) -> dict[str, Any]:
    """The seconds of each case in every round, after one that is not counted; collective."""
    from summa3d.bench.machine import machine

    names = Case.__dataclass_fields__
    with tempfile.TemporaryDirectory() as own:
        folder = world.bcast(own)
        cases = [Case(**{name: case[name] for name in names}) for case in race["cases"]]
        contenders = [CONTENDERS[case.kind](case, world, Path(folder)) for case in cases]
        carried = [over_the_port(contender, world) for contender in contenders]
        times = in_turn(dict(enumerate(contenders)), rounds)
        world.Barrier()
    return {"times": [*times.values()], "carried": carried, "machine": machine(world, probe=False)}


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
    from summa3d.launcher.emulate import NIC

    folder = Path("/sys/class/net", NIC, "statistics")
    return [int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx")]


def product(case: Case, world: Any, folder: Path) -> Callable[[], float]:
    """A product with its operands; collective."""
    from summa3d.bench.clock import Clock
    from summa3d.bench.products import element, operands
    from summa3d.comm.grid import Grid
    from summa3d.gemm.algorithms.registry import ALGORITHMS

    found = ALGORITHMS[case.what]
    plan = found.plan("nn", *case.sizes)
    grid = Grid(world, case.axes, case.order, case.tile)
    blocks = [matrix.block for matrix in operands(plan, grid, element, MATRICES, "cpu")]
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

    torch.autograd.set_multithreading_enabled(False)
    run, take = training(settings(case), world, folder / case.label.replace(" ", "-"))
    barrier = run.grid.world.barrier
    return lambda: barrier() or seconds(lambda: (take(), barrier()))


CONTENDERS = {"product": product, "block": block, "step": step}
"""Kind of a case → what makes its stopwatch."""


if __name__ == "__main__":
    main()
