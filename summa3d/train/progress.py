"""The progress report of a run, on stderr of rank 0: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .metrics import CoreTime, Step

PLAIN_EVERY = 10.0
"""Seconds between two plain lines."""


class Progress:
    """Reports steps and messages. `speak` is True on rank 0 only; on other ranks, all methods do nothing."""

    def __init__(self, steps: int, speak: bool) -> None:
        self.steps, self.speak = steps, speak
        self._live = _live_line() if speak and sys.stderr.isatty() else None
        self._last_plain = float("-inf")
        self._validation_loss: float | None = None

    def step(self, step: Step, core_time: CoreTime | None) -> None:
        """Show a step. `core_time` is the latest that is known, that of the step before."""
        if not self.speak:
            return
        if step.validation_loss is not None:
            self._validation_loss = step.validation_loss
        text = self._describe(step, core_time)
        if self._live is not None:
            self._live.update(text, refresh=True)
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY or step.validation_loss is not None or step.step == self.steps:
            self._last_plain = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print `text` on a line of its own."""
        if not self.speak:
            return
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the live line; its last text stays on the terminal."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _describe(self, step: Step, core_time: CoreTime | None) -> str:
        parts = [f"step {step.step}/{self.steps}", f"loss {step.loss:.4f}"]
        if self._validation_loss is not None:
            parts.append(f"validation {self._validation_loss:.4f}")
        parts += [f"{step.tokens / step.seconds:,.0f} tokens/s", f"{step.words:,} words moved"]
        if core_time is not None:
            parts.append(str(core_time))
        return " · ".join(parts)


def _live_line():  # type: ignore[no-untyped-def]
    """A live line that this thread redraws at every step: a second thread would take CPU time from the ranks."""
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(stderr=True), auto_refresh=False)
