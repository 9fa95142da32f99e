"""What our own Python costs beside what it wraps: a table of measurements with their limits, all run or those that are named.

Each is taken on fresh ranks or in fresh processes. `--against DIR` lets `collectives` race another checkout. Exit 1 where a dry
run exceeds its budget, which is in CPU seconds and holds beside any other work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, ROOT, about, environment, from_ranks, printed, save, verdict
from overhead_cases import BATCH, MICRO_BATCHES, PARTS, TORCH
from ranks import in_range, spread
from step import RANKS

Claims = Sequence[tuple[str, bool]]
Found = tuple[dict[str, Any], Sequence[str], Claims]
"""What is kept of a measurement, what is printed of it, and its claims."""


@dataclass(frozen=True)
class Row:
    """A measurement of `what`. limits : of its claims, in their order; rounds, calls : how often, unless the user says so."""

    what: str
    limits: tuple[float, ...]
    measure: Callable[[Row, Path | None], Found]
    rounds: int = 1
    calls: int = 1

    def on_ranks(self, ranks: int, name: str, started_by: Sequence[str] = ()) -> Any:
        """Return what a case of overhead_cases.py finds on fresh ranks."""
        return from_ranks(ranks, HERE / "overhead_cases.py", name, self.rounds, self.calls, started_by=started_by)


def main() -> None:
    """Measure the rows that the command line names, and print what they take and whether the claims hold."""
    listed = "".join(f"\n  {name:<13}{row.what}" for name, row in ROWS.items())
    parser = argparse.ArgumentParser(description=__doc__ + listed, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Measure these rows. The default is all.")
    parser.add_argument("--rounds", type=int, help="Take this many rounds, starts or processes of each row.")
    parser.add_argument("--calls", type=int, help="Time this many calls or steps of a round in the rows that count them.")
    parser.add_argument("--against", type=Path, metavar="DIR", help="Compare collectives with another checkout of summa3d.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the results to FILE.")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ROWS]
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    results, claims = {}, []
    for name in args.names or ROWS:
        load, row = os.getloadavg()[0], ROWS[name]
        row = replace(row, rounds=args.rounds or row.rounds, calls=args.calls or row.calls)
        print(f"{name}: {row.what}; load {load:.1f}", flush=True)
        result, lines, held = row.measure(row, args.against)
        results[name] = result | {"load": load}
        print("\n".join(([about(result["machine"])] if "machine" in result else []) + [f"  {line}" for line in lines]))
        claims += [(name, *claim) for claim in held]
    for name, claim, holds in claims:
        print(verdict(f"{name}: {claim}", holds))
    save({"kind": "overhead", "rows": results}, args.json)
    sys.exit(any(name == "dry-run" and not holds for name, _, holds in claims))


def import_time(row: Row, against: Path | None) -> Found:
    """Seconds of the import in fresh processes, after one that is not counted."""
    clocks = "time.perf_counter(), time.process_time()"
    timed = f"import time\nwall, cpu = {clocks}\nimport summa3d.gemm\nlater, used = {clocks}\nprint(later - wall, used - cpu)"
    command = [sys.executable, "-c", "import numpy\nfrom mpi4py import MPI\n" + timed]
    pairs = [[*map(float, printed(command, environment()).split())] for _ in range(1 + row.rounds)]
    times, processor = zip(*pairs[1:], strict=True)
    line, (limit,) = f"import summa3d.gemm after numpy and mpi4py: {in_range(times, 3, ' s')}", row.limits
    line += f", of them {median(processor):.3f} s of processor time"
    return {"seconds": pairs[1:]}, [line], [(f"at most {limit} s, median of {row.rounds}", median(times) <= limit)]


BEFORE = {
    "0b71ce9, before plans and executors were kept": {1: (458, 739), 2: (575, 561, 946), 4: (678, 1169), 8: (781, 1656)},
    "fd9d67e, before collectives were prepared": {1: (117, 118), 2: (249, 193, 341), 4: (328, 434), 8: (407, 816)},
}
"""Commit → ranks → the largest counts over ranks of sys.setprofile's events call and c_call, with MPICH and node memory."""


