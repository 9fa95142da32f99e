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

from ..comm.health.processes import descendants, described, environment_of, launched_as, state_of

LOOK_EVERY, AT_FIRST = 100, 10
"""Milliseconds between two looks for ranks that have started, until all have been seen; and between the first FIRST looks."""
FIRST, LOOKS = 200, 800
"""Looks after which no further rank is expected: the others are on other nodes."""
SENT = (0, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a launcher sends to the other ranks when one has ended, and 0 for none."""
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 8


class FirstEnded:
    """Follows the ranks that a launcher has started on this node, in a thread."""

    def __init__(self) -> None:
        self._ranks: list[str] = []
        self._thread: threading.Thread | None = None

    def follow(self, launcher: int) -> None:
        """Follow the ranks of a launcher, on Linux; elsewhere the system does not tell when another's child ends."""
        if sys.platform == "linux":
            self._thread = threading.Thread(target=self._follow, args=(launcher,), name="ranks", daemon=True)
            self._thread.start()

    def ranks(self) -> list[str]:
        """Return the ranks that ended first, of a launcher that has ended: several where they ended at once."""
        if self._thread is not None:
            self._thread.join(20 * LOOK_EVERY / 1000)
        return self._ranks

    def _follow(self, launcher: int) -> None:
        poll, known, looks = select.poll(), dict[int, tuple[int, str]](), 0
        own, total = launched_as(environment_of(launcher)), 1

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
            self._ranks = [known[descriptor][1] for descriptor, _ in poll.poll(AT_FIRST if looks < FIRST else LOOK_EVERY)]
        look()  # for those that have not been seen when the first one ends
        while state_of(launcher) is not None:
            time.sleep(LOOK_EVERY / 1000)
        self._ranks = [who for descriptor, (_, who) in known.items() if ended_by(descriptor) not in SENT] or self._ranks
        for descriptor in known:
            os.close(descriptor)


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
