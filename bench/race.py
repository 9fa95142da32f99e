"""A race of our product against a peer library's on the same ranks, shared by gemm_vs_heat.py and gemm_vs_jax.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from common import about, conclude, itself, options, save
from ranks import in_range, tell

CASES = {"square": (2048, 2048, 2048), "tall": (8192, 512, 512), "wide": (512, 8192, 512), "large k": (512, 512, 8192)}
DTYPES = ("float32", "float64")
RANKS = (2, 4, 8)
SLOW, AHEAD = 0.6, 1.5  # where the peer's part of the ceiling is below SLOW, ours is AHEAD times as fast; elsewhere not behind
SQUARE = 1024  # side of the products whose rate is the ceiling
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}
OURS = "ours"
CEILINGS = {"ceiling, numpy": "numpy", "ceiling, torch": "torch"}


class Cores:
    """All cores at their best: a square product of its own on one rank a core, at the same time, while other ranks sleep."""

    ranks = 0  # it is timed by itself, after a call that is not

    def __init__(self, world: Any, dtype: str, library: str) -> None:
        import numpy as np
        import torch

        from summa3d import Grid
        from summa3d.bench.clock import Clock
        from summa3d.comm.nodes import Nodes

        self.count = min(world.size, Nodes.of(world).total_cores)
        self.here = world.rank < self.count  # ranks are dealt out to cores in turn
        if not self.here:
            return
        self.clock = Clock(Grid(world.Create_group(world.Get_group().Incl(range(self.count))), {"y": self.count}))
        a = np.sin(np.arange(SQUARE * SQUARE)).astype(dtype).reshape(SQUARE, SQUARE)
        b, c = a.T.copy(), np.empty_like(a)
        tensors = [torch.from_numpy(one) for one in (a, b, c)]
        self.product = {"numpy": lambda: np.matmul(a, b, out=c), "torch": lambda: torch.mm(*tensors[:2], out=tensors[2])}[library]

    def seconds(self) -> float:
        """Seconds of the products of all cores; 0 on ranks without one."""
        return self.clock.spans(self.product)[0] if self.here else 0.0

    @property
    def flops(self) -> int:
        """Floating-point operations of all of them."""
        return 2 * SQUARE**3 * self.count


def in_turn(contenders: Mapping[str, Any], world: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, right after one product of it that is not counted; complete on rank 0."""
    from summa3d.bench.race import raced

    return dict(zip(contenders, raced([*contenders.values()], rounds, world), strict=True))


def ceiling(world: Any, dtype: str) -> dict[str, Cores]:
    """The contenders whose fastest round is the ceiling."""
    return {name: Cores(world, dtype, library) for name, library in CEILINGS.items()}


def rate(seconds: Mapping[str, list[float]], flops: int) -> float:
    """The rate of the cores: `flops` over the least time of all rounds, since other work can only lower it."""
    return flops / min(min(seconds[name]) for name in CEILINGS)


Peers = Callable[[Any, Any], Mapping[str, Any]]
"""Makes the peers of a problem by name, and raises ValueError where the product of one is not ours, given on rank 0."""


def measure(args: argparse.Namespace, world: Any, found: Any, versions: str, peers: Peers) -> None:
    """Race in all cases on every rank; rank 0 prints JSON."""
    rows = [raced(name, problem, args.rounds, world, peers) for name, problem in problems(args)]
    tell(world, {"machine": found, "versions": versions, "rows": rows})


def raced(case: str, problem: Any, rounds: int, world: Any, peers: Peers) -> dict[str, Any]:
    """A case in the result: in each round the part of the ceiling that each contender reaches and, for a peer, its time ÷ ours.

    Collective; complete on rank 0.
    """
    load, ours, ceilings = os.getloadavg()[0], own(problem, world), ceiling(world, problem.dtype)
    ours.seconds()
    wanted = ours.c.to_global() if ours.here else None
    contenders = {**ceilings, OURS: ours, **peers(problem, wanted)}
    seconds = in_turn(contenders, world, rounds)
    if world.rank != 0:
        return {}
    top = rate(seconds, next(iter(ceilings.values())).flops)
    sides = {name: times for name, times in seconds.items() if name not in CEILINGS}
    return {
        "case": case,
        **{name: getattr(problem, name) for name in ("m", "n", "k", "dtype")},
        "ranks": world.size,
        "load": load,
        "label": ours.entry.label,
        "seconds": seconds,
        "ceiling": top,
        "parts": {name: [problem.flops / taken / top for taken in times] for name, times in sides.items()},
        "quotients": {
            name: [its / mine for its, mine in zip(times, seconds[OURS], strict=True)]
            for name, times in sides.items()
            if name != OURS
        },
    }


