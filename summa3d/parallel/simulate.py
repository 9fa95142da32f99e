"""Pipeline schedules run without ranks: when each op runs, what it leaves in flight, and whether its messages can deadlock.

Messages are simulated as an MPI that keeps no copies moves them, as NCCL's streams do, and as an MPI does that moves them only
while their sender is inside MPI.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from ..errors import ConfigError
from .schedule import GRADIENT_ENDS, GRADIENT_SENDERS, Message, Op, Schedule, StreamOf, pair_stream

SECONDS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "X": 1.0, "W": 1.0}
"""Time of a rank's ops over all its layers, in units: what the papers' figures assume."""


class Span(NamedTuple):
    """When a rank runs an op."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The ops of all ranks in time. `ideal` is what a rank computes, on average: the time of a pipeline that never waits."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @cached_property
    def time(self) -> float:
        """When the last op ends."""
        return max(span.end for span in self.spans)

    @cached_property
    def busy(self) -> list[float]:
        """The time for which each rank computes."""
        found = [0.0] * self.schedule.p
        for span in self.spans:
            found[span.rank] += span.end - span.start
        return found

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
) -> Timeline:
    """Run each op as soon as its rank is free and its input is there; messages and sums take no time.

    Raises ConfigError for a schedule that deadlocks.

    seconds : kind of op → its time over a rank's share of the layers. layers : of each stage; None, all have as many.
    of_stages : (kind of op, stage) → its time, in place of both.
    """
    mean = sum(layers or [1] * len(schedule.homes)) / schedule.p
    spans: list[list[Span]] = [[] for _ in range(schedule.p)]
    ends = [0.0]
    for rank, op, kind, own, given in zip(*in_order(schedule), strict=True):
        if of_stages is None:
            taken = seconds.get(op.kind, 0.0) * (1 if layers is None else layers[kind[1]]) / mean
        else:
            taken = of_stages.get(kind, 0.0)
        start = max(ends[own], ends[given])
        ends.append(start + taken)
        if op.kind != "T":
            spans[rank].append(Span(rank, op, start, ends[-1]))
    return Timeline(schedule, tuple(span for of_rank in spans for span in of_rank))


class Events(NamedTuple):
    """The ops of all ranks as columns, each behind what it waits for.

    kinds : (kind of op, stage). own, given : the numbers of the event before it on its rank, and of that which makes what the
    rank waits for; they count from 1, and 0 is none. What the rank itself has made before is not among them.
    """

    ranks: list[int]
    ops: list[Op]
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

    def needs(rank: int, op: Op, stage: int) -> tuple[int, int]:
        """The event of another rank, and that of this one, that an op waits for; below 0 where it has not come."""
        if op.kind == "F":
            return forward[stage][op.micro], 0
        if op.kind in GRADIENT_SENDERS:
            return backward[stage + 1][op.micro], forward[stage + 1][op.micro]
        if op.kind == "T":
            if not together and all(schedule.programs[one][places[one]].kind == "T" for one in joint):
                together.update({one: last[one] for one in joint})
            return max((turn for one, turn in together.items() if one != rank), default=0 if together else -1), 0
        return 0, backward[stage][op.micro] if op.kind == "W" else 0

    going = True
    while going:
        going = False
        for rank, ops in enumerate(schedule.programs):
            for op in ops[places[rank] :]:
                stage = schedule.stages[rank][op.chunk]
                given, own = needs(rank, op, stage)
                if given < 0 or own < 0:
                    break
                events.ranks.append(rank)
                events.ops.append(op)
                events.kinds.append((op.kind, stage))
                events.own.append(last[rank])
                events.given.append(given)
                last[rank] = len(events.ops)
                if op.kind == "F":
                    forward[stage + 1][op.micro] = last[rank]
                elif op.kind in GRADIENT_SENDERS:
                    backward[stage][op.micro] = last[rank]
                places[rank], going = places[rank] + 1, True
    if any(place < len(ops) for place, ops in zip(places, schedule.programs, strict=True)):
        raise ConfigError(f"{schedule} deadlocks.")
    return events


