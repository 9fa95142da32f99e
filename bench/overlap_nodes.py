"""Benchmark of products in pieces between emulated nodes: seconds beside those of the arithmetic and of the messages alone.

Sizes are such that both take alike on this machine: a rank's rate is measured first. Predictions are written before a case runs.
Needs root.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import exp, log, prod
from statistics import mean, median
from typing import Any

from common import conclude, from_nodes, from_ranks, note, options, save
from ranks import in_turn, on_machine, seconds, started, tell

from summa3d.columns import aligned

PIECES = (1, 2, 4, 8, 16)
PORT = 100e6 / 8
"""Bytes a second of a port."""
DTYPE = "float32"
ONE_NODE_EACH, SHARED_CORES = 0.85, 0.78


@dataclass(frozen=True)
class Case:
    """A product with one operand that moves, whose words take as long as its multiply-adds: the free size makes it so."""

    moved: str
    form: str
    nodes: int

    @property
    def axes(self) -> dict[str, int]:
        """The grid: the axis along which the operand moves has all nodes."""
        return {axis: self.nodes if axis == {"A": "y", "B": "x", "C": "z"}[self.moved] else 1 for axis in "xyz"}

    def sizes(self, rate: float, scale: int) -> dict[str, int]:
        """m, n and k, of which the moved operand has two, for ranks that multiply-add `rate` times a second."""
        free = max(self.nodes, int(4 * rate * (self.nodes - 1) / PORT) // scale)
        rows, columns = 2048 // scale, 1024 // scale
        return {"A": {"m": rows, "n": free, "k": columns}, "B": {"m": free, "n": columns, "k": rows}}.get(
            self.moved, {"m": rows, "n": columns, "k": free}
        )

    def __str__(self) -> str:
        return f"{self.moved} moves, {self.form}, {self.nodes} nodes"


CASES = [Case(moved, form, nodes) for nodes in (2, 4) for moved in "ABC" for form in ("nn", "nt", "tn")]


def main() -> None:
    """Measure all cases; print a row each and the claims."""
    parser = options(__doc__, 5)
    parser.add_argument("--case", type=int, action="append", help="Run the case of this number alone. May be repeated.")
    parser.add_argument("--scale", type=int, default=1, help="Divide all sizes by this.")
    parser.add_argument("--rate", type=float, help="Take this rate in place of measuring: multiply-adds a second.")
    args = parser.parse_args()
    if args.on_ranks:
        return on_a_rank(args)
    load = os.getloadavg()[0]
    rate = args.rate or from_ranks(2, __file__, "--on-ranks", "--scale", args.scale)["rate"]
    note(f"load {load:.1f}; a rank multiply-adds {rate / 1e9:.1f} · 10⁹ times a second while another does")
    rows = []
    for number in args.case or range(len(CASES)):
        arguments = "--case", number, "--scale", args.scale, "--rate", rate, "--rounds", args.rounds
        rows.append(from_nodes(CASES[number].nodes, "100mbit", __file__, "--on-ranks", *arguments))
        note(line(rows[-1]))
    print("\n".join(aligned([HEADINGS, *map(cells, rows)])))
    save({"kind": "overlap between nodes", "load": load, "rate": rate, "rows": rows}, args.json)
    conclude(claims(rows))


HEADINGS = (
    "case",
    "m·n·k",
    "arithmetic",
    "messages",
    "1 piece",
    "best",
    "pieces",
    "max ÷ best",
    "1 piece ÷ best",
    "best ÷ predicted",
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in milliseconds."""
    best = row["best"]
    taken = {name: 1e3 * median(times) for name, times in row["seconds"].items()}
    figures = (taken[name] for name in ("arithmetic", "messages", "1", best))
    size = "·".join(str(row["sizes"][letter]) for letter in "mnk")
    ratios = (row["reached"], row["faster"], taken[best] / 1e3 / row["predicted"][best])
    return (row["case"], size, *(f"{figure:.0f}" for figure in figures), best, *(f"{ratio:.2f}" for ratio in ratios))


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    return " · ".join(f"{heading} {cell}" for heading, cell in zip(HEADINGS, cells(row), strict=True))


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return what must hold of cases whose arithmetic and messages take alike within 2×."""
    found = []
    for nodes, least in ((2, ONE_NODE_EACH), (4, SHARED_CORES)):
        alike = [row for row in rows if row["nodes"] == nodes and 0.5 <= row["alike"] <= 2]
        if alike:
            middle = exp(mean(log(row["reached"]) for row in alike))
            claim = (
                f"{nodes} nodes: max(arithmetic, messages) is at least {least} of the seconds of each of {len(alike)} products"
            )
            found.append((f"{claim}; geometric mean {middle:.2f}", all(row["reached"] >= least for row in alike)))
    return found


def on_a_rank(args: Any) -> None:
    """Run on every rank: the rate of a core, or the case of this number; rank 0 prints JSON."""
    if args.case is None:
        world, _ = on_machine()
        return tell(world, {"rate": rate_of(world, args.scale)})
    world = started()
    tell(world, measured(CASES[args.case[-1]], args.rate, args.scale, args.rounds, world))


def rate_of(world: Any, scale: int) -> float:
    """Multiply-adds a second of a rank's product while the others multiply too; collective."""
    import numpy as np

    size = 2048 // scale
    a, b = (np.ones((size, size), DTYPE) for _ in "ab")
    out = np.empty_like(a)
    times = in_turn({"": timed(world, lambda: np.matmul(a, b, out=out))}, 5, 1)[""]
    return size**3 / median(times)


