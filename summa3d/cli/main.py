"""The entry point of `summa3d`: selects the subcommand, initializes MPI, and checks that launcher and MPI library match."""

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

from ..errors import CapacityError, ConfigError, LaunchError, Summa3dError
from ..launch.runtime import (
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
from ..node_support import forbidden

if TYPE_CHECKING:
    from _typeshed import SupportsWrite
    from mpi4py import MPI

COMMANDS = {
    "launch": "Start a command on several MPI ranks of this machine.",
    "gemm": "Multiply two distributed matrices; report time, words moved and error.",
    "train": "Train a transformer from a configuration.",
    "generate": "Continue a prompt with a trained model.",
    "checkpoint": "Show what a checkpoint holds; import and export Transformers folders.",
    "bench": "Benchmark products and transformer blocks: algorithms and schemes side by side, strong and weak scaling.",
    "report": "Show tables and plots of the results of bench.",
    "plot": "Plot the losses of runs of train.",
    "doctor": "Report what this installation uses, and warn of what may fail or be slow.",
}
WITHOUT_MPI = ("launch", "report", "plot", "doctor")
USAGE_STATUS = 2
RANK_0_SECONDS = 1.0  # seconds that other ranks wait for rank 0 to print, where MPI cannot order them


class Parser(argparse.ArgumentParser):
    """An argument parser that prints on rank 0 only. All ranks parse the same arguments, and so exit alike."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if _rank() == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after a barrier: a launcher ends all ranks when one fails, and might end rank 0 before it has printed."""
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
            time.sleep(RANK_0_SECONDS)
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
        hint = "\n  `summa3d train … --dry-run` reports what each rank of a grid would hold." if name == "train" else ""
        reason = next(iter(str(error).splitlines()), "the size of the allocation is unknown")
        raise CapacityError(f"rank {_rank()} ran out of memory: {reason}{hint}") from error
    return status


def _out_of_memory(error: Exception) -> bool:
    """Whether the error says that an allocation of numpy, CuPy or torch failed; each library raises its own type."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _without_command(name: str) -> int:
    launched = launched_as()
    if launched is not None and launched[1] != 0:
        time.sleep(RANK_0_SECONDS)
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
    """Initialize MPI, install the abort hook, and share the cores of a node among its ranks; collective over all ranks.

    Call it before numpy or torch is imported: numerical libraries read their thread count when they are loaded.

    Raises LaunchError where the launcher belongs to another MPI than the one that mpi4py loads, so that each process would be a
    job of one rank, and ConfigError for an unknown value of SUMMA3D_BIND.
    """
    import mpi4py

    forbidden("SUMMA3D_BIND")  # raises an error for an unknown value, on every rank
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    version = MPI.Get_library_version()
    if not MPI.Is_initialized():
        _check_launcher(version, size=None)
        _yield_while_waiting(vendor_of(version))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="suspicious MPI")  # the next check raises an error with a remedy
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
    """Raise LaunchError unless the MPI library sees the ranks that the launcher started; `size` is None before MPI_Init."""
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
            f"  so each process would be a job of one rank. Use the launcher of {name}: summa3d launch -n {ranks} …\n"
            "  (`summa3d doctor` shows the library and its launcher)."
        )


def _yield_while_waiting(vendor: str) -> None:
    """Let waiting ranks yield their core where a plain mpiexec started more ranks than cores, as `summa3d launch` does."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS") or "1"
    if local.isdigit() and int(local) > usable_cores():
        for name, value in waiting_settings(vendor).items():
            os.environ.setdefault(name, value)


def _share_cores(node: MPI.Comm) -> None:
    """Share a node's cores among its ranks: set the number of BLAS threads per rank, unless the user has set it.

    Ranks that outnumber the cores are each bound to one core, in turn.
    """
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
