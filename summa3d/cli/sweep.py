"""`summa3d sweep plan|run|status|collect|report|submit`: many measurements from one file, resumed by the ids of its points.

Where a launcher has started this process, `run` measures on its ranks; else it starts the ranks itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..columns import counted
from ..comm.health.processes import launched_as
from ..errors import ConfigError, DataError
from ..files import replace_text, whole
from ..interpreter import module
from .bench.block import QUIET_PROFILER
from .report import add_outputs, show
from .traces import rank_counts

if TYPE_CHECKING:
    from ..sweep.file import Sweep
    from ..sweep.points import Point

FOLDER = Path("runs/sweeps")
HELP = {
    "plan": "Print the points of a sweep: ids, predicted seconds and node-hours; and what is refused, with the reason.",
    "run": "Run the points that are missing: one start for each rank count, or on the ranks that a launcher has started.",
    "status": "Print how many points are measured, have failed and are missing.",
    "collect": "Join the points of several folders or files: each id once, the newest of those that come twice.",
    "report": "Print tables and write plots of the points in folders or files.",
    "submit": "Write a job script for each number of nodes, and print the lines that submit them.",
}
TASK = "SLURM_ARRAY_TASK_ID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands with their options to `parser`."""
    parser.description = "Measure products, blocks or training steps on many rank counts and configurations, as a file describes."
    acts = parser.add_subparsers(dest="act", required=True, metavar="|".join(HELP))
    made = {name: acts.add_parser(name, help=text, description=text) for name, text in HELP.items()}
    for name in ("plan", "run", "status", "submit"):
        item = made[name]
        item.add_argument("file", metavar="FILE", help="Take this TOML file, or the sweep of this name that is shipped.")
        item.add_argument(
            "--set",
            action="append",
            default=[],
            dest="assignments",
            metavar="KEY=VALUE",
            help="Change a key of the file, as rounds=3 or ranks=1,2,4; of other names, a key of base, as m=4096.",
        )
        item.add_argument("--dir", type=Path, metavar="DIR", help=f"Write there. The default is {FOLDER}/NAME.")
    run = made["run"]
    run.add_argument(
        "--ranks", type=rank_counts, metavar="1,2,4", help="Run these rank counts only. The default is all of the file."
    )
    run.add_argument("--retry", action="store_true", help="Run points again whose line is an error.")
    run.add_argument(
        "--fewer",
        action="store_true",
        help="Run points of fewer ranks on the ranks that were started, too; the other ranks sleep.",
    )
    run.add_argument("--array", action="store_true", help=f"Run the one rank count whose place among them is {TASK}.")
    run.add_argument("--only", action="append", default=[], metavar="ID", help="Run this point only. The option may be repeated.")
    run.add_argument(
        "--retry-before",
        type=float,
        default=0.0,
        metavar="T",
        help="Run points again whose error is older, in seconds since 1970.",
    )
    made["submit"].add_argument(
        "--site", default="cpu", metavar="NAME|FILE", help="Write jobs for this site of `summa3d jobs`. The default is cpu."
    )
    made["plan"].add_argument("--json", action="store_true", help="Print a JSON line for each point in place of the table.")
    collect = made["collect"]
    collect.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="Write the lines to this file.")
    collect.add_argument("--csv", action="store_true", help="Write CSV in place of JSON lines.")
    for item in (collect, made["report"]):
        item.add_argument(
            "places", nargs="+", type=Path, metavar="DIR|FILE", help="Read all points in this folder, or this file."
        )
    add_outputs(made["report"])


def run(args: argparse.Namespace) -> int:
    """Do what the subcommand says; returns the exit status. `run` is collective on ranks that a launcher has started."""
    if args.act == "collect":
        return collect(args)
    if args.act == "report":
        return show(args.places, args)
    if args.act == "run" and launched_as() is not None:
        return measure(args)
    import mpi4py

    mpi4py.rc.initialize = False  # the names of MPI are enough
    from ..jobs.script import site
    from ..sweep.file import load
    from ..sweep.lines import known_in
    from ..sweep.run import Runner, plan_table, planned, status_table, write_jobs
    from ..train.progress import Pulse

    sweep = load(args.file, args.assignments)
    directory = args.dir or FOLDER / sweep.name
    if args.act == "submit":
        command = ["summa3d", "sweep", "run", args.file, "--dir", str(directory), *_set(args)]
        print("\n".join(write_jobs(sweep, command, directory, site(args.site))))
        return 0
    points, refused = planned(sweep, Pulse(f"sweep {args.act}").of("checking point"))
    known = known_in(directory, _say)
    if args.act == "plan" and args.json:
        from ..sweep.measure import about

        print("\n".join(json.dumps(about(point)) for point in points))
    elif args.act != "run":
        print("\n".join((plan_table if args.act == "plan" else status_table)(sweep, points, known)))
    for item in refused:
        _say(f"refused: {item.label} on {counted(item.ranks, 'rank')}: {' '.join(str(item.error).split())}")
    if refused and not points:
        raise ConfigError(f"{sweep.name} has no points: {len(refused)} refused, with the reasons above.")
    if args.act != "run":
        return 0
    counts = chosen_counts(args, sweep.ranks)
    _check_chosen(args, sweep, points)
    points = [point for point in points if not args.only or point.id in args.only]
    runner = Runner(sweep, directory, _starter(args, sweep, directory), _say, time.time() if args.retry else args.retry_before)
    status = runner.run(points, counts)
    print("\n".join(status_table(sweep, points, known_in(directory, _say))))
    return status


