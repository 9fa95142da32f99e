"""End the whole job when one rank fails: the abort hook, the watchdog, and agreement of ranks on errors."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mpi4py import MPI

from ..errors import AgreementError, Summa3dError
from .profile import flight

WAIT_FOR_RANK_ZERO = 0.3  # seconds a rank leaves to rank 0 to speak first, where all of them fail alike
WAIT_PER_RANK = 0.02  # more of it, so that the ranks of several nodes do not speak at once
LONGEST_WAIT = 2.0
WAIT_FOR_THE_END = 5.0  # seconds that a silent rank, or an abort that does not return, waits before the process ends itself
TIME_TO_BE_HEARD = 0.25  # seconds for a launcher to forward the report: Open MPI's drops what is under way at an abort
STDERR = 2  # the file descriptor
INTERRUPTED = 130  # the shell's exit status for SIGINT
CLAIM_LIFETIME = 3600.0  # seconds after which a claim to print is swept up


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
    if not _has_peers():
        sys.stderr.write(_report(kind, error, trace))
        sys.stderr.flush()
        return
    status = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
    if _may_speak():
        sys.stdout.flush()
        sys.stderr.write(_report(kind, error, trace, of_rank=f" on {_who()}"))
        _save_flight()
        sys.stderr.flush()
        time.sleep(TIME_TO_BE_HEARD)
        abort(status)
    time.sleep(WAIT_FOR_THE_END)
    abort(status)


def abort(status: int) -> NoReturn:
    """End every rank of the job with `status`; a process that the MPI library cannot end, ends itself."""
    backstop = threading.Timer(WAIT_FOR_THE_END, os._exit, (status,))
    backstop.daemon = True
    backstop.start()
    sys.stdout.flush()
    sys.stderr.flush()
    if _has_peers():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


def end_job(status: int) -> None:
    """End every rank with `status` where this one alone asks to exit (``sys.exit(3)`` in the middle of a run)."""
    if _has_peers() and status != 0:
        if _may_speak():
            sys.stderr.write(f"{_who()} exits with status {status}, and so the job ends\n")
        abort(status)


def _has_peers() -> bool:
    return MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _may_speak() -> bool:
    """Decide whether this rank prints: rank 0 at once, the others after leaving it time, one rank per node."""
    rank = MPI.COMM_WORLD.rank
    if rank != 0:
        time.sleep(min(WAIT_FOR_RANK_ZERO + WAIT_PER_RANK * rank, LONGEST_WAIT))
    return _claim_node()


def _claim_node() -> bool:
    """Take this job's one place to print on this node: a file that only one process can create.

    It outlives the process, because a slow rank may fail after the first one has already ended. `summa3d launch` removes it with
    the recorders; without it, old ones are swept up.
    """
    launched = os.environ.get(flight.VARIABLE, "")
    folder = Path(tempfile.gettempdir() if launched in ("", flight.NO) else launched)
    prefix = f"{flight.CLAIM}{os.getuid()}-"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(folder / f"{prefix}{job_name()}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:
        return True
    for old in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > CLAIM_LIFETIME:
                old.unlink()
    return True


def job_name() -> str:
    """Name the job as all its ranks on this node would: by the launcher's own identifier, or by the launcher itself."""
    if "PMIX_NAMESPACE" in os.environ:
        return f"{os.environ['PMIX_NAMESPACE']}.{_start_of(os.getppid())}"
    if "SLURM_STEP_ID" in os.environ and "SLURM_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}.{os.getppid()}"
    return f"{os.getppid()}.{_start_of(os.getppid())}"


def _start_of(process: int) -> str:
    """When a process started, in clock ticks since boot, so that a number used again is not taken for the same process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def _save_flight() -> None:
    """Keep the records of this node's ranks and say where, unless `summa3d launch` does, or nobody waits."""
    recorder, now = flight.recorder, time.time()
    if recorder is None or flight.VARIABLE in os.environ or not flight.table(flight.read_folder(recorder.file.parent), now):
        return
    kept = flight.save(recorder.file.parent, now)
    if kept is not None:
        sys.stderr.write(f"what each rank was doing: summa3d doctor --flight {kept}\n")


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, of_rank: str = "") -> str:
    if issubclass(kind, Summa3dError):
        return f"{kind.__name__}: {error}\n"
    if issubclass(kind, KeyboardInterrupt):
        return "interrupted\n"
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


def _who() -> str:
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}{_where()}"


def _where() -> str:
    """Where this rank is, in brackets; nothing where nothing tells it."""
    state = _state()
    return f" [{state}]" if state else ""


