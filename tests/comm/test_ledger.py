"""The ledger: lines by collective, axis, phase and dtype; watching a block of code; the workspace in use and its peak."""

from __future__ import annotations

import numpy as np
import pytest

from summa3d.comm.profile.ledger import Amounts, Ledger
from summa3d.node_support import why_no_node_memory

node_memory_only = pytest.mark.skipif(why_no_node_memory() is not None, reason=f"no node memory: {why_no_node_memory()}")


def line(words):
    return Amounts(calls=1, words=words, messages=1, bytes=8 * words, seconds=0.5, cpu_seconds=0.25)


def test_lines_are_kept_apart_by_collective_axis_and_phase():
    ledger = Ledger()
    ledger.line("all_gather", "x", "float64").add(line(1))
    with ledger.phase("forward"):
        ledger.line("all_gather", "x", "float64").add(line(2))
        with ledger.phase("backward"):
            ledger.line("all_gather", "y", "float64").add(line(4))
        ledger.line("reduce", "x", "float64").add(line(8))
        ledger.line("all_gather", "x", "float64").add(line(16))
    ledger.line("all_gather", "x", "float64").add(line(32))
    assert [(row.collective, row.axis, row.phase, row.amounts.words, row.amounts.calls) for row in ledger.rows()] == [
        ("all_gather", "x", "other", 33, 2),
        ("all_gather", "x", "forward", 18, 2),
        ("all_gather", "y", "backward", 4, 1),
        ("reduce", "x", "forward", 8, 1),
    ]
    assert ledger.total().words == 63
    assert ledger.total("forward") == Amounts(3, 26, 3, 208, 1.5, 0.75)
    assert ledger.total(axis="x").words == 59
    assert ledger.total("forward", "y") == Amounts()
    shown = [text.split() for text in str(ledger).splitlines()]
    assert shown[2] == ["all_gather", "x", "forward", "float64", "2", "18", "2", "144", "1"]
    assert shown[-1] == ["total", "6", "63", "6", "504", "3"] and len(shown) == 6


def test_lines_are_kept_apart_by_dtype():
    ledger = Ledger()
    for dtype, words in (("bfloat16", 1), ("float32", 2), ("bfloat16", 4)):
        ledger.line("all_gather", "x", dtype).add(line(words))
    assert [(row.dtype, row.amounts.words) for row in ledger.rows()] == [("bfloat16", 5), ("float32", 2)]
    assert (ledger.total(dtype="bfloat16").words, ledger.total().words) == (5, 7)


def test_the_phase_returns_to_what_it_was_after_an_error_and_unknown_phases_are_refused():
    ledger = Ledger()
    with pytest.raises(ZeroDivisionError), ledger.phase("optimizer"):
        raise ZeroDivisionError
    assert ledger.current_phase == "other"
    with (
        pytest.raises(ValueError, match="'sideways' is not one of forward, backward, optimizer, other"),
        ledger.phase("sideways"),
    ):
        pass


def test_watching_holds_what_the_block_moved_and_nests():
    ledger = Ledger()
    ledger.line("all_gather", "x", "float64").add(line(1))
    with ledger.watch() as outer:
        ledger.line("all_gather", "x", "float64").add(line(2))
        with ledger.watch() as inner:
            ledger.line("reduce", "y", "float64").add(line(4))
        ledger.line("all_gather", "x", "float64").add(line(8))
    ledger.line("reduce", "y", "float64").add(line(16))
    assert (inner.words, inner.calls, [row.axis for row in inner.rows]) == (4, 1, ["y"])
    assert (outer.words, outer.calls, outer.bytes, outer.messages, outer.seconds) == (14, 3, 112, 3, 1.5)
    assert {(row.collective, row.amounts.words) for row in outer.rows} == {("all_gather", 10), ("reduce", 4)}
    outer.rows[0].amounts.words = 99
    assert ledger.total().words == 31


