"""Processor time of a collective's Python on each rank, in µs, of this checkout and, in turn, of another one (--against DIR).

Waiting is left out: a collective is begun, all ranks meet, and only then it is completed.
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
RANKS, WORDS, WARM_UPS = 2, 64, 50
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
    for _ in range(args.rounds):
        for tree, folder in trees.items():
            os.environ["SUMMA3D_BENCHED"] = str(folder)
            printed = on_ranks(RANKS, [str(HERE / "collective_overhead.py"), "--calls", str(args.calls), "--on-ranks"])
            for name, micros in json.loads(printed.splitlines()[-1]).items():
                found[tree].setdefault(name, []).append(micros)
    how = f"in the quickest tenth of {args.calls}; {RANKS} ranks started {args.rounds} times; load {load:.1f}"
    print(f"µs of processor time a call {how}")
    worst = 0.0
    for name, here in found["here"].items():
        mine = statistics.median(here)
        line = f"  {name:<28} {mine:6.2f}"
        if "against" in found:
            other = statistics.median(found["against"][name])
            worst = max(worst, mine - other)
            line += f"   against {other:6.2f}   {mine - other:+.2f}"
        print(line)
    if "against" in found:
        print("  " + verdict(f"at most {LIMIT:.0f} µs more a collective", worst <= LIMIT))
    save({"kind": "collective_overhead", "load": load, "microseconds": found}, args.json)


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
    if world.rank == 0:
        print(json.dumps(taken))


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
