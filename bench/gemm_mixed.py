"""Benchmark of products of matrices in mixed layouts beside heat's and DTensor's of the same matrices, in the same ranks in turn.

12 pairs of layouts on 4 ranks: words, counted where they travel, beside those that our plan says; and times.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from block_vs_dtensor import gloo_mesh
from common import about, conclude, itself, options, save
from gemm_vs_heat import FOLDER, has_heat, imported
from pmpi import preloaded, received_bytes
from race import check, in_turn
from ranks import in_range, on_machine, tell

RANKS, AHEAD = 4, 10
OURS, HEAT, DTENSOR = "ours", "heat", "DTensor"
NUMBERS: dict[str, int | None] = {"rows": 0, "columns": 1, "copies": None}
"""What ranks hold of a matrix → the split of heat's, the shard of a DTensor; None is a copy."""
SQUARE, SHORT, LONG = (1536, 1792, 2048), (512, 640, 6144), (6144, 640, 512)
CASES = (
    ("rows", "rows", None, SQUARE),
    ("rows", "columns", None, SQUARE),
    ("columns", "rows", "rows", SQUARE),
    ("columns", "columns", None, SQUARE),
    ("rows", "copies", None, LONG),
    ("columns", "copies", None, SQUARE),
    ("copies", "rows", None, SHORT),
    ("copies", "columns", None, SQUARE),
    ("rows", "rows", "columns", SQUARE),
    ("columns", "columns", "rows", LONG),
    ("columns", "rows", "columns", SHORT),
    ("rows", "columns", "copies", SHORT),
)
"""What ranks hold of A, of B, of C (None: each leaves it where it falls, as a whole sum), and m, n, k."""


def main() -> None:
    """Count the words, race, and print the rows and whether the claims hold; or say how heat is installed."""
    reader = options(__doc__, 9)
    reader.add_argument("--divide", type=int, default=1, metavar="N", help="Divide all sizes by N, for a quick run.")
    reader.add_argument("--packages", type=Path, default=FOLDER, metavar="DIR", help="Import heat from this folder.")
    reader.add_argument("--count", action="store_true", help="Count words alone.")
    args = reader.parse_args()
    if not has_heat(args.packages):
        return
    if args.on_ranks:
        return on_ranks(args)
    with preloaded():
        result = itself(RANKS)
    if not args.count:
        words = [row["words"] for row in result["rows"]]
        result = itself(RANKS)
        for row, counted in zip(result["rows"], words, strict=True):
            row["words"] = counted
    print(about(result["machine"]))
    print(result["versions"])
    for row in result["rows"]:
        print("\n".join(lines(row)))
    conclude(claims(result["rows"]))
    save({"kind": "race", "peer": "heat, DTensor", **result}, args.json)


