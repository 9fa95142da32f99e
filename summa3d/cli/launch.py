"""`summa3d launch -n N ARGS…`: starts the launcher of this interpreter's MPI, which runs `summa3d ARGS…` N times.

It also starts Python scripts (`launch -n N script.py`) and modules (`launch -n N -m module`). This process initializes no MPI.
With `--emulate` they run on emulated nodes (launch/emulate.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..columns import counted
from ..errors import LaunchError
from ..interpreter import module
from ..launcher import emulate, segments
from ..launcher.follow import follow
from ..launcher.runtime import Runtime, find_launcher, launcher_vendor, loaded_runtime, rank_environment, usable_cores
from .main import COMMANDS, parser_of, unknown_command

SCRIPT = "summa3d.launcher.script"
SAVES = "train"
"""The command that saves when it is asked to end."""
HOLD = ("env", "--block-signal=TERM,INT")
"""Starts a program with requests blocked: what comes before Python can block it itself waits until the run hears it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d launch` to `parser`."""
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="Start this many ranks.")
    parser.add_argument(
        "--emulate",
        type=emulate.network_of,
        metavar="nodes=N,port=RATE",
        help="Start the ranks on N emulated nodes of this machine, with ports of this rate, such as 1gbit or 250mbit; as root.",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="Do not say first which ranks are started with which MPI.")
    parser.add_argument(
        "-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE", help="Run this Python module on every rank."
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS…",
        help="Run this command of summa3d on every rank, for example: train demo; or a Python script: script.py.",
    )


def mpi_command(
    ranks: int, arguments: list[str], environ: Mapping[str, str] = os.environ, runtime: Runtime | None = None
) -> tuple[list[str], dict[str, str], str]:
    """The launcher's command line and environment, and a one-line summary, for a program of this interpreter on `ranks` ranks.

    Parameters
    ----------
    arguments : arguments of the Python interpreter, as ["-m", "summa3d", "doctor"]
    runtime : the MPI library that mpi4py loads; None, it is looked for

    Raises LaunchError where no launcher belongs to the MPI library that mpi4py loads.
    """
    runtime = runtime or loaded_runtime()
    launcher = find_launcher(runtime, environ)
    cores = usable_cores()
    settings, words = rank_environment(runtime.vendor, ranks, cores, environ)
    account = f"{counted(ranks, 'rank')} on {counted(cores, 'core')}, {runtime.name} ({launcher.command[0]})"
    command = [*launcher.command, "-n", str(ranks), sys.executable, *arguments]
    return command, {**environ, **settings}, f"{account}, {words}" if words else account


def _words(args: argparse.Namespace) -> list[str]:
    """The words of the ranks' command."""
    words: list[str] = args.arguments
    return words[1:] if words[:1] == ["--"] else words


def program(args: argparse.Namespace) -> list[str]:
    """The arguments of every rank's Python: a command of summa3d, or a script or module as `python -m mpi4py` runs it.

    Raises LaunchError for a word that is neither a command nor a file of text.
    """
    words = _words(args)
    if args.ranks < 1 or not (words or args.module):
        raise LaunchError(
            f"launch needs at least one rank and a command; got -n {args.ranks} and {' '.join(words) or 'no command'}.\n"
            "  For example: summa3d launch -n 8 train demo"
        )
    if args.module:
        return module(SCRIPT, "-m", *args.module)
    if words[0] in COMMANDS:
        return module("summa3d", *words)
    script = Path(words[0])
    if script.name.startswith("python") and script.suffix != ".py":
        given = " ".join(words[1:2]) or "script.py"
        raise LaunchError(f"launch starts its own Python, {sys.executable}, on every rank: name the script alone, {given}.")
    if not script.is_file():
        raise LaunchError(f"{unknown_command(words[0])} Nor is there a script of this path.")
    with script.open("rb") as file:
        if b"\0" in file.read(1024):
            raise LaunchError(f"{script} is no Python script: it has bytes that are no text. mpiexec starts other programs.")
    return module(SCRIPT, *words)


def holding(command: list[str]) -> list[str]:
    """Return a launcher's command whose ranks hold requests to end back from their start on, where this system's env can."""
    try:
        blocks = subprocess.run([*HOLD, "true"], capture_output=True).returncode == 0
    except OSError:
        blocks = False
    rank = command.index(sys.executable)
    return [*command[:rank], *HOLD, *command[rank:]] if blocks else command


def check_words(args: argparse.Namespace) -> None:
    """Exit as a command of summa3d would where its words cannot be parsed, and after its help, before any rank starts."""
    words = _words(args)
    if args.module or words[0] not in COMMANDS:
        return
    import mpi4py

    mpi4py.rc.initialize = False  # some commands name what MPI has
    parser_of(words[0]).parse_args(words[1:])


def run(args: argparse.Namespace) -> int:
    """Run the launcher to its end, on emulated nodes if that is asked for, and return its exit status.

    Where the system cannot wait for signals, this process is replaced by the launcher. Raises LaunchError where the launcher
    cannot be started, nodes not be emulated, or MPICH's ranks have no room to share memory in.
    """
    arguments, runtime = program(args), loaded_runtime()
    check_words(args)
    command, environment, account = mpi_command(args.ranks, arguments, runtime=runtime)
    if not args.module and _words(args)[0] == SAVES:
        command = holding(command)
    emulated = "" if args.emulate is None else f"{args.emulate.nodes} emulated nodes, "
    if not args.quiet:
        print(f"summa3d launch: {emulated}{account}", file=sys.stderr, flush=True)
    if runtime.vendor == "mpich" and args.emulate is None:
        settings = segments.settings(args.ranks, environment)
        words = f"; it is left alone as far as that goes: {' '.join(f'{name}={settings[name]}' for name in settings)}"
        for warning in segments.warnings(args.ranks):
            print(f"summa3d launch: {warning}{words if settings else ''}", file=sys.stderr, flush=True)
        environment |= settings
    if sys.stderr.isatty() and Path(command[0]).name != "srun":  # which forwards whole lines
        environment["SUMMA3D_TERMINAL"] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    if args.emulate is not None:
        reason = emulate.why_not(launcher_vendor((command[0],)))
        if reason is not None:
            raise LaunchError(f"nodes cannot be emulated: {reason}.")
    try:
        if args.emulate is not None:
            launcher = command[: command.index("-n")]
            return emulate.run(args.emulate, launcher, args.ranks, [sys.executable, *arguments], environment)
        if hasattr(signal, "sigwaitinfo") and sys.platform == "linux":
            return follow(command, environment)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}. `summa3d doctor` shows the launcher in use.") from error
