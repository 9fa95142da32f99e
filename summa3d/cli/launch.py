# `summa3d launch -n 8 ARGS…`: becomes the mpiexec that belongs to this interpreter's MPI, running `summa3d ARGS…`.
# May import errors and cli.runtime. Loads no MPI itself.
# Next: runtime.py (how the launcher is found and which settings fit), main.py (what each rank then runs).
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from ..errors import LaunchError
from .runtime import find_launcher, loaded_runtime, rank_environment, usable_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks to start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS…", help="what every rank runs: train demo …")


def mpi_command(
    ranks: int, arguments: list[str], environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str], str]:
    """Return the command line, the environment and a one-line account for `arguments` of this interpreter on `ranks` ranks."""
    runtime = loaded_runtime()
    launcher = find_launcher(runtime, environ)
    cores = usable_cores()
    settings, words = rank_environment(runtime.vendor, ranks, cores, environ)
    account = f"{ranks} ranks on {cores} core{'s' if cores > 1 else ''}, {runtime.name} ({launcher.command[0]})"
    command = [*launcher.command, "-n", str(ranks), sys.executable, *arguments]
    return command, {**environ, **settings}, f"{account}, {words}" if words else account


def run(args: argparse.Namespace) -> int:
    """Replace this process by the launcher; returns only by raising."""
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if args.ranks < 1 or not arguments:
        raise LaunchError(
            f"launch needs at least one rank and a command; got -n {args.ranks} and {' '.join(arguments) or 'no command'}.\n"
            "  For example: summa3d launch -n 8 train demo"
        )
    command, environment, account = mpi_command(args.ranks, ["-m", "summa3d", *arguments])
    print(f"summa3d launch: {account}", file=sys.stderr, flush=True)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
