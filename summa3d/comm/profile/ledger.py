"""The ledger: calls, words, messages, bytes and seconds by collective, axis, phase and dtype, and workspace in use."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ...columns import aligned
from ..device.arrays import Array, dtype_name, is_on_device
from .nvtx import Ranges
from .timeline import Span, Timeline
from .trace import COPIES, PRODUCTS, Communication, Stretch, Trace, Work

if TYPE_CHECKING:
    from ..device.backend import Backend

PHASES = ("forward", "backward", "optimizer", "other")
NOTHING = nullcontext()


@dataclass
class Amounts:
    """Amounts moved by one rank: words (elements) and bytes are those *received*.

    seconds is wall time inside the calls, cpu_seconds the thread's processor time inside them. Of arrays on a device, seconds
    are the device's, between events around the work, and are added once the device has passed them (`Ledger.settle`); what
    MPI does for them on the host is added at once, without the time for which the host waits for the device.
    """

    calls: int = 0
    words: int = 0
    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, other: Amounts) -> None:
        """Add `other` in place."""
        self.calls += other.calls
        self.words += other.words
        self.messages += other.messages
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds

    def wait(self, seconds: float, cpu_seconds: float) -> None:
        """Add what the completion of a communication took."""
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds


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
    bytes of a workspace array until it is freed, for the peak. From `start_trace` to `stop_trace`, phases, products, copies and
    communications are kept in a trace. `ranges`, where set, shows phases and communications to a profiler. `device` is that
    of the grid's arrays; None, CuPy's.

    `control` counts the bytes received in comparing calls over the ranks: at the first use of a kind of call, and at each with
    `check`. They are in no line, so that words are those of the operations alone.
    """

    def __init__(self, device: Backend | None = None) -> None:
        self.current_phase = "other"
        self.workspace_bytes = 0
        self.workspace_peak = 0
        self.control = 0
        self.trace: Trace | None = None
        self._ranges: Ranges | None = None
        self.timeline = Timeline(device)
        self._lines: dict[tuple[str, str, str, str], Amounts] = {}
        self._tracked: dict[int, tuple[weakref.ref[Any], int]] = {}

    by_steps = False
    """Whether products, and the start and the end of each communication, must be reported: by `product`, `begin`, `complete`."""
    alike: Callable[[Sequence[Hashable]], Iterable[int]] = staticmethod(lambda kinds: range(len(kinds)))
    """The places of `kinds`, in order, for a loop that does the same at places of one kind: a dry run leaves most out."""

    @property
    def ranges(self) -> Ranges | None:
        """The ranges that show phases and communications to a profiler; None, none do."""
        return self._ranges

    @ranges.setter
    def ranges(self, ranges: Ranges | None) -> None:
        self._ranges = ranges
        self.by_steps = ranges is not None or self.trace is not None

    def line(self, collective: str, axis: str, dtype: str) -> Amounts:
        """The line of this collective, axis and dtype in the current phase, to add to."""
        return self._lines.setdefault((collective, axis, self.current_phase, dtype), Amounts())

    def begin(self, collective: str, axis: str, dtype: str, amounts: Amounts, start: float, issue: float) -> Communication | None:
        """Write in the trace, if there is one, that a communication was begun at `start`, in a call of `issue` seconds.

        `complete` fills in its end.
        """
        if self.trace is None:
            return None
        moved = (amounts.words, amounts.messages, amounts.bytes)
        communication = Communication(collective, axis, self.current_phase, dtype, *moved, start, issue)
        self.trace.communications.append(communication)
        return communication

    def complete(self, line: Amounts, traced: Communication | None, seconds: float, cpu_seconds: float, wait: float) -> None:
        """Add to a communication's line what completing it took, and write in the trace how long the host was at it, `wait`."""
        line.wait(seconds, cpu_seconds)
        if traced is not None:
            traced.end, traced.wait = time.perf_counter(), wait

    def expect(self, line: Amounts, traced: Communication | None, spans: Sequence[Span]) -> None:
        """Have the seconds of `spans` added to a communication's line, and written in the trace, once its device has passed."""
        for span in spans:
            span.account = partial(_passed, line, None if traced is None else traced.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the block moves under phase `name`."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is not one of {', '.join(PHASES)}")
        before, self.current_phase = self.current_phase, name
        trace, start = self.trace, time.perf_counter()
        try:
            with NOTHING if self.ranges is None else self.ranges.around(name):
                yield
        finally:
            self.current_phase = before
            if trace is not None:
                trace.phases.append((name, start, time.perf_counter()))

    # -- the trace ----------------------------------------------------------------------------------------------------------

    def start_trace(self, trace: Trace | None = None) -> Trace:
        """Keep in `trace`, a new one by default, what happens from now on; the device's clock is tied to the host's."""
        self.trace, self.by_steps = Trace() if trace is None else trace, True
        self.timeline.settle()
        self.timeline.follow()
        return self.trace

    def stop_trace(self) -> Trace:
        """The trace, complete: waits for the device."""
        trace, self.trace, self.by_steps = self.trace or Trace(), None, self.ranges is not None
        self.timeline.settle()
        if self.timeline.used:
            trace.error = max(trace.error or 0.0, self.timeline.error)
        self.timeline.forget()
        return trace

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """A span of the trace around phases, or around products that have none; and a range for a profiler."""
        start, before = time.perf_counter(), 0.0 if self.trace is None else self._arithmetic()
        with NOTHING if self.ranges is None else self.ranges.around(name):
            yield
        if self.trace is not None:
            self.trace.runs.append((name, start, time.perf_counter()))
            self.trace.arithmetic.append((name, self._arithmetic() - before))

    def _arithmetic(self) -> float:
        """The processor time of this thread outside communications."""
        return time.thread_time() - sum(amounts.cpu_seconds for amounts in self._lines.values())

    def product(self, a: Array, b: Array, form: str, out: Array, made: int | None = None) -> AbstractContextManager[None]:
        """Around a local product out = op(A)·op(B), of one or of many matrices, or `made` elements of it: a span of the trace."""
        if self.trace is None:
            return NOTHING
        *batch, rows, columns = a.shape
        (m, k), n = (rows, columns) if form[0] == "n" else (columns, rows), b.shape[-1 if form[1] == "n" else -2]
        kind = dtype_name(a)
        flops = (8 if kind.startswith("complex") else 2) * (prod([*batch, m, n]) if made is None else made) * k
        about = {"m": m, "n": n, "k": k, "form": form, "flops": flops}
        return self._working(self.trace, PRODUCTS, f"product {form}", out, {**about, "dtype": kind})

    def copy(self, target: Array) -> AbstractContextManager[None]:
        """Around a local copy into `target`: a span of the trace, if there is one."""
        if self.trace is None:
            return NOTHING
        return self._working(self.trace, COPIES, "copy", target, {"bytes": target.nbytes, "dtype": dtype_name(target)})

    @contextmanager
    def _working(self, trace: Trace, kind: str, name: str, out: Array, about: dict[str, Any]) -> Iterator[None]:
        timeline = self.timeline
        stream = timeline.backend.current(out) if is_on_device(out) else None
        mark = None if stream is None else timeline.start(stream)
        start = time.perf_counter()
        yield
        work = Work(kind, name, {**about, "phase": self.current_phase}, start, time.perf_counter() - start)
        trace.work.append(work)
        if stream is not None and mark is not None:
            span = Span(name)
            span.account = partial(_passed, None, work.device)
            timeline.stop(mark, stream, span)

    # -- workspace ----------------------------------------------------------------------------------------------------------

    def track(self, array: Any, stays: bool = False) -> Any:
        """Count the bytes of a workspace array while it lives; returns the array.

        stays : whether it does from one product to the next, which a dry run counts apart
        """
        nbytes = array.nbytes
        self.workspace_bytes += nbytes
        if self.workspace_bytes > self.workspace_peak:
            self.workspace_peak = self.workspace_bytes
        reference = weakref.ref(array, self._release)
        self._tracked[id(reference)] = reference, nbytes
        return array

    def _release(self, reference: weakref.ref[Any]) -> None:
        self.workspace_bytes -= self._tracked.pop(id(reference))[1]

    def reset_peak(self) -> None:
        """Forget the workspace peak so far."""
        self.workspace_peak = self.workspace_bytes

    # -- reading ------------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """A table of the lines, and their sum."""
        rows = [(row.collective, row.axis, row.phase, row.dtype, row.amounts) for row in self.rows()]
        lines = [
            (*names, *(f"{number:,}" for number in (of.calls, of.words, of.messages, of.bytes)), f"{of.seconds:.3g}")
            for *names, of in (*rows, ("total", "", "", "", self.total()))
        ]
        head = ("collective", "axis", "phase", "dtype", "calls", "words", "messages", "bytes", "seconds")
        return "\n".join(aligned([head, *lines], left=range(4)))

    def rows(self) -> list[Row]:
        """Every line, in the order in which it first appeared; of a device, the seconds that are known without waiting."""
        self.timeline.collect()
        return [Row(*key, copy(amounts)) for key, amounts in self._lines.items()]

    def total(self, phase: str | None = None, axis: str | None = None, dtype: str | None = None) -> Amounts:
        """The sum over the lines of `phase`, `axis` and `dtype`; None takes all."""
        result = Amounts()
        for row in self.rows():
            if phase in (None, row.phase) and axis in (None, row.axis) and dtype in (None, row.dtype):
                result.add(row.amounts)
        return result

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        """Yield an account that, once the block has ended, holds what the block moved.

        Nothing waits for a device: for its seconds call `timeline.settle` before the block and at its end.
        """
        self.timeline.collect()
        before = {key: copy(amounts) for key, amounts in self._lines.items()}
        moved = Watched()
        moved.rows = []
        yield moved
        self.timeline.collect()
        for key, amounts in self._lines.items():
            old = before.get(key, Amounts())
            delta = Amounts(*(getattr(amounts, field.name) - getattr(old, field.name) for field in fields(Amounts)))
            if delta.calls:
                moved.rows.append(Row(*key, delta))
                moved.add(delta)


def _passed(
    line: Amounts | None, device: list[Stretch] | None, name: str, seconds: float, own: float, start: float | None
) -> None:
    """A device has passed a span: `own` of its seconds are those of the ledger's line, all of them a stretch of the trace."""
    if line is not None:
        line.seconds += own
    if device is not None and start is not None:
        device.append(Stretch(name, start, seconds))
