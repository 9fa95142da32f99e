"""Benchmark of a training step: eight ranks beside one rank on one core, for the demo's model and for a tiny one.

Both train in one job, in turn: rank 0 alone while the others sleep, then all ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import about, on_ranks, save, verdict

RANKS, GRID = 8, ("grid.x=2", "grid.y=2", "grid.z=2")
MODELS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "tiny": ("model.hidden=16", "model.heads=4", "model.sequence=8", "model.layers=4", "train.batch=8"),
}
STILL = ("train.steps=100000", "train.evaluate_every=0", "train.checkpoint_every=0", "train.keep=0")
STEPS = {"demo": (3, 8), "tiny": (20, 40)}  # steps of a round: alone, on all ranks
WARM_UP = 3
EFFICIENCY, GOAL, TINY = 0.67, 0.8, 0.040


def main() -> None:
    """Run the benchmark and print whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], help="Time these models.")
    parser.add_argument("--rounds", type=int, default=7, help="Time this many interleaved rounds.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.model, args.rounds)
    said = on_ranks(RANKS, [__file__, "--model", *args.model, "--rounds", str(args.rounds), "--on-ranks"])
    result = json.loads(said.splitlines()[-1])
    print(about(result["machine"]))
    print(f"host tensors multiplied by {result['products_by']}")
    for name, found in result["models"].items():
        alone, together, cores = found["alone"], found["together"], result["cores"]
        parts = [one / (cores * all_) for one, all_ in zip(alone, together, strict=True)]
        print(f"{name}: one rank on one core {spread(alone)} ms a step, {RANKS} ranks on {cores} cores {spread(together)} ms")
        shares = {key: median(values) for key, values in found["shares"].items()}
        print("  of the cores: " + ", ".join(f"{key} {value:.0%}" for key, value in shares.items()))
        print(f"  one rank's step ÷ ({cores} × that of {RANKS}): {median(parts):.2f} [{min(parts):.2f}–{max(parts):.2f}]")
        if name == "demo":
            print("  " + verdict(f"at least {EFFICIENCY} (the goal is {GOAL})", median(parts) >= EFFICIENCY))
        else:
            print("  " + verdict(f"at most {TINY * 1e3:.0f} ms a step on {RANKS} ranks", median(together) <= TINY))
    save(result, args.json)


def spread(seconds: list[float]) -> str:
    """The median and the range, in milliseconds."""
    return f"{median(seconds) * 1e3:.1f} [{min(seconds) * 1e3:.1f}–{max(seconds) * 1e3:.1f}]"


def measure(models: list[str], rounds: int) -> None:
    """Run on every rank: time steps alone and together, in turn; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    from summa3d.bench.machine import machine
    from summa3d.comm.nodes import Nodes

    world = MPI.COMM_WORLD
    result: dict[str, Any] = {"kind": "step", "machine": machine(world), "cores": Nodes.of(world).total_cores, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        folder = world.bcast(folder)
        for name in models:
            result["models"][name], result["products_by"] = race(name, rounds, Path(folder), world, result["cores"])
        world.Barrier()
    if world.rank == 0:
        print(json.dumps(result))


def race(name: str, rounds: int, folder: Path, world: Any, cores: int) -> tuple[dict[str, Any], str]:
    """Seconds of a step in each round, alone and together, and the use of the cores together; and what multiplies."""
    import torch
    from mpi4py import MPI

    from summa3d.train.config import load
    from summa3d.train.loop import take_step
    from summa3d.train.metrics import CoreTime
    from summa3d.train.prepare import prepare

    together = prepare(load("demo", [*MODELS[name], *GRID, *STILL]), world, folder / name)
    alone = None
    if world.rank == 0:
        alone = prepare(load("demo", [*MODELS[name], *STILL, "scheme=serial"]), MPI.COMM_SELF, folder / f"{name}-alone")
    world.Barrier()
    found: dict[str, Any] = {"alone": [], "together": [], "shares": {"arithmetic": [], "communication": [], "idle": []}}
    with torch.autograd.set_multithreading_enabled(False):
        for turn in range(-1, rounds):
            for run, count, times in ((alone, STEPS[name][0], found["alone"]), (together, STEPS[name][1], found["together"])):
                together.grid.world.barrier()
                begin, steps = time.perf_counter(), []
                if run is not None:
                    steps = [take_step(run, 1 + index) for index in range(count if turn >= 0 else WARM_UP)]
                together.grid.world.barrier()
                seconds = time.perf_counter() - begin
                if turn < 0:
                    continue
                times.append(seconds / count)
                if run is together:
                    cpu = [sum(getattr(step, part) for step in steps) for part in ("arithmetic_seconds", "communication_seconds")]
                    share = CoreTime.of(cores, seconds, 1, world.size, [*map(world.allreduce, cpu), 0.0])
                    for key, values in found["shares"].items():
                        values.append(getattr(share, key))
    return found, together.grid.job.blas.name


if __name__ == "__main__":
    sys.exit(main())