def timed(world: Any, act: Callable[[], object]) -> Callable[[], float]:
    """A stopwatch of an act on all ranks, until the last is done."""
    return lambda: world.Barrier() or seconds(lambda: (act(), world.Barrier()))


def measured(case: Case, rate: float, scale: int, rounds: int, world: Any) -> dict[str, Any]:
    """The seconds of a case in one piece and in several, in turn with those of its arithmetic and of its messages; collective."""
    import numpy as np

    from summa3d.comm.grid import Grid
    from summa3d.gemm import Cuboid, CuboidPlan
    from summa3d.gemm.pieces.timing import seconds_of

    grid, sizes = Grid(world, case.axes), case.sizes(rate, scale)
    executors = {pieces: Cuboid(CuboidPlan(case.form, **sizes, pieces=pieces), grid) for pieces in PIECES}
    whole = executors[1]
    random = np.random.default_rng(world.rank)
    a, b = (random.random(block, dtype=DTYPE) for block in (whole.a_block, whole.b_block))
    gathered = whole.gather_a(a), whole.gather_b(b)
    partial, out = np.empty((whole.m, whole.n), DTYPE), np.empty(whole.c_block, DTYPE)
    acts: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: whole.workspace.accumulate(*gathered, case.form, partial),
        "messages": lambda: (whole.gather_a(a), whole.gather_b(b), whole.scatter_c(partial)),
    }
    acts |= {str(pieces): (lambda executor=executor: executor.run(a, b, out)) for pieces, executor in executors.items()}
    times = in_turn({name: timed(world, act) for name, act in acts.items()}, rounds, 1)
    alone = {name: median(times[name]) for name in ("arithmetic", "messages")}
    work, words = prod(sizes.values()) / case.nodes, grid_words(whole)
    predicted = {
        str(pieces): seconds_of(
            executor.plan,
            case.axes,
            grid.coordinates,
            lambda count: alone["messages"] * count / words,
            lambda m, n, k: alone["arithmetic"] * m * n * k / work,
        )
        for pieces, executor in executors.items()
    }
    best = min(map(str, PIECES), key=lambda name: median(times[name]))
    return {
        **asdict(case),
        "case": str(case),
        "sizes": sizes,
        "seconds": times,
        "predicted": predicted,
        "best": best,
        "alike": alone["messages"] / alone["arithmetic"],
        "reached": max(alone.values()) / median(times[best]),
        "faster": median(times["1"]) / median(times[best]),
    }


def grid_words(executor: Any) -> int:
    """Words that this rank receives in one product."""
    from summa3d.gemm import volume

    return volume.of_plan(executor.plan, executor.grid.shape).words_of(executor.grid.coordinates)


if __name__ == "__main__":
    main()
