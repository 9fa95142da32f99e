"""What is gathered behind products that do not need it yet, in the order in which it was started."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ...comm.grid import BaseGrid


class OnItsWay(Protocol):
    """An operand on its way."""

    @property
    def done(self) -> bool:
        """Return whether all of it is here."""

    def step(self) -> None:
        """Take what has arrived, and start what comes next."""

    def fill(self) -> bool:
        """Start as much as may be under way while nothing else is; whether all has started."""

    def finish(self) -> None:
        """Return once all of it is here."""


class BehindQueue:
    """What is gathered behind products, in the order in which it was started, alike on all ranks.

    One is under way at a time, and the next once it is here; behind long arithmetic, several.
    """

    def __init__(self) -> None:
        self._waiting: deque[OnItsWay] = deque()

    @classmethod
    def of(cls, grid: BaseGrid) -> BehindQueue:
        """That of a job, which all parts of its grid share."""
        result: BehindQueue = grid.job.kept[cls].setdefault("queue", cls())
        return result

    def __bool__(self) -> bool:
        """Return whether something is not waited for yet: alike on all members of its axis, whatever has arrived."""
        return bool(self._waiting)

    def add(self, item: OnItsWay) -> None:
        """Put one behind the others; it begins at once if it is the only one."""
        self._waiting.append(item)
        if len(self._waiting) == 1:
            item.step()

    def step(self) -> None:
        """Let the next piece begin, where the last one has arrived: called where nothing that is waited for is under way."""
        for item in self._waiting:
            if not item.done:
                item.step()
                return

    def fill(self) -> None:
        """Let as much be under way as delays nothing else: called before long arithmetic between whose parts nothing steps."""
        for item in self._waiting:
            if not item.fill():
                return

    def advance_to(self, item: OnItsWay) -> None:
        """Complete all that were started before one of them, which is about to be used."""
        while item in self._waiting and self._waiting[0] is not item:
            self._waiting.popleft().finish()

    def finish(self, item: OnItsWay) -> None:
        """Complete all up to one of them, in order."""
        self.advance_to(item)
        if item in self._waiting:
            item.finish()
            self._waiting.popleft()
