"""The entry point of `summa3d`: selects the subcommand, initializes MPI, and checks that launcher and MPI library match."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import preemption
from ..comm.health.processes import launched_as
from ..errors import CapacityError, ConfigError, DataError, LaunchError, Summa3dError, shortened
from ..files import LARGEST_WHOLE
from ..launcher.runtime import (
    VENDOR_NAMES,
    let_idle_threads_sleep,
    no_library,
    share_threads,
    take_core,
    usable_cores,
    vendor_of,
    version_of,
)
from ..launcher.segments import unname
from ..launcher.slurm import TYPE_VARIABLE, advice
from ..node_support import affinity, forbidden, watchdog_seconds
from ..waiting import LIKE_OPEN_MPI, local_ranks, waiting_settings

if TYPE_CHECKING:
    from _typeshed import SupportsWrite
    from mpi4py import MPI

COMMANDS = {
    "launch": "Start a command, or a Python program, on several MPI ranks of this machine.",
    "gemm": "Multiply two distributed matrices; report time, words moved and error.",
    "train": "Train a transformer from a configuration.",
    "generate": "Continue a prompt with a trained model.",
    "config": "Show the keys of a configuration: type, default and meaning; or write a configuration file.",
    "checkpoint": "Show what a checkpoint holds; verify it; import and export Transformers folders.",
    "bench": "Benchmark products and transformer blocks: algorithms and schemes side by side, strong and weak scaling.",
    "sweep": "Measure products, blocks or training steps on many rank counts and grids, as a file describes; resume; collect.",
    "jobs": "Write Slurm scripts that need no other file: training, sweeps, scaling, for a site.",
    "report": "Show tables and plots of the results of bench.",
    "plot": "Plot the losses of runs of train.",
    "plan": "Find the fastest grid for a model on a cluster; measured steps beside predictions; schedules, drawn; formulas.",
    "doctor": "Report what this installation uses, and warn of what may fail or be slow.",
}
WITHOUT_MPI = ("launch", "config", "jobs", "report", "plot", "plan", "doctor")
HELP = json.loads(Path(__file__).with_name("help.json").read_text(encoding="utf-8"))
"""What help shows: examples of each command, and what environment variables do."""
EXAMPLES: dict[str, list[str]] = HELP["examples"]
VARIABLES: dict[str, str] = HELP["variables"]
EXTRAS = {
    **dict.fromkeys(("torch", "safetensors", "rich", "tomli_w"), "train"),
    "tokenizers": "bpe",
    "matplotlib": "plot",
    "ml_dtypes": "bf16",
    "cupy": "gpu",
}
"""Package that the core goes without → the extra that installs it."""
OF_FILES = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EISDIR, errno.ENOTDIR, errno.EIO),
)
"""What a file system says of a file: the user's to mend."""
NO_MEMORY = (
    *("DefaultCPUAllocator", "can't start new thread", "calculation overflowed", "Overflow when", "Invalid shape dimension"),
    "failed to map segment",
    "std::bad_alloc",
)
"""What errors of numpy, CuPy and torch say of an allocation that failed."""
USAGE_STATUS, PIPE_STATUS = 2, 141  # the latter as shells report an end by SIGPIPE
COMPLETION_VARIABLE = "_ARGCOMPLETE"  # set by the shell's hook
RANK_0_SECONDS = 1.0  # seconds that ranks wait for rank 0 to print, or rank 0 for them to end, where MPI cannot order them


class Formatter(argparse.HelpFormatter):
    """Help with the default of every option, and examples on lines of their own."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        says = action.default in (None, False, argparse.SUPPRESS) or action.default == [] or "default" in text.lower()
        return text if says else f"{text} The default is %(default)s."

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def whole_number(text: str) -> int:
    """The number of an option of type int. Raises ArgumentTypeError for one that 64 bits do not hold."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not text.isascii() or "_" in text:  # of which Python takes some
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    if abs(value) > LARGEST_WHOLE:
        raise argparse.ArgumentTypeError(f"{text} is beyond ±(2^63 − 1)")
    return value


