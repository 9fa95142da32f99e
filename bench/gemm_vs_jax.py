"""Benchmark of our product on N ranks against JAX's jitted `matmul` of the same matrices on N devices of the host, in turn.

JAX runs in one process of its own Python, while our ranks sleep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, environment
from race import OURS, TOLERANCE, ceiling, in_turn, own, parser, problems, row_of, start

FOLDER = HERE / "build" / "jax"
INSTALL = "python -m venv {0}; {0}/bin/python -m pip install jax"


def main() -> None:
    """Run the race on each number of ranks, or say how JAX is installed."""
    reader = parser(__doc__)
    reader.add_argument("--python", type=Path, default=FOLDER / "bin" / "python", metavar="FILE", help="Run JAX by this Python.")
    args = reader.parse_args()
    if args.on_ranks:
        return measure(args)
    probe = [args.python, "-c", "import jax"]
    if not args.python.exists() or subprocess.run(probe, capture_output=True, env=environment()).returncode != 0:
        print(f"JAX is not compared: {args.python} has none. " + INSTALL.format(FOLDER))
        return
    start(__file__, "JAX", sys.argv[1:], args)


def measure(args: Any) -> None:
    """Run on every rank: race our product and JAX's in all cases; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    from summa3d.bench.machine import machine

    world = MPI.COMM_WORLD
    found = machine(world)
    peer = Peer(args.python, world.size) if world.rank == 0 else None
    rows = [row for name, problem in problems(args) if (row := raced(name, problem, args.rounds, peer, world))]
    if peer:
        peer.end()
        print(json.dumps({"machine": found, "versions": peer.versions, "rows": rows}))


class Peer:
    """The process that runs JAX on `devices` devices of the host, free to use all cores."""

    def __init__(self, python: Path, devices: int) -> None:
        from summa3d.launch.runtime import on_all_cores

        settings = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        with on_all_cores():
            self.process = subprocess.Popen(
                [python, HERE / "jax_peer.py"],
                env=environment(None) | settings,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.versions = self.answer()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError where the process has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"JAX's process ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


class Jax:
    """JAX's product in one sharding, asked for by rank 0 while the other ranks sleep."""

    def __init__(self, sharding: str, peer: Peer | None) -> None:
        self.sharding, self.peer = sharding, peer

    def seconds(self) -> float:
        """Seconds of one product, as JAX's process measures them; 0 on other ranks."""
        return self.peer.ask({"sharding": self.sharding}) if self.peer else 0.0


def raced(name: str, problem: Any, rounds: int, peer: Peer | None, world: Any) -> dict[str, Any] | None:
    """The row of a case, on rank 0; collective."""
    load, ours, top = os.getloadavg()[0], own(problem, world), ceiling(world, problem.dtype)
    ours.seconds()
    wanted = ours.c.to_global() if ours.here else None
    shardings = world.bcast(list(loaded(problem, wanted, peer)) if peer else None)
    seconds = in_turn({**top, OURS: ours, **{f"JAX {one}": Jax(one, peer) for one in shardings}}, world, rounds)
    if peer is None:
        return None
    return row_of(name, ours, seconds, next(iter(top.values())).flops, load, world.size)


def loaded(problem: Any, wanted: Any, peer: Peer) -> dict[str, float]:
    """Hand JAX the matrices; returns its shardings. Raises ValueError where a result is not ours."""
    import numpy as np

    from summa3d.bench.products import whole

    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f"{name}.npy") for name in "abc"}
        np.save(files["a"], whole(problem.m, problem.k, problem.dtype))
        np.save(files["b"], whole(problem.k, problem.n, problem.dtype))
        np.save(files["c"], wanted)
        differences: dict[str, float] = peer.ask(files)
    for name, difference in differences.items():
        if not difference < TOLERANCE[problem.dtype]:
            raise ValueError(f"JAX ({name}) computes another product: its result differs by {difference:.1e}")
    return differences


if __name__ == "__main__":
    main()
