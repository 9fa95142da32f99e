# What was moved: calls, words, messages, bytes and seconds per collective, axis, phase and dtype, and the workspace in use.
# Imports trace.
# Next: collectives.py, which writes every line of it; gemm/volume.py, the closed forms it must equal.
from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from .trace import Communication, Trace

PHASES = ("forward", "backward", "optimizer", "other")


@dataclass
class Amounts:
    """Amounts moved by one rank: words and bytes are those *received* (DESIGN §1).

    seconds is wall time inside the calls, cpu_seconds the thread's processor time inside them.
    """

    calls: int = 0
    words: int = 0
    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, other: Amounts) -> None:
        self.calls += other.calls  # spelled out, because every collective passes here
        self.words += other.words
        self.messages += other.messages
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(**{field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(Amounts)})


@dataclass(frozen=True)
class Row:
    """One line of the ledger."""

    collective: str
    axis: str
    phase: str
    dtype: str
    amounts: Amounts


class Watched(Amounts):
    """What a `with ledger.watch()` block moved; filled when the block ends. `rows` holds the same per line."""

    rows: list[Row]


class Ledger:
    """The account of one rank of one grid.

    `phase` names what the job is doing, so that forward, backward and optimizer are counted apart. `track` counts the
    bytes of a workspace array until it is freed, for the peak. While `trace` is set, phases and communications are kept in it.
    """

    def __init__(self) -> None:
        self.current_phase = "other"
        self.workspace_bytes = 0
        self.workspace_peak = 0
        self.trace: Trace | None = None
        self._lines: dict[tuple[str, str, str, str], Amounts] = {}

    def record(self, collective: str, axis: str, dtype: str, amounts: Amounts) -> Amounts:
        """Add `amounts` of elements of `dtype` to the line of this collective and axis in the current phase; returns the line."""
        key = (collective, axis, self.current_phase, dtype)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Amounts()
        line.add(amounts)
        return line

    def begin(self, collective: str, axis: str, dtype: str, amounts: Amounts, start: float) -> Communication | None:
        """Write in the trace, if there is one, that a communication was begun at `start`; whoever completes it writes when."""
        if self.trace is None:
            return None
        moved = (amounts.words, amounts.messages, amounts.bytes)
        return self.trace.begin(Communication(collective, axis, self.current_phase, dtype, *moved, start, amounts.seconds))

    def complete(self, line: Amounts, traced: Communication | None, seconds: float, cpu_seconds: float) -> None:
        """Add to a communication's line, and write in the trace, what completing it took."""
        line.seconds += seconds
        line.cpu_seconds += cpu_seconds
        if traced is not None:
            traced.end, traced.wait = time.perf_counter(), seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the block moves under phase `name`."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is not one of {', '.join(PHASES)}")
        before, self.current_phase = self.current_phase, name
        trace, start = self.trace, time.perf_counter()
        try:
            yield
        finally:
            self.current_phase = before
            if trace is not None:
                trace.phases.append((name, start, time.perf_counter()))

    def track(self, array: Any) -> Any:
        """Count the bytes of a workspace array while it lives; returns the array."""
        self.workspace_bytes += array.nbytes
        self.workspace_peak = max(self.workspace_peak, self.workspace_bytes)
        weakref.finalize(array, self._release, array.nbytes)
        return array

    def _release(self, nbytes: int) -> None:
        self.workspace_bytes -= nbytes

    def reset_peak(self) -> None:
        """Forget the workspace peak so far."""
        self.workspace_peak = self.workspace_bytes

    def rows(self) -> list[Row]:
        """Every line, in the order in which it first appeared."""
        return [Row(*key, _copy(amounts)) for key, amounts in self._lines.items()]

    def total(self, phase: str | None = None, axis: str | None = None, dtype: str | None = None) -> Amounts:
        """The sum over the lines of `phase`, `axis` and `dtype`; None takes all."""
        result = Amounts()
        for (_, line_axis, line_phase, line_dtype), amounts in self._lines.items():
            if phase in (None, line_phase) and axis in (None, line_axis) and dtype in (None, line_dtype):
                result.add(amounts)
        return result

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        """Yield an account that, once the block has ended, holds what the block moved."""
        before = {key: _copy(amounts) for key, amounts in self._lines.items()}
        moved = Watched()
        moved.rows = []
        yield moved
        for key, amounts in self._lines.items():
            delta = amounts.minus(before.get(key, Amounts()))
            if delta.calls:
                moved.rows.append(Row(*key, delta))
                moved.add(delta)


def _copy(amounts: Amounts) -> Amounts:
    return amounts.minus(Amounts())