def time_of(events: Events, of_stages: Mapping[tuple[str, int], float]) -> float:
    """When the last op ends, as `Timeline.time`, of events whose (kind, stage) take so long."""
    ends = [0.0]
    end = ends.append
    for kind, own, given in zip(events.kinds, events.own, events.given, strict=True):
        before, made = ends[own], ends[given]
        end((before if before > made else made) + of_stages[kind])
    return max(ends)


def in_flight(ops: Sequence[Op], ends: Sequence[str] = GRADIENT_ENDS) -> list[int]:
    """How many inputs of chunks a rank keeps, after each of its ops: a backward of weights releases one.

    ends : the kinds that end a flight; GRADIENT_SENDERS for what the gradient of an input ends
    """
    steps = {"F": 1, **dict.fromkeys(ends, -1)}
    return list(accumulate(steps.get(op.kind, 0) for op in ops))


# -- tracks: what the threads and streams of a rank do, one step after the other ------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a track does as one; the next step begins when this one has ended.

    needs : what must have happened on this rank before it begins: ops, and messages received. sends, receives : messages that
    must have passed before it ends. starts : messages that it begins to send, and does not wait for. op : what it computes.
    """

    needs: frozenset[Hashable] = frozenset()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    starts: tuple[Message, ...] = ()
    op: Op | None = None


Tracks = dict[tuple[int, Hashable], list[Step]]
"""(rank, name of a track) → its steps."""


def stuck(tracks: Tracks) -> dict[tuple[int, Hashable], Step]:
    """Run tracks beside each other as far as they go; the step of each that never ends. Without a deadlock there is none.

    A message passes when the step that sends it and the one that receives it have both begun: nothing is buffered.
    """
    places, begun = dict.fromkeys(tracks, 0), dict.fromkeys(tracks, -1)
    offered: set[Message] = set()
    posted: set[Message] = set()
    done: set[tuple[int, Hashable]] = set()
    moved = True
    while moved:
        moved = False
        for track, steps in tracks.items():
            rank = track[0]
            while places[track] < len(steps):
                step = steps[places[track]]
                if not all((rank, needed) in done for needed in step.needs):
                    break
                if begun[track] != places[track]:  # which may let another rank's step end
                    begun[track], moved = places[track], True
                    offered.update(step.sends, step.starts)
                    posted.update(step.receives)
                if not offered.issuperset(step.receives) or not posted.issuperset(step.sends):
                    break
                done.update((rank, event) for event in (*step.receives, step.op) if event is not None)
                places[track] += 1
                moved = True
    return {track: steps[places[track]] for track, steps in tracks.items() if places[track] < len(steps)}


def messages_of(schedule: Schedule, rank: int) -> Iterator[tuple[Op, Message | None, Message | None]]:
    """The ops of a rank, each with the message that it waits for and the one that it sends."""
    for op in schedule.ops_of(rank):
        if op.kind not in "RT":
            yield op, schedule.received(rank, op), schedule.sent(rank, op)


def _some(*messages: Message | None) -> tuple[Message, ...]:
    return tuple(message for message in messages if message is not None)


def by_mpi(schedule: Schedule) -> Tracks:
    """The pipeline over MPI as comm/channel.py runs it: sends start at once and are waited for at the end, receives block."""
    tracks: Tracks = {}
    for rank in range(schedule.p):
        steps = tracks[rank, "host"] = []
        started: list[Message] = []
        for op, received, sent in messages_of(schedule, rank):
            steps += [Step(receives=_some(received)), Step(op=op), Step(starts=_some(sent))]
            started += _some(sent)
        steps.append(Step(sends=tuple(started)))
    return tracks


def by_blocking(schedule: Schedule) -> Tracks:
    """A pipeline that receives, computes and sends, and blocks in each."""
    return {
        (rank, "host"): [
            step
            for op, received, sent in messages_of(schedule, rank)
            for step in (Step(receives=_some(received)), Step(op=op), Step(sends=_some(sent)))
        ]
        for rank in range(schedule.p)
    }


def by_streams(schedule: Schedule, stream_of: StreamOf = pair_stream, ahead: int = 1) -> Tracks:
    """The pipeline over NCCL: a message is queued at once, on a stream that carries one message after the other.

    ahead : how many ops ahead receives are posted. A message also waits for what the rank's own stream held when it was queued.
    """
    tracks: Tracks = defaultdict(list)
    for rank in range(schedule.p):
        program = list(messages_of(schedule, rank))
        posted = 0
        for place, (op, received, sent) in enumerate(program):
            needs = frozenset(() if place == 0 else [program[place - 1][0]])
            while posted <= min(place + ahead, len(program) - 1):
                for message in _some(program[posted][1]):
                    stream = stream_of(message.kind, message.source, False)
                    tracks[rank, stream].append(Step(needs=needs, receives=(message,)))
                posted += 1
            tracks[rank, "compute"].append(Step(needs=frozenset(_some(received)), op=op))
            for message in _some(sent):
                tracks[rank, stream_of(message.kind, message.target, True)].append(Step(needs=frozenset([op]), sends=(message,)))
    return dict(tracks)


def by_groups(schedule: Schedule, ahead: int = 0) -> Tracks:
    """The pipeline over one NCCL communicator whose messages are queued as a group when the next one is waited for."""
    tracks: Tracks = defaultdict(list)
    for rank in range(schedule.p):
        program = list(messages_of(schedule, rank))
        group: list[tuple[Message, bool]] = []
        posted = 0

        def launch(needs: frozenset[Hashable], rank: int = rank, group: list[tuple[Message, bool]] = group) -> None:
            sends, receives = (tuple(message for message, way in group if way is sends) for sends in (True, False))
            tracks[rank, "nccl"].append(Step(needs=needs, sends=sends, receives=receives))
            group.clear()

        for place, (op, received, sent) in enumerate(program):
            while posted <= min(place + ahead, len(program) - 1):
                group += [(message, False) for message in _some(program[posted][1])]
                posted += 1
            if received is not None and group:
                launch(frozenset(() if place == 0 else [program[place - 1][0]]))
            tracks[rank, "compute"].append(Step(needs=frozenset(_some(received)), op=op))
            group += [(message, True) for message in _some(sent)]
        launch(frozenset([program[-1][0]]))
    return dict(tracks)


def asleep(schedule: Schedule, inner: int = 2, progress: bool = True) -> dict[tuple[int, int], Step] | None:
    """Search all orders of events for a deadlock of `inner` tensor-parallel ranks a stage; the step of each rank that never ends.

    Every op is one collective of a stage's ranks, in which they sleep in their node's memory. A message passes while its receiver
    waits for it and its sender is inside MPI: always but for such a sleep, and there too with `progress` (transport/progress.py).
    """
    tracks = by_mpi(schedule)
    programs = [[step for step in tracks[rank, "host"] if step != Step()] for rank in range(schedule.p)]
    ranks = list(product(range(schedule.p), range(inner)))
    begun = {message: place for program in programs for place, step in enumerate(program) for message in step.starts}
    taken = {message: place for program in programs for place, step in enumerate(program) for message in step.receives}

    def ends(places: tuple[int, ...], rank: int, index: int) -> bool:
        """Whether the next step of a rank can end now."""
        step = programs[rank][places[rank * inner + index]]
        if step.op is not None:  # all are there; the first ends it for all
            return index == 0 and len({places[rank * inner + other] for other in range(inner)}) == 1
        if step.receives:
            (message,) = step.receives
            sender = places[message.source * inner + index]
            return sender > begun[message] and (progress or programs[message.source][sender].op is None)
        return all(places[message.target * inner + index] > taken[message] for message in step.sends)

    start = (0,) * len(ranks)
    seen, waiting = {start}, [start]
    while waiting:
        places = waiting.pop()
        running = [(rank, index) for rank, index in ranks if places[rank * inner + index] < len(programs[rank])]
        able = [one for one in running if ends(places, *one)]
        if running and not able:
            return {(rank, index): programs[rank][places[rank * inner + index]] for rank, index in running}
        for rank, index in able:
            joint = programs[rank][places[rank * inner + index]].op is not None
            moved = range(rank * inner, rank * inner + inner) if joint else (rank * inner + index,)
            following = tuple(place + (number in moved) for number, place in enumerate(places))
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return None