def gemm_calls(row: Row, against: Path | None) -> Found:
    """Calls of a product on 1, 2, 4 and 8 ranks, and the frames from `DistMatrix.__matmul__` to the first in the transport.

    The frames, both ends included, are those of the deepest communication; at fd9d67e they are 9 with the cuboid, 11 with SUMMA.
    """
    found, lines, claims = {}, [], []
    kept, prepared, deepest = row.limits
    for ranks in (1, 2, 4, 8):
        where = f"{ranks} rank{'s' if ranks > 1 else ''}"
        found[ranks] = row.on_ranks(ranks, "calls")
        for place, (name, (calls, frames)) in enumerate(found[ranks].items()):
            lines.append(f"{where}, {name}: {calls} calls")
            for (commit, counts), limit in zip(BEFORE.items(), (kept, prepared if ranks > 1 else 1.0), strict=True):
                share = calls / counts[ranks][place]
                lines.append(f"  {share:.2f} of the {counts[ranks][place]} at {commit}")
                claims.append((f"{where}, {name}: at most {limit:.2f} of the calls at {commit}", share <= limit))
            if ranks > 1:
                claims.append((f"{where}, {name}: {frames} frames to the transport, at most {deepest}", frames <= deepest))
    return {"calls": found}, lines, claims


def gemm(row: Row, against: Path | None) -> Found:
    """µs of a product on each grid, and of the bare calls."""
    (limit,), lines, claims = row.limits, [], []
    result = row.on_ranks(2, "gemm")
    for one in result["rows"]:
        grid, more = ",".join(str(size) for size in one["grid"].values()), one["overhead_us"]
        bare = ", ".join(f"{name} {taken:.1f}" for name, taken in one["bare_us"].items())
        lines.append(f"{grid}: ours {one['ours_us']:.1f} µs; bare: {bare}; {more:.1f} µs more than the fastest")
        claims.append((f"{grid}: at most {limit:.0f} µs more, median of {row.calls} calls", more <= limit))
    return result, lines, claims


def linear(row: Row, against: Path | None) -> Found:
    """µs and calls of each layer."""
    (limit,), result = row.limits, row.on_ranks(1, "linear")
    its, lines, claims = result["rows"][TORCH], [], []
    for name, one in result["rows"].items():
        forward, backward, both = (median(one["seconds"][part]) * 1e6 for part in ("forward", "backward", "both"))
        parts = f"{both:.1f} µs a call (forward {forward:.1f}, backward {backward:.1f})"
        line = f"{parts}, {one['calls']['forward']} + {one['calls']['backward']} calls of functions"
        if name == TORCH:
            lines.append(f"torch {result['torch']}: {line}")
            continue
        more = [(mine - other) * 1e6 for mine, other in zip(one["seconds"]["both"], its["seconds"]["both"], strict=True)]
        one["overhead_us"] = spread(more)
        lines.append(f"{name}: {line}; {in_range(more, 1, ' µs more')}")
        claims.append((f"{name}: at most {limit:.0f} µs more than torch's, forward + backward", median(more) <= limit))
    return result, lines, claims


def executor(row: Row, against: Path | None) -> Found:
    """µs of an operation beyond the plain loop."""
    (limit,), result = row.limits, row.on_ranks(1, "executor")
    pairs = zip(result["seconds"]["executor"], result["seconds"]["plain"], strict=True)
    more = [(ours - plain) / result["ops"] * 1e6 for ours, plain in pairs]
    line = f"{result['ops']} operations: {in_range(more, 1, ' µs more each')}"
    claim = f"at most {limit:.0f} µs of Python an operation"
    return result | {"overhead_us": spread(more)}, [line], [(claim, median(more) <= limit)]