def chosen_counts(args: argparse.Namespace, of_file: Sequence[int]) -> list[int]:
    """The rank counts to run. Raises ConfigError where --array asks for a task's and there is none."""
    counts = list(args.ranks or of_file)
    if not args.array:
        return counts
    said = os.environ.get(TASK, "")
    task = whole(said)
    if task is None or task >= len(counts):
        raise ConfigError(f"--array: {TASK} is {said or 'not set'}; it is the place of a rank count among {counts}, from 0.")
    return [counts[task]]


def _check_chosen(args: argparse.Namespace, sweep: Sweep, points: Sequence[Point]) -> None:
    """Raise ConfigError for a rank count or an id that no point has."""
    for option, given, known in (
        ("--ranks", args.ranks or [], list(sweep.ranks)),
        ("--only", args.only, [point.id for point in points]),
    ):
        for item in given:
            if item not in known:
                raise ConfigError(f"{option} {item}: {sweep.name} has no such point; it has {', '.join(map(str, known))}.")


def _set(args: argparse.Namespace) -> list[str]:
    return [word for assignment in args.assignments for word in ("--set", assignment)]


def _starter(args: argparse.Namespace, sweep: Sweep, directory: Path) -> Callable[[int, Sequence[str]], int]:
    """The function that starts ranks for the points of one rank count, with the sweep's threads; says how many these are."""
    from ..launcher.runtime import MPIEXEC_VARIABLE, THREAD_VARIABLES, threads_are_free, usable_cores
    from ..sweep.file import EQUAL
    from .launch import mpi_command

    threads: dict[str, str] = {}
    if threads_are_free():
        most, cores = max(sweep.ranks), usable_cores()
        on_node = min(most, sweep.ranks_per_node) if os.environ.get(MPIEXEC_VARIABLE) else most  # a launcher of several nodes
        count = sweep.threads_of_rank(cores, on_node)
        if count is not None:
            threads = dict.fromkeys(THREAD_VARIABLES, str(count))
            why = f", as {on_node} on {cores} core{'s' * (cores > 1)} have" if sweep.threads == EQUAL else ""
            _say(f"{count} BLAS thread{'s' * (count > 1)} a rank on every rank count{why}; threads=each gives each its own share")

    def start(ranks: int, options: Sequence[str]) -> int:
        words = module("summa3d", "sweep", "run", args.file, "--dir", str(directory), *_set(args), *options)
        words += [word for item in args.only for word in ("--only", item)] if "--only" not in options else []
        command, environ, account = mpi_command(ranks, words, {**os.environ, **threads})
        _say(account)
        return subprocess.call(command, env=environ, stdin=subprocess.DEVNULL)

    return start


def measure(args: argparse.Namespace) -> int:
    """Run the missing points of the ranks that were started; collective. Returns 0; the line of a point that fails says so."""
    os.environ.setdefault(*QUIET_PROFILER)
    from mpi4py import MPI

    from ..sweep.file import load
    from ..sweep.measure import measure as measured
    from ..sweep.run import planned
    from ..train.on_root import on_root

    world, sweep = MPI.COMM_WORLD, load(args.file, args.assignments)

    def chosen() -> list[Point]:
        points = [point for point in planned(sweep)[0] if not args.only or point.id in args.only]
        return [point for point in points if point.ranks == world.size or (args.fewer and point.ranks < world.size)]

    before = world.bcast(time.time()) if args.retry else args.retry_before
    say = _say if world.rank == 0 else lambda text: None
    points = on_root(world, chosen, DataError)
    if not points:
        launched = launched_as()
        say(f"{sweep.name} has no points of {world.size} ranks, which {launched[2] if launched else 'a launcher'} has started.")
    measured(sweep, points, world, args.dir or FOLDER / sweep.name, args.fewer, before, say)
    return 0


def collect(args: argparse.Namespace) -> int:
    """Write the points of folders and files to one file; returns the exit status."""
    from ..sweep.lines import as_csv
    from ..sweep.lines import collect as collected

    result = collected(args.places, _say)
    text = as_csv(result) if args.csv else "".join(json.dumps(line) + "\n" for line in result)
    try:
        replace_text(args.out, text)
    except OSError as error:
        raise DataError(f"{args.out} cannot be written: {error.strerror}.") from None
    failed = sum("error" in line for line in result)
    _say(f"{len(result)} points ({failed} failed) of {', '.join(_names(result))}: {args.out}")
    return 0


def _names(points: Iterable[dict[str, dict[str, str]]]) -> list[str]:
    return list(dict.fromkeys(line["sweep"]["name"] for line in points))


def _say(text: str) -> None:
    print(f"summa3d sweep: {text}", file=sys.stderr, flush=True)
