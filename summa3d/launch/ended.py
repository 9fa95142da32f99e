"""Which rank of a job ended first: the one that was killed, where no rank could say why it fails."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading

from ..comm.health.processes import descendants, described, environment_of, launched_as, state_of

LOOK_EVERY = 100
"""Milliseconds between two looks for ranks that have started, until all have been seen."""
LOOKS = 600
"""Looks after which no further rank is expected: the others are on other nodes."""


class FirstEnded:
    """Follows the ranks that a launcher has started on this node, in a thread.

    Attributes
    ----------
    ranks : those that were seen to end first: several where they ended at once
    """

    def __init__(self) -> None:
        self.ranks: list[str] = []

    def follow(self, launcher: int) -> None:
        """Follow the ranks of a launcher, on Linux; elsewhere the system does not tell when another's child ends."""
        if sys.platform == "linux":
            threading.Thread(target=self._follow, args=(launcher,), name="ranks", daemon=True).start()

    def _follow(self, launcher: int) -> None:
        poll, known, looks = select.poll(), dict[int, tuple[int, str]](), 0
        own, total = launched_as(environment_of(launcher)), 1
        while not self.ranks and state_of(launcher) is not None:
            looks += 1
            for process in descendants(launcher) if len(known) < total and looks < LOOKS else ():
                launched = launched_as(environment_of(process))
                if launched in (None, own) or any(launched[1] == rank for rank, _ in known.values()):
                    continue  # it is no rank, or one has started it
                with contextlib.suppress(OSError):  # it has ended
                    descriptor = os.pidfd_open(process)
                    poll.register(descriptor, select.POLLIN)
                    known[descriptor] = launched[1], described(process)
                    total = launched[0]
            self.ranks = [known[descriptor][1] for descriptor, _ in poll.poll(LOOK_EVERY)]
        for descriptor in known:
            os.close(descriptor)
