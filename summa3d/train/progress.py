"""The progress report of a run, on stderr of rank 0: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..files import whole

if TYPE_CHECKING:
    from .metrics import CoreTime, StepMetrics

PLAIN_EVERY = 10.0
"""Seconds between two plain lines."""
COLUMNS = 100
"""The longest line."""
TERMINAL_VARIABLE = "SUMMA3D_TERMINAL"
"""The columns of the terminal that `summa3d launch` was started in: behind a launcher, stderr itself is a pipe."""


class Progress:
    """Reports steps and messages. `speak` is True on rank 0 only; on other ranks, all methods do nothing."""

    def __init__(self, steps: int, speak: bool) -> None:
        self.steps, self.speak = steps, speak
        columns = _terminal_columns() if speak else 0
        self._columns = min(columns - 1, COLUMNS) if columns else COLUMNS
        self._live = _live_line(columns) if columns else None
        self._began, self._first = time.monotonic(), 0
        self._last_plain = float("-inf")
        self._validation_loss: float | None = None

    def start(self, done: int) -> None:
        """Count the time that is left from now on; `done` steps were taken before."""
        self._began, self._first = time.monotonic(), done

    def step(self, step: StepMetrics, core_time: CoreTime | None) -> None:
        """Show a step. `core_time` is the latest that is known, that of the step before."""
        if not self.speak:
            return
        if step.validation_loss is not None:
            self._validation_loss = step.validation_loss
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._describe(step, core_time, now), refresh=True)
        elif now - self._last_plain >= PLAIN_EVERY or step.validation_loss is not None or step.step == self.steps:
            self._last_plain = now
            print(self._describe(step, core_time, now), file=sys.stderr, flush=True)

    def doing(self, text: str) -> None:
        """Show what is done now: on the live line until it changes, else on a line of its own."""
        if self._live is not None:
            self._live.update(text[: self._columns], refresh=True)
        else:
            self.say(text)

    def say(self, text: str) -> None:
        """Print `text` on lines of its own."""
        if not self.speak:
            return
        wrapped = textwrap.fill(text, self._columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if self._live is not None:
            self._live.console.print(wrapped)
        else:
            print(wrapped, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the live line; its last text stays on the terminal."""
        if self._live is not None:
            self._live.stop()

    def _describe(self, step: StepMetrics, core_time: CoreTime | None, now: float) -> str:
        left = (now - self._began) / max(step.step - self._first, 1) * (self.steps - step.step)
        parts = [f"step {step.step}/{self.steps} {step.step / self.steps:.0%}", f"{clock(left)} left", f"loss {step.loss:.4f}"]
        if self._validation_loss is not None:
            parts.append(f"val {self._validation_loss:.4f}")
        parts.append(f"{step.tokens / step.seconds:,.0f} tok/s")
        if core_time is not None:
            parts += core_time.brief()
        while len(line := " · ".join(parts)) > self._columns and len(parts) > 1:
            parts.pop()
        return line


class Pulse:
    """Says on stderr, at most every PLAIN_EVERY seconds, how far a command is that prints nothing until its end.

    command : in whose name. speak : False on all ranks but one
    """

    def __init__(self, command: str, speak: bool = True) -> None:
        self._command, self._speak = command, speak
        self._began = self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Say it, unless something was said, or the command begun, less than PLAIN_EVERY seconds ago."""
        now = time.monotonic()
        if self._speak and now - self._last >= PLAIN_EVERY:
            self._last = now
            print(f"summa3d {self._command}: {text}, {clock(now - self._began)} so far", file=sys.stderr, flush=True)

    def of(self, what: str) -> Callable[[int, int], None]:
        """Return a callback of (done, total) that prints the progress of `what`, with the remaining time by the mean so far."""
        began = time.monotonic()

        def tell(done: int, total: int) -> None:
            left = f", about {clock((time.monotonic() - began) / done * (total - done))} left" if done else ""
            self.say(f"{what} {min(done + 1, total)} of {total}{left}")

        return tell


SILENT = Progress(0, speak=False)
"""Reports nothing."""


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds.

    >>> clock(61.2), clock(7262)
    ('1:01', '2:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _terminal_columns() -> int:
    """The columns of the terminal that stderr is shown on; 0 where there is none."""
    if sys.stderr.isatty():
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    return whole(os.environ.get(TERMINAL_VARIABLE, "")) or 0


def _live_line(columns: int):  # type: ignore[no-untyped-def]
    """A live line that this thread redraws at every step: a second thread would take CPU time from the ranks."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, force_terminal=True, width=columns, highlight=False, markup=False, emoji=False)
    return Live(console=console, auto_refresh=False, redirect_stdout=False)
