"""A dry run says what a real run does: every line of its ledger as integers, what it saves and what it holds at its peak."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from dry_real import Real, lines_of, run_dry
from golden_cases import Case, read

SAVED, PEAK, WHOLE = 0.001, 0.03, 0.05
SCRATCH = 0.08
"""Tolerance of a peak in 16 bits over all cases: torch's products of them take up to 0.3 MB of scratch memory,
6 % of the smallest models here, which no dry run can know."""
GRAIN = 1 << 18
"""Slots of a node's memory grow in steps of so many bytes."""
STRIDE = {1: 12, 2: 16, 4: 37, 6: 25, 12: 56}


def cases_of(ranks: int) -> list[Case]:
    return [case for case, _ in read() if prod(case.axes.values()) == ranks]


def check(case: Case, make_grid: Any, node_memory: bool, halves: float = WHOLE) -> None:
    """The case on this world, through its node's memory or MPI, against its dry run."""
    grid = make_grid(check=False, node_memory=node_memory, **case.axes)
    through_node = bool(grid.staged) and grid.size > 1
    real = Real(case, grid)
    saved = real.saved()
    real.step()
    lines, peak = real.measured()
    dry = run_dry(case, grid.rank, grid.size if through_node else 1)
    said = dry.bytes()
    assert lines_of(dry) == lines, case.name
    assert abs(said["activations"] - saved) <= SAVED * saved, (case.name, said["activations"] / saved)
    close = PEAK if case.dtype == "float32" else halves
    assert abs(said["peak"] - peak) <= close * peak, (case.name, said["peak"] / peak)
    slots = [buffer for axis in grid._axes.values() if (buffer := axis.node_buffer) is not None]
    assert said["node"] <= sum(slot.size_bytes for slot in slots) <= said["node"] + 2 * GRAIN * len(slots)


@pytest.mark.mpi(sizes=tuple(STRIDE), timeout=400)
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_a_dry_run_moves_saves_and_holds_what_a_real_run_does(make_grid, world_size, node_memory, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    stride = STRIDE[world_size]  # cases take turns between the node's memory and MPI
    for case in cases_of(world_size)[0 if node_memory else stride :: 2 * stride]:
        check(case, make_grid, node_memory)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8, 9, 12), timeout=7200)
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_every_case_moves_saves_and_holds_what_a_real_run_does(make_grid, world_size, node_memory, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    for case in cases_of(world_size):
        check(case, make_grid, node_memory, SCRATCH)
