"""End the whole job when one rank fails: the abort hooks, and what a failing rank says."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from opcode import opname
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from ... import preemption
from ...errors import GridError, Summa3dError
from ...node_support import forbidden
from . import flight, flight_files

WAIT_FOR_RANK_ZERO = 0.3  # seconds a rank leaves to rank 0 to speak first, where all of them fail alike
WAIT_PER_RANK = 0.02  # more of it, so that the ranks of several nodes do not speak at once
LONGEST_WAIT = 2.0
WAIT_FOR_THE_INTERRUPTED = LONGEST_WAIT + 0.3  # seconds that a rank which fails since another was interrupted leaves to it
MOMENT = 0.2
"""Seconds after which a rank that waited is found to wait still, or not."""
STDERR = 2  # the file descriptor
WAIT_FOR_THE_END = 5.0  # seconds that a silent rank, or an abort that does not return, waits before the process ends itself
TIME_TO_BE_HEARD = 0.25  # seconds for a launcher to forward the report: what is under way at an abort may be dropped


def install_abort_hook() -> None:
    """From now on an uncaught exception on this rank, in any thread, ends the job on all ranks, non-zero, reported once.

    The traceback of one failing rank is printed: rank 0's if it fails too, otherwise the first of its node. A Summa3dError
    is printed as its message alone. Without MPI, or with one rank, exceptions end the process as usual. Call it on every rank.
    """
    sys.excepthook = report_and_abort
    threading.excepthook = _on_thread_exception


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        error = args.exc_value if args.exc_value is not None else args.exc_type()
        report_and_abort(args.exc_type, error, args.exc_traceback)


def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the failure once per job, then end all ranks; returns only where there are no other ranks."""
    if has_peers() and not _speaks:
        _say_and_abort(error, lambda: sys.stderr.write(_report(kind, error, trace, of_rank=f" on {who()}")))
    sys.stderr.write(_report(kind, error, trace))
    sys.stderr.flush()


_speaks = False
"""Whether a hook of this process reports, which may call another one: torch.distributed's shows what the one before it wrote."""


def _say_and_abort(error: BaseException, say: Callable[[], object]) -> NoReturn:
    """Report once per job and end it. A Ctrl-C, which all ranks get, may come while this one waits to report another's."""
    global _speaks
    interrupted = preemption.is_interrupt(error)
    try:
        _leave_others_time(WAIT_FOR_THE_INTERRUPTED if interrupted and not isinstance(error, KeyboardInterrupt) else 0.0)
        preemption.ignore_interrupts()
    except KeyboardInterrupt as interrupt:
        preemption.ignore_interrupts()
        interrupted, say = True, partial(sys.stderr.write, _report(KeyboardInterrupt, interrupt, None, of_rank=f" on {who()}"))
    if flight.claim_node():
        sys.stdout.flush()
        _speaks = True
        say()
        save_flight()
        sys.stderr.flush()
        time.sleep(TIME_TO_BE_HEARD)
    else:
        time.sleep(WAIT_FOR_THE_END)
    abort(preemption.INTERRUPTED if interrupted else 1)


_ends_job = False


def prepare_for_failure(comm: MPI.Intracomm) -> bool:
    """Record this rank's communications from now on. If all ranks of the job, several, are in `comm`, a failure of one ends all.

    An uncaught exception of the main thread is shown as before, by the hook that is there; sys.exit with a status other than 0
    ends the job with that status. Left alone are programs in which the abort hook is installed, interactive sessions, pytest and
    mpi4py.futures; and all with SUMMA3D_ABORT=no. Later calls do nothing. Returns whether failures end the job since this call.
    """
    global _ends_job
    flight.start(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    if _ends_job or not 1 < comm.size == MPI.COMM_WORLD.size or sys.excepthook is report_and_abort or _is_left_alone():
        return False
    _ends_job, show, leave = True, sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not has_peers():
            show(kind, error, trace)
            return

        def say() -> None:
            sys.stderr.write(f"uncaught exception on {who()}:\n")
            show(kind, error, trace)

        _say_and_abort(error, say)

    def noted(*status: Any) -> NoReturn:
        try:
            leave(*status)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                *_, (frame, _) = traceback.walk_stack(sys._getframe())
                atexit.unregister(_end_job_as_asked)
                atexit.register(_end_job_as_asked, frame, error)  # called first, before other ranks hear that this one ends
            raise

    sys.excepthook, sys.exit = hook, noted
    return True


def _is_left_alone() -> bool:
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "get_ipython")
    return interactive or "_pytest" in sys.modules or "mpi4py.futures" in sys.modules or forbidden("SUMMA3D_ABORT")


def _end_job_as_asked(frame: FrameType, error: SystemExit) -> None:
    """End the job if `error` ends this program: if the outermost frame of its raise has not returned. It was not caught then."""
    if not opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
        end_job(status_of(error))