class Parser(argparse.ArgumentParser):
    """An argument parser that prints on rank 0 only. All ranks parse the same arguments, and so exit alike."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, whole_number)

    def _get_formatter(self) -> argparse.HelpFormatter:
        self.formatter_class = Formatter
        return super()._get_formatter()

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if _rank() == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Exit with one line that says what is wrong and where the options are explained."""
        commands = self.prog.partition(" ")[2]
        self.exit(USAGE_STATUS, f"{self.prog}: {shortened(message.rstrip('.'))}; see summa3d help {commands}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after a barrier: a launcher ends all ranks when one fails, and might end rank 0 before it has printed."""
        if message:
            self._print_message(message, sys.stderr)
        sys.stderr.flush()
        module = sys.modules.get("mpi4py.MPI")
        if module is not None and module.Is_initialized():
            module.COMM_WORLD.Barrier()
        raise SaidExit(status)


class SaidExit(SystemExit):
    """The exit of a parser, which has said why, and of all ranks alike."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if COMPLETION_VARIABLE in os.environ:
        _complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # of a pipe that has taken the place of a file
            sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks, and halves of characters
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1 : 2 if arguments[1:2] == ["launch"] else None], "--help"]  # launch hands its words on
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return _without_command(name)
    let_idle_threads_sleep()
    if without_mpi(name, arguments[1:]):
        try:
            return _run_for_reader(name, arguments[1:])
        except Summa3dError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    try:
        if name == "train":
            preemption.listen(*(request.name for request in preemption.REQUESTS))
        with preemption.ending_at_once():  # until a report can name the rank: the launcher does
            start_mpi(most_threads=1 if name == "checkpoint" or "--dry-run" in arguments else None)
    except (CapacityError, ConfigError, LaunchError) as error:
        launched = launched_as()
        if launched is not None and launched[1] != 0 and not isinstance(error, CapacityError):  # which rank 0 says as well
            time.sleep(RANK_0_SECONDS)
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    status = (_run_for_reader if launched_as() is None else _run)(name, arguments[1:])
    return _leave_last(status) if status == preemption.STATUS else status


def _leave_last(status: int) -> int:
    """The exit status of this rank of a job that ends with `status` and has not failed: rank 0's alone, which leaves last.

    A launcher may kill the other ranks when one ends with a status, and report theirs.
    """
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    MPI.Finalize()
    if rank != 0:
        return 0
    time.sleep(RANK_0_SECONDS)
    return status


def without_mpi(name: str, arguments: Sequence[str]) -> bool:
    """True if a command runs on no ranks: of sweeps, all but `run` where a launcher has started it; of products, plans alone."""
    if name == "gemm":
        return "--dry" in arguments and launched_as() is None
    return name in WITHOUT_MPI or (name == "sweep" and (arguments[:1] != ["run"] or launched_as() is None))


def _complete() -> None:
    """Answer the shell that asks, through argcomplete, how the line goes on; does not return."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="summa3d")
    commands = parser.add_subparsers()
    for name, what in COMMANDS.items():
        importlib.import_module(f".{name}", __package__).add_arguments(commands.add_parser(name, help=what))
    argcomplete.autocomplete(parser)


def _run_for_reader(name: str, arguments: list[str]) -> int:
    """`_run` in one process, quiet where the reader of a pipe, as `head`, has what it wants."""
    try:
        status = _run(name, arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at the end must not fail
        return PIPE_STATUS


def _run(name: str, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(f".{name}", __package__)
        parsed = parser_of(name).parse_args(arguments)
        status: int = module.run(parsed)
    except SystemExit as request:
        if not without_mpi(name, arguments):
            from ..comm.health.failure import end_job, status_of

            end_job(status_of(request), speaks=not isinstance(request, SaidExit))
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        raise ConfigError(
            f"summa3d {name} needs {package}, which is not installed: pip install 'summa3d[{extra}]' "
            f"(in a checkout: pip install -e '.[{extra}]')."
        ) from error
    except OSError as error:
        if error.errno not in OF_FILES or error.filename is None:
            raise
        raise DataError(f"{error.strerror}: {error.filename}") from error
    except (ImportError, MemoryError, RuntimeError) as error:
        if _lacks_mpi(error):
            raise _no_library(error) from error
        if not _out_of_memory(error):
            raise
        hint = "\n  `summa3d train … --dry-run` reports what each rank of a grid would hold." if name == "train" else ""
        reason = next(iter(str(error).splitlines()), "the size of the allocation is unknown")
        raise CapacityError(f"rank {_rank()} ran out of memory: {reason}{hint}") from error
    return status


def parser_of(name: str) -> Parser:
    """The parser of a command, with its examples."""
    examples = "examples:\n" + "".join(f"  {line}\n" for line in EXAMPLES.get(name, ()))
    parser = Parser(prog=f"summa3d {name}", description=COMMANDS[name], epilog=examples)
    importlib.import_module(f".{name}", __package__).add_arguments(parser)
    return parser


def _lacks_mpi(error: Exception) -> bool:
    """Return whether the error says that mpi4py finds no MPI library, or cannot load what was built for one."""
    return getattr(error, "name", None) == "mpi4py.MPI" or str(error).startswith("cannot load MPI library")


def _no_library(error: Exception) -> LaunchError:
    return no_library((str(error).splitlines() or [type(error).__name__])[-1])


def _out_of_memory(error: Exception) -> bool:
    """Return whether the error says that an allocation of numpy, CuPy or torch failed; each library raises its own type."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(sign in str(error) for sign in NO_MEMORY)


def _without_command(name: str) -> int:
    launched = launched_as()
    if launched is not None and launched[1] != 0:
        time.sleep(RANK_0_SECONDS)
        return 0 if name in ("-h", "--help", "-V", "--version") else USAGE_STATUS
    if name in ("-V", "--version"):
        from .. import __version__

        print(f"summa3d {__version__}")
        return 0
    listing = "usage: summa3d COMMAND …\n\n" + "".join(f"  {command:<10} {what}\n" for command, what in COMMANDS.items())
    listing += "  help       Show the options of a command, with examples: `summa3d help train` or `summa3d train --help`.\n"
    listing += "\n  -V, --version  Print the version.\n  -h, --help     Print this text.\n"
    if name in ("-h", "--help"):
        variables = "".join(f"  {variable:<20} {what}\n" for variable, what in VARIABLES.items())
        print(f"{listing}\nenvironment variables:\n{variables}", end="")
        return 0
    print("\n\n".join(filter(None, (f"summa3d: {unknown_command(name)}" if name else "", listing.rstrip()))), file=sys.stderr)
    return USAGE_STATUS


def unknown_command(name: str) -> str:
    """Message for a word that is no command: the nearest command.

    >>> unknown_command("trian")
    "there is no command 'trian'; did you mean 'train'?"
    """
    nearest = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"there is no command {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ".")


def start_mpi(most_threads: int | None = None) -> None:
    """Initialize MPI, install the abort hook, and share the cores of a node among its ranks; collective over all ranks.

    Call it before numpy or torch is imported: numerical libraries read their thread count when they are loaded.

    most_threads : the most BLAS threads of a rank, where the user has not set their number

    Raises LaunchError where mpi4py finds no MPI library, and where the launcher belongs to another MPI than the one that mpi4py
    loads, so that each process would be a job of one rank; ConfigError for an unknown value of SUMMA3D_BIND, SUMMA3D_UNLINK or
    SUMMA3D_WATCHDOG.
    """
    import mpi4py

    for variable in ("SUMMA3D_BIND", "SUMMA3D_UNLINK"):
        forbidden(variable)  # raises an error for an unknown value, on every rank
    seconds = watchdog_seconds()
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _no_library(error) from error
    version = MPI.Get_library_version()
    _watch_ranks(seconds)
    if not MPI.Is_initialized():
        _check_launcher(version, size=None)
        _yield_while_waiting(vendor_of(version))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="suspicious MPI")  # the next check raises an error with a remedy
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    _check_launcher(version, size=MPI.COMM_WORLD.size)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if vendor_of(version) == "mpich" and not forbidden("SUMMA3D_UNLINK"):
        unname(node)
    _share_cores(node, most_threads)
    node.Free()
    from ..comm.device.arrays import keep_freed_memory
    from ..comm.health.failure import install_abort_hook

    install_abort_hook()
    keep_freed_memory()


def _watch_ranks(seconds: float) -> None:
    """Watch the ranks of this node, from before MPI_Init on."""
    from ..comm.health import flight, watchdog

    launched = launched_as()
    if launched is not None:
        ranks, rank, _ = launched
        flight.start(rank, ranks)
        watchdog.watch(seconds)


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
        fitting = (
            f"Use the launcher of {name}: summa3d launch -n {ranks} …\n  (`summa3d doctor` shows the library and its launcher)."
        )
        if os.environ.get("SLURM_STEP_NUM_TASKS") == str(ranks):
            launcher, fitting = "srun", advice(vendor, os.environ.get(TYPE_VARIABLE, "none"))
        raise LaunchError(
            f"{launcher} started {ranks} processes, but this interpreter's mpi4py loads {name},\n"
            f"  so each process would be a job of one rank. {fitting}"
        )


def _yield_while_waiting(vendor: str) -> None:
    """Let waiting ranks yield their core where a plain mpiexec started more ranks than cores, as `summa3d launch` does."""
    if local_ranks() > usable_cores():
        for name, value in waiting_settings(vendor).items():
            os.environ.setdefault(name, value)


def _share_cores(node: MPI.Comm, most_threads: int | None) -> None:
    """Share a node's cores among its ranks: set the number of BLAS threads per rank, unless the user has set it.

    Ranks that outnumber the cores are each bound to one core, in turn.
    """
    mine = affinity()
    sharing = node.allgather(mine).count(mine)
    if sharing == node.size > len(mine):
        take_core(node.rank)
    share = max(1, len(mine) // sharing)
    share_threads(min(share, most_threads or share))


def _rank() -> int:
    module = sys.modules.get("mpi4py.MPI")
    return module.COMM_WORLD.rank if module is not None and module.Is_initialized() else 0


if __name__ == "__main__":
    raise SystemExit(main())
