"""The critical path of a pipeline: ops as long as their arithmetic took, replayed as if each rank had a core of its own."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from .schedule import Schedule, ScheduleOp
from .simulate import ScheduleTimeline, timeline


def replay(schedule: Schedule, arithmetic: Iterable[tuple[int, Iterable[tuple[str, float]]]]) -> ScheduleTimeline:
    """The schedule in time, its ops as long as the arithmetic that was measured of them; communication takes no time.

    arithmetic : of each rank, its index on axis pp, and the name and the seconds of its runs. Runs that are no ops of it are left
        out. An op takes the mean over its micro-batches, of the rank that took longest for it among those that hold the stage
    """
    slowest: dict[tuple[str, int], float] = {}
    for index, runs in arithmetic:
        names = {str(op): op for op in schedule.ops_of(index)}
        taken: dict[tuple[str, int], list[float]] = {}
        for name, seconds in runs:
            if name in names:
                op: ScheduleOp = names[name]
                taken.setdefault((op.kind, schedule.stages[index][op.chunk]), []).append(seconds)
        for key, result in taken.items():
            slowest[key] = max(slowest.get(key, 0.0), fmean(result))
    return timeline(schedule, of_stages=slowest)


def in_words(replayed: ScheduleTimeline) -> str:
    """Describe in a line what a replayed step would take."""
    work = max(replayed.ideal, 1e-12)
    return (
        f"pipeline {replayed.schedule.name}: with a core for each rank, and ops as long as their arithmetic, a step takes "
        f"{replayed.time:.3g} s: {work:.3g} s of work a rank, and a bubble of {100 * (replayed.time - work) / work:.0f}% of it"
    )
