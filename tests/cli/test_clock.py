"""A span is from the first rank's start to the last rank's end, whatever one rank's own clock saw."""

from __future__ import annotations

import pytest

from summa3d.bench.clock import Clock


@pytest.mark.mpi(sizes=(1, 2, 3))
def test_a_span_holds_the_slowest_act_of_any_rank_and_is_equal_on_all(comm, make_grid, world_size, clock):
    spanned = Clock(make_grid(x=world_size))
    own = [0.5 * comm.rank, 0.5 * (world_size - comm.rank)]
    spans = spanned.spans(*(lambda seconds=seconds: clock.passes(seconds) for seconds in own))
    assert spans == [0.5 * (world_size - 1), 0.5 * world_size]
    assert len(set(map(tuple, comm.allgather(spans)))) == 1


@pytest.mark.mpi(sizes=(2,))
def test_a_rank_that_begins_late_does_not_shorten_the_span(comm, make_grid, monkeypatch, clock):
    spanned = Clock(make_grid(x=2))
    barrier = spanned.world.barrier
    late = iter([0.5 * comm.rank, 0])  # rank 1 leaves the first barrier late, and does nothing
    monkeypatch.setattr(spanned.world, "barrier", lambda: (barrier(), clock.passes(next(late))))
    assert spanned.one_node
    assert spanned.spans(lambda: None) == [0.5]
    spanned.one_node = False  # of ranks whose clocks differ, the longest that one saw
    late = iter([0.5 * comm.rank, 0])
    assert spanned.spans(lambda: clock.passes(0.125)) == [0.125]
