"""A race of our product against a peer library's on the same ranks, shared by gemm_vs_heat.py and gemm_vs_jax.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from common import about, on_ranks, save, verdict

CASES = {"square": (2048, 2048, 2048), "tall": (8192, 512, 512), "wide": (512, 8192, 512), "large k": (512, 512, 8192)}
DTYPES = ("float32", "float64")
RANKS = (2, 4, 8)
SLOW, AHEAD = 0.6, 1.5  # where the peer's part of the ceiling is below SLOW, ours is AHEAD times as fast; elsewhere not behind
SQUARE = 1024  # side of the products whose rate is the ceiling
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}
OURS = "ours"
CEILINGS = {"ceiling, numpy": "numpy", "ceiling, torch": "torch"}


class Contender(Protocol):
    """One side of a race."""

    def seconds(self) -> float:
        """Seconds of one product, over all ranks; collective over the world."""
        ...


class Cores:
    """All cores at their best: a square product of its own on one rank a core, at the same time, while other ranks sleep."""

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


def in_turn(contenders: Mapping[str, Contender], world: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, right after one product of it that is not counted; complete on rank 0."""
    from summa3d.bench.clock import sleep_until_all_are_here

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            sleep_until_all_are_here(world)  # those that the last contender left idle sleep
            contender.seconds()
            seconds[name].append(contender.seconds())
    sleep_until_all_are_here(world)
    return seconds


def ceiling(world: Any, dtype: str) -> dict[str, Cores]:
    """The contenders whose fastest round is the ceiling."""
    return {name: Cores(world, dtype, library) for name, library in CEILINGS.items()}


def rate(seconds: Mapping[str, list[float]], flops: int) -> float:
    """The rate of the cores: `flops` over the least time of all rounds, since other work can only lower it."""
    return flops / min(min(seconds[name]) for name in CEILINGS)


def row_of(case: str, ours: Any, seconds: dict[str, list[float]], flops: int, load: float, ranks: int) -> dict[str, Any]:
    """A case in the result: in each round the part of the ceiling that each contender reaches and, for a peer, its time ÷ ours.

    `flops` are those of the products that set the ceiling.
    """
    problem, top = ours.entry.problem, rate(seconds, flops)
    raced = {name: times for name, times in seconds.items() if name not in CEILINGS}
    return {
        "case": case,
        **{name: getattr(problem, name) for name in ("m", "n", "k", "dtype")},
        "ranks": ranks,
        "load": load,
        "label": ours.entry.label,
        "seconds": seconds,
        "ceiling": top,
        "parts": {name: [problem.flops / taken / top for taken in times] for name, times in raced.items()},
        "quotients": {
            name: [its / mine for its, mine in zip(times, seconds[OURS], strict=True)]
            for name, times in raced.items()
            if name != OURS
        },
    }


def own(problem: Any, world: Any) -> Any:
    """Our product with the algorithm and grid that the library chooses; collective."""
    from summa3d.bench.products import ProductRunner, own_choice
    from summa3d.comm.transport.node_memory import in_one_node
    from summa3d.gemm.cost.machine import Machine

    return ProductRunner(own_choice(problem, world.size, Machine(node=in_one_node(world))), world)


def check(name: str, found: Any, wanted: Any) -> None:
    """Raise ValueError where a peer's result is not ours: then it computes another product."""
    import numpy as np

    difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not difference < TOLERANCE[str(wanted.dtype)]:
        raise ValueError(f"{name} computes another product: its result differs by {difference:.1e}")


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options of a race."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument(
        "--case", action="append", choices=CASES, help="Run this case. The option may be repeated. The default is all."
    )
    made.add_argument("--divide", type=int, default=1, metavar="N", help="Divide all sizes by N, for a quick run.")
    made.add_argument("--dtype", action="append", choices=DTYPES, help="Set the dtype of A, B and C. The default is both.")
    made.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="P", help="Run on these rank counts.")
    made.add_argument("--rounds", type=int, default=7, help="Time this many interleaved rounds.")
    made.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    made.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    return made


def problems(args: argparse.Namespace) -> Iterable[tuple[str, Any]]:
    """The cases that the command line asks for."""
    from summa3d.bench.products import Problem

    for name in args.case or CASES:
        for dtype in args.dtype or DTYPES:
            yield name, Problem(*(size // args.divide for size in CASES[name]), dtype=dtype)


def start(script: str, peer: str, arguments: list[str], args: argparse.Namespace) -> None:
    """Run the race on each number of ranks, and print the rows and whether the claims hold."""
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        result = json.loads(on_ranks(ranks, [script, *arguments, "--on-ranks"]).splitlines()[-1])
        print(about(result["machine"]))
        print(f"{peer} {result['versions']}")
        for row in result["rows"]:
            print("\n".join(lines(row)))
        rows += result["rows"]
    for claim, held in claims(peer, rows):
        print(verdict(claim, held))
    save({"kind": "race", "peer": peer, "machine": result["machine"], "versions": result["versions"], "rows": rows}, args.json)


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row as text: of each side milliseconds and part of the ceiling, and of a peer its time ÷ ours."""
    what = f"{row['case']} {row['m']}×{row['n']}×{row['k']} {row['dtype']}, {row['ranks']} ranks"
    said = [f"{what}, load {row['load']:.1f}; ceiling {row['ceiling'] / 1e9:.0f} Gflop/s; ours: {row['label']}"]
    for name, parts in row["parts"].items():
        text = f"  {name}: {median(row['seconds'][name]) * 1e3:.1f} ms, {median(parts):.2f} of the ceiling"
        times = row["quotients"].get(name)
        said.append(text + (f"; {median(times):.2f} × our time [{min(times):.2f}–{max(times):.2f}]" if times else ""))
    return said


def claims(peer: str, rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """The two claims with the worst case of each, and whether they hold."""
    pairs = [
        (
            median(row["quotients"][name]),
            median(row["parts"][name]),
            f"{row['case']} {row['dtype']}, {row['ranks']} ranks, {name}",
        )
        for row in rows
        for name in row["quotients"]
    ]
    slow, worst = [pair for pair in pairs if pair[1] < SLOW], min(pairs)
    said = []
    if slow:
        few, least = sum(pair[0] < AHEAD for pair in slow), min(slow)
        claim = (
            f"≥ {AHEAD}× as fast as {peer} wherever {peer} is below {SLOW} of the ceiling: {len(slow) - few} of {len(slow)} cases"
        )
        said.append((f"{claim}; the least {least[0]:.2f}× ({least[2]})", not few))
    behind = sum(pair[0] < 1 for pair in pairs)
    claim = f"never behind {peer}: ahead in {len(pairs) - behind} of {len(pairs)} cases; the least {worst[0]:.2f}× ({worst[2]})"
    return [*said, (claim, not behind)]
