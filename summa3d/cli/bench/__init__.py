"""`summa3d bench gemm|strong|weak|block|calibrate`: products or blocks in interleaved rounds; or this machine's description.

Prints a table and writes JSON for `summa3d report`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...comm.device.arrays import DEVICES
from ...dtypes import DTYPES, HALVES
from ...errors import ConfigError, DataError
from ...files import grid_of, replace_text
from ...launcher.runtime import usable_cores
from ..gemm import add_cluster_argument, machine_of
from ..traces import JSON, add_trace_arguments, check_positive, check_trace_arguments, ranges_for, rank_counts
from .block import add_block_arguments, block_result

INEXACT = tuple(name for name in DTYPES if not name.startswith("int"))
SWITCHES = ("lookahead", "sequence")  # options of algorithms that are on (1) or off (0)
FORMS = ("nn", "nt", "tn", "tt")
NAMED = (
    "Time this algorithm on its grid of fewest words. The option may be repeated. "
    "`all` takes every algorithm that can use the ranks."
)
ENTRY = "Time this algorithm on this grid. Options such as panel=128 are listed with the axes. The option may be repeated."
EVERY = "Time the library's choice against every algorithm on every grid that replicates no operand."
CHOOSES_AND_PREDICTS = "Print times predicted for this described cluster beside the measured ones; products are chosen by it too."
KIND_HELP = {
    "gemm": "Compare algorithms and grids on all ranks.",
    "strong": "Time one product on 1, 2, 4, … ranks.",
    "block": "Compare transformer blocks in any schemes and grids on all ranks.",
    "calibrate": "Measure this machine on all ranks at once, and describe it as a cluster for --cluster here.",
    "weak": "Time products with constant work per rank: m, n and k grow with the cube root of the rank count.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands gemm, strong, block, weak and calibrate with their options to `parser`."""
    parser.description = (
        "Benchmark products or transformer blocks: every round runs every entry once; plans and workspace are reused."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="gemm|strong|weak|block|calibrate")
    gemm, strong, block, calibrate, weak = (
        kinds.add_parser(kind, help=text, description=text) for kind, text in KIND_HELP.items()
    )
    add_calibrate_arguments(calibrate)
    add_block_arguments(block)
    for kind in (gemm, strong, weak):
        for size in ("m", "n", "k"):
            where = " on one rank" if kind is weak else ""
            text = f"Set the size {size} of C (m×n) = op(A) (m×k) · op(B) (k×n){where}."
            kind.add_argument(f"--{size}", type=int, required=True, help=text)
        kind.add_argument("--form", choices=FORMS, default="nn", help="Take A and B as they are (n) or transposed (t).")
        kind.add_argument("--dtype", choices=INEXACT, default="float64", help="Set the dtype of A, B and C.")
        kind.add_argument("--algorithm", action="append", metavar="NAME", help=NAMED)
        kind.add_argument(
            "--rounds", type=int, default=7, help="Time this many rounds, after a warm-up round that is not counted."
        )
        kind.add_argument(
            "--numpy",
            type=int,
            nargs="?",
            const=0,
            metavar="THREADS",
            help="Time numpy's product on rank 0 as well, with this many threads. Without a number, all cores are used.",
        )
        kind.add_argument("--device", choices=DEVICES, help="Hold the operands there. The default is SUMMA3D_DEVICE, else cpu.")
        kind.add_argument("--json", metavar="FILE", help=JSON)
    for kind in (gemm, strong, weak, block):
        add_trace_arguments(kind, "one more round")
        add_cluster_argument(kind, CHOOSES_AND_PREDICTS)
    gemm.add_argument("--entry", action="append", default=[], metavar="NAME[:x=2,y=1,…]", help=ENTRY)
    gemm.add_argument("--every-grid", action="store_true", help=EVERY)
    for kind in (strong, weak):
        kind.add_argument(
            "--ranks",
            type=rank_counts,
            metavar="1,2,4",
            help="Run on these rank counts. The default is all powers of two below the number of ranks, and that number.",
        )


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d bench calibrate` to `parser`."""
    parser.add_argument("--device", choices=DEVICES, help="Measure these. The default is SUMMA3D_DEVICE, else cpu.")
    parser.add_argument("--json", metavar="FILE", help=JSON)
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="FILE",
        help="Write the cluster to FILE; without FILE, where --cluster here reads it (SUMMA3D_CLUSTER, else the user's folder).",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print its table or JSON on rank 0, and return the exit status; collective over all ranks."""
    from mpi4py import MPI

    from ...bench.machine import machine
    from ...bench.tables import table
    from ...comm.profile.trace import check_file

    world, file = MPI.COMM_WORLD, None if args.json in (None, "-") else Path(args.json)
    if file is not None:
        check_file(file, "--json")  # before the benchmark runs, not after it
    if args.kind == "calibrate":
        return calibrated(args, file)
    check_trace_arguments(args, world)
    results = machine(world)
    result = {"machine": results, **(block_result(args) if args.kind == "block" else _product_result(args))}
    if world.rank == 0:
        for name in results["overrides"]:
            print(f"warning: {name} is set; OpenBLAS may run at half its speed. Unset {name}.", file=sys.stderr)
        print(json.dumps(result) if args.json == "-" else table(result).text(), flush=True)
        if file is not None:
            _write(file, json.dumps(result) + "\n", "--json")
    return 0


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    except OSError as error:
        raise DataError(f"{option} {file} cannot be written: {error}") from error


def calibrated(args: argparse.Namespace, file: Path | None) -> int:
    """Measure this machine, print the numbers that explain the times, and write its description; returns the exit status."""
    from mpi4py import MPI

    from ...bench.calibrate import Calibration
    from ...bench.fitted import WORST, as_result, as_table, described, fit
    from ...bench.machine import machine
    from ...cluster import here_file, read_text
    from ...comm.device.select import requested_device, take_device

    world, device = MPI.COMM_WORLD, requested_device(args.device)
    if device == "cuda":
        take_device(world)
    measured, where = Calibration(world, device).run(), machine(world, probe=False)
    result = fit(measured.samples)  # equal on all ranks, as the times are
    if world.rank == 0:
        print(
            json.dumps(as_result(measured, result, where)) if args.json == "-" else as_table(measured, result).text(), flush=True
        )
        if file is not None:
            _write(file, json.dumps(as_result(measured, result, where)) + "\n", "--json")
    if result.error > WORST:
        raise ConfigError(
            f"the times contradict each other: their median error is {result.error:.0%}; at most {WORST:.0%} may be. "
            f"The load is {os.getloadavg()[0]:.1f}, {measured.ranks} of it ours. Nothing was written; try again when it is lower."
        )
    if args.write is not None and world.rank == 0:
        text, target = described(measured, result, where), Path(args.write) if args.write else here_file()
        read_text(text, str(target))
        _write(target, text, "--write")
        print(f"written: {target}", file=sys.stderr)
    return 0


def _product_result(args: argparse.Namespace) -> dict[str, Any]:
    from mpi4py import MPI

    from ...bench.predicted import compared, of_product
    from ...bench.products import run_benchmark
    from ...comm.device.select import requested_device, take_device

    check_positive(args, "m", "n", "k", "rounds")
    args.device = requested_device(args.device)
    threads = 0 if args.numpy is None else args.numpy or usable_cores()
    check_numpy(args.device, args.dtype, threads)
    if args.device == "cuda":
        take_device(MPI.COMM_WORLD)
    args.machine = machine_of(args.cluster, args.device, MPI.COMM_WORLD)
    entries = list(MAKERS[args.kind](args, MPI.COMM_WORLD.size))
    predicted = None if args.cluster is None else [of_product(entry, args.machine) for entry in entries]
    results = run_benchmark(entries, MPI.COMM_WORLD, args.rounds, threads, args.trace, ranges_for(args))
    result = {"kind": args.kind, **results}
    return result if predicted is None or MPI.COMM_WORLD.rank else compared(result, predicted, args.machine.cluster)


def check_numpy(device: str, dtype: str, threads: int) -> None:
    """Raise ConfigError where numpy's product is asked for, but numpy on the host has no comparable product."""
    if threads and (device != "cpu" or dtype in HALVES):
        raise ConfigError(
            f"--numpy times numpy's product on the host, which is not comparable with {dtype} on {device}. "
            "Leave --numpy out, or choose float32 or float64 on cpu."
        )


def gemm_entries(args: argparse.Namespace, ranks: int) -> Iterator[Any]:
    """The entries of --entry, then those of --every-grid or --algorithm; without any, the library's choice."""
    from ...bench.products import Problem, ProductEntry

    problem = Problem(args.m, args.n, args.k, args.form, args.dtype, args.device)
    for text in args.entry:
        name, grid, options = parse_entry(text, problem, ranks)
        yield ProductEntry(name, grid, problem, options)
    if args.every_grid:
        yield from every_grid(problem, ranks, args.machine)
    elif args.algorithm or not args.entry:
        yield from _of_algorithms(args, [ranks])


def scaling_entries(args: argparse.Namespace, ranks: int) -> Iterator[Any]:
    """Yield the entries of strong and weak scaling: the points of a sweep of products, all in one race."""
    counts = args.ranks or sorted({ranks, *(1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks)})
    if max(counts) > ranks:
        raise ConfigError(f"--ranks asks for {max(counts)}; {ranks} were started. Start at least {max(counts)} ranks.")
    yield from _of_algorithms(args, counts)


def _of_algorithms(args: argparse.Namespace, counts: list[int]) -> Iterator[Any]:
    """Yield the points of a sweep of --algorithm, or of what the library chooses, each on its grid of fewest words.

    Algorithms that cannot use a rank count are left out where several are named.
    """
    from ...sweep.file import Sweep
    from ...sweep.points import ALL, CHOSEN, entry_of, expand

    names = [CHOSEN] if not args.algorithm else [ALL] if ALL in args.algorithm else args.algorithm
    base = {name: getattr(args, name) for name in ("m", "n", "k", "form", "dtype", "device")}
    kind, rule = ("weak", "cube") if args.kind == "weak" else ("strong", "")
    sweep = Sweep(kind, kind, "gemm", "", counts, base, {"algorithm": names}, weak=rule, base_ranks=1)
    points, refused = expand(sweep)
    if refused and len(names) == 1:
        raise refused[0].error
    for point in points:
        yield entry_of(point, args.machine)


MAKERS = {"gemm": gemm_entries, "strong": scaling_entries, "weak": scaling_entries}


def every_grid(problem: Any, ranks: int, machine: Any) -> Iterator[Any]:
    """The library's choice, then every other algorithm and grid of exactly `ranks` ranks that replicates no operand."""
    from ...bench.products import ProductEntry, own_choice
    from ...gemm.algorithms.registry import ALGORITHMS

    chosen = own_choice(problem, ranks, machine)
    yield chosen
    for name, rules in ALGORITHMS.items():
        plan = rules.plan(problem.form, problem.m, problem.n, problem.k)
        for grid in rules.grids(ranks):
            replicates_nothing = all(size == 1 or axis in plan.split_by_all for axis, size in grid.items())
            if replicates_nothing and (name, grid) != (chosen.algorithm, chosen.grid):
                yield ProductEntry(name, grid, problem)


def parse_entry(text: str, problem: Any, ranks: int) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Parse --entry: ``summa:x=2,y=4,panel=128`` → ("summa", {"x": 2, "y": 4}, {"panel": 128}).

    Axes that are left out have size 1. Without any axis, the grid of `ranks` ranks with the fewest words is taken. Raises
    ConfigError for an unknown algorithm, axis or option.
    """
    from ...bench.products import fewest_words
    from ...gemm.algorithms.registry import algorithm

    name, _, rest = text.partition(":")
    rules = algorithm(name)
    sizes = grid_of(rest) if rest else {}
    known = (*rules.axes, *rules.options)
    if sizes is None or not set(sizes) <= set(known):
        raise ConfigError(
            f"--entry {text}: {rest!r} is not AXIS=SIZE,OPTION=NUMBER,…, each once; {rules.name} has {', '.join(known)}."
        )
    options = {key: bool(size) if key in SWITCHES else size for key, size in sizes.items() if key in rules.options}
    axes = {axis: sizes.get(axis, 1) for axis in rules.axes}
    given = any(axis in sizes for axis in rules.axes)
    return rules.name, axes if given else fewest_words(algorithm(name, ranks), problem, ranks), options