def test_workspace_is_counted_until_it_is_freed():
    ledger = Ledger()
    first = ledger.track(np.zeros(100))
    second = ledger.track(np.zeros(50, np.float32))
    assert (ledger.workspace_bytes, ledger.workspace_peak) == (1000, 1000)
    del first
    assert (ledger.workspace_bytes, ledger.workspace_peak) == (200, 1000)
    ledger.reset_peak()
    assert ledger.workspace_peak == 200
    del second
    assert (ledger.workspace_bytes, ledger.workspace_peak) == (0, 200)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", [False, True])
def test_a_started_call_is_counted_once_in_the_phase_that_started_it(make_grid, clock, monkeypatch, node_memory):
    """And so is the wait for it, in whatever phase that is, but nothing that is done before."""
    grid = make_grid(x=2, check=False, node_memory=node_memory)
    with grid.ledger.phase("backward"):
        pending = grid["x"].start_all_reduce(np.ones(10))
    started = grid.ledger.total("backward")
    assert (started.calls, started.words, started.seconds) == (1, 10, 0)
    kind = type(pending._carried)
    complete = kind.complete
    monkeypatch.setattr(kind, "complete", lambda carried: (clock.passes(0.5, cpu=0.125), complete(carried))[1])
    clock.passes(8, cpu=2)
    with grid.ledger.phase("forward"):
        pending.wait()
        pending.wait()
    assert [(row.phase, row.amounts.calls) for row in grid.ledger.rows()] == [("backward", 1)]
    waited = grid.ledger.total("backward")
    assert (waited.seconds, waited.cpu_seconds) == (0.5, 0.125)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", [False, True])
def test_calls_that_are_alike_are_counted_each_in_its_own_phase(make_grid, node_memory):
    """Prepared ones too, in whatever phase they were prepared."""
    grid, block = make_grid(x=2, check=False, node_memory=node_memory), np.ones(10)
    with grid.ledger.phase("optimizer"):
        prepared = grid["x"].prepare("all_reduce", block)
    for phase in ("forward", "backward", "forward"):
        with grid.ledger.phase(phase):
            grid["x"].all_reduce(block)
            prepared.start(block).wait()
    assert [(row.phase, row.amounts.calls) for row in grid.ledger.rows()] == [("forward", 4), ("backward", 2)]


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", [False, True])
def test_waiting_costs_wall_time_and_work_costs_processor_time(make_grid, clock, monkeypatch, node_memory):
    """Seconds are those inside the calls only; a rank that computes between two calls is not charged for it."""
    grid = make_grid(x=2, check=False, node_memory=node_memory)
    transports = grid["x"].transports
    carry = transports.carry
    monkeypatch.setattr(transports, "carry", lambda *call: (clock.passes(0.5, cpu=0.125), carry(*call))[1])
    with grid.ledger.watch() as moved:
        clock.passes(8, cpu=2)
        grid["x"].all_reduce(np.ones(3))
        clock.passes(8, cpu=2)
    assert (moved.seconds, moved.cpu_seconds) == (0.5, 0.125)


@node_memory_only
@pytest.mark.mpi(sizes=(2,))
def test_a_short_call_costs_the_processor_time_that_its_rank_does_not_sleep(make_grid, clock, monkeypatch):
    """Of one that came before, in the node's memory: the processor's own clock is not read there."""
    axis, block, awake = make_grid(x=2, check=False, node_memory=True)["x"], np.ones(3), 2**-15
    calls = (lambda: axis.all_reduce(block)), (lambda: axis.start_all_reduce(block).wait())
    for call in calls:
        call()
    pending = axis.start_all_reduce(block)
    naps, kind = pending._naps, type(pending._carried)
    complete = kind.complete
    pending.wait()

    def sleep_and_complete(carried):
        clock.passes(0.5 + awake)
        naps.seconds += 0.5
        return complete(carried)

    monkeypatch.setattr(kind, "complete", sleep_and_complete)
    for call in calls:
        with axis.ledger.watch() as moved:
            call()
        assert (moved.calls, moved.seconds, moved.cpu_seconds) == (1, 0.5 + awake, awake)
