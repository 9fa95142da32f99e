"""A span is from the first rank's start to the last rank's end, whatever one rank's own clock saw."""

from __future__ import annotations

import time

import pytest

from summa3d.bench.clock import Clock


@pytest.mark.mpi(sizes=(1, 2, 3))
def test_a_span_holds_the_slowest_act_of_any_rank_and_is_equal_on_all(comm, make_grid, world_size):
    clock = Clock(make_grid(x=world_size))
    own = [0.02 * comm.rank, 0.02 * (world_size - comm.rank)]
    spans = clock.spans(*(lambda seconds=seconds: time.sleep(seconds) for seconds in own))
    assert len(set(map(tuple, comm.allgather(spans)))) == 1
    assert spans[0] >= 0.02 * (world_size - 1)
    assert spans[1] >= 0.02 * world_size


@pytest.mark.mpi(sizes=(2,))
def test_a_rank_that_begins_late_does_not_shorten_the_span(comm, make_grid, monkeypatch):
    clock = Clock(make_grid(x=2))
    barrier = clock.world.barrier
    late = iter([0.05 * comm.rank, 0])  # rank 1 leaves the first barrier late, and does nothing
    monkeypatch.setattr(clock.world, "barrier", lambda: (barrier(), time.sleep(next(late))))
    assert clock.one_node
    assert clock.spans(lambda: None)[0] >= 0.045  # rank 0 may leave the barrier a little after rank 1
    clock.one_node = False  # of ranks whose clocks differ, the longest that one saw
    late = iter([0.05 * comm.rank, 0])
    assert clock.spans(lambda: None)[0] < 0.05
