"""Every schedule of up to 8 ranks: makespan, memory in flight and messages by closed forms, and no deadlock whatever moves them.

The same simulation must find the deadlocks of pipelines that are known to have them.
"""

from __future__ import annotations

import graphlib
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from deadlocks import asleep, by_blocking, by_groups, by_mpi, by_streams, stuck

from summa3d.parallel.schedule import (
    GRADIENT_ENDS,
    GRADIENT_SENDERS,
    SCHEDULES,
    PipelineMessage,
    Schedule,
    ScheduleOp,
    build,
    dependencies,
    pair_stream,
)
from summa3d.parallel.simulate import in_flight, messages_of, timeline

PIPELINES = [2, 3, 4, 5, *(pytest.param(p, marks=pytest.mark.wide) for p in (6, 7, 8))]
"""Numbers of ranks: 1 is accumulation, 8 the most that the proof of a pipeline of any size rests on."""
STREAMS = {
    "one": lambda kind, peer, sends: 0,
    "kind": lambda kind, peer, sends: kind,
    "peer": lambda kind, peer, sends: peer,
    "kind and peer": lambda kind, peer, sends: (kind, peer),
    "kind, peer and direction": pair_stream,
}


def chunks_of(name: str, p: int, m: int) -> tuple[int, ...]:
    """Numbers of chunks that a schedule takes with so many ranks and micro-batches, up to 4."""
    several = {"interleaved": (2, 3, 4) if m % p == 0 else (), "zb-v": (2,) if m >= p else ()}
    return several.get(name, (1,))


def schedules(p: int, names: str = "gpipe 1f1b interleaved zb-h1 zb-v") -> Iterator[Schedule]:
    """All of p ranks, up to 3p + 2 micro-batches and 4 chunks; with sums in every other one."""
    for m in range(1, 3 * p + 3):
        for name in names.split():
            for v in chunks_of(name, p, m):
                yield build(name, p, m, v, replicas=m % 2 == 0, tied=m % 3 == 0)


def peak(schedule: Schedule, rank: int) -> int:
    """The closed form of the inputs in flight; with zb-h1 from F to X."""
    p, m, v = schedule.p, schedule.m, schedule.v
    most = {"gpipe": m, "1f1b": p - rank, "interleaved": 2 * (p - 1 - rank) + (v - 1) * p + 1, "zb-h1": p - rank}
    return min(2 * p, m + 1 + rank) if schedule.name == "zb-v" else min(most[schedule.name], m * v)


def idle(schedule: Schedule) -> float:
    """The closed form of the time for which each rank waits; zero-bubble schedules take more for few micro-batches."""
    p, m = schedule.p, schedule.m
    split = {"zb-h1": p - 1 + max(0, p - m), "zb-v": (p - 1) / 2 + max(0, 2 * p - 2 - m) / 2}
    return split.get(schedule.name, 3 * (p - 1) / schedule.v)


@pytest.mark.parametrize("p", PIPELINES)
def test_makespan_memory_and_messages_are_those_of_the_closed_forms(p: int) -> None:
    for schedule in schedules(p):
        m, v = schedule.m, schedule.v
        drawn = timeline(schedule)
        assert drawn.time == pytest.approx(3 * m + idle(schedule)), schedule
        assert drawn.idle == pytest.approx([idle(schedule)] * p) and drawn.ideal == pytest.approx(3 * m)
        received: Counter[int] = Counter()
        sent: list[PipelineMessage] = []
        for rank in range(p):
            ends = GRADIENT_SENDERS if schedule.name == "zb-h1" else GRADIENT_ENDS
            assert max(in_flight(schedule.ops_of(rank), ends)) == peak(schedule, rank), (schedule, rank)
            assert in_flight(schedule.ops_of(rank))[-1] == 0
            assert schedule.name != "zb-h1" or max(in_flight(schedule.ops_of(rank))) <= min(p, m), (schedule, rank)
            for _, comes, goes in messages_of(schedule, rank):
                received[rank] += comes is not None
                sent += [goes] if goes is not None else []
        turns = {"zb-v": 1}.get(schedule.name, 0)
        assert len(sent) == len(set(sent)) == sum(received.values()) == 2 * m * (p * v - 1 - turns)
        ends_there = {rank: (rank == 0) + (rank == p - 1) for rank in range(p)}
        assert received == {rank: m * (2 * v - ends_there[rank] * (1 + turns)) for rank in range(p)}


@pytest.mark.parametrize("p", PIPELINES)
def test_no_schedule_deadlocks_over_mpi_without_buffers_or_over_the_streams_of_nccl(p: int) -> None:
    for schedule in schedules(p):
        assert stuck(by_mpi(schedule)) == {}, schedule
        for ahead in (0, 1):
            assert stuck(by_streams(schedule, ahead=ahead)) == {}, (schedule, ahead)


@pytest.mark.parametrize("p", PIPELINES)
def test_pipelines_that_block_in_their_sends_deadlock(p: int) -> None:
    """With one micro-batch nothing comes the other way, and GPipe sends one way at a time."""
    for schedule in schedules(p):
        one_way = schedule.name == "gpipe" or (schedule.name in ("1f1b", "zb-h1") and schedule.m == 1)
        assert bool(stuck(by_blocking(schedule))) != one_way, schedule