def collectives(row: Row, against: Path | None) -> Found:
    """µs of each collective of this checkout and, in turn, of the other one.

    Waiting is left out: a collective is begun, all ranks meet, and only then it is completed. Whole and prepared ones are timed
    by the quickest call of many, which has not waited.
    """
    trees = {"here": ROOT} | ({"against": against.resolve()} if against else {})
    found: dict[str, dict[str, list[float]]] = {tree: {} for tree in trees}
    for turn in range(row.rounds):
        for tree, folder in list(trees.items())[:: -1 if turn % 2 else 1]:
            os.environ["SUMMA3D_BENCHED"] = str(folder)
            for name, taken in row.on_ranks(2, "collectives").items():
                found[tree].setdefault(name, []).append(taken)
    micros = {
        tree: {name: (min if "whole" in name else median)(times) for name, times in rows.items()} for tree, rows in found.items()
    }
    lines = [f"µs of processor time a call in the quickest tenth of {row.calls}; 2 ranks started {row.rounds} times"]
    for name, mine in micros["here"].items():
        other = micros.get("against", {}).get(name)
        lines.append(f"{name:<46} {mine:6.2f}" + ("" if other is None else f"   against {other:6.2f}   {mine - other:+.2f}"))
    return {"microseconds": found}, lines, claims_on_collectives(micros["here"], micros["against"]) if against else []


def claims_on_collectives(here: Mapping[str, float], against: Mapping[str, float]) -> Claims:
    """Return the claims on two checkouts' µs of each call, and whether they hold."""
    more, most_gathered, most_prepared = ROWS["collectives"].limits
    whole = [name for name in against if name.startswith("whole ")]
    begun = max(here[name] - against[name] for name in against if name not in whole)
    gathered = max(here[name] / against[name] for name in whole)
    claims = [
        (f"at most {more:.0f} µs more a collective", begun <= more),
        (f"a whole all_gather takes {gathered:.2f} of the other's time, at most {most_gathered}", gathered <= most_gathered),
    ]
    shares = [here[f"prepared {name}"] / against[name] for name in whole if f"prepared {name}" in here]
    if shares:
        claims.append((f"a prepared one takes {max(shares):.2f} of it, at most {most_prepared}", max(shares) <= most_prepared))
    return claims


def model(layers: int, hidden: int, heads: int) -> list[str]:
    """A GPT of these sizes in place of the demo's model."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": 2048, "vocabulary": 51200}
    return [f"model.{name}={size}" for name, size in sizes.items()] + ["dtype=bfloat16", "recompute=full"]


DRY = {
    "demo": ["grid.x=2", "grid.y=2", "grid.z=2"],
    "175B on 1,024 ranks": [*model(96, 12288, 96), "grid.x=16", "grid.y=8", "grid.z=8", "train.batch=1024"],
    "1T on 3,072 ranks": [
        *model(128, 25600, 160),
        *("grid.x=48", "grid.y=8", "grid.z=8", "train.batch=3072", "train.accumulate=8"),
    ],
}
"""Case → what it changes of the demo's configuration."""
DRY_RUN = """
import mpi4py; mpi4py.rc.initialize = False
import json, resource, sys, time
import torch
torch.set_num_threads(1)
begun = time.process_time()
from summa3d.train import config
from summa3d.train.dry_run import predict
found = predict(config.load("demo", [*sys.argv[1:], "device=cpu"]), 1)
seconds = time.process_time() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "memory": peak, "parameters": found["parameters"], "peak": found["peak"]}))
"""


def dry_run(row: Row, against: Path | None) -> Found:
    """CPU seconds beyond importing torch, and memory, of each case in a process of its own, without MPI_Init."""
    lines, claims, rows = [f"{'case':<22}{'parameters':>22}{'CPU s':>8}{'budget':>8}{'MiB':>8}{'GiB a rank':>12}"], [], []
    *budgets, most = row.limits
    for (name, changes), budget in zip(DRY.items(), budgets, strict=True):
        one = json.loads(printed([sys.executable, "-c", DRY_RUN, *changes], environment()))
        rows.append({"case": name, "budget": budget, **one})
        sizes = f"{one['memory'] / 2**20:>8.0f}{one['peak'] / 2**30:>12.2f}"
        lines.append(f"{name:<22}{one['parameters']:>22,}{one['seconds']:>8.2f}{budget:>8.1f}{sizes}")
        fits = one["seconds"] <= budget and one["memory"] <= most * 2**30
        claims.append((f"{name}: at most {budget:.0f} s of CPU and {most:.0f} GiB", fits))
    return {"rows": rows}, lines, claims


