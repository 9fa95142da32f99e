"""The trace: phases, products, copies and communications of all ranks on one clock, for Perfetto."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ...errors import ConfigError, DataError
from ...files import replace_text

PHASES, RUNS, PRODUCTS, COPIES = "phases", "runs", "products", "copies"
ON_DEVICE = " on the device"
MICRO = 1e6  # a trace counts in µs


@dataclass
class Stretch:
    """What a device did for something: on the host's clock, between two events of its stream."""

    name: str
    start: float
    seconds: float


@dataclass
class Communication:
    """One communication of one rank: begun in a call that took `issue` seconds, completed in a wait that took `wait`.

    Both are the host's; `device` holds when a device was at it, if one was.
    """

    name: str
    axis: str
    phase: str
    dtype: str
    words: int
    messages: int
    bytes: int
    start: float
    issue: float
    end: float = 0.0
    wait: float = 0.0
    device: list[Stretch] = field(default_factory=list)


@dataclass
class Work:
    """One product or copy of one rank: the call that made it, on the host, and when its device was at it, if one was."""

    kind: str
    name: str
    about: dict[str, Any]
    start: float
    seconds: float
    device: list[Stretch] = field(default_factory=list)


@dataclass
class Trace:
    """What one rank did: runs and the phases in them as (name, start, end), and its work and communications, as begun.

    arithmetic : (name, seconds) of each run: the processor time of its thread outside communications
    error : how far the device's times may be off on the host's clock, in seconds; None where no device was at work.
    """

    phases: list[tuple[str, float, float]] = field(default_factory=list)
    runs: list[tuple[str, float, float]] = field(default_factory=list)
    arithmetic: list[tuple[str, float]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    error: float | None = None


def check_file(path: Path, option: str = "--trace") -> None:
    """Raise ConfigError unless `option` names a file in a folder that there is."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise ConfigError(f"{option} {path} {what}. Name a file in a folder that exists.")


def write(path: Path, trace: Trace, comm: MPI.Intracomm) -> None:
    """Write the traces of all ranks of `comm` to one JSON file, on rank 0's clock (collective).

    A process for each rank; tracks for its phases, runs, products, copies, and for each axis. On an axis's track lie the calls
    that begin a communication and the waits that complete one; above them each communication from begin to end, with its words,
    messages, bytes and phase. What a device did has tracks of its own, by events of its streams.
    Raises DataError on all ranks where rank 0 cannot write it.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    one_clock = bool(comm.allreduce(node.size == comm.size, MPI.MIN))
    node.Free()
    comm.Barrier()
    here = time.perf_counter()
    offset = 0.0 if one_clock else comm.bcast(here) - here
    parts = comm.gather((_Events(trace, comm.rank, offset).all(), trace.error))
    text = None if parts is None else _joined(parts, comm.size, one_clock)
    error = None
    try:
        if text is not None:
            replace_text(path, text)
    except OSError as caught:
        error = DataError(f"--trace {path} cannot be written: {caught.strerror}.")
    error = comm.bcast(error)
    if error is not None:
        raise error


def _joined(parts: list[tuple[list[dict[str, Any]], float | None]], ranks: int, one_clock: bool) -> str:
    """The file's text, from each rank's events and how far its device's clock may be off."""
    events = [event for part, _ in parts for event in part]
    origin = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - origin, 3)
    about: dict[str, Any] = {
        "ranks": ranks,
        "clock": "the node's own clock" if one_clock else "each rank's clock, set to rank 0's when all had left a barrier",
    }
    errors = [error for _, error in parts if error is not None]
    if errors:
        tied = f"tied to the host's by one event a rank, at most {max(errors) * MICRO:.1f} µs off when it was"
        about["device clock"] = tied
    return json.dumps({"traceEvents": events, "otherData": about}) + "\n"


class _Events:
    """One rank's events, as the Chrome trace format has them."""

    def __init__(self, trace: Trace, rank: int, offset: float) -> None:
        self.trace, self.rank, self.offset = trace, rank, offset
        self.tracks: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []

    def all(self) -> list[dict[str, Any]]:
        self._track(PHASES)
        for track, spans in ((PHASES, self.trace.phases), (RUNS, self.trace.runs)):
            for name, start, end in spans:
                self._span(name, track, start, end - start)
        for work in self.trace.work:
            self._span(work.name, work.kind, work.start, work.seconds, **work.about)
            self._device(work.device, work.kind, **work.about)
        for number, communication in enumerate(self.trace.communications):
            self._communication(communication, f"{self.rank}.{number}")
        names = [{"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}]
        for track, tid in self.tracks.items():
            names.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": tid, "args": {"name": track}})
        return names + self.events

    def _track(self, name: str) -> int:
        return self.tracks.setdefault(name, len(self.tracks))

    def _span(self, name: str, track: str, start: float, seconds: float, **args: Any) -> None:
        place = {"pid": self.rank, "tid": self._track(track)}
        when = {"ts": (start + self.offset) * MICRO, "dur": seconds * MICRO}
        self.events.append({"ph": "X", "name": name, **place, **when, "args": args})

    def _device(self, stretches: list[Stretch], track: str, **args: Any) -> None:
        for stretch in stretches:
            self._span(stretch.name, track + ON_DEVICE, stretch.start, stretch.seconds, **args)

    def _communication(self, communication: Communication, number: str) -> None:
        track = f"axis {communication.axis}"
        args = {"axis": communication.axis, "phase": communication.phase, "dtype": communication.dtype}
        amounts = {"words": communication.words, "messages": communication.messages, "bytes": communication.bytes}
        self._span(f"begin {communication.name}", track, communication.start, communication.issue, **args)
        if communication.end:
            self._span(
                f"wait for {communication.name}", track, communication.end - communication.wait, communication.wait, **args
            )
        self._device(communication.device, track, **args)
        ends = [
            communication.end or communication.start + communication.issue,
            *(stretch.start + stretch.seconds for stretch in communication.device),
        ]
        flight = {"cat": track, "name": communication.name, "id": number, "pid": self.rank, "tid": self._track(track)}
        self.events.append({"ph": "b", **flight, "ts": (communication.start + self.offset) * MICRO, "args": {**args, **amounts}})
        self.events.append({"ph": "e", **flight, "ts": (max(ends) + self.offset) * MICRO})
