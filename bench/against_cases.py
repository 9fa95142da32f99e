"""The cases of against.py: each is timed on the ranks of one job, with names that docs/public.md lists, and commands.

`summa3d launch -n RANKS against_cases.py FOLDER CASE…` prints their seconds as JSON; summa3d must be the checkout in FOLDER.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ranks import grid_layer, tell

RANKS = (1, 2, 4, 8)
WARM_UPS = 3
SMALL, LARGE = 64, 131072
"""Words on each rank of a small and of a large collective."""
FEATURES, TOKENS = 512, 256
BLOCK = ("--batch", "4", "--sequence", "128", "--hidden", "256", "--heads", "8", "--rounds", "9")
STEPS, FIRST = 12, 3
"""Steps of a training run, and those at its start that are not counted."""
STILL = ("train.evaluate_every=0", "train.checkpoint_every=0", "train.keep=0", "train.sample_tokens=0")


@dataclass(frozen=True)
class Case:
    """A case: its number of ranks, and what returns its seconds on all of them; collective over the world."""

    ranks: int
    seconds: Callable[[Any], float]


def timed(world: Any, act: Callable[[], object], samples: int, calls: int = 1) -> float:
    """Return the seconds of a call, from the first rank's start to the last one's end: of the quickest sample of all.

    Other work on the machine only adds to a sample.
    """
    import numpy as np
    from mpi4py import MPI

    starts, ends = np.empty(samples), np.empty(samples)
    for _ in range(WARM_UPS):
        act()
    for sample in range(samples):
        world.Barrier()
        starts[sample] = time.perf_counter()
        for _ in range(calls):
            act()
        ends[sample] = time.perf_counter()
    first, last = np.empty_like(starts), np.empty_like(ends)
    world.Allreduce(starts, first, MPI.MIN)
    world.Allreduce(ends, last, MPI.MAX)
    return float((last - first).min()) / calls


def product(
    world: Any, layouts: Sequence[str], algorithm: str, grid: dict[str, int], size: int, dtype: str, samples: int, calls: int = 1
) -> float:
    """Return the seconds of C = A·B of square matrices, in the cuboid's layouts unless others are given."""
    import numpy as np

    from summa3d import DistMatrix, Grid, matmul
    from summa3d.gemm import CuboidPlan

    plan = CuboidPlan("nn", m=size, n=size, k=size)
    with Grid(world, grid) as made:
        a, b = (
            DistMatrix.from_function(lambda rows, columns: np.sin(rows + 2.0 * columns).astype(dtype), (size, size), made, layout)
            for layout in layouts or (plan.a_layout, plan.b_layout)
        )
        return timed(world, lambda: matmul(a, b, algorithm=algorithm), samples, calls)


def linear(world: Any) -> float:
    """Return the seconds of forward and backward of a linear layer, float32, on a grid of 2×2×2."""
    from summa3d import Grid

    layer = grid_layer(FEATURES, Grid(world, {"x": 2, "y": 2, "z": 2}), (8, TOKENS // 8))

    def act() -> None:
        layer.forward()
        layer.backward()
        layer.forget()

    return timed(world, act, samples=25)


def collective(world: Any, operation: str, words: int, node_memory: bool) -> float:
    """Return the seconds of a blocking collective along the one axis of a grid."""
    import numpy as np

    from summa3d.comm import Grid

    with Grid(world, {"x": world.size}, node_memory=node_memory) as grid:
        array, call = np.ones(words), getattr(grid["x"], operation)
        return timed(world, lambda: call(array), samples=25, calls=200 if words == SMALL else 10)


def block(world: Any, scheme: str) -> float:
    """Return the seconds of forward and backward of a block, as `summa3d bench block` times it."""
    with shared_folder(world) as folder:
        command("bench", "block", "--scheme", scheme, *BLOCK, "--json", str(folder / "block.json"))
        world.Barrier()
        (row,) = json.loads((folder / "block.json").read_text(encoding="utf-8"))["rows"]
        return float(min(row["seconds"]["both"]["all"]))


def step(world: Any) -> float:
    """Return the seconds of a training step of the demo's model on a grid of 2×2×2, as metrics.jsonl has them."""
    settings = ("grid.x=2", "grid.y=2", "grid.z=2", f"train.steps={STEPS}", *STILL)
    with shared_folder(world) as folder:
        command("train", "demo", "--run", str(folder / "run"), *(word for pair in settings for word in ("--set", pair)))
        world.Barrier()
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return float(min(json.loads(line)["seconds"] for line in lines[FIRST:]))


@contextlib.contextmanager
def shared_folder(world: Any) -> Any:
    """Yield a temporary folder of rank 0 to all ranks; it is removed when all have left."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(world.bcast(name))
        world.Barrier()


def command(*words: str) -> None:
    """Run `summa3d WORDS…` on these ranks, silently. A status other than 0 ends this rank with it."""
    sys.argv = ["summa3d", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module("summa3d", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise


def collectives() -> dict[str, Case]:
    """Return the cases of collectives: each small and large, through node memory and through MPI."""
    return {
        f"{operation}-{size}-{way}": Case(2, partial(collective, operation=operation, words=words, node_memory=way == "node"))
        for operation in ("all_gather", "reduce_scatter", "all_reduce")
        for size, words in (("small", SMALL), ("large", LARGE))
        for way in ("node", "mpi")
    }


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    two_d = ("m:x k:y", "k:x n:y")

    def of(ranks: int, algorithm: str, grid: Sequence[int], *sizes: Any) -> Case:
        shape, layouts = dict(zip("xyz", grid, strict=False)), () if algorithm == "cuboid" else two_d
        return Case(ranks, lambda world: product(world, layouts, algorithm, shape, *sizes))

    return {
        "product-cuboid-64-p1": of(1, "cuboid", (1, 1, 1), 64, "float64", 25, 400),
        "product-cuboid-64-p2": of(2, "cuboid", (1, 1, 2), 64, "float64", 25, 100),
        "product-summa-512-p4": of(4, "summa", (2, 2), 512, "float32", 25),
        "product-cannon-1024-p4": of(4, "cannon", (2, 2), 1024, "float64", 15),
        "product-summa-256-p8": of(8, "summa", (2, 4), 256, "float32", 25),
        "product-cuboid-2048-p8": of(8, "cuboid", (2, 2, 2), 2048, "float32", 9),
        "linear-p8": Case(8, linear),
        "block-cuboid-p8": Case(8, partial(block, scheme="cuboid:2,2,2")),
        "block-oned-sp-p4": Case(4, partial(block, scheme="oned-sp")),
        "step-demo-p8": Case(8, step),
        **collectives(),
    }


CASES = cases()


def main() -> None:
    """Time the cases that the command line names; rank 0 prints their seconds as JSON."""
    import summa3d.kernels
    from mpi4py import MPI

    import summa3d

    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for module, source in ((summa3d, folder / "summa3d"), (summa3d.kernels, folder / "kernels")):
        imported = Path(str(module.__file__)).resolve().parent
        if imported != source.resolve():
            sys.exit(f"{module.__name__} is imported from {imported}, not from {source.resolve()}, which is to be measured")
    seconds = {name: CASES[name].seconds(MPI.COMM_WORLD) for name in names}
    tell(MPI.COMM_WORLD, seconds)


if __name__ == "__main__":
    main()
