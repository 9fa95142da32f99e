"""Which rank of a job ended first: the one that was killed, where no rank could say why it fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import threading
import time
from ctypes import CDLL
from pathlib import Path

from ..comm.health import flight_files
from ..comm.health.processes import descendants, described, environment_of, launched_as, state_of
from ..files import whole

LOOK_EVERY, AT_FIRST = 100, 10
"""Milliseconds between two looks for ranks that have started, until all have been seen; and between the first FIRST looks."""
FIRST, LOOKS = 200, 800
"""Looks after which no further rank is expected: the others are on other nodes."""
SENT = (0, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a launcher sends to the other ranks when one has ended, and 0 for none."""
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 8
IN_ATTRIB, IN_CLOSE_WRITE = 0x4, 0x8
EVENT = struct.Struct("iIII")
"""An event of inotify: watch, kind, cookie, and the bytes of the name that follows."""
EVENTS = 1 << 16
"""Bytes of them that are read: the first ones decide."""


class FirstEnded:
    """Follows the ranks that a launcher has started on this node, in a thread."""

    def __init__(self) -> None:
        self._ranks: list[str] = []
        self._died: list[str] = []
        self._thread: threading.Thread | None = None

    def follow(self, launcher: int, folder: Path | None) -> None:
        """Follow the ranks of a launcher, on Linux; elsewhere the system does not tell when another's child ends.

        folder : that of their records
        """
        if sys.platform == "linux":
            self._thread = threading.Thread(target=self._follow, args=(launcher, folder), name="ranks", daemon=True)
            self._thread.start()

    def ranks(self, reported: bool) -> list[str]:
        """Return the ranks that ended first, of a launcher that has ended: several where they ended at once.

        reported : some rank has reported a failure, and then ended the others; the one that had ended before, if one had
        """
        if self._thread is not None:
            self._thread.join(20 * LOOK_EVERY / 1000)
        return self._died if reported else self._ranks

    def _follow(self, launcher: int, folder: Path | None) -> None:
        closings = -1 if folder is None else closings_in(folder)
        poll, known, looks = select.poll(), dict[int, tuple[int, str]](), 0
        own, total, seen = launched_as(environment_of(launcher)), 1, list[tuple[int, str]]()

        def look() -> None:
            nonlocal total
            for process in descendants(launcher):
                launched = launched_as(environment_of(process))
                if launched in (None, own) or any(launched[1] == rank for rank, _ in known.values()):
                    continue  # it is no rank, or one has started it
                with contextlib.suppress(OSError):  # it has ended
                    descriptor = os.pidfd_open(process)
                    poll.register(descriptor, select.POLLIN)
                    known[descriptor] = launched[1], described(process)
                    total = launched[0]

        while not self._ranks and state_of(launcher) is not None:
            looks += 1
            if len(known) < total and looks < LOOKS:
                look()
            seen = [known[descriptor] for descriptor, _ in poll.poll(AT_FIRST if looks < FIRST else LOOK_EVERY)]
            self._ranks = [who for _, who in seen]
        look()  # for those that have not been seen when the first one ends
        while state_of(launcher) is not None:
            time.sleep(LOOK_EVERY / 1000)
        whose, closed = dict(known.values()), ended_in_order(closings)
        if folder is not None and closed and closed[0] in whose:
            self._ranks = [whose[closed[0]], *(who for rank, who in seen if rank not in closed)]
            head = flight_files.head_of(folder / f"{closed[0]}{flight_files.SUFFIX}")
            self._died = self._ranks[:1] if head is not None and not head.ended else []
        self._ranks = [who for descriptor, (_, who) in known.items() if ended_by(descriptor) not in SENT] or self._ranks
        for descriptor in known:
            os.close(descriptor)


def closings_in(folder: Path) -> int:
    """Descriptor from which `ended_in_order` reads which records in a folder were closed; -1 where there is none."""
    kernel = CDLL(None)
    descriptor: int = kernel.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    kernel.inotify_add_watch(descriptor, os.fsencode(folder), IN_CLOSE_WRITE | IN_ATTRIB)
    return descriptor


def ended_in_order(closings: int) -> list[int]:
    """The ranks that ended before one of them ended the others (`flight.ends_others`), in order; closes the descriptor.

    A rank closes its record before the connections by which its launcher hears of its end (`flight_files.keep_open`).
    """
    events, at, ranks = b"", 0, list[int]()
    with contextlib.suppress(OSError):  # it was none, or nothing has happened
        events = os.read(closings, EVENTS)
    with contextlib.suppress(OSError):
        os.close(closings)
    while at < len(events):
        _, kind, _, length = EVENT.unpack_from(events, at)
        name = Path(os.fsdecode(events[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0")))
        at += EVENT.size + length
        rank = whole(name.stem) if name.suffix == flight_files.SUFFIX else None
        if rank is not None and kind == IN_ATTRIB:
            break
        if rank is not None and rank not in ranks:
            ranks.append(rank)
    return ranks


def ended_by(descriptor: int) -> int:
    """The signal that ended a process, from its descriptor once its parent has asked; 0 where none, or before Linux 6.15.

    A launcher sees the connections of a rank close, and kills the others, before that rank has ended, so the order may be theirs.
    """
    with contextlib.suppress(OSError):
        info = fcntl.ioctl(descriptor, PIDFD_GET_INFO, struct.pack("Q56x", PIDFD_INFO_EXIT))
        mask, status = struct.unpack("Q52xi", info)
        if mask & PIDFD_INFO_EXIT:
            return status & 0x7F
    return 0
