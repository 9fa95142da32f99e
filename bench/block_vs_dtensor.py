"""Benchmark of transformer blocks against an equal model in PyTorch's tensor parallelism (DTensor over gloo).

Both run forward and backward in the same processes, in turn, with equal weights and inputs.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from common import conclude, itself, note, options, save
from ranks import Layer, on_machine, spread, tell

RANKS = 8
SIZES = {"layers": 2, "hidden": 512, "heads": 8, "sequence": 256}
BATCH = 8
ONE_D = ("oned", "oned-sp")
BEST_CUBOID, SEVERAL_AXES, ONED = 0.9, 1.0, 1.0  # limits of the three claims
TRANSPORTS = {"node": "yes", "mpi": "no"}  # SUMMA3D_NODE_MEMORY
TRIALS = 1  # rounds of the trial that selects the entries
FINALISTS = 2  # selected entries of each kind: oned, oned-sp, cuboids with one axis, cuboids with several
TOLERANCE = 1e-4
BOUND, FREE = "DTensor", "DTensor, threads free"
"""The rank's main thread is bound to one core, as ours is; or the kernel places it."""


def main() -> None:
    """Run the benchmark on 8 ranks, through each transport asked for, and print whether the claims hold."""
    parser = options(__doc__, 7)
    parser.add_argument(
        "--through",
        nargs="+",
        choices=TRANSPORTS,
        default=[*TRANSPORTS],
        help="Use node memory (node) or MPI only (mpi) as the transport of our ranks. The default is both, in turn.",
    )
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.rounds)
    from summa3d.bench.tables import table

    for transport in args.through:
        os.environ["SUMMA3D_NODE_MEMORY"] = TRANSPORTS[transport]
        result = itself(RANKS)
        print(f"Transport of our ranks: {'MPI only' if transport == 'mpi' else 'node memory'}")
        print(table(result).text())
        for claim, ratio, limit in claims(result["rows"]):
            print(f"{claim}: {ratio['median']:.2f} [{ratio['min']:.2f}–{ratio['max']:.2f}]")
            conclude([(f"at most {limit}", ratio["median"] <= limit)])
        several = args.json and len(args.through) > 1
        save(result, args.json.with_stem(f"{args.json.stem}-{transport}") if several else args.json)


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, float], float]]:
    """Each claim with its quotient of times and its limit; claims on schemes that did not run are left out."""
    ours = [row for row in rows if row["scheme"] != "dtensor"]
    one_d = fastest([row for row in ours if row["scheme"] in ONE_D])
    oned = fastest([row for row in ours if row["scheme"] == "oned"])
    cuboid = fastest([row for row in ours if row["scheme"] not in ONE_D])
    several = fastest([row for row in ours if row["scheme"] not in ONE_D and sum(n > 1 for n in row["grid"].values()) > 1])
    peer = fastest([row for row in rows if row["scheme"] == "dtensor"])
    compared = [(cuboid, one_d, BEST_CUBOID), (several, one_d, SEVERAL_AXES), (oned, peer, ONED), (cuboid, peer, ONED)]
    return [
        (f"{own['label']} ÷ {other['label']}", quotient(own, other), limit)
        for own, other, limit in compared
        if own is not None and other is not None
    ]


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with the smallest median time of forward and backward; None for no rows."""
    return min(rows, key=lambda row: row["seconds"]["both"]["median"], default=None)


def quotient(own: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Median, minimum and maximum over rounds of own time / other time."""
    pairs = zip(own["seconds"]["both"]["all"], other["seconds"]["both"]["all"], strict=True)
    return spread(mine / its for mine, its in pairs)


def measure(rounds: int) -> None:
    """Run on every rank: select the fastest entries of each kind, time them and DTensor in turn, and print JSON on rank 0."""
    world, found = on_machine()
    from summa3d.cli.bench.block import QUIET_PROFILER

    os.environ.setdefault(*QUIET_PROFILER)
    from summa3d.bench.blocks import BlockRunner, Case, facts, rows_of, timed
    from summa3d.nn import ModelConfig

    case = Case(ModelConfig(**SIZES), BATCH)
    contenders = [*(BlockRunner(entry, case, world) for entry in picked(case, world)), *peers_of(case, world)]
    rows = list(rows_of(contenders, timed(contenders, rounds, world)))
    for row in rows:
        if row["relative_difference"] > TOLERANCE:
            raise ValueError(f"{row['label']} computes another function: its output differs by {row['relative_difference']:.1e}")
    tell(world, {"kind": "block", "machine": found, **facts(case, world.size), "rows": rows})