@pytest.mark.parametrize("p", PIPELINES)
def test_messages_that_nccl_groups_until_one_is_waited_for_deadlock(p: int) -> None:
    """Messages queued behind a group wait for all of it; receives that were posted ahead make it worse."""
    for schedule in schedules(p):
        several = schedule.name in ("interleaved", "zb-v")
        assert bool(stuck(by_groups(schedule))) == (several and schedule.m > p), schedule
        if p > 3 or schedule.name == "interleaved" or (several and schedule.m > p):
            assert stuck(by_groups(schedule, ahead=1)), schedule


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_check_by_a_topological_sort_agrees_with_the_simulation(p: int) -> None:
    """Of any map of messages to streams: they deadlock if and only if there is a cycle."""
    found = Counter[tuple[str, str]]()
    for schedule in schedules(p):
        for name, stream_of in STREAMS.items():
            deadlocks = bool(stuck(by_streams(schedule, stream_of, ahead=0)))
            sorter = graphlib.TopologicalSorter(dependencies(schedule, stream_of))
            if deadlocks:
                with pytest.raises(graphlib.CycleError):
                    sorter.prepare()
            else:
                sorter.prepare()
            found[schedule.name, name] += deadlocks
    every = 3 * ((3 * p + 2) // p)
    assert found["1f1b", "one"] == 3 * p + 1 and found["interleaved", "kind"] == every  # all but m = 1, and all
    assert found["interleaved", "kind and peer"] == (every if p == 2 else 0)  # both neighbours of a rank are one peer
    assert not any(found[name, "kind, peer and direction"] for name in SCHEDULES)


SLEEPERS = [
    *((p, name, 1) for p in (2, 3) for name in ("gpipe", "1f1b", "zb-h1")),
    (2, "zb-v", 2),
    pytest.param(3, "zb-v", 2, marks=pytest.mark.wide),
    *((2, "interleaved", v) for v in (2, 3, 4)),
    *(pytest.param(3, "interleaved", v, marks=pytest.mark.wide) for v in (2, 3, 4)),
]


@pytest.mark.parametrize(("p", "name", "v"), SLEEPERS)
def test_ranks_that_sleep_in_sums_of_their_stage_deadlock_unless_they_keep_messages_moving(p: int, name: str, v: int) -> None:
    for m in (1, 2, 3, 4) if v == 1 else range(p, 5) if name == "zb-v" else (p, 2 * p)[: 4 // p]:
        schedule = build(name, p, m, v)
        assert asleep(schedule) is None, schedule
        assert (asleep(schedule, progress=False) is None) == (name == "gpipe" or m == 1), schedule
        assert asleep(schedule, inner=1, progress=False) is None, schedule


def test_the_figures_of_the_paper() -> None:
    """4 ranks and 8 micro-batches, a forward of 1 and a backward of 2, of which half are weights; and larger ones."""
    for (name, p, m, v), time in {
        ("gpipe", 4, 8, 1): 33,
        ("1f1b", 4, 8, 1): 33,
        ("interleaved", 4, 8, 2): 28.5,
        ("interleaved", 4, 8, 3): 27,
        ("zb-h1", 4, 8, 1): 27,
        ("zb-v", 4, 8, 2): 25.5,
        ("interleaved", 8, 32, 4): 101.25,
    }.items():
        assert timeline(build(name, p, m, v)).time == pytest.approx(time)


def test_a_stage_with_more_layers_holds_the_others_up() -> None:
    """2 stages of 3 and 1 layers: the first computes 1.5 times, the second half as long as the mean."""
    drawn = timeline(build("gpipe", 2, 2), layers=(3, 1))
    assert [(span.start, span.end) for span in drawn.spans] == [
        *((0, 1.5), (1.5, 3), (4.5, 7.5), (7.5, 10.5)),
        *((1.5, 2), (3, 3.5), (3.5, 4.5), (4.5, 5.5)),
    ]
    assert (drawn.time, drawn.ideal, drawn.idle) == (10.5, 6, [1.5, 7.5])


def test_a_deadlock_is_told_by_the_step_of_each_rank() -> None:
    first, second = stuck(by_blocking(build("1f1b", 2, 2))).values()
    assert first.sends == (PipelineMessage("F", 1, 1, 0, 1),) and second.sends == (PipelineMessage("B", 0, 0, 1, 0),)
    assert in_flight([ScheduleOp("F", 0, 0), ScheduleOp("X", 0, 0), ScheduleOp("W", 0, 0), ScheduleOp("R", 0)]) == [1, 1, 0, 0]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_pipeline_ends_with_the_longest_path_through_all_that_happens(p: int) -> None:
    for schedule in schedules(p):
        rng = random.Random(str(schedule))
        taken = {(kind, stage): rng.random() for kind in "FBXWR" for stage in range(len(schedule.homes))}
        before, ends = dependencies(schedule), {}
        for node in graphlib.TopologicalSorter(before).static_order():
            own = 0.0
            if not isinstance(node, (PipelineMessage, str)):
                op = schedule.ops_of(node[0])[node[1]]
                own = taken[op.kind, schedule.stages[node[0]][op.chunk]]
            ends[node] = max((ends[one] for one in before.get(node, ())), default=0.0) + own
        drawn = timeline(schedule, of_stages=taken)
        assert drawn.time == max(ends.values())
        assert all(span.end == ends[span.rank, schedule.ops_of(span.rank).index(span.op)] for span in drawn.spans)