def status_of(error: SystemExit) -> int:
    """The exit status that a SystemExit asks for, as Python gives it."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def abort(status: int) -> NoReturn:
    """End every rank of the job with `status`; a process that the MPI library cannot end, ends itself."""
    backstop = threading.Timer(WAIT_FOR_THE_END, os._exit, (status,))
    backstop.daemon = True
    with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while the interpreter ends
        backstop.start()
    sys.stdout.flush()
    sys.stderr.flush()
    if has_peers():
        with contextlib.suppress(OSError):  # without a descriptor left, MPI adds its line behind ours
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
        flight.ends_others()
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


def end_job(status: int, speaks: bool = True) -> None:
    """End every rank with `status` where this one alone asks to exit (``sys.exit(3)`` in the middle of a run).

    speaks : whether it says so; not where the reason has been printed
    """
    if has_peers() and status != 0:
        if speaks and _may_speak():
            sys.stderr.write(f"{who()} exits with status {status}, and so the job ends\n")
        sys.stderr.flush()
        time.sleep(TIME_TO_BE_HEARD)
        abort(status)


_forked = False
"""Whether this process was forked from a rank, whose MPI it must leave alone."""


def _in_fork() -> None:
    """Have a process that was forked from a rank end without MPI: mpi4py would finalize the rank's, and end the job."""
    global _forked
    _forked = MPI.Is_initialized() and not MPI.Is_finalized()
    if not _forked:
        return
    leave, status = sys.exit, [0]

    def noted(*asked: Any) -> NoReturn:
        status[0] = status_of(SystemExit(*asked))
        leave(*asked)

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_value") else status[0])

    sys.exit = noted
    atexit.register(end)


os.register_at_fork(after_in_child=_in_fork)


OWN_THREADS = ("watch", "watchdog", "preemption", "lease", "ranks")
"""The library's threads, none of which communicates over a grid."""


def is_alone() -> bool:
    """Return whether no thread of this process but the calling one can communicate."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return all(thread.name in OWN_THREADS for thread in others)


def not_a_rank() -> str:
    """Reason why a process that was forked from a rank cannot communicate."""
    return f"process {os.getpid()} was forked from rank {MPI.COMM_WORLD.rank}, and is no rank itself: it cannot communicate."


def has_peers() -> bool:
    """Return whether MPI is in use and has other ranks."""
    return not _forked and MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _leave_others_time(later: float = 0.0) -> None:
    """Wait so long that others speak first: rank 0 for `later` seconds, the others longer."""
    rank = MPI.COMM_WORLD.rank
    time.sleep(later + (min(WAIT_FOR_RANK_ZERO + WAIT_PER_RANK * rank, LONGEST_WAIT) if rank else 0.0))


def _may_speak() -> bool:
    """Decide whether this rank prints, one per node: rank 0 at once, the others after leaving it time."""
    _leave_others_time()
    return flight.claim_node()


def _somebody_stays(folder: Path) -> bool:
    """Return whether a rank waits, and does so a moment later: else it was about to go on."""

    def waits() -> bool:
        return bool(flight.table(flight.read_folder(folder), time.time()))

    if not waits():
        return False
    time.sleep(MOMENT)
    return waits()


def save_flight() -> None:
    """Keep the records of this node's ranks and say where, unless `summa3d launch` does, or nobody waits."""
    recorder = flight.recorder
    if recorder is None or flight_files.VARIABLE in os.environ or not _somebody_stays(recorder.file.parent):
        return
    kept = flight_files.save(recorder.file.parent, time.time())
    if kept is not None:
        sys.stderr.write(f"what each rank was doing: summa3d doctor --flight {kept}\n")


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, of_rank: str = "") -> str:
    if issubclass(kind, Summa3dError):
        return f"{kind.__name__}: {error}\n"
    if issubclass(kind, KeyboardInterrupt):
        return f"interrupted{of_rank}\n"
    head = f"uncaught exception{of_rank}:\n" if of_rank else ""
    return head + "".join(traceback.format_exception(kind, error, trace))


_state: Callable[[], str] = str
"""What tells where this rank is, in a line; nothing, as a rule."""


@contextlib.contextmanager
def telling_where(state: Callable[[], str]) -> Iterator[None]:
    """While the block runs, and once it has failed, reports of a failure or a hang of this rank say `state()`.

    It is called for such a report only, from any thread.
    """
    global _state
    before, _state = _state, state
    yield
    _state = before


def who() -> str:
    """This rank, and where it is."""
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}{where()}"


def where() -> str:
    """Program location of this rank and the communication it waits for, in brackets; empty if unknown."""
    told = "; ".join(filter(None, (_state(), flight.waiting())))
    return f" [{told}]" if told else ""


def said(error: BaseException) -> str:
    """An error in words: its class, and its message where it has one."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def check_comm(comm: MPI.Comm, operation: str) -> None:
    """Raise GridError where the communicator of an operation was freed, or belongs to the rank that forked this process."""
    if _forked:
        raise GridError(f"{operation}: {not_a_rank()}")
    if comm == MPI.COMM_NULL:
        raise GridError(
            f"{operation}: its communicator was freed, with the grid that made it or by its owner. Make another grid."
        )
