"""Benchmark of a training step against torch's: plain on one rank; DDP, ZeRO-1, FSDP2, tensor parallelism and pipelines.

The same MPI ranks hold our model and torch's (torch.distributed over gloo), with equal weights and rows, and take steps in turn.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from common import about, conclude, environment, from_ranks, note, options, printed, save
from ranks import started, tell, training

MODEL = {"hidden": 256, "layers": 8, "heads": 8, "sequence": 128, "vocabulary": 4096}
SMALL = {"hidden": 16, "layers": 8, "heads": 4, "sequence": 8, "vocabulary": 32}
ROWS, MICRO_BATCHES = 16, 8
RANKS = (1, 2, 4)
STILL = ("evaluate_every=0", "checkpoint_every=0", "keep=0", "steps=100000", "sample_tokens=0")
WARM_UP, AGREE, TOLERANCE = 2, 3, 1e-4
"""Steps of each side before the first round; steps whose losses are compared before, and their largest difference, relative."""
AHEAD, TOGETHER = 1.0, 1.15


class Pair(NamedTuple):
    """What both sides do. peer : the name of a method of `torch_step.Peers`. axis : along which our ranks lie."""

    peer: str
    axis: str
    settings: tuple[str, ...] = ()


def _pipeline(schedule: str, chunks: int = 1) -> Pair:
    return Pair(
        "pipeline", "pp", (f"pipeline.schedule={schedule}", f"pipeline.chunks={chunks}", f"train.accumulate={MICRO_BATCHES}")
    )


PAIRS = {
    "one-rank": Pair("plain", "dp"),
    "1f1b": _pipeline("1f1b"),
    "interleaved": _pipeline("interleaved", 2),
    "zb-h1": _pipeline("zb-h1"),
    "zb-v": _pipeline("zb-v", 2),
    "ddp": Pair("ddp", "dp", ("replicas.zero=0",)),
    "zero-1": Pair("zero", "dp", ("replicas.zero=1",)),
    "fsdp": Pair("fsdp", "dp", ("replicas.zero=3",)),
    "tp": Pair("tensor_parallel", "y", ("scheme=oned",)),
}


def main() -> None:
    """Run the pairs asked for on each number of ranks, and print the ratios and whether the claims hold."""
    parser = options(__doc__, 11, "Time this many rounds, of one step of each side; rounds take turns in which side is first.")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=[*PAIRS], help="Run these pairs. The default is all.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[*RANKS], metavar="P", help="Run on these rank counts.")
    parser.add_argument("--small", action="store_true", help="Take a tiny model, for a quick try.")
    parser.add_argument("--plain", action="store_true", help="Start ranks by a plain mpiexec, without what `launch` sets.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.pairs, args.rounds, args.small, args.plain)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        fitting = [name for name in args.pairs if (name == "one-rank") == (ranks == 1)]
        if not fitting:
            continue
        result = on_plain_ranks(ranks) if args.plain else from_ranks(ranks, *sys.argv, "--on-ranks")
        print(about(result["machine"]))
        print(f"products of host tensors: ours by {result['ours']}, torch's by {result['torch']}")
        for row in result["rows"]:
            print(line(row))
        rows += result["rows"]
    conclude(claims(rows))
    save({"kind": "step-vs-torch", "machine": result["machine"], "plain": args.plain, "rows": rows}, args.json)


def on_plain_ranks(ranks: int) -> Any:
    """The JSON that this script prints on ranks that a plain mpiexec has started."""
    import json

    from summa3d.launcher.runtime import find_launcher, loaded_runtime

    command = [*find_launcher(loaded_runtime()).command, "-n", str(ranks), sys.executable, *sys.argv, "--on-ranks"]
    return json.loads(printed(command, environment()).splitlines()[-1])


def line(row: dict[str, Any]) -> str:
    """A row as text: both steps in milliseconds, and the peer's ÷ ours."""
    ours, peer = (median(row["seconds"][side]) * 1e3 for side in ("ours", "peer"))
    found, cpu = quotient(row), quotient(row, "processor")
    ends = "range" if found.is_range else "95 %"
    name = f"{row['pair']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
    sides = f"ours {ours:.1f} ms, torch {peer:.1f} ms ({row['threads']}), load {row['load']:.1f}"
    return (
        f"{name}: {sides}; torch ÷ ours {found.middle:.2f} [{found.ends} {ends}], of processor time {cpu.middle:.2f} [{cpu.ends}]"
    )


