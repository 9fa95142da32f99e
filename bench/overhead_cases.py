"""What overhead.py measures on ranks: `overhead_cases.py NAME ROUNDS CALLS`, started on them, prints it as JSON."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from ranks import Layer, in_turn, on_machine, seconds, started, tell, training

WARM_UPS, FEW = 50, 5
Act = Callable[[], object]


def counted(act: Act) -> int:
    """Calls of Python's and C's functions in `act`, as sys.setprofile sees them, beside `act` and what ends the count."""
    calls = -2

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    act()
    sys.setprofile(None)
    return calls


# -- collectives --------------------------------------------------------------------------------------------------------------

WORDS, WHOLE = 64, {"64 doubles": 64, "64 KiB": 64 * 1024 // 8}
"""Words on each rank of the collectives that are begun, and of the gathers that are timed whole."""


def collectives(rounds: int, calls: int) -> tuple[Any, dict[str, float]]:
    """µs of each collective of the checkout that SUMMA3D_BENCHED names."""
    sys.path.insert(0, os.environ["SUMMA3D_BENCHED"])
    import numpy as np
    from mpi4py import MPI

    from summa3d.comm.grid import Grid

    world, taken, array = MPI.COMM_WORLD, {}, np.ones(WORDS)
    for way, node_memory in {"node memory": True, "MPI": False}.items():
        axis = Grid(world, {"x": world.size}, node_memory=node_memory)["x"]
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            taken[f"{name}, {way}"] = quick_tenth(partial(getattr(axis, f"start_{name}"), array), calls, world)
        for size, words in WHOLE.items():
            taken |= whole_gathers(axis, np.ones(words), calls, f"whole all_gather of {size}, {way}")
    return world, taken


def whole_gathers(axis: Any, array: Any, calls: int, name: str) -> dict[str, float]:
    """Return the µs of this thread in the quickest `axis.all_gather(array)` and in the quickest prepared one, if it has such."""
    ways: dict[str, Act] = {name: lambda: axis.all_gather(array)}
    if hasattr(axis, "prepare"):
        gather = axis.prepare("all_gather", like=array)
        ways[f"prepared {name}"] = lambda: gather.start(array).wait()
    timed = {way: partial(seconds, act, time.thread_time_ns) for way, act in ways.items()}
    return {way: min(times) / 1000 for way, times in in_turn(timed, calls, WARM_UPS).items()}


def quick_tenth(start: Any, calls: int, world: Any) -> float:
    """The µs of this thread that a collective takes, without the wait for other ranks, in all but the quickest tenth of calls.

    Other work on the machine empties the caches between calls; the quickest are those that it left alone.
    """
    micros = []
    for call in range(calls + WARM_UPS):
        before = time.thread_time_ns()
        pending = start()
        begun = time.thread_time_ns()
        world.Barrier()
        after = time.thread_time_ns()
        pending.wait()
        if call >= WARM_UPS:
            micros.append((begun - before + time.thread_time_ns() - after) / 1000)
    return statistics.quantiles(micros, n=10)[0]


# -- the executor of a pipeline -----------------------------------------------------------------------------------------------

MICRO_BATCHES = 64


def executor(rounds: int, calls: int) -> tuple[Any, dict[str, Any]]:
    """Seconds of the processor of a step by the executor and by a plain loop: other work on the machine does not count."""
    world, found = on_machine()
    ways = Ways()
    acts = {name: partial(seconds, getattr(ways, name), time.thread_time) for name in ("plain", "executor")}
    ops = len(ways.pipeline.program(MICRO_BATCHES))
    return world, {"machine": found, "ops": ops, "seconds": in_turn(acts, rounds, FEW)}


class Ways:
    """A step of micro-batches that compute next to nothing, by the executor and by a plain loop; the sums are compared."""

    def __init__(self) -> None:
        import torch

        from summa3d.nn import ModelConfig, build, scheme
        from summa3d.parallel.executor import Stage
        from summa3d.parallel.pipeline import Pipeline

        torch.autograd.set_multithreading_enabled(False)
        self.model = build(ModelConfig(layers=1, hidden=8, heads=1, sequence=4, vocabulary=16), scheme("serial"))
        self.weight = self.model.blocks[0].mlp_norm.weight

        class Tiny(Stage):
            def forward(stage, x: Any, inputs: Any, batch: Any) -> Any:
                return self.weight.sum(), None

        self.pipeline = Pipeline(self.model, "1f1b", 1, torch.float32)
        self.pipeline.executor.stages = [Tiny(**vars(stage)) for stage in self.pipeline.executor.stages]
        self.micro = ({}, self.model.batch_of({"tokens": torch.zeros(1, 4, dtype=torch.long)}))
        self.executor()
        want, self.weight.grad = self.weight.grad.clone(), None
        self.plain()
        assert torch.equal(self.weight.grad, want)

    def executor(self) -> None:
        """The step as training takes it."""
        self.pipeline.run(MICRO_BATCHES, lambda micro: self.micro)

    def plain(self) -> None:
        """The same forwards and backwards."""
        (stage,) = self.pipeline.executor.stages
        losses = []
        for _ in range(MICRO_BATCHES):
            loss, _ = stage.forward(None, *self.micro)
            (loss * 1.0).backward()
            losses.append(loss.detach())


# -- calls of a product -------------------------------------------------------------------------------------------------------

SIZE, WARM_PRODUCTS = 64, 3
TRANSPORT = "/summa3d/comm/transport/"
PRODUCTS = {
    1: ("cuboid x=1,y=1,z=1", "summa x=1,y=1"),
    2: ("cuboid x=1,y=1,z=2", "cuboid x=1,y=2,z=1", "summa x=1,y=2"),
    4: ("cuboid x=2,y=1,z=2", "summa x=2,y=2"),
    8: ("cuboid x=2,y=2,z=2", "summa x=2,y=4"),
}
"""Ranks → algorithms and grids."""


def gemm_calls(rounds: int, calls: int) -> tuple[Any, dict[str, list[int]]]:
    """The largest counts over ranks of calls and of frames in each product."""
    world = started()
    found = {name: world.allgather(calls_of(name, world)) for name in PRODUCTS[world.size]}
    return world, {name: [max(counts) for counts in zip(*ranks, strict=True)] for name, ranks in found.items()}


def calls_of(name: str, world: Any) -> tuple[int, int]:
    """This rank's calls in the fourth of four products, and its frames to the transport."""
    from summa3d.cli.gemm import parse_grid
    from summa3d.comm.grid import Grid
    from summa3d.gemm import DistMatrix
    from summa3d.gemm.algorithms.registry import algorithm

    algorithm_name, shape = name.split()
    with Grid(world, parse_grid(shape)) as grid:
        stored = algorithm(algorithm_name).plan("nn", SIZE, SIZE, SIZE).stored[:2]
        a, b = (DistMatrix.from_function(lambda i, j: i + j, extent, grid, layout) for layout, extent in stored)
        for _ in range(WARM_PRODUCTS):
            a @ b
        calls, frames = 0, [0]

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")
            if event == "call" and TRANSPORT in frame.f_code.co_filename:
                frames.append(depth(frame))

        sys.setprofile(profile)
        a @ b
        sys.setprofile(None)
    return calls, max(frames)


