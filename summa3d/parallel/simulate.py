"""Pipeline schedules run without ranks: when each op runs, and what it leaves in flight and sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..errors import ConfigError
from .schedule import GRADIENT_ENDS, GRADIENT_SENDERS, PipelineMessage, Schedule, ScheduleOp

SECONDS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "X": 1.0, "W": 1.0}
"""Time of a rank's ops over all its layers, in units: what the papers' figures assume."""


class OpSpan(NamedTuple):
    """When a rank runs an op."""

    rank: int
    op: ScheduleOp
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """The ops of all ranks in time. `ideal` is what a rank computes, on average: the time of a pipeline that never waits."""

    schedule: Schedule
    spans: tuple[OpSpan, ...]

    @cached_property
    def time(self) -> float:
        """Time at which the last op ends."""
        return max(span.end for span in self.spans)

    @cached_property
    def busy(self) -> list[float]:
        """The time for which each rank computes."""
        result = [0.0] * self.schedule.p
        for span in self.spans:
            result[span.rank] += span.end - span.start
        return result

    @property
    def idle(self) -> list[float]:
        """The time for which each rank waits."""
        return [self.time - busy for busy in self.busy]

    @property
    def ideal(self) -> float:
        """The mean time for which a rank computes."""
        return sum(self.busy) / self.schedule.p


def timeline(
    schedule: Schedule,
    seconds: Mapping[str, float] = SECONDS,
    layers: Sequence[int] | None = None,
    of_stages: Mapping[tuple[str, int], float] | None = None,
) -> ScheduleTimeline:
    """Run each op as soon as its rank is free and its input is there; messages and sums take no time.

    Raises ConfigError for a schedule that deadlocks.

    seconds : kind of op → its time over a rank's share of the layers. layers : of each stage; None, all have as many.
    of_stages : (kind of op, stage) → its time, in place of both.
    """
    mean = sum(layers or [1] * len(schedule.homes)) / schedule.p
    spans: list[list[OpSpan]] = [[] for _ in range(schedule.p)]
    ends = [0.0]
    for rank, op, kind, own, given in zip(*in_order(schedule), strict=True):
        if of_stages is None:
            taken = seconds.get(op.kind, 0.0) * (1 if layers is None else layers[kind[1]]) / mean
        else:
            taken = of_stages.get(kind, 0.0)
        start = max(ends[own], ends[given])
        ends.append(start + taken)
        if op.kind != "T":
            spans[rank].append(OpSpan(rank, op, start, ends[-1]))
    return ScheduleTimeline(schedule, tuple(span for of_rank in spans for span in of_rank))


class Events(NamedTuple):
    """The ops of all ranks as columns, each behind what it waits for.

    kinds : (kind of op, stage). own, given : the numbers of the event before it on its rank, and of that which makes what the
    rank waits for; they count from 1, and 0 is none. What the rank itself has made before is not among them.
    """

    ranks: list[int]
    ops: list[ScheduleOp]
    kinds: list[tuple[str, int]]
    own: list[int]
    given: list[int]


def in_order(schedule: Schedule) -> Events:
    """The ops of all ranks, each behind what it waits for: the last one of its rank, and what makes its inputs.

    Raises ConfigError for a schedule that deadlocks.
    """
    many, joint = len(schedule.homes), [rank for rank, ops in enumerate(schedule.programs) if any(op.kind == "T" for op in ops)]
    forward = [[-int(stage > 0)] * schedule.m for stage in range(many + 1)]  # stage → the events that make its inputs, or -1
    backward = [[-int(stage < many)] * schedule.m for stage in range(many + 1)]  # the same of gradients, for the stage before
    events, places, last = Events([], [], [], [], []), [0] * schedule.p, [0] * schedule.p
    together: dict[int, int] = {}  # the last events of the ranks of T before it
    number, add_kind, add_own, add_given = 0, events.kinds.append, events.own.append, events.given.append

    def joined(rank: int) -> int:
        """The event of another rank that T waits for; below 0 where not all ranks of T are there."""
        if not together and all(schedule.programs[item][places[item]].kind == "T" for item in joint):
            together.update({item: last[item] for item in joint})
        return max((turn for item, turn in together.items() if item != rank), default=0 if together else -1)

    going = True
    while going:
        going = False
        for rank, ops in enumerate(schedule.programs):
            stages, before = schedule.stages[rank], places[rank]
            for kind, chunk, micro in ops[before:]:
                stage, given, own = stages[chunk], 0, 0
                if kind == "F":
                    given = forward[stage][micro]
                elif kind in GRADIENT_SENDERS:
                    given, own = backward[stage + 1][micro], forward[stage + 1][micro]
                elif kind == "T":
                    given = joined(rank)
                elif kind == "W":
                    own = backward[stage][micro]
                if given < 0 or own < 0:
                    break
                add_kind((kind, stage))
                add_own(last[rank])
                add_given(given)
                last[rank] = number = number + 1
                if kind == "F":
                    forward[stage + 1][micro] = number
                elif kind in GRADIENT_SENDERS:
                    backward[stage][micro] = number
                places[rank] += 1
            events.ranks.extend([rank] * (places[rank] - before))
            events.ops.extend(ops[before : places[rank]])
            going = going or places[rank] > before
    if any(place < len(ops) for place, ops in zip(places, schedule.programs, strict=True)):
        raise ConfigError(f"{schedule} deadlocks.")
    return events


def time_of(events: Events, of_stages: Mapping[tuple[str, int], float]) -> float:
    """Time at which the last op ends, as `ScheduleTimeline.time`, of events whose (kind, stage) take so long."""
    ends = [0.0]
    end = ends.append
    for taken, own, given in zip(map(of_stages.__getitem__, events.kinds), events.own, events.given, strict=True):
        before, made = ends[own], ends[given]
        end((before if before > made else made) + taken)
    return max(ends)


def in_flight(ops: Sequence[ScheduleOp], ends: Sequence[str] = GRADIENT_ENDS) -> list[int]:
    """Number of inputs of chunks that a rank keeps, after each of its ops: a backward of weights releases one.

    ends : the kinds that end a flight; GRADIENT_SENDERS for what the gradient of an input ends
    """
    steps = {"F": 1, **dict.fromkeys(ends, -1)}
    return list(accumulate(steps.get(op.kind, 0) for op in ops))


def messages_of(schedule: Schedule, rank: int) -> Iterator[tuple[ScheduleOp, PipelineMessage | None, PipelineMessage | None]]:
    """The ops of a rank, each with the message that it waits for and the one that it sends."""
    for op in schedule.ops_of(rank):
        if op.kind not in "RT":
            yield op, schedule.received(rank, op), schedule.sent(rank, op)