def own(problem: Any, world: Any) -> Any:
    """Our product with the algorithm and grid that the library chooses; collective."""
    from summa3d.bench.products import ProductRunner, own_choice
    from summa3d.comm.transport.node_memory import in_one_node
    from summa3d.gemm.cost.machine import Machine

    return ProductRunner(own_choice(problem, world.size, Machine(node=in_one_node(world))), world)


def check(name: str, difference: float, dtype: str) -> None:
    """Raise ValueError where a peer's result differs from ours: then it computes another product."""
    if not difference < TOLERANCE[dtype]:
        raise ValueError(f"{name} computes another product: its result differs by {difference:.1e}")


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options of a race."""
    made = options(text, 7)
    again = "Run this case. The option may be repeated. The default is all."
    made.add_argument("--case", action="append", choices=CASES, help=again)
    made.add_argument("--divide", type=int, default=1, metavar="N", help="Divide all sizes by N, for a quick run.")
    made.add_argument("--dtype", action="append", choices=DTYPES, help="Set the dtype of A, B and C. The default is both.")
    made.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="P", help="Run on these rank counts.")
    return made


def problems(args: argparse.Namespace) -> Iterable[tuple[str, Any]]:
    """The cases that the command line asks for."""
    from summa3d.bench.products import Problem

    for name in args.case or CASES:
        for dtype in args.dtype or DTYPES:
            yield name, Problem(*(size // args.divide for size in CASES[name]), dtype=dtype)


def start(peer: str, args: argparse.Namespace) -> None:
    """Run the race on each number of ranks, and print the rows and whether the claims hold."""
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        result = itself(ranks)
        print(about(result["machine"]))
        print(f"{peer} {result['versions']}")
        for row in result["rows"]:
            print("\n".join(lines(row)))
        rows += result["rows"]
    conclude(claims(peer, rows))
    save({"kind": "race", "peer": peer, "machine": result["machine"], "versions": result["versions"], "rows": rows}, args.json)


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row as text: of each side milliseconds and part of the ceiling, and of a peer its time ÷ ours."""
    what = f"{row['case']} {row['m']}×{row['n']}×{row['k']} {row['dtype']}, {row['ranks']} ranks"
    said = [f"{what}, load {row['load']:.1f}; ceiling {row['ceiling'] / 1e9:.0f} Gflop/s; ours: {row['label']}"]
    for name, parts in row["parts"].items():
        text = f"  {name}: {median(row['seconds'][name]) * 1e3:.1f} ms, {median(parts):.2f} of the ceiling"
        times = row["quotients"].get(name)
        said.append(text + (f"; its time ÷ ours {in_range(times, 2)}" if times else ""))
    return said


def claims(peer: str, rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """The two claims with the worst case of each, and whether they hold."""
    pairs = [
        (median(times), median(row["parts"][name]), f"{row['case']} {row['dtype']}, {row['ranks']} ranks, {name}")
        for row in rows
        for name, times in row["quotients"].items()
    ]
    slow, worst = [pair for pair in pairs if pair[1] < SLOW], min(pairs)
    said = []
    if slow:
        few, least = sum(pair[0] < AHEAD for pair in slow), min(slow)
        claim = f"≥ {AHEAD}× as fast as {peer} wherever {peer} is below {SLOW} of the ceiling"
        cases = f"{len(slow) - few} of {len(slow)} cases; the least {least[0]:.2f}× ({least[2]})"
        said.append((f"{claim}: {cases}", not few))
    behind = sum(pair[0] < 1 for pair in pairs)
    claim = f"never behind {peer}: ahead in {len(pairs) - behind} of {len(pairs)} cases; the least {worst[0]:.2f}× ({worst[2]})"
    return [*said, (claim, not behind)]