def on_ranks(args: Namespace) -> None:
    """Run on every rank: count the words of all cases, or race them; rank 0 prints JSON."""
    world, found = on_machine()  # before heat brings scipy's OpenBLAS along
    import torch

    heat = imported(args.packages)
    mesh = gloo_mesh(world)
    is_counted = "LD_PRELOAD" in os.environ
    rows = []
    for a, b, c, sizes in CASES:
        m, n, k = (size // args.divide for size in sizes)
        row = {"a": a, "b": b, "c": c, "m": m, "n": n, "k": k, "ranks": world.size, "load": os.getloadavg()[0]}
        contenders = contenders_of((a, b, c), (m, n, k), world, heat, mesh)
        if is_counted:
            row["words"] = {name: int(world.allreduce(one.words())) for name, one in contenders.items()}
            row["words"]["our plan"] = contenders[OURS].planned
        else:
            row["seconds"] = in_turn(contenders, args.rounds, world)
        rows.append(row)
    tell(world, {"machine": found, "versions": f"heat {heat.__version__}, torch {torch.__version__}", "rows": rows})


class Contender:
    """A product whose operands lie in place."""

    ranks = 0  # it is timed by itself, after a product that is not
    planned = 0

    def __init__(self, world: Any, product: Callable[[], Any], whole: Callable[[Any], Any]) -> None:
        from summa3d import Grid
        from summa3d.bench.clock import Clock

        self.product, self.whole, self.clock = product, whole, Clock(Grid(world, {"y": world.size}))

    def seconds(self) -> float:
        """Seconds of one product, over all ranks; collective."""
        return self.clock.spans(self.product)[0]

    def words(self) -> float:
        """Words that this rank receives through MPI in one product; collective."""
        before = received_bytes()
        self.product()
        return (received_bytes() - before) / 8


def contenders_of(layouts: tuple[str, str, str | None], sizes: tuple[int, int, int], world: Any, heat: Any, mesh: Any) -> Any:
    """The three products of a case. Raises ValueError on rank 0 where the result of one is not ours. Collective."""
    import numpy as np

    from summa3d.bench.products import whole

    m, n, k = sizes
    a, b = whole(m, k, "float64"), whole(k, n, "float64")
    made = {
        OURS: ours(a, b, layouts, world),
        HEAT: heats(a, b, layouts, world, heat),
        DTENSOR: dtensors(a, b, layouts, world, mesh),
    }
    for name, one in made.items():
        found = one.whole(one.product())
        if world.rank == 0:
            check(name, float(np.abs(found - a @ b).max() / np.abs(a @ b).max()), "float64")
    return made


def ours(a: Any, b: Any, layouts: tuple[str, str, str | None], world: Any) -> Contender:
    """Our product, and the words of its plan."""
    from summa3d import Grid
    from summa3d.gemm import DistMatrix, matmul, plan_any

    grid = Grid(world, {"x": world.size})
    texts = {
        name: {"rows": f"{row}:x {column}", "columns": f"{row} {column}:x", "copies": f"{row} {column}"}
        for name, row, column in (("a", "m", "k"), ("b", "k", "n"), ("c", "m", "n"))
    }
    to = None if layouts[2] is None else texts["c"][layouts[2]]
    lie = [texts[name][layout] for name, layout in zip("ab", layouts, strict=False)]
    left, right = (DistMatrix.from_global(one, grid, layout) for one, layout in zip((a, b), lie, strict=True))
    made = Contender(world, lambda: matmul(left, right, out_layout=to), lambda c: c.to_global())
    found = made.product()
    made.planned = plan_any(*lie, *(a.shape[0], b.shape[1], a.shape[1]), grid, to or found.layout).words
    return made


def heats(a: Any, b: Any, layouts: tuple[str, str, str | None], world: Any, heat: Any) -> Contender:
    """heat's product, and a resplit where C is asked for elsewhere."""
    import torch

    left, right = (heat.array(torch.from_numpy(one), split=NUMBERS[layout]) for one, layout in zip((a, b), layouts, strict=False))

    def product() -> Any:
        c = heat.matmul(left, right)
        return c if layouts[2] is None or c.split == NUMBERS[layouts[2]] else heat.resplit(c, NUMBERS[layouts[2]])

    return Contender(world, product, lambda c: c.numpy())


class Traced(Contender):
    """A DTensor's product; its words are those of the collectives that a dispatch mode sees."""

    def words(self) -> float:
        """Words that this rank receives in one product; collective."""
        with traced() as found:
            self.product()
        return sum(found)


def dtensors(a: Any, b: Any, layouts: tuple[str, str, str | None], world: Any, mesh: Any) -> Contender:
    """DTensor's product, whose sum is completed: by rows, where C is asked for nowhere."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def placed(name: str) -> list[Any]:
        number = NUMBERS[name]
        return [Replicate() if number is None else Shard(number)]

    left, right = (
        distribute_tensor(torch.from_numpy(one), mesh, placed(layout)) for one, layout in zip((a, b), layouts, strict=False)
    )

    def product() -> Any:
        c = torch.mm(left, right)
        if layouts[2] is not None:
            return c.redistribute(placements=placed(layouts[2]))
        return c.redistribute(placements=placed("rows")) if c.placements[0].is_partial() else c

    return Traced(world, product, lambda c: c.full_tensor().numpy())


@contextmanager
def traced() -> Iterator[list[float]]:
    """A list of the words that this rank receives in each collective of DTensor's."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[float] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(kind == DTensor for kind in types):
                return NotImplemented
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if "c10d" in function.namespace and "wait" not in name and "wrap" not in name:
                found.append(received(name, args, result))
            return result

    with Mode():
        yield found


def received(name: str, args: Any, result: Any) -> float:
    """Words that a member receives in a collective that is optimal in bandwidth."""
    import torch.distributed as dist

    g = dist.get_world_size()
    if name.startswith("all_gather"):
        return float(result.numel() - args[0].numel())
    if name.startswith("reduce_scatter"):
        return float((g - 1) * result.numel())
    if name.startswith("all_reduce"):
        return 2 * (g - 1) / g * float(result.numel())
    if name.startswith("all_to_all"):
        return float(result.numel() / result.shape[0] * (sum(args[1]) - args[1][dist.get_rank()]))
    raise ValueError(f"the collective {name} of a DTensor is not counted.")


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row as text."""
    c = "" if row["c"] is None else f" → {row['c']}"
    words = row["words"]
    said = [f"{row['a']} × {row['b']}{c}, {row['m']}×{row['n']}×{row['k']}, load {row['load']:.1f}"]
    said[0] += "; words: " + ", ".join(f"{name} {count:,}" for name, count in words.items())
    for name, times in row.get("seconds", {}).items():
        text = f"  {name}: {median(times) * 1e3:.1f} ms"
        said.append(text if name == OURS else f"{text}; its time ÷ ours {in_range(quotients(row, name), 2)}")
    return said


def quotients(row: Mapping[str, Any], name: str) -> list[float]:
    """A peer's time ÷ ours in each round."""
    return [its / own for its, own in zip(row["seconds"][name], row["seconds"][OURS], strict=True)]


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The claims, with what was found, and whether they hold."""
    exact = sum(row["words"][OURS] == row["words"]["our plan"] for row in rows)
    said = [(f"our words through MPI are those of the plan: {exact} of {len(rows)}", exact == len(rows))]
    for peer in (HEAT, DTENSOR):
        fewer = sum(row["words"][OURS] <= row["words"][peer] for row in rows)
        said.append((f"no more words than {peer}: {fewer} of {len(rows)}", fewer == len(rows)))
        if "seconds" in rows[0]:
            ahead = sum(median(quotients(row, peer)) > 1 for row in rows)
            said.append((f"ahead of {peer} in ≥ {AHEAD} of {len(rows)}: {ahead}", ahead >= AHEAD))
    return said


if __name__ == "__main__":
    main()
