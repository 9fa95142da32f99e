# The entry point: picks the subcommand, starts MPI for those that use it, checks that the launcher fits the library.
# May import every other package; imports the subcommand's module only when it is chosen.
# Next: the subcommand of your choice beside this file; launch.py; comm/failure.py for how a run ends when it fails.
from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ..capability import forbidden
from ..errors import CapacityError, ConfigError, LaunchError, Summa3dError
from .runtime import (
    LIKE_OPEN_MPI,
    THREAD_VARIABLES,
    VENDOR_NAMES,
    launched_as,
    take_core,
    usable_cores,
    vendor_of,
    version_of,
    waiting_settings,
)

if TYPE_CHECKING:
    from _typeshed import SupportsWrite
    from mpi4py import MPI

COMMANDS = {
    "launch": "start a command on several MPI ranks of this machine",
    "gemm": "multiply two distributed matrices; report time, words moved and error",
    "train": "train a transformer from a configuration",
    "generate": "continue a prompt with a trained model",
    "checkpoint": "show what a checkpoint holds; import and export Transformers folders",
    "bench": "time products against each other: algorithms side by side, strong and weak scaling",
    "report": "show tables and plots of what bench measured",
    "doctor": "report what this installation runs on, and what may go wrong",
}
WITHOUT_MPI = ("launch", "report", "doctor")
USAGE_STATUS = 2
TIME_TO_SPEAK = 1.0  # seconds the other ranks leave to rank 0 where MPI cannot order them


class Parser(argparse.ArgumentParser):
    """An argument parser that speaks on rank 0 only; all ranks parse the same line and so stop alike."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if _rank() == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave together: a launcher that sees one rank fail ends the others, rank 0 perhaps before it has spoken."""
        if message:
            self._print_message(message, sys.stderr)
        sys.stderr.flush()
        module = sys.modules.get("mpi4py.MPI")
        if module is not None and module.Is_initialized():
            module.COMM_WORLD.Barrier()
        raise SystemExit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return _without_command(name)
    if name in WITHOUT_MPI:
        try:
            return _run(name, arguments[1:])
        except Summa3dError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    try:
        start_mpi()
    except (ConfigError, LaunchError) as error:
        launched = launched_as()
        if launched is not None and launched[1] != 0:
            time.sleep(TIME_TO_SPEAK)
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return _run(name, arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f".{name}", __package__)
    parser = Parser(prog=f"summa3d {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        status: int = module.run(parsed)
    except SystemExit as request:
        if name not in WITHOUT_MPI:
            from ..comm.failure import end_job

            end_job(request.code if isinstance(request.code, int) else int(request.code is not None))
        raise
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        hint = "\n  `summa3d train … --dry-run` says what each rank of a grid would hold." if name == "train" else ""
        what = next(iter(str(error).splitlines()), "nothing says how much")
        raise CapacityError(f"rank {_rank()} has not the memory for this: {what}{hint}") from error
    return status


def _out_of_memory(error: Exception) -> bool:
    """Whether numpy, CuPy or torch, each in its own way, could not allocate."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _without_command(name: str) -> int:
    launched = launched_as()
    if launched is not None and launched[1] != 0:
        time.sleep(TIME_TO_SPEAK)
        return 0 if name in ("-h", "--help", "--version") else USAGE_STATUS
    if name == "--version":
        from .. import __version__

        print(f"summa3d {__version__}")
        return 0
    listing = "usage: summa3d COMMAND …\n\n" + "".join(f"  {command:<10} {what}\n" for command, what in COMMANDS.items())
    if name in ("-h", "--help"):
        print(listing + "\n`summa3d COMMAND --help` lists a command's options.")
        return 0
    nearest = difflib.get_close_matches(name, COMMANDS, n=1)
    wrong = f"summa3d: there is no command {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ".") if name else ""
    print("\n\n".join(filter(None, (wrong, listing.rstrip()))), file=sys.stderr)
    return USAGE_STATUS


def start_mpi() -> None:
    """Initialise MPI, make any failure end the whole job, and refuse a launcher that belongs to another MPI.

    Numerical libraries read their thread count when they are loaded, so this runs before the first of them is imported.
    """
    import mpi4py

    forbidden("SUMMA3D_BIND")  # a wrong value is an error here, on every rank
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    version = MPI.Get_library_version()
    if not MPI.Is_initialized():
        _check_launcher(version, size=None)
        _yield_while_waiting(vendor_of(version))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="suspicious MPI")  # the next check says it once, and what to do
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    _check_launcher(version, size=MPI.COMM_WORLD.size)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    _share_cores(node)
    node.Free()
    from ..comm.failure import install_abort_hook
    from ..comm.memory import keep_freed_memory

    install_abort_hook()
    keep_freed_memory()


def _check_launcher(version: str, size: int | None) -> None:
    """Compare what the launcher started with what the library sees: before MPI_Init (size None), then after it."""
    launched = launched_as()
    if launched is None or launched[0] == 1:
        return
    ranks, _, launcher = launched
    vendor = vendor_of(version)
    crosses = size is None and launcher.startswith(("Open MPI", "jsrun")) and vendor not in LIKE_OPEN_MPI
    if crosses or size == 1:
        name = f"{VENDOR_NAMES[vendor]} {version_of(version)}"
        raise LaunchError(
            f"{launcher} started {ranks} processes, but this interpreter's mpi4py loads {name},\n"
            f"  so each would be a job of one rank. Start them with {name}'s own launcher: summa3d launch -n {ranks} …\n"
            "  (`summa3d doctor` shows the library and its launcher)."
        )


def _yield_while_waiting(vendor: str) -> None:
    """Under a plain mpiexec with more ranks than cores, let waiting ranks yield; `summa3d launch` sets the same."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS") or "1"
    if local.isdigit() and int(local) > usable_cores():
        for name, value in waiting_settings(vendor).items():
            os.environ.setdefault(name, value)


def _share_cores(node: MPI.Comm) -> None:
    """Give every rank of a node its share of the cores: threads, unless the user has said how many, or one core in turn."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    sharing = node.allgather(mine).count(mine)
    if sharing == node.size > len(mine):
        take_core(node.rank)
    if not any(name in os.environ for name in THREAD_VARIABLES):
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(max(1, len(mine) // sharing))))


def _rank() -> int:
    module = sys.modules.get("mpi4py.MPI")
    return module.COMM_WORLD.rank if module is not None and module.Is_initialized() else 0


if __name__ == "__main__":
    raise SystemExit(main())
