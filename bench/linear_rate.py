"""Benchmark of a `Linear` on a grid of ranks, forward + backward: the rate of its three products beside that of the cores."""

from __future__ import annotations

import argparse
import json
import os
import sys
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from common import about, on_ranks, save, verdict
from race import CEILINGS, OURS, ceiling, in_turn, rate

BATCH = 8
LIMIT = 0.6


def main() -> None:
    """Run the benchmark, and print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="Set the numbers of rows, of input and of output features.")
    parser.add_argument("--grid", default="2,2,2", metavar="X,Y,Z", help="Set the sizes of the grid axes x, y and z.")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="Set the dtype.")
    parser.add_argument("--rounds", type=int, default=15, help="Time this many interleaved rounds.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    grid = dict(zip("xyz", map(int, args.grid.split(",")), strict=True))
    if args.on_ranks:
        return measure(args.size, args.dtype, args.rounds, grid)
    load = os.getloadavg()[0]
    said = on_ranks(prod(grid.values()), [__file__, *sys.argv[1:], "--on-ranks"])
    result = json.loads(said.splitlines()[-1]) | {"load": load, "grid": grid}
    print(about(result["machine"]))
    for name, library in CEILINGS.items():
        top = result["flops"] / min(result["seconds"][name]) / 1e9
        print(
            f"rate of the {result['cores']} cores by {library} {result[library]}: {top:.1f} Gflop/s, best of {args.rounds} rounds"
        )
    work, top = 3 * 2 * args.size**3, rate(result["seconds"], result["flops"])
    parts = [work / own / top for own in result["seconds"][OURS]]
    taken = median(result["seconds"][OURS])
    print(f"Linear {args.size}³ {args.dtype} on {args.grid}, forward + backward: {taken * 1e3:.1f} ms")
    print(f"{work / taken / 1e9:.1f} Gflop/s, {median(parts):.3f} of the rate of the cores [{min(parts):.3f}–{max(parts):.3f}]")
    if median(parts) > 1:
        print(f"  no verdict: no layer is faster than its cores, so other work ran on them (load {load:.1f})")
    else:
        print("  " + verdict(f"≥ {LIMIT} of the cores' rate, median of {args.rounds} rounds", median(parts) >= LIMIT))
    save(result, args.json)


def measure(size: int, dtype: str, rounds: int, grid: dict[str, int]) -> None:
    """Run on every rank: time the layer and what the cores can do, in turn; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    import numpy as np
    import torch
    from mpi4py import MPI

    from summa3d import Grid
    from summa3d.bench.machine import machine

    world = MPI.COMM_WORLD
    found, top = machine(world), ceiling(world, dtype)
    seconds = in_turn({**top, OURS: Layer(size, getattr(torch, dtype), Grid(world, grid))}, world, rounds)
    if world.rank == 0:
        cores = top[next(iter(CEILINGS))]
        facts = {"numpy": np.__version__, "torch": torch.__version__, "flops": cores.flops, "cores": cores.count}
        print(json.dumps({"kind": "linear_rate", "machine": found, **facts, "seconds": seconds}))


class Layer:
    """The layer with this rank's blocks of an input and of a gradient of its output."""

    def __init__(self, size: int, dtype: Any, grid: Any) -> None:
        import torch

        from summa3d.bench.clock import Clock
        from summa3d.layout import distribute
        from summa3d.nn import Linear, initialise, scheme

        cuboid = scheme("cuboid", grid)
        self.layer, self.clock = Linear(size, size, cuboid, dtype=dtype), Clock(grid)
        initialise(self.layer, cuboid, seed=1)
        wholes = torch.randn((2, BATCH, size // BATCH, size), generator=torch.Generator().manual_seed(1), dtype=dtype)
        self.x = distribute(wholes[0], grid, self.layer.input_layout).requires_grad_()
        self.gradient = distribute(wholes[1], grid, self.layer.output_layout)

    def seconds(self) -> float:
        """Seconds of a forward and a backward, over all ranks; collective."""
        taken = sum(self.clock.spans(self.forward, self.backward))
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        return taken

    def forward(self) -> None:
        """One forward; collective."""
        self.y = self.layer(self.x)

    def backward(self) -> None:
        """One backward, of the last forward; collective."""
        self.y.backward(self.gradient)


if __name__ == "__main__":
    sys.exit(main())