def depth(frame: FrameType | None) -> int:
    """Return the number of frames from `__matmul__` to the first of them in the transport, both included; 0 without one."""
    names: list[str] = []
    while frame is not None and frame.f_code.co_name != "__matmul__":
        names.append(frame.f_code.co_filename)
        frame = frame.f_back
    first = next((place for place, name in enumerate(reversed(names), start=2) if TRANSPORT in name), 0)
    return first if frame is not None else 0


# -- a small product ----------------------------------------------------------------------------------------------------------

GRIDS = ({"x": 1, "y": 1, "z": 2}, {"x": 1, "y": 2, "z": 1})


def gemm(rounds: int, calls: int) -> tuple[Any, dict[str, Any]]:
    """Median µs of our product and of the bare calls on each grid, in turn."""
    world, found = on_machine()
    from summa3d.bench.clock import sleep_until_all_are_here

    sleep_until_all_are_here(world)
    return world, {"machine": found, "calls": calls, "rows": [compare(world, grid, calls) for grid in GRIDS]}


def compare(world: Any, grid: dict[str, int], calls: int) -> dict[str, Any]:
    """Median times on one grid in µs, the largest over ranks; collective."""
    from summa3d.bench.products import Problem, ProductEntry, ProductRunner

    runner = ProductRunner(ProductEntry("cuboid", grid, Problem(SIZE, SIZE, SIZE)), world)
    acts = {name: partial(seconds, act) for name, act in {"ours": runner.run, **bare(world, runner, grid)}.items()}
    times = in_turn(acts, calls, WARM_UPS)
    medians = {name: max(world.allgather(median(taken))) * 1e6 for name, taken in times.items()}
    ours = medians.pop("ours")
    runner.free()
    return {"grid": grid, "ours_us": ours, "bare_us": medians, "overhead_us": ours - min(medians.values())}


