"""The launcher as a child: signals are passed on, and after a failure its ranks' flight recorders say who waited for whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .. import preemption
from ..comm.health import flight, flight_files, processes
from ..node_support import watchdog_seconds
from . import segments
from .ended import FirstEnded

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
PR_SET_PDEATHSIG = 1
LOOK_EVERY = 1.0
"""Seconds between two looks at the ranks; if the launch itself was stopped meanwhile, twice as many count."""
PATIENCE = 6.0
"""Seconds beyond the limit, so that ranks that are not stopped may speak first: they know more."""
LONG = 5.0
"""Seconds that a rank must have waited when a job is interrupted, for the interruption to look like the end of a hang."""
ALONE = 20.0
"""Seconds for which ranks must have waited, all others having ended, for nobody to be on the way with an answer."""


def follow(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a launcher to its end, and say what the ranks were doing if it failed; its exit status, as a shell gives it.

    A process of the job that stays stopped beyond the limit of the watchdog is killed, and so the launcher ends the job; ranks
    that wait for ranks that have ended are (`StrandedRanks`).

    Raises OSError where it cannot be started, ConfigError for an unknown value of SUMMA3D_WATCHDOG.
    """
    first, stopped, began = FirstEnded(), Stopped(watchdog_seconds()), time.time()
    before, folder = signal.pthread_sigmask(signal.SIG_BLOCK, [*PASSED_ON, signal.SIGCHLD]), None
    try:
        if flight_files.VARIABLE not in environ:
            folder = flight_files.new_folder()
            environ = {**environ, flight_files.VARIABLE: str(folder)}
        child = Child(command, environ, before)
        first.follow(child.process.pid, folder)
        alone = StrandedRanks(folder, ALONE if stopped.limit else 0.0)
        status = child.wait(stopped.look, alone.look)
        if status != 0:
            segments.remove_left(began)
        if status not in (0, preemption.STATUS) and folder is not None:
            for line in _ended(status, child, first, stopped.killed or alone.ended, folder):
                print(line, file=sys.stderr)
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):  # its ranks have removed it, or one of them still does
                flight_files.remove(folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return status


def _ended(status: int, child: Child, first: FirstEnded, killed: bool, folder: Path) -> Iterator[str]:
    """Message for a job that has failed: what ended it, where nothing has said so, and the table of `told`.

    killed : whether this process has ended it, and said why
    """
    interrupted, ended = status == preemption.INTERRUPTED, child.process.returncode
    reported = any(folder.glob(f"{flight_files.CLAIM}*"))
    if not killed and not (reported and (child.asked or ended < 0)):
        if child.asked:
            yield f"summa3d launch: {child.asked.name} ended the job"
        elif ended < 0:
            who = f"the launcher (process {child.process.pid})"
            yield f"summa3d launch: {signal.Signals(-ended).name} ended {who}, and so the job"
        elif ranks := first.ranks(reported):
            how = "interrupted" if interrupted else "without a report"
            yield f"summa3d launch: {', '.join(ranks)} ended first, {how}"
        elif sys.platform == "linux" and not reported:
            yield f"summa3d launch: the launcher ended with status {ended} before a rank was seen"
    yield from told(folder, time.time(), LONG if interrupted else 0.0)


def told(folder: Path, now: float, at_least: float = 0.0) -> list[str]:
    """The table of who waited for whom when the job of these recorders ended, and where they are kept from now on.

    Empty where nobody waited, or no one as long as `at_least` seconds.
    """
    flights = flight.read_folder(folder)
    longest = max((now - flight.waits.began for flight in flights if flight.waits), default=-1.0)
    if longest < at_least:
        return []
    kept = flight_files.save(folder, now)
    return [*flight.table(flights, now), *([f"  kept: summa3d doctor --flight {kept}"] if kept else [])]


class Stopped:
    """How long processes of a job have been stopped: one that is, from before MPI_Init to its end, is killed after `limit` s.

    With a limit of 0 none is. `killed` says whether some was.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.killed, self._seconds, self._last = limit, False, dict[int, float](), time.monotonic()

    def look(self, launcher: int) -> None:
        """Look at the launcher and at what it has started; say which have been stopped for too long, and kill them."""
        elapsed, self._last = min(time.monotonic() - self._last, 2 * LOOK_EVERY), time.monotonic()
        states = {process: processes.state_of(process) for process in (launcher, *processes.descendants(launcher))}
        stopped = [process for process, state in states.items() if state and state.letter == processes.STOPPED]
        self._seconds = {process: self._seconds.get(process, 0.0) + elapsed for process in stopped}
        for process, seconds in self._seconds.items():
            if self.limit and seconds >= self.limit + PATIENCE:
                self.killed = True
                who = f"the launcher (process {process})" if process == launcher else processes.described(process)
                said = f"{who} has been stopped for {self.limit:g} s; the job ends"
                print(f"summa3d launch: {said}", file=sys.stderr, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


class StrandedRanks:
    """Ends a job whose ranks on this node, all there are, have ended but for some that wait in communications for `limit` s.

    As where rank 0 alone asks for a norm: nobody is left that could answer. Ranks that wait for each other, as for a long
    message, are left alone. With a limit of 0, or without records, none is ended.
    """

    def __init__(self, folder: Path | None, limit: float) -> None:
        self.folder, self.limit, self.ended = folder, limit, False
        self._waits, self._seconds, self._last = dict[int, int](), 0.0, time.monotonic()

    def look(self, launcher: int) -> None:
        """Look at the records of the ranks; say which wait for ranks that have ended, and ask the launcher to end the job."""
        elapsed, self._last = min(time.monotonic() - self._last, 2 * LOOK_EVERY), time.monotonic()
        if self.folder is None or not self.limit or self.ended:
            return
        waits = self._alone(self.folder)
        self._seconds = self._seconds + elapsed if waits and waits == self._waits else 0.0
        self._waits = waits
        if self._seconds >= self.limit and _is_hopeless(flight.read_folder(self.folder)):
            self.ended = True
            who = f"rank{'s' if len(waits) > 1 else ''} {', '.join(map(str, waits))}"
            said = f"{who} waited {self.limit:g} s for ranks that have ended: a call that they did not make; the job ends"
            print(f"summa3d launch: {said}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGTERM)

    @staticmethod
    def _alone(folder: Path) -> dict[int, int]:
        """The ranks that are left, with the number of the communication that each waits in; none where one of them is at work."""
        heads = [head for head in map(flight_files.head_of, flight_files.records_of(folder).values()) if head is not None]
        if not any(head.ended for head in heads) or len(heads) < heads[0].ranks:
            return {}  # as where other nodes have ranks
        left = flight.neighbours(folder)
        return {rank.rank: rank.number for rank in left} if all(rank.waits for rank in left) else {}


def _is_hopeless(flights: Sequence[flight.Flight]) -> bool:
    """Return whether some rank waits in a collective of ranks of which one has ended."""
    ended = {flight.rank for flight in flights if flight.ended}
    for item in flights:
        if item.waits is not None and not item.waits.what.startswith(flight.MESSAGES):
            axis = item.waits.axis
            if ended.intersection(flight.members(axis)) or axis == "all ranks" or re.search(rf"\b{item.ranks} ranks", axis):
                return True
    return False


class Child:
    """The launcher as a child in a process group of its own, so that Ctrl-C in a terminal reaches it once, and by this process.

    before : the signals that were blocked when this process began; those of PASSED_ON and SIGCHLD are blocked now

    Attributes
    ----------
    asked : the latest signal that asked this process to end; None where none did
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], before: set[int | signal.Signals]) -> None:
        kernel, interrupts = ctypes.CDLL(None), signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.asked: signal.Signals | None = None
        self._echoes, self._interrupted, self._interrupts = Path(command[0]).name == "srun", float("-inf"), 0

        def begin() -> None:
            os.setpgid(0, 0)
            kernel.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a launcher whose parent is killed ends its ranks
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it prints though it is in the background
            if interrupts:  # Python's own handler is lost at exec, with what it has noted
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        terminal = sys.stdin is not None and sys.stdin.isatty()  # of which a process in the background cannot read
        self.process = subprocess.Popen(
            list(command), env=dict(environ), preexec_fn=begin, stdin=subprocess.PIPE if terminal else None
        )
        if terminal:
            threading.Thread(target=self._feed, name="stdin", daemon=True).start()

    def wait(self, *looks: Callable[[int], None]) -> int:
        """Pass signals on until the launcher ends, and return its status as a shell gives it; 130 where it was interrupted.

        looks : are called with the launcher's process every LOOK_EVERY seconds
        """
        with self.process as child:
            while child.poll() is None:
                info = signal.sigtimedwait([*PASSED_ON, signal.SIGCHLD], LOOK_EVERY)
                if info is None:
                    for look in looks:
                        look(child.pid)
                elif info.si_signo != signal.SIGCHLD:
                    self._pass_on(info.si_signo)
        status = 128 - child.returncode if child.returncode < 0 else child.returncode
        fine = (0, preemption.STATUS) if self._interrupts < 2 else (preemption.STATUS,)  # MPICH's may end its ranks, and with 0
        return preemption.INTERRUPTED if self._interrupts and status not in fine else status

    def _pass_on(self, number: int) -> None:
        """Pass a signal on, but no echo of an interrupt, at the second of which MPICH's launcher kills the ranks.

        srun wants two within a second.
        """
        if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            self.asked = signal.Signals(number)
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted < preemption.SAME and not self._echoes:
                return
            self._interrupted, self._interrupts = now, self._interrupts + 1
        self.process.send_signal(number)

    def _feed(self) -> None:
        """Copy what is typed; nothing where this process is in the background itself."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN])
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            while typed := os.read(sys.stdin.fileno(), 1 << 16):
                pipe.write(typed)
                pipe.flush()
            pipe.close()
