"""Benchmark of our product on N ranks against JAX's jitted `matmul` of the same matrices on N devices of the host, in turn.

JAX runs in one process of its own Python, while our ranks sleep.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import HERE, environment
from race import check, measure, parser, start
from ranks import on_machine

FOLDER = HERE / "build" / "jax"
INSTALL = "python -m venv {0}; {0}/bin/python -m pip install jax"


def main() -> None:
    """Run the race on each number of ranks, or say how JAX is installed."""
    reader = parser(__doc__)
    reader.add_argument("--python", type=Path, default=FOLDER / "bin" / "python", metavar="FILE", help="Run JAX by this Python.")
    args = reader.parse_args()
    if args.on_ranks:
        return on_ranks(args)
    probe = [args.python, "-c", "import jax"]
    if not args.python.exists() or subprocess.run(probe, capture_output=True, env=environment()).returncode != 0:
        print(f"JAX is not compared: {args.python} has none. " + INSTALL.format(FOLDER))
        return
    start("JAX", args)


def on_ranks(args: Any) -> None:
    """Run on every rank: race our product and JAX's in all cases; rank 0 prints JSON."""
    world, found = on_machine()
    peer = Peer(args.python, world.size) if world.rank == 0 else None
    measure(args, world, found, peer.versions if peer else "", partial(shardings, peer=peer, world=world))
    if peer:
        peer.end()


class Peer:
    """The process that runs JAX on `devices` devices of the host, free to use all cores."""

    def __init__(self, python: Path, devices: int) -> None:
        from summa3d.launcher.runtime import on_all_cores

        settings = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        with on_all_cores():
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([python, HERE / "jax_peer.py"], env=environment(None) | settings, **pipes)
        self.versions = self.answer()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request."""
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError where the process has ended."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"JAX's process ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


class Jax:
    """JAX's product in one sharding, asked for by rank 0 while the other ranks sleep."""

    ranks = 0  # it is timed by itself, after a product that is not

    def __init__(self, sharding: str, peer: Peer | None) -> None:
        self.sharding, self.peer = sharding, peer

    def seconds(self) -> float:
        """Seconds of one product, as JAX's process measures them; 0 on other ranks."""
        return self.peer.ask({"sharding": self.sharding}) if self.peer else 0.0


def shardings(problem: Any, wanted: Any, peer: Peer | None, world: Any) -> dict[str, Jax]:
    """JAX's products in all shardings; raises ValueError on rank 0 where one is not ours. Collective."""
    names = world.bcast(list(loaded(problem, wanted, peer)) if peer else None)
    return {f"JAX {name}": Jax(name, peer) for name in names}


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
        check(f"JAX ({name})", difference, problem.dtype)
    return differences


if __name__ == "__main__":
    main()