def bare(comm: Any, runner: Any, grid: dict[str, int]) -> dict[str, Act]:
    """The collective and the product that ours contains, as bare calls of mpi4py and numpy into preallocated arrays."""
    import numpy as np

    a, b, c = runner.a.block.copy(), runner.b.block.copy(), np.empty_like(runner.c.block)
    whole, parts = np.empty((SIZE, SIZE)), np.empty((2, SIZE // 2, SIZE))

    def gather() -> None:
        comm.Allgather(a, whole)
        np.matmul(whole, b, out=c)

    def reduce_scatter() -> None:
        np.matmul(a, b, out=whole)
        comm.Reduce_scatter_block(whole, c)

    def all_to_all() -> None:
        np.matmul(a, b, out=whole)
        comm.Alltoall(whole, parts)
        np.add(parts[0], parts[1], out=c)

    if grid["y"] == 2:
        return {"Allgather + matmul": gather}
    return {"matmul + Reduce_scatter_block": reduce_scatter, "matmul + Alltoall + add": all_to_all}


# -- a layer ------------------------------------------------------------------------------------------------------------------

SIZES = {"batch": 2, "sequence": 4, "features": 16}
TORCH, SCHEMES = "torch", {"serial": {}, "cuboid": {"x": 1, "y": 1, "z": 1}}
BATCH = 50  # calls whose median is one sample of a round
PASSES = ("forward", "backward", "both")


def linear(rounds: int, calls: int) -> tuple[Any, dict[str, Any]]:
    """Seconds and calls of each layer, in turn."""
    world, found = on_machine()
    import torch

    x, gradient = torch.randn((2, *SIZES.values()), generator=torch.Generator().manual_seed(1))
    layers = {name: Counted(layer, x, gradient) for name, layer in built(world).items()}
    for layer in layers.values():
        layer.seconds(WARM_UPS)
    times = in_turn({name: partial(layer.seconds, BATCH) for name, layer in layers.items()}, rounds)
    rows = {
        name: {"seconds": dict(zip(PASSES, zip(*times[name], strict=True), strict=True)), "calls": layer.calls()}
        for name, layer in layers.items()
    }
    return world, {"machine": found, "torch": torch.__version__, **SIZES, "rows": rows}


def built(world: Any) -> dict[str, Any]:
    """torch's layer and ours, with equal weights."""
    import torch

    from summa3d import Grid
    from summa3d.nn import Linear, initialise, scheme

    h = SIZES["features"]
    layers = {TORCH: torch.nn.Linear(h, h)}
    for name, grid in SCHEMES.items():
        bound = scheme(name, Grid(world, grid) if grid else None)
        layers[name] = Linear(h, h, bound)
        initialise(layers[name], bound, seed=1)
    with torch.no_grad():
        layers[TORCH].weight.copy_(layers["serial"].weight.t())
        layers[TORCH].bias.copy_(layers["serial"].bias)
    return layers


class Counted(Layer):
    """A layer whose passes are timed, and whose calls are counted."""

    def seconds(self, calls: int) -> list[float]:
        """Median seconds of a forward, of a backward and of both."""
        taken = []
        for _ in range(calls):
            forward, backward = seconds(self.forward), seconds(self.backward)
            taken.append((forward, backward, forward + backward))
            self.forget()
        return [median(of) for of in zip(*taken, strict=True)]

    def calls(self) -> dict[str, int]:
        """Calls of functions in a forward and in a backward."""
        found = {"forward": counted(self.forward), "backward": counted(self.backward)}
        self.forget()
        return found


# -- what a step waits for ----------------------------------------------------------------------------------------------------

NOT_RANDOM = 0x0040000
"""Linux's ADDR_NO_RANDOMIZE, in the personality of a process."""
COLLECTIVES = 100
PARTS, ROWS, COLUMNS = 4, 4, 32  # a joined collective's parts, and a rank's block of each


def waits(rounds: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """Measure what steps take, where ranks sleep in them, and what collectives take apart and joined."""
    world, found = on_machine()
    import torch
    from step import GRID, MODELS, STILL

    personality = int(Path("/proc/self/personality").read_text(encoding="ascii"), 16)
    result: dict[str, Any] = {"machine": found, "equal_addresses": bool(personality & NOT_RANDOM)}
    with tempfile.TemporaryDirectory() as folder, torch.autograd.set_multithreading_enabled(False):
        run, step = training([*MODELS["tiny"], *GRID, *STILL], world, Path(world.bcast(folder)) / "tiny")
        for _ in range(FEW):
            step()
        result["step"] = taken(step, steps, world)
        with run.grid.ledger.watch() as moved:
            result["sleeps"] = sleeps(step, steps)
        calls = Counter[str]()
        for row in moved.rows:
            calls[row.axis] += row.amounts.calls
        result["communications"] = {axis: count / steps for axis, count in calls.items()}
        result["collectives"] = joined(run.grid["x"], world)
        world.Barrier()
    return world, result


def taken(act: Act, times: int, world: Any) -> dict[str, float]:
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


def sleeps(step: Act, steps: int) -> dict[str, float]:
    """Return how often this rank sleeps in a step, by axis."""
    from summa3d.comm.transport.node_memory import Flags

    counts, wait = Counter[str](), Flags.wait

    def counting(flags: Flags, flag: int, value: int) -> bool:
        slept = wait(flags, flag, value)
        counts[flags.label] += slept
        return slept

    Flags.wait = counting  # type: ignore[method-assign]
    for _ in range(steps):
        step()
    Flags.wait = wait  # type: ignore[method-assign]
    return {axis: count / steps for axis, count in counts.items()}


def joined(axis: Any, world: Any) -> dict[str, dict[str, float]]:
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

    ways: dict[str, dict[str, Act]] = {
        "all_gather": {"apart": lambda: [axis.start_all_gather(block).wait() for block in blocks], "joined": gathered},
        "reduce_scatter": {"apart": lambda: [axis.start_reduce_scatter(whole).wait() for whole in wholes], "joined": scattered},
    }
    return {
        operation: {way: taken(act, COLLECTIVES, world)["cpu_ms"] * 1e3 for way, act in of.items()}
        for operation, of in ways.items()
    }


CASES: dict[str, Callable[[int, int], tuple[Any, dict[str, Any]]]] = {
    **{"collectives": collectives, "executor": executor, "calls": gemm_calls},
    **{"gemm": gemm, "linear": linear, "waits": waits},
}


if __name__ == "__main__":
    tell(*CASES[sys.argv[1]](*map(int, sys.argv[2:])))
