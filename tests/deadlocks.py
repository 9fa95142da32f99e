"""Whether the messages of a pipeline's schedule can deadlock, by running its ranks beside each other.

Messages move as an MPI that keeps no copies moves them, as NCCL's streams do, and as an MPI does that moves them only while their
sender is inside MPI.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import product

from summa3d.parallel.schedule import PipelineMessage, Schedule, ScheduleOp, StreamOf, pair_stream
from summa3d.parallel.simulate import messages_of


@dataclass(frozen=True)
class Step:
    """What a track does as one; the next step begins when this one has ended.

    needs : what must have happened on this rank before it begins: ops, and messages received. sends, receives : messages that
    must have passed before it ends. starts : messages that it begins to send, and does not wait for. op : what it computes.
    """

    needs: frozenset[Hashable] = frozenset()
    sends: tuple[PipelineMessage, ...] = ()
    receives: tuple[PipelineMessage, ...] = ()
    starts: tuple[PipelineMessage, ...] = ()
    op: ScheduleOp | None = None


Tracks = dict[tuple[int, Hashable], list[Step]]
"""(rank, name of a track) → its steps."""


def stuck(tracks: Tracks) -> dict[tuple[int, Hashable], Step]:
    """Run tracks beside each other as far as they go; the step of each that never ends. Without a deadlock there is none.

    A message passes when the step that sends it and the one that receives it have both begun: nothing is buffered.
    """
    places, begun = dict.fromkeys(tracks, 0), dict.fromkeys(tracks, -1)
    offered: set[PipelineMessage] = set()
    posted: set[PipelineMessage] = set()
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


def _some(*messages: PipelineMessage | None) -> tuple[PipelineMessage, ...]:
    return tuple(message for message in messages if message is not None)


def by_mpi(schedule: Schedule) -> Tracks:
    """The pipeline over MPI as comm/channel.py runs it: sends start at once and are waited for at the end, receives block."""
    tracks: Tracks = {}
    for rank in range(schedule.p):
        steps = tracks[rank, "host"] = []
        started: list[PipelineMessage] = []
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
        group: list[tuple[PipelineMessage, bool]] = []
        posted = 0

        def launch(needs: frozenset[Hashable], rank: int = rank, group: list[tuple[PipelineMessage, bool]] = group) -> None:
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
        """Return whether the next step of a rank can end now."""
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
