"""A dry run says what a real run does: every line of its ledger as integers, what it saves and what it holds at its peak."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from dry_real import Real, lines_of, run_dry
from golden_cases import TEXT, Case, read

from summa3d.nn.overlap import DEFAULT, Overlap

SAVED, PEAK = 0.001, 0.03
"""Tolerances of what is saved, and of the peak without the scratch memory of torch's products."""
GRAIN = 1 << 18
"""Slots of a node's memory grow in steps of so many bytes."""
STRIDE = {1: 12, 2: 16, 4: 37, 6: 53, 12: 56}


def cases_of(ranks: int) -> list[Case]:
    return [case for case, _ in read() if prod(case.axes.values()) == ranks]


def check(case: Case, make_grid: Any, node_memory: bool, overlap: Overlap = DEFAULT) -> None:
    """The case on this world, through its node's memory or MPI, against its dry run."""
    grid = make_grid(check=False, node_memory=node_memory, **case.axes)
    through_node = bool(grid.staged) and grid.size > 1
    real = Real(case, grid, overlap)
    saved = real.saved()
    real.step()
    lines, peak = real.measured()
    dry = run_dry(case, grid.rank, grid.size if through_node else 1, overlap=overlap)
    said = dry.bytes()
    assert lines_of(dry) == lines, case.name
    assert abs(said["activations"] - saved) <= SAVED * saved, (case.name, said["activations"] / saved)
    assert abs(said["peak"] - peak) <= PEAK * peak, (case.name, said["peak"] / peak)
    slots = [nbytes for axis in grid.communicators.axes.values() if (nbytes := axis.node_bytes) is not None]
    assert said["node"] <= sum(slots) <= said["node"] + 2 * GRAIN * len(slots)


@pytest.mark.mpi(sizes=tuple(STRIDE), timeout=400)
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_a_dry_run_moves_saves_and_holds_what_a_real_run_does(make_grid, world_size, node_memory, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    stride = STRIDE[world_size]  # cases take turns between the node's memory and MPI
    for case in cases_of(world_size)[0 if node_memory else stride :: 2 * stride]:
        check(case, make_grid, node_memory)


@pytest.mark.mpi(sizes=(4,))
def test_a_dry_run_of_products_in_pieces_moves_and_holds_what_a_real_run_does(make_grid, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    sizes = {**TEXT, "family": "gpt2", "layers": 1}
    cases = [
        ("cuboid", {"x": 2, "y": 1, "z": 2}),
        ("oned", {"y": 4}),
        ("summa", {"x": 2, "y": 2}),
    ]
    for number, (scheme, axes) in enumerate(cases):
        case = Case(scheme, axes, "copied", sizes, 8, ("none", 1), number == 0, "float32")
        check(case, make_grid, False, Overlap(pieces=3, gather=int(number == 0)))


@pytest.mark.mpi(sizes=(4,))
def test_a_dry_run_of_unlike_parts_moves_and_holds_what_a_real_run_does(make_grid, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    sizes = {"layers": 1, "heads": 7, "ffn": 353, "sequence": 31, "vocabulary": 191}
    gpt, llama = {**sizes, "hidden": 91, "dropout": 0.1}, {**sizes, "family": "llama", "hidden": 98, "kv_heads": 7}
    cases = [
        ("cuboid", {"y": 2, "z": 2}, gpt),
        ("cuboid-sequence", {"x": 2, "y": 2}, llama),
        ("cuboid", {"x": 2, "y": 2}, {**llama, "kv_heads": 1}),
        ("summa", {"x": 2, "y": 2}, llama),
        ("oned-sp", {"y": 4}, gpt),
    ]
    for number, (scheme, axes, case) in enumerate(cases):
        recompute = ("none", 1) if number % 2 else ("full", 1)
        check(Case(scheme, axes, "copied", case, 5, recompute, number < 3, "float32"), make_grid, number == 0)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8, 9, 12), timeout=7200)
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_every_case_moves_saves_and_holds_what_a_real_run_does(make_grid, world_size, node_memory, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    wrong = []
    for case in cases_of(world_size):
        try:
            check(case, make_grid, node_memory)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)