def picked(case: Any, world: Any) -> list[Any]:
    """The fastest grids and switches of each kind, as a short trial of all entries selects them; collective."""
    from summa3d.bench.blocks import BlockEntry, BlockRunner, gathers, grids_for, timed
    from summa3d.nn.schemes.scheme import SCHEMES

    entries = [
        BlockEntry(name, grid, regather)
        for name in SCHEMES
        if name in ONE_D or name.startswith("cuboid")
        for grid in grids_for(name, world.size, case)
        for regather in ((True, False) if gathers(name) else (True,))
    ]
    runners = [BlockRunner(entry, case, world) for entry in entries]
    taken = world.bcast([seconds["both"]["min"] for seconds in timed(runners, TRIALS, world)])
    for runner in runners:
        runner.free()
    ranked = [entry for _, entry in sorted(zip(taken, entries, strict=True), key=lambda pair: pair[0])]
    chosen: dict[Any, list[Any]] = {}
    for entry in ranked:
        several = sum(size > 1 for size in entry.grid.values()) > 1
        chosen.setdefault(entry.scheme if entry.scheme in ONE_D else ("cuboid", several), []).append(entry)
    finalists = [entry for kind in chosen.values() for entry in kind[:FINALISTS]]
    if world.rank == 0:
        note("selected: " + " · ".join(entry.label for entry in finalists))
    return finalists


def peers_of(case: Any, world: Any) -> list[Any]:
    """The DTensor model on the same ranks, once with its main thread bound to a core as ours is, and once free; collective."""
    from summa3d.launcher.runtime import on_all_cores

    stack = dtensor_stack(case, gloo_mesh(world))
    return [Peer(BOUND, stack, case, world, nullcontext), Peer(FREE, stack, case, world, on_all_cores)]


def gloo_mesh(world: Any) -> Any:
    """A mesh of torch's of all ranks, in a process group of its own that gloo serves; collective."""
    import socket

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from summa3d.launcher.runtime import on_all_cores

    port = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{world.bcast(port)}"
    place = {"rank": world.rank, "world_size": world.size, "timeout": timedelta(seconds=120)}
    with on_all_cores():  # gloo's own threads start here
        dist.init_process_group("gloo", init_method=address, **place)
    return init_device_mesh("cpu", (world.size,))


def dtensor_stack(case: Any, mesh: Any) -> Any:
    """Our blocks as plain torch modules with our serial weights, sharded by PyTorch's own plan."""
    from plain_block import plain_stack
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    stack = plain_stack(case, mesh.size())
    column, row = ColwiseParallel, RowwiseParallel
    plan = {"attention.qkv": column(), "attention.out": row(), "mlp.up": column(), "mlp.down": row()}
    for block in stack:
        parallelize_module(block, mesh, plan)
    return stack


class Peer(Layer):
    """The DTensor model as a contender, with the methods of `summa3d.bench.blocks.BlockRunner`."""

    def __init__(self, label: str, stack: Any, case: Any, world: Any, threads: Any) -> None:
        from summa3d import Grid
        from summa3d.bench.blocks import inputs
        from summa3d.bench.clock import Clock

        super().__init__(stack, *inputs(case))
        self.label, self.comm, self.ranks, self.threads = label, world, world.size, threads
        self.clock = Clock(Grid(world, {"y": world.size}))

    def seconds(self) -> tuple[float, float]:
        """Seconds of one forward and of one backward, over all ranks; collective."""
        with self.threads():
            forward, backward = self.clock.spans(self.forward, self.backward)
        self.forget()
        return forward, backward

    def output(self) -> Any:
        """The global output [b, s, h] of one forward; collective."""
        import torch

        with torch.no_grad():
            return self.layer(self.x)

    def facts(self) -> dict[str, Any]:
        """The columns of a row that name the contender."""
        return {"scheme": "dtensor", "grid": {"y": self.comm.size}, "regather": False, "label": self.label}

    def amounts(self) -> dict[str, Any]:
        """Bytes saved for backward, at the peak, and of parameters, measured as ours are; torch's words are not counted."""
        from summa3d.bench.memory import peak_bytes, saved_bytes

        with saved_bytes([self.x, *self.layer.parameters()]) as saved:
            self.forward()
        self.backward()
        self.forget()
        peak = peak_bytes(lambda: self.layer(self.x).backward(self.gradient))
        self.forget()
        parameters = (getattr(parameter, "to_local", lambda own=parameter: own)() for parameter in self.layer.parameters())
        held = sum(parameter.nbytes for parameter in parameters)
        most = [max(values) for values in zip(*self.comm.allgather((saved.bytes, peak + held, held)), strict=True)]
        return dict(zip(("saved_bytes", "peak_bytes", "parameter_bytes"), most, strict=True))


if __name__ == "__main__":
    main()