SETARCH = ("setarch", "-R")
OWN, EQUAL = "own addresses", "equal addresses"


def waits(row: Row, against: Path | None) -> Found:
    """Processor time, switches, where ranks sleep, and small collectives beside a joined one, with own and equal addresses."""
    allowed = shutil.which(SETARCH[0]) and subprocess.run([*SETARCH, "true"], capture_output=True).returncode == 0
    starts: dict[str, Sequence[str]] = {OWN: ()} | ({EQUAL: SETARCH} if allowed else {})  # containers often forbid it
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in starts}
    for turn in range(row.rounds):
        for name in sorted(starts, reverse=turn % 2 == 0):
            found[name].append(row.on_ranks(RANKS, "waits", started_by=starts[name]))
    lines = [line for name, rows in found.items() for line in waited(name, rows)]
    result = {"machine": found[OWN][0]["machine"], "starts": found}
    if not all(one["equal_addresses"] for one in found.get(EQUAL, [{"equal_addresses": False}])):
        return result, [*lines, "setarch -R does not reach the ranks here: equal addresses are not compared"], []
    own, equal = (median(one["step"]["cpu_ms"] for one in rows) for rows in found.values())
    lines.append(f"equal ÷ own addresses: {equal / own:.2f} of the processor time of a step")
    (limit,) = row.limits
    return result, lines, [(f"with equal addresses at most {limit} of it", equal <= limit * own)]


def waited(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what the ranks of one kind of start took, medians over the starts."""
    step, first = {key: median(row["step"][key] for row in rows) for key in rows[0]["step"]}, rows[0]
    by_axis = (f"{axis} {count:.0f} and {first['sleeps'].get(axis, 0):.1f}" for axis, count in first["communications"].items())
    lines = [
        f"{name}: {step['cpu_ms']:.1f} ms of processor a rank-step, {step['switches']:.0f} switches, {step['wall_ms']:.1f} ms",
        "  communications and sleeps of rank 0, by axis: " + ", ".join(by_axis),
    ]
    for operation in first["collectives"]:
        apart, joined = (median(row["collectives"][operation][way] for row in rows) for way in ("apart", "joined"))
        lines.append(f"  {PARTS} of {operation}: {apart:.0f} µs of processor, joined with their copies {joined:.0f} µs")
    return lines


ROWS = {
    "import": Row("seconds of `import summa3d.gemm`", (0.15,), import_time, rounds=11),
    "calls": Row("calls of functions in a warm A @ B, and its frames to the transport", (0.6, 0.75, 8), gemm_calls),
    "gemm": Row("64³ on 2 ranks beside the bare collective and product in it", (30.0,), gemm, calls=1000),
    "linear": Row(f"a tiny `Linear` beside torch's, rounds of {BATCH} calls of each", (100.0,), linear, rounds=21),
    "executor": Row(
        f"a pipeline's executor at p = 1, {MICRO_BATCHES} micro-batches, beside a loop", (50.0,), executor, rounds=101
    ),
    "collectives": Row("Python of a collective on each rank", (2.0, 1.05, 0.8), collectives, rounds=5, calls=1000),
    "dry-run": Row("a dry run of a step, up to a trillion parameters", (2.0, 5.0, 10.0, 1.0), dry_run),
    "waits": Row(f"a tiny model's step on {RANKS} ranks, and addresses (`setarch -R`)", (0.9,), waits, rounds=6, calls=40),
}
"""Every claim's row."""


if __name__ == "__main__":
    main()
