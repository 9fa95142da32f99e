"""Benchmark of a `Linear` on a grid of ranks, forward + backward: the rate of its three products beside that of the cores."""

from __future__ import annotations

import os
from math import prod
from statistics import median
from typing import Any

from common import about, conclude, itself, options, save
from race import CEILINGS, OURS, ceiling, in_turn, rate
from ranks import grid_layer, in_range, on_machine, tell

BATCH = 8
LIMIT = 0.6


def main() -> None:
    """Run the benchmark, and print whether the claim holds."""
    parser = options(__doc__, 15)
    parser.add_argument("--size", type=int, default=1024, help="Set the numbers of rows, of input and of output features.")
    parser.add_argument("--grid", default="2,2,2", metavar="X,Y,Z", help="Set the sizes of the grid axes x, y and z.")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="Set the dtype.")
    args = parser.parse_args()
    grid = dict(zip("xyz", map(int, args.grid.split(",")), strict=True))
    if args.on_ranks:
        return measure(args.size, args.dtype, args.rounds, grid)
    load = os.getloadavg()[0]
    result = itself(prod(grid.values())) | {"load": load, "grid": grid}
    print(about(result["machine"]))
    for name, library in CEILINGS.items():
        top = result["flops"] / min(result["seconds"][name]) / 1e9
        by = f"rate of the {result['cores']} cores by {library} {result[library]}"
        print(f"{by}: {top:.1f} Gflop/s, best of {args.rounds} rounds")
    work, top = 3 * 2 * args.size**3, rate(result["seconds"], result["flops"])
    parts = [work / own / top for own in result["seconds"][OURS]]
    taken = median(result["seconds"][OURS])
    print(f"Linear {args.size}³ {args.dtype} on {args.grid}, forward + backward: {taken * 1e3:.1f} ms")
    print(f"{work / taken / 1e9:.1f} Gflop/s, of the rate of the cores {in_range(parts, 3)}")
    if median(parts) > 1:
        print(f"  no verdict: no layer is faster than its cores, so other work ran on them (load {load:.1f})")
    else:
        conclude([(f"≥ {LIMIT} of the cores' rate, median of {args.rounds} rounds", median(parts) >= LIMIT)])
    save(result, args.json)


def measure(size: int, dtype: str, rounds: int, grid: dict[str, int]) -> None:
    """Run on every rank: time the layer and what the cores can do, in turn; rank 0 prints JSON."""
    world, found = on_machine()
    import numpy as np
    import torch

    from summa3d import Grid

    top = ceiling(world, dtype)
    seconds = in_turn({**top, OURS: Timed(size, getattr(torch, dtype), Grid(world, grid))}, world, rounds)
    cores = top[next(iter(CEILINGS))]
    facts = {"numpy": np.__version__, "torch": torch.__version__, "flops": cores.flops, "cores": cores.count}
    tell(world, {"kind": "linear_rate", "machine": found, **facts, "seconds": seconds})


class Timed:
    """The layer of `size` features as an entry of a race."""

    ranks = 0  # it is timed by itself, after a call that is not

    def __init__(self, size: int, dtype: Any, grid: Any) -> None:
        from summa3d.bench.clock import Clock

        self.layer, self.clock = grid_layer(size, grid, (BATCH, size // BATCH), dtype), Clock(grid)

    def seconds(self) -> float:
        """Seconds of a forward and a backward, over all ranks; collective."""
        taken = sum(self.clock.spans(self.layer.forward, self.layer.backward))
        self.layer.forget()
        return taken


if __name__ == "__main__":
    main()
