"""What ends a job that hangs: a deadline for steps, and ranks of a node that look whether the others are stopped or asleep.

The system tells a rank that is stopped, or asleep, from one that is busy: a heartbeat of its own would miss beats in a long call
that holds the interpreter's lock. Ranks look only while they themselves do not communicate.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, NoReturn

from mpi4py import MPI

from . import flight, processes
from .failure import STDERR, TIME_TO_BE_HEARD, WAIT_FOR_THE_END, abort, has_peers, prepare_for_failure, save_flight, where, who

LOOK_EVERY = 1.0
"""Seconds between two looks; a rank that was stopped itself counts no more than twice as many."""
PATIENCE = 3.0
"""Seconds beyond the limit, so that a deadline for steps, whose report has stacks, is the first to speak."""
AWAKE = 0.02
"""The part of a core that a rank takes which is not asleep."""
SHOW_STACKS = signal.SIGRTMAX - 1
"""The signal on which a rank prints the stack traces of all its threads, also while one of them holds the GIL."""
STOPPED, ASLEEP, WAITS, WORKS = "is stopped", "is asleep outside of any communication", "waits in a communication", "works"
SILENT = (STOPPED, ASLEEP)


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Ends a job that makes no progress: unless `touch` is called every `seconds`, this rank prints its stacks and ends the job.

    Every stuck rank prints before the first one ends the job (`GRACE` seconds later), and one of a node names stopped ranks.
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
        if flight.recorder is not None and flight.claim_node():
            stopped = {rank: STOPPED for rank in ranks_here(flight.recorder) if kind_of(rank) == STOPPED}
            os.write(self.output, "".join(f"{line}\n" for line in said(stopped)).encode())
            save_flight()
            sys.stderr.flush()
        if not self._stopped.wait(self.GRACE):
            faulthandler.cancel_dump_traceback_later()
            abort(1)

    def _stacks(self) -> str:
        """Return the stacks of all threads but the watchdog's own, as one text so that ranks do not mix their lines."""
        rank = who() if has_peers() else f"this process{where()}"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"{rank}: {self.what} for {self.seconds:g} s; the job ends. Its stacks, innermost call last:\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"  thread {names.get(ident, ident)}:\n")
                lines += ["  " + line for line in traceback.format_stack(frame)]
        return "".join(lines)


def ranks_here(recorder: flight.Recorder) -> list[flight.Neighbour]:
    """The ranks of this node that have not ended: those with a record, and of those without one the ones that are stopped."""
    ranks = flight.neighbours(recorder.file.parent)
    for process in set(processes.children(os.getppid())) - {rank.process for rank in ranks}:
        state, launched = processes.state_of(process), processes.launched_as(processes.environment_of(process))
        if state is not None and state.letter == processes.STOPPED and launched is not None:
            ranks.append(flight.Neighbour(launched[1], process, 0, False))
    return ranks


def kind_of(rank: flight.Neighbour, before: Look | None = None, elapsed: float = 0.0) -> str:
    """State of a rank of this node; `before` is what was seen of it `elapsed` seconds ago, None of one that is new."""
    state = processes.state_of(rank.process)
    if state is not None and state.letter == processes.STOPPED:
        return STOPPED
    if state is None or before is None or before.number != rank.number:
        return WORKS
    if rank.waits:
        return WAITS
    idle = state.letter == processes.ASLEEP and state.seconds - before.seconds < AWAKE * elapsed
    return ASLEEP if idle and not processes.reads_or_writes(rank.process) else WORKS


class Look(NamedTuple):
    """What was seen of a rank: the number of its communications, its processor seconds, and how long it has been silent."""

    number: int
    seconds: float
    silent: float


class NodeWatch:
    """Ends the job when a rank of this node is stopped, or asleep outside of communication, for `seconds`; names it.

    It also ends a job of which every rank on this node waits for a communication, or is silent, that long. A rank that computes,
    reads, writes, or waits in another call of MPI, is at work.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._looks: dict[int, Look] = {}
        self._stuck = 0.0  # seconds for which no rank of the node has been at work
        faulthandler.register(SHOW_STACKS, file=STDERR, all_threads=True)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        number, last = 0, time.monotonic()
        while True:
            time.sleep(LOOK_EVERY)
            elapsed, last = min(time.monotonic() - last, 2 * LOOK_EVERY), time.monotonic()
            recorder = flight.recorder
            if recorder is None or not self.seconds:
                continue
            if recorder.number != number:
                number, self._stuck = recorder.number, 0.0
                self._looks.clear()
            elif report := self.look(ranks_here(recorder), elapsed):
                self._end(report)

    def look(self, ranks: Sequence[flight.Neighbour], elapsed: float) -> dict[flight.Neighbour, str]:
        """Look at the ranks of this node, `elapsed` seconds after the last time; those that end the job, and what each does."""
        limit, looks, kinds = self.seconds + PATIENCE, {}, {}
        for rank in ranks:
            before, state = self._looks.get(rank.process), processes.state_of(rank.process)
            kinds[rank] = kind = kind_of(rank, before, elapsed)
            silent = elapsed + (before.silent if before else 0.0) if kind in SILENT else 0.0
            looks[rank.process] = Look(rank.number, state.seconds if state else 0.0, silent)
        self._looks = looks
        self._stuck = 0.0 if WORKS in kinds.values() else self._stuck + elapsed
        if self._stuck >= limit:
            return kinds
        return {rank: kind for rank, kind in kinds.items() if looks[rank.process].silent >= limit}

    def _end(self, kinds: Mapping[flight.Neighbour, str]) -> NoReturn:
        """Say which ranks end the job, with the stacks of those that are asleep, and end it."""
        if flight.claim_node():
            lines = [f"for {self.seconds:g} s nothing has gone on; the job ends:", *said(kinds)]
            os.write(STDERR, "".join(f"{line}\n" for line in lines).encode())
            for rank, kind in kinds.items():
                if kind == ASLEEP:
                    with contextlib.suppress(OSError):
                        os.kill(rank.process, SHOW_STACKS)
            if ASLEEP in kinds.values():
                time.sleep(Watchdog.GRACE)
            save_flight()
            sys.stderr.flush()
            time.sleep(TIME_TO_BE_HEARD)
            for rank, kind in kinds.items():
                if kind == STOPPED:  # hydra waits for it, where it has not initialized MPI
                    with contextlib.suppress(OSError):
                        os.kill(rank.process, signal.SIGKILL)
        else:
            time.sleep(WAIT_FOR_THE_END)
        abort(1)


def said(kinds: Mapping[flight.Neighbour, str]) -> list[str]:
    """A line for each of these ranks of this node, and one for those of which it has no record."""
    lines = [f"  rank {rank.rank} (process {rank.process}) {kind}" for rank, kind in kinds.items()]
    missing = flight.unrecorded()
    if missing:
        lines.append(f"  no record of rank {', '.join(map(str, missing))} here: of another node, or not started")
    return lines


_watch: NodeWatch | None = None


def watch(seconds: float) -> None:
    """Watch the ranks of this node from now on; nothing for 0 s, and where no recorder has been started.

    Call it on every rank.
    """
    global _watch
    if seconds and flight.recorder is not None:
        _watch = NodeWatch(seconds)


def guard(comm: MPI.Intracomm, seconds: float) -> None:
    """Let a failure of one rank end the job (`prepare_for_failure`), and, of a script, watch its ranks from its first grid on."""
    if prepare_for_failure(comm):
        watch(seconds)


def limit(seconds: float) -> None:
    """Change after how many seconds a watched job is ended."""
    if _watch is not None:
        _watch.seconds = seconds
