"""Processor time of a collective's Python on each rank, in µs, of this checkout and, in turn, of another one (--against DIR).

Waiting is left out: a collective is begun, all ranks meet, and only then it is completed. A whole `axis.all_gather(x)`, and the
same prepared once and started often, are timed by the quickest call of many, which has not waited.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 2.0
"""µs that comparing and recording calls may add to a collective."""
PREPARED, GATHERED = 0.8, 1.05
"""Shares of the other checkout's `axis.all_gather(x)` that a prepared one, and this checkout's own, may take."""
RANKS, WORDS, WARM_UPS = 2, 64, 50
WHOLE = {"64 doubles": 64, "64 KiB": 64 * 1024 // 8}
"""Words on each rank of the gathers that are timed whole."""
WAYS = {"node memory": True, "MPI": False}


def main() -> None:
    """Measure this checkout and the other one in turn, and print what each collective takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="DIR", help="Another checkout of summa3d to compare with.")
    parser.add_argument("--rounds", type=int, default=5, help="Start the ranks this many times for each checkout.")
    parser.add_argument("--calls", type=int, default=1000, help="Time this many calls of each collective.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks:  # before `common` imports this checkout
        measure(args.calls)
        return
    from common import HERE, ROOT, on_ranks, save, verdict

    trees = {"here": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    load = os.getloadavg()[0]
    found: dict[str, dict[str, list[float]]] = {tree: {} for tree in trees}
    for turn in range(args.rounds):
        for tree, folder in list(trees.items())[:: -1 if turn % 2 else 1]:
            os.environ["SUMMA3D_BENCHED"] = str(folder)
            printed = on_ranks(RANKS, [str(HERE / "collective_overhead.py"), "--calls", str(args.calls), "--on-ranks"])
            for name, micros in json.loads(printed.splitlines()[-1]).items():
                found[tree].setdefault(name, []).append(micros)
    how = f"in the quickest tenth of {args.calls}; {RANKS} ranks started {args.rounds} times; load {load:.1f}"
    print(f"µs of processor time a call {how}")
    micros = {
        tree: {name: (min if "whole" in name else statistics.median)(times) for name, times in rows.items()}
        for tree, rows in found.items()
    }
    for name, mine in micros["here"].items():
        other = micros.get("against", {}).get(name)
        print(f"  {name:<46} {mine:6.2f}" + ("" if other is None else f"   against {other:6.2f}   {mine - other:+.2f}"))
    if "against" in found:
        for claim, held in claims(micros["here"], micros["against"]):
            print("  " + verdict(claim, held))
    save({"kind": "collective_overhead", "load": load, "microseconds": found}, args.json)


def claims(here: dict[str, float], against: dict[str, float]) -> list[tuple[str, bool]]:
    """Return the claims on two checkouts' µs of each call, and whether they hold."""
    whole = [name for name in against if name.startswith("whole ")]
    begun = max(here[name] - against[name] for name in against if name not in whole)
    gathered = max(here[name] / against[name] for name in whole)
    rows = [
        (f"at most {LIMIT:.0f} µs more a collective", begun <= LIMIT),
        (f"a whole all_gather takes {gathered:.2f} of the other's time, at most {GATHERED}", gathered <= GATHERED),
    ]
    shares = [here[f"prepared {name}"] / against[name] for name in whole if f"prepared {name}" in here]
    if shares:
        rows.append((f"a prepared one takes {max(shares):.2f} of it, at most {PREPARED}", max(shares) <= PREPARED))
    return rows


def measure(calls: int) -> None:
    """Run on each rank: time the collectives of the checkout that SUMMA3D_BENCHED names; rank 0 prints JSON."""
    sys.path.insert(0, os.environ["SUMMA3D_BENCHED"])
    import numpy as np
    from mpi4py import MPI

    from summa3d.comm.grid import Grid

    world, taken = MPI.COMM_WORLD, {}
    array = np.ones(WORDS)
    for way, node_memory in WAYS.items():
        axis = Grid(world, {"x": world.size}, node_memory=node_memory)["x"]
        started: dict[str, Any] = {
            "all_gather": lambda axis=axis: axis.start_all_gather(array),
            "reduce_scatter": lambda axis=axis: axis.start_reduce_scatter(array),
            "all_reduce": lambda axis=axis: axis.start_all_reduce(array),
            "broadcast": lambda axis=axis: axis.start_broadcast(array),
        }
        for name, start in started.items():
            taken[f"{name}, {way}"] = quick_tenth(start, calls, world)
        for size, words in WHOLE.items():
            taken |= whole_gathers(axis, np.ones(words), calls, f"whole all_gather of {size}, {way}")
    if world.rank == 0:
        print(json.dumps(taken))


def whole_gathers(axis: Any, array: Any, calls: int, name: str) -> dict[str, float]:
    """Return the µs of this thread in the quickest `axis.all_gather(array)` and in the quickest prepared one, if it has such."""
    ways = {name: lambda: axis.all_gather(array)}
    if hasattr(axis, "prepare"):
        gather = axis.prepare("all_gather", like=array)
        ways[f"prepared {name}"] = lambda: gather.start(array).wait()
    micros: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(calls + WARM_UPS):
        for way, act in ways.items():
            before = time.thread_time_ns()
            act()
            micros[way].append((time.thread_time_ns() - before) / 1000)
    return {way: min(times[WARM_UPS:]) for way, times in micros.items()}


def quick_tenth(start: Any, calls: int, world: Any) -> float:
    """The µs of this thread that a collective takes, without the wait for other ranks, in all but the quickest tenth of calls.

    Other work on the machine empties the caches between calls; the quickest are those that it left alone.
    """
    micros = []
    for call in range(calls + WARM_UPS):
        before = time.thread_time_ns()
        pending = start()
        begun = time.thread_time_ns()
        world.Barrier()
        after = time.thread_time_ns()
        pending.wait()
        if call >= WARM_UPS:
            micros.append((begun - before + time.thread_time_ns() - after) / 1000)
    return statistics.quantiles(micros, n=10)[0]


if __name__ == "__main__":
    main()
