"""Benchmark of our product against heat's `matmul` of the same matrices, for each of heat's splits, in the same ranks in turn.

heat uses our mpi4py and torch. It lies in a folder of its own, which nothing but this script reads.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from common import HERE
from race import OURS, ceiling, check, in_turn, own, parser, problems, row_of, start

SPLITS = ((0, 0), (0, 1), (1, 0), (1, 1))
FOLDER = HERE / "build" / "heat"
INSTALL = "python -m pip install --no-deps --target {folder} heat scipy"


def main() -> None:
    """Run the race on each number of ranks, or say how heat is installed."""
    reader = parser(__doc__)
    reader.add_argument("--packages", type=Path, default=FOLDER, metavar="DIR", help="Import heat from this folder.")
    args = reader.parse_args()
    if not (args.packages / "heat").is_dir():
        print(f"heat is not compared: it is not in {args.packages}. " + INSTALL.format(folder=args.packages))
        return
    if args.on_ranks:
        return measure(args)
    start(__file__, "heat", sys.argv[1:], args)


def measure(args: Any) -> None:
    """Run on every rank: race ours and heat's product in all cases; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    import torch
    from mpi4py import MPI

    from summa3d.bench.machine import machine

    world = MPI.COMM_WORLD
    found = machine(world)  # before heat brings scipy's OpenBLAS along
    heat = imported(args.packages)
    rows = [row for name, problem in problems(args) if (row := raced(name, problem, args.rounds, heat, world))]
    if world.rank == 0:
        print(json.dumps({"machine": found, "versions": f"{heat.__version__}, torch {torch.__version__}", "rows": rows}))


def imported(folder: Path) -> Any:
    """The package heat from `folder`, and whatever else from our own environment."""
    sys.path.append(str(folder))
    # heat imports torchvision for its data sets only, whose builds fit one build of torch each.
    sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.transforms")}
    import heat

    return heat


class Heat:
    """heat's product of the matrices of a problem in two splits."""

    def __init__(self, problem: Any, splits: tuple[int, int], heat: Any, world: Any) -> None:
        import torch

        from summa3d import Grid
        from summa3d.bench.clock import Clock
        from summa3d.bench.products import whole

        self.heat, self.clock = heat, Clock(Grid(world, {"y": world.size}))
        sizes = ((problem.m, problem.k), (problem.k, problem.n))
        self.a, self.b = (
            heat.array(torch.from_numpy(whole(*size, problem.dtype)), split=split)
            for size, split in zip(sizes, splits, strict=True)
        )

    def seconds(self) -> float:
        """Seconds of one product, over all ranks; collective."""
        return self.clock.spans(self.product)[0]

    def product(self) -> Any:
        """heat's product; collective."""
        return self.heat.matmul(self.a, self.b)


def raced(name: str, problem: Any, rounds: int, heat: Any, world: Any) -> dict[str, Any] | None:
    """The row of a case, on rank 0; collective."""
    load, ours, top = os.getloadavg()[0], own(problem, world), ceiling(world, problem.dtype)
    heats = {f"heat {splits}": Heat(problem, splits, heat, world) for splits in SPLITS}
    seconds = in_turn({**top, OURS: ours, **heats}, world, rounds)
    results = {label: contender.product().numpy() for label, contender in heats.items()}
    wanted = ours.c.to_global() if ours.here else None
    if world.rank != 0:
        return None
    for label, result in results.items():
        check(label, result, wanted)
    return row_of(name, ours, seconds, next(iter(top.values())).flops, load, world.size)


if __name__ == "__main__":
    main()
