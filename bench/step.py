"""Benchmark of a training step: eight ranks beside one rank on one core, for the demo's model and for a tiny one.

Both train in one job, in turn: rank 0 alone while the others sleep, then all ranks.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import about, conclude, itself, options, save
from ranks import in_range, on_machine, tell, training

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
    parser = options(__doc__, 7)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], help="Time these models.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.model, args.rounds)
    result = itself(RANKS)
    print(about(result["machine"]))
    print(f"host tensors multiplied by {result['products_by']}")
    for name, found in result["models"].items():
        alone, together, cores = found["alone"], found["together"], result["cores"]
        parts = [one / (cores * all_) for one, all_ in zip(alone, together, strict=True)]
        one, all_ = (in_range((seconds * 1e3 for seconds in times), 1) for times in (alone, together))
        print(f"{name}: one rank on one core {one} ms a step, {RANKS} ranks on {cores} cores {all_} ms")
        shares = {key: median(values) for key, values in found["shares"].items()}
        print("  of the cores: " + ", ".join(f"{key} {value:.0%}" for key, value in shares.items()))
        print(f"  one rank's step ÷ ({cores} × that of {RANKS}): {in_range(parts, 2)}")
        efficient = f"at least {EFFICIENCY} (the goal is {GOAL})", median(parts) >= EFFICIENCY
        quick = f"at most {TINY * 1e3:.0f} ms a step on {RANKS} ranks", median(together) <= TINY
        conclude([efficient if name == "demo" else quick])
    save(result, args.json)


def measure(models: list[str], rounds: int) -> None:
    """Run on every rank: time steps alone and together, in turn; rank 0 prints JSON."""
    world, found = on_machine()
    from summa3d.comm.nodes import Nodes

    result: dict[str, Any] = {"kind": "step", "machine": found, "cores": Nodes.of(world).total_cores, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        folder = world.bcast(folder)
        for name in models:
            result["models"][name], result["products_by"] = race(name, rounds, Path(folder), world, result["cores"])
        world.Barrier()
    tell(world, result)


def race(name: str, rounds: int, folder: Path, world: Any, cores: int) -> tuple[dict[str, Any], str]:
    """Seconds of a step in each round, alone and together, and the use of the cores together; and what multiplies."""
    import torch
    from mpi4py import MPI

    from summa3d.train.metrics import CoreTime

    run, together = training([*MODELS[name], *GRID, *STILL], world, folder / name)
    alone = None
    if world.rank == 0:
        _, alone = training([*MODELS[name], *STILL, "scheme=serial"], MPI.COMM_SELF, folder / f"{name}-alone")
    world.Barrier()
    found: dict[str, Any] = {"alone": [], "together": [], "shares": {"arithmetic": [], "communication": [], "idle": []}}
    with torch.autograd.set_multithreading_enabled(False):
        for turn in range(-1, rounds):
            for step, count, times in ((alone, STEPS[name][0], found["alone"]), (together, STEPS[name][1], found["together"])):
                run.grid.world.barrier()
                begin, steps = time.perf_counter(), []
                if step is not None:
                    steps = [step() for _ in range(count if turn >= 0 else WARM_UP)]
                run.grid.world.barrier()
                seconds = time.perf_counter() - begin
                if turn < 0:
                    continue
                times.append(seconds / count)
                if step is together:
                    cpu = [sum(getattr(step, part) for step in steps) for part in ("arithmetic_seconds", "communication_seconds")]
                    share = CoreTime.of(cores, seconds, 1, world.size, [*map(world.allreduce, cpu), 0.0])
                    for key, values in found["shares"].items():
                        values.append(getattr(share, key))
    return found, run.grid.job.blas.name


if __name__ == "__main__":
    main()