def quotient(row: dict[str, Any], of: str = "seconds") -> Any:
    """The peer's time ÷ ours with its interval; of the clock on the wall, or of the processors of all ranks."""
    from summa3d.bench.statistics import ratio

    return ratio(row[of]["peer"], row[of]["ours"])


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Each pair is not behind, and their geometric mean is ahead; one rank has a claim of its own."""
    several = {f"{row['pair']}, {row['ranks']} ranks": quotient(row).middle for row in rows if row["ranks"] > 1}
    said = []
    for row in rows:
        if row["ranks"] == 1:
            alone = quotient(row).middle
            said.append((f"one rank: torch ÷ ours ≥ {AHEAD}: {alone:.2f}", alone >= AHEAD))
    if several:
        worst = min(several, key=lambda name: several[name])
        mean = geometric_mean(several.values())
        said.append((f"each pair ≥ {AHEAD}: the least is {several[worst]:.2f} ({worst})", several[worst] >= AHEAD))
        said.append((f"geometric mean of {len(several)} pairs ≥ {TOGETHER}: {mean:.2f}", mean >= TOGETHER))
    return said


def settings(pair: Pair, ranks: int, model: dict[str, int], corpus: Path) -> list[str]:
    """The configuration of our side, as assignments."""
    found = [f"model.{name}={value}" for name, value in model.items()]
    found += [f"train.batch={ROWS}", *(f"train.{one}" for one in STILL), f"grid.{pair.axis}={ranks}"]
    return [
        *found,
        f"data.path={corpus}",
        "data.token_dtype=uint16",
        f"data.tokenizer=numbers:{model['vocabulary']}",
        *pair.settings,
    ]


def measure(pairs: list[str], rounds: int, small: bool, plain: bool) -> None:
    """Run on every rank: time both sides of each pair in turn; rank 0 prints JSON."""
    if plain:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    else:
        world = started()
    from summa3d.cli.bench.block import QUIET_PROFILER

    os.environ.setdefault(*QUIET_PROFILER)
    import numpy as np
    import torch
    import torch_step

    from summa3d.bench.machine import machine

    found, model = machine(world), SMALL if small else MODEL
    if world.size > 1:
        torch_step.join(world)
    rows, ours = [], ""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.bcast(own))
        if world.rank == 0:
            numbers = np.random.default_rng(1).integers(0, model["vocabulary"], 1 << 17)
            numbers.astype(np.uint16).tofile(folder / "tokens.bin")
        world.Barrier()
        for name in pairs:
            if (PAIRS[name].axis == "dp" and name == "one-rank") != (world.size == 1):
                continue
            row, ours = race(name, settings(PAIRS[name], world.size, model, folder / "tokens.bin"), rounds, world, folder)
            rows.append(row)
            gc.collect()
        world.Barrier()
    mkl = torch.backends.mkl.is_available()
    tell(world, {"machine": found, "ours": ours, "torch": "MKL" if mkl else "its own BLAS", "rows": rows})
    if world.size > 1:
        torch.distributed.destroy_process_group()


def race(name: str, assignments: list[str], rounds: int, world: Any, folder: Path) -> tuple[dict[str, Any], str]:
    """Seconds of a step of each side in each round, once the losses of their first steps agree; and what multiplies ours."""
    import torch
    import torch_step

    from summa3d.bench.clock import Clock
    from summa3d.launcher.runtime import on_all_cores

    run, step = training(assignments, world, folder / name)
    train = run.config.train

    def draw(number: int) -> Any:
        return run.objective.training(train.seed, number - 1, 0, train.batch)

    peers = torch_step.Peers(run.config, draw, world.size, world.rank)
    peer = getattr(peers, PAIRS[name].peer)()

    def own() -> float:
        with torch.autograd.set_multithreading_enabled(False):
            return float(step().loss)

    clock = Clock(run.grid)
    for number in range(AGREE):
        mine, its = own(), world.allreduce(peer())
        if abs(mine - its) > TOLERANCE * abs(its):
            raise ValueError(f"{name} trains another model: the loss of step {number + 1} is {mine:.6f}, torch's is {its:.6f}")
    threads = {"threads bound": nullcontext, "threads free": on_all_cores}

    def other(how: str) -> Any:
        with threads[how]():
            return peer()

    tried = {how: min(clock.spans(*[lambda how=how: other(how)] * WARM_UP)) for how in threads}
    best = world.bcast(min(tried, key=lambda how: tried[how]))
    sides: dict[str, Callable[[], Any]] = {"ours": own, "peer": lambda: other(best)}
    seconds, processor = ({side: list[float]() for side in sides} for _ in range(2))
    clock.spans(own)
    for number in range(rounds):
        order = [*sides] if number % 2 == 0 else [*sides][::-1]
        for side in order:
            before = time.process_time()
            seconds[side] += clock.spans(sides[side])
            processor[side].append(world.allreduce(time.process_time() - before))
    if world.rank == 0:
        note(f"{name}, {world.size} ranks: done")
    multiplies = run.grid.job.blas.name
    run.grid.free()
    about_it = {"pair": name, "ranks": world.size, "threads": best, "load": os.getloadavg()[0]}
    return {**about_it, "seconds": seconds, "processor": processor}, multiplies


if __name__ == "__main__":
    main()
