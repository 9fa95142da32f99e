# When everything happened: phases and communications of every rank on one clock, as a trace for Perfetto or chrome://tracing.
# Imports errors, mpi4py. Whoever has no trace pays one test a communication.
# Next: ledger.py, whose `trace` this is; collectives.py, which writes to it.
from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ..errors import ConfigError

PHASES = "phases"
MICRO = 1e6  # a trace counts in µs


@dataclass
class Communication:
    """One communication of one rank: begun in a call that took `issue` seconds, completed in a wait that took `wait`."""

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


@dataclass
class Trace:
    """What one rank did: phases as (name, start, end), and its communications, in the order in which they were begun."""

    phases: list[tuple[str, float, float]] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)

    def begin(self, communication: Communication) -> Communication:
        self.communications.append(communication)
        return communication


def check_file(path: Path) -> None:
    """Raise ConfigError unless a trace can be written there."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise ConfigError(f"--trace {path} {what}. Name a file in a folder that exists.")


def write(path: Path, trace: Trace, comm: MPI.Intracomm) -> None:
    """Write the traces of all ranks of `comm` to one JSON file, on rank 0's clock (collective).

    A process for each rank; tracks for its phases and for each axis. On an axis's track lie the calls that begin a communication
    and the waits that complete one; above them each communication from begin to end, with its words, messages, bytes and phase.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    one_clock = bool(comm.allreduce(node.size == comm.size, MPI.MIN))
    node.Free()
    comm.Barrier()
    here = time.perf_counter()
    offset = 0.0 if one_clock else comm.bcast(here) - here
    events = _events(trace, comm.rank, offset)
    parts = comm.gather(events)
    if parts is None:
        return
    origin = min((event["ts"] for part in parts for event in part if "ts" in event), default=0.0)
    for part in parts:
        for event in part:
            if "ts" in event:
                event["ts"] = round(event["ts"] - origin, 3)
    clock = "the node's own clock" if one_clock else "each rank's clock, set to rank 0's when all had left a barrier"
    whole = {"traceEvents": [event for part in parts for event in part], "otherData": {"ranks": comm.size, "clock": clock}}
    path.write_text(json.dumps(whole) + "\n", encoding="utf-8")


def _events(trace: Trace, rank: int, offset: float) -> list[dict[str, Any]]:
    tracks = {PHASES: 0}
    events: list[dict[str, Any]] = []

    def span(name: str, track: str, start: float, seconds: float, **args: Any) -> None:
        place = {"pid": rank, "tid": tracks.setdefault(track, len(tracks))}
        events.append({"ph": "X", "name": name, **place, "ts": (start + offset) * MICRO, "dur": seconds * MICRO, "args": args})

    for name, start, end in trace.phases:
        span(name, PHASES, start, end - start)
    for number, one in enumerate(trace.communications):
        track = f"axis {one.axis}"
        args = {"axis": one.axis, "phase": one.phase, "dtype": one.dtype}
        amounts = {"words": one.words, "messages": one.messages, "bytes": one.bytes}
        span(f"begin {one.name}", track, one.start, one.issue, **args)
        if one.end:
            span(f"wait for {one.name}", track, one.end - one.wait, one.wait, **args)
        flight = {"cat": track, "name": one.name, "id": f"{rank}.{number}", "pid": rank, "tid": tracks[track]}
        events.append({"ph": "b", **flight, "ts": (one.start + offset) * MICRO, "args": {**args, **amounts}})
        events.append({"ph": "e", **flight, "ts": ((one.end or one.start + one.issue) + offset) * MICRO})
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}} for track, tid in tracks.items()
    ]
    return names + events
