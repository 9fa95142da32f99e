"""The launcher as a child: signals are passed on, and after a failure its ranks' flight recorders say who waited for whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .. import preemption
from ..comm.profile import flight, flight_files, processes
from ..node_support import watchdog_seconds
from . import segments
from .ended import FirstEnded

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
FROM_KERNEL = 0x80
"""si_code of a signal that the terminal sent: to the launcher as well."""
PR_SET_PDEATHSIG = 1
INTERRUPTED = (130, -signal.SIGINT)
LOOK_EVERY = 1.0
"""Seconds between two looks at the ranks; if the launch itself was stopped meanwhile, twice as many count."""
PATIENCE = 6.0
"""Seconds beyond the limit, so that ranks that are not stopped may speak first: they know more."""
LONG = 5.0
"""Seconds that a rank must have waited when a job is interrupted, for the interruption to look like the end of a hang."""


def follow(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a launcher to its end, and say what the ranks were doing if it failed; its exit status, as a shell gives it.

    A process of the job that stays stopped beyond the limit of the watchdog is killed, and so the launcher ends the job.

    Raises OSError where it cannot be started, ConfigError for an unknown value of SUMMA3D_WATCHDOG.
    """
    first, stopped, began = FirstEnded(), Stopped(watchdog_seconds()), time.time()
    named = environ.get(flight.VARIABLE)
    folder = flight_files.new_folder() if named is None else None
    try:
        status = _run(command, {**environ, flight.VARIABLE: str(folder)} if folder else dict(environ), stopped, first.follow)
        if status != 0:
            segments.remove_left(began)
        if status not in (0, preemption.STATUS) and folder is not None:
            reported = stopped.killed or any(folder.glob(f"{flight_files.CLAIM}*"))
            if first.ranks and status not in INTERRUPTED and not reported:
                print(f"summa3d launch: {', '.join(first.ranks)} ended first, without a report", file=sys.stderr)
            for line in told(folder, time.time(), LONG if status in INTERRUPTED else 0.0):
                print(line, file=sys.stderr)
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):  # its ranks have removed it, or one of them still does
                flight_files.remove(folder)
    return 128 - status if status < 0 else status


def told(folder: Path, now: float, at_least: float = 0.0) -> list[str]:
    """The table of who waited for whom when the job of these recorders ended, and where they are kept from now on.

    Empty where nobody waited, or no one as long as `at_least` seconds.
    """
    flights = flight.read_folder(folder)
    longest = max((now - one.waits.began for one in flights if one.waits), default=-1.0)
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
        """Look at what the launcher has started; say which processes have been stopped for too long, and kill them."""
        elapsed, self._last = min(time.monotonic() - self._last, 2 * LOOK_EVERY), time.monotonic()
        states = {process: processes.state_of(process) for process in processes.descendants(launcher)}
        stopped = [process for process, state in states.items() if state and state.letter == processes.STOPPED]
        self._seconds = {process: self._seconds.get(process, 0.0) + elapsed for process in stopped}
        for process, seconds in self._seconds.items():
            if self.limit and seconds >= self.limit + PATIENCE:
                self.killed = True
                said = f"{processes.described(process)} has been stopped for {self.limit:g} s; the job ends"
                print(f"summa3d launch: {said}", file=sys.stderr, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _run(command: Sequence[str], environ: Mapping[str, str], stopped: Stopped, started: Callable[[int], None]) -> int:
    """Start the launcher, pass signals on to it until it ends, and return its status; negative, the signal that ended it.

    stopped : looks at its processes. started : called with the launcher's process
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*PASSED_ON, signal.SIGCHLD])
    kernel = ctypes.CDLL(None)

    def begin() -> None:
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a launcher whose parent is killed ends its ranks
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with subprocess.Popen(list(command), env=dict(environ), preexec_fn=begin) as child:
            started(child.pid)
            while child.poll() is None:
                info = signal.sigtimedwait([*PASSED_ON, signal.SIGCHLD], LOOK_EVERY)
                if info is None:
                    stopped.look(child.pid)
                elif info.si_signo != signal.SIGCHLD and info.si_code != FROM_KERNEL and child.poll() is None:
                    child.send_signal(info.si_signo)
            return child.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