class Watchdog:
    """Ends a job that makes no progress: unless `touch` is called every `seconds`, this rank prints its stacks and exits.

    Every stuck rank prints before the first one exits (`GRACE` seconds later), because a launcher kills the others then.
    A hang that holds the interpreter's lock is ended by `faulthandler`, another `GRACE` later. Use it as a context manager,
    or call `stop`.
    """

    GRACE = 2.0
    REARM_EVERY = 1.0  # seconds between re-armings of faulthandler: `touch` itself costs a clock reading

    def __init__(self, seconds: float, what: str = "no progress", output: int = STDERR) -> None:
        self.seconds, self.what, self.output = seconds, what, output
        self._stopped = threading.Event()
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Say that this rank is alive."""
        now = time.monotonic()
        self._deadline = now + self.seconds
        if now - self._armed > self.REARM_EVERY:
            self._arm()

    def stop(self) -> None:
        """Stop watching this rank, and disarm the stack dump."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _arm(self) -> None:
        self._armed = time.monotonic()
        self._deadline = self._armed + self.seconds
        backstop = self.seconds + self.REARM_EVERY + 2 * self.GRACE
        faulthandler.dump_traceback_later(backstop, exit=True, file=self.output)

    def _watch(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            if self._stopped.wait(left):
                return
        os.write(self.output, self._stacks().encode(errors="replace"))
        if flight.recorder is not None and _claim_node():
            _save_flight()
            sys.stderr.flush()
        if not self._stopped.wait(self.GRACE):
            os._exit(1)

    def _stacks(self) -> str:
        """Return the stacks of all threads but the watchdog's own, as one text so that ranks do not mix their lines."""
        who = _who() if _has_peers() else f"this process{_where()}"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"{who}: {self.what} for {self.seconds:g} s; the job ends. Its stacks, innermost call last:\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"  thread {names.get(ident, ident)}:\n")
                lines += ["  " + line for line in traceback.format_stack(frame)]
        return "".join(lines)


def agree_on_error(comm: MPI.Comm, error: Exception | None) -> None:
    """Collective over `comm`: if any rank passes an exception, all raise the one of the lowest such rank.

    A check that can fail on some ranks only (a file that one node cannot read) goes through here before the next collective,
    so that no rank waits for one that has left. Where not all ranks failed, the message names those that did.
    """
    found = comm.allgather(None if error is None else _sendable(error))
    failed = [rank for rank, one in enumerate(found) if one is not None]
    if not failed:
        return
    kind, message = next(one for one in found if one is not None)
    if len(failed) < comm.size:
        message += f"\n  On {_ranks_in_words(failed)} of {comm.size} only."
    raise kind(message) from error


def _sendable(error: Exception) -> tuple[type[Exception], str]:
    """Reduce an exception to (class, message), the nearest base class that every rank can import and build from a message."""
    message = str(error.args[0]) if len(error.args) == 1 else str(error)
    for kind in type(error).__mro__:
        if issubclass(kind, Exception) and "<locals>" not in kind.__qualname__ and _builds(kind, message):
            return kind, message
    return Exception, message


def _builds(kind: Callable[[str], Exception], message: str) -> bool:
    try:
        kind(message)
    except Exception:  # any refusal, of whatever class, means that this class takes more than a message
        return False
    return True


def check_agreement(comm: MPI.Comm, operation: str, facts: Mapping[str, object]) -> None:
    """Collective over `comm`: raise AgreementError on all ranks unless all passed the same operation and facts.

    The message names, for everything that differs, which ranks passed what. Facts are compared by their `repr`.
    """
    mine = {"operation": operation, **{name: repr(fact) for name, fact in facts.items()}}
    everyone = comm.allgather(mine)
    differing = [name for name in dict.fromkeys(name for one in everyone for name in one) if _values(everyone, name) != 1]
    if not differing:
        return
    lines = [f"  {name}: {who_passed_what([one.get(name, 'nothing') for one in everyone])}" for name in differing]
    where = "which collective they are in" if "operation" in differing else operation
    raise AgreementError(f"the {comm.size} ranks do not agree on {where}:\n" + "\n".join(lines))


def _values(everyone: Sequence[Mapping[str, str]], name: str) -> int:
    return len({one.get(name) for one in everyone})


def who_passed_what(values: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """The different values, and of which ranks each is; the ranks are numbered from 0 unless they are given.

    >>> who_passed_what(["sum", "max", "sum"])
    'sum on ranks 0, 2; max on rank 1'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks_in_words(ranks)}" for value, ranks in ranks_of.items())


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
