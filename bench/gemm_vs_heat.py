"""Benchmark of our product against heat's `matmul` of the same matrices, for each of heat's splits, in the same ranks in turn.

heat uses our mpi4py and torch. It lies in a folder of its own, which nothing but this script reads.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from common import HERE
from race import check, measure, parser, start
from ranks import on_machine

SPLITS = ((0, 0), (0, 1), (1, 0), (1, 1))
FOLDER = HERE / "build" / "heat"
INSTALL = "python -m pip install --no-deps --target {folder} heat scipy"


def main() -> None:
    """Run the race on each number of ranks, or say how heat is installed."""
    reader = parser(__doc__)
    reader.add_argument("--packages", type=Path, default=FOLDER, metavar="DIR", help="Import heat from this folder.")
    args = reader.parse_args()
    if not has_heat(args.packages):
        return
    if args.on_ranks:
        return on_ranks(args)
    start("heat", args)


def has_heat(packages: Path) -> bool:
    """Return whether heat is in this folder; where it is not, says how it is installed."""
    found = (packages / "heat").is_dir()
    if not found:
        print(f"heat is not compared: it is not in {packages}. " + INSTALL.format(folder=packages))
    return found


def on_ranks(args: Any) -> None:
    """Run on every rank: race ours and heat's product in all cases; rank 0 prints JSON."""
    world, found = on_machine()  # before heat brings scipy's OpenBLAS along
    import torch

    heat = imported(args.packages)
    versions = f"{heat.__version__}, torch {torch.__version__}"
    measure(args, world, found, versions, partial(heats, heat=heat, world=world))


def imported(folder: Path) -> Any:
    """The package heat from `folder`, and whatever else from our own environment."""
    sys.path.append(str(folder))
    # heat imports torchvision for its data sets only, whose builds fit one build of torch each.
    sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.transforms")}
    import heat

    return heat


class Heat:
    """heat's product of the matrices of a problem in two splits."""

    ranks = 0  # it is timed by itself, after a product that is not

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


def heats(problem: Any, wanted: Any, heat: Any, world: Any) -> dict[str, Heat]:
    """heat's products in all splits; raises ValueError on rank 0 where one is not ours. Collective."""
    import numpy as np

    made = {f"heat {splits}": Heat(problem, splits, heat, world) for splits in SPLITS}
    for label, contender in made.items():
        result = contender.product().numpy()
        if world.rank == 0:
            check(label, float(np.abs(result - wanted).max() / np.abs(wanted).max()), problem.dtype)
    return made


if __name__ == "__main__":
    main()
