"""Time of Muon's orthogonalisation on 2 ranks beside one rank's Newton–Schulz of the largest owner's matrices, in one run."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

from common import conclude, itself, options, save
from ranks import in_turn, started, tell

CLAIM = 1.15
"""Of one rank's Newton–Schulz of the largest owner's matrices and the all-to-alls as predicted, at most."""
RANKS = 2


def main() -> None:
    """Run the benchmark on 2 ranks, print the figures and whether the claim holds."""
    parser = options(__doc__, 9)
    parser.add_argument("--hidden", type=int, default=768, help="Of the model whose matrices are taken.")
    parser.add_argument("--layers", type=int, default=4, help="Of the model.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.hidden, args.layers, args.rounds)
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, GPT of {args.layers} layers, hidden {args.hidden}, float32")
    row, claims = itself(RANKS), []
    for clock in ("wall", "processor"):
        alone, together = row["alone"][clock], row["together"][clock]
        quotients = [ours / (share + row["predicted"]) for ours, share in zip(together, alone, strict=True)]
        share = median(quotients)
        print(
            f"{clock} time: {1e3 * median(together):.0f} ms; of the largest owner's Newton–Schulz on one rank "
            f"{1e3 * median(alone):.0f} ms, and {1e3 * row['predicted']:.1f} ms predicted for the all-to-alls: "
            f"{share:.2f} ({min(quotients):.2f}–{max(quotients):.2f})"
        )
        claims.append((f"{clock} time at most {CLAIM} × the largest owner's share and the all-to-alls", share <= CLAIM))
    print(f"words of the busiest rank {row['words']:,}, as planned; of the arithmetic the largest owner has {row['part']:.2f}")
    conclude(claims[:1] if os.getloadavg()[0] < RANKS + 1 else claims[1:])
    save({"kind": "muon_owners", **row}, args.json)


def measure(hidden: int, layers: int, rounds: int) -> None:
    """Run on every rank; rank 0 prints what is measured as JSON."""
    world = started()
    import torch

    from summa3d.comm.grid import Grid
    from summa3d.dtypes import dtype_of
    from summa3d.gemm.cost.machine import Machine
    from summa3d.layout.layout import Layout, Sharding
    from summa3d.nn.muon.matrices import matrices_of
    from summa3d.nn.muon.newton_schulz import NewtonSchulz
    from summa3d.nn.muon.orthogonalise import MatrixOwners

    torch.set_num_threads(1)
    with Grid(world, {"y": world.size}) as grid:
        how = NewtonSchulz()
        held = {f"{name}{layer}": size for layer in range(layers) for name, size in _sizes(hidden).items()}
        shardings = {name: Sharding(Layout((), ("y",)), shape) for name, (shape, _) in held.items()}
        cut = [one for name, (_, parts) in held.items() for one in matrices_of(name, shardings[name], (1, parts))]
        owners = MatrixOwners(cut, grid, how)
        blocks = {name: torch.randn(sharding.local_shape(grid)) for name, sharding in shardings.items()}
        plan, here = owners.plan, owners.axis.index
        loads = [sum(how.flops(*cut[number].shape) for number in plan.owned_by(rank)) for rank in range(world.size)]
        largest = loads.index(max(loads))
        batches = _batches([cut[number].shape for number in plan.owned_by(largest)])

        def alone() -> None:
            for batch in batches if here == largest else ():
                how.orthogonalised(batch)

        def clocked(act: Any) -> tuple[float, float]:
            grid.world.barrier()
            wall, own = time.perf_counter(), time.process_time()
            act()
            return time.perf_counter() - wall, time.process_time() - own

        def one_rank() -> tuple[float, float]:
            """The largest owner computes, and the others sleep."""
            found = clocked(alone)
            return world.bcast(found, root=largest)

        def all_ranks() -> tuple[float, float]:
            found = world.allgather(clocked(lambda: owners.orthogonalised(blocks)))
            return max(wall for wall, _ in found), max(own for _, own in found)

        times = in_turn({"alone": one_rank, "together": all_ranks}, rounds, 1)
        words = max(plan.words_of(rank) for rank in range(world.size))
        predicted = Machine().transfer(words, 0, 2 * (world.size - 1), dtype_of("float32"), world.size)
        row: dict[str, Any] = {"words": words, "predicted": predicted, "part": max(loads) / sum(loads)}
        for name, pairs in times.items():
            row[name] = {"wall": [wall for wall, _ in pairs], "processor": [own for _, own in pairs]}
        tell(world, row)


def _sizes(hidden: int) -> dict[str, tuple[tuple[int, int], int]]:
    """The weights of a block, and the matrices that each holds side by side."""
    return {
        "qkv": ((hidden, 3 * hidden), 3),
        "out": ((hidden, hidden), 1),
        "up": ((hidden, 4 * hidden), 1),
        "down": ((4 * hidden, hidden), 1),
    }


def _batches(shapes: list[tuple[int, int]]) -> list[Any]:
    """Random matrices of these shapes, those of one shape as a batch."""
    import torch

    return [torch.randn(shapes.count(shape), *shape) for shape in dict.fromkeys(shapes)]


if __name__ == "__main__":
    main()
