"""Debug mode: ranks that call a collective differently all get the same error, which names who passed what, and none hangs."""

from __future__ import annotations

import numpy as np
import pytest

from summa3d.errors import AgreementError, Summa3dError

PARAMETERS = {
    "operation": (
        lambda axis, odd: axis.all_gather(np.zeros(3)) if odd else axis.all_reduce(np.zeros(3)),
        ["all_gather over x", "all_reduce over x"],
    ),
    "all_gather without sizes": (lambda axis, odd: axis.all_gather(np.zeros(3 + odd)), ["sizes", "[4"]),
    "all_gather sizes": (
        lambda axis, odd: axis.all_gather(np.zeros(2), sizes=[2, 2, 3] if odd else [2, 2, 2]),
        ["[2, 2, 3]", "[2, 2, 2]"],
    ),
    "all_gather other dims": (lambda axis, odd: axis.all_gather(np.zeros((2, 5 + odd)), sizes=[2] * 3), ["(5,)", "(6,)"]),
    "all_gather dim": (lambda axis, odd: axis.all_gather(np.zeros((2, 2)), dim=int(odd)), ["dim"]),
    "dtype": (lambda axis, odd: axis.all_gather(np.zeros(2, np.float32 if odd else np.float64)), ["float32", "float64"]),
    "reduce_scatter shape": (lambda axis, odd: axis.reduce_scatter(np.zeros(3 + odd)), ["extent: ", "3 on rank", "4 on rank"]),
    "reduce_scatter sizes": (
        lambda axis, odd: axis.reduce_scatter(np.zeros(4), sizes=[2, 1, 1] if odd else [1, 1, 2]),
        ["[2, 1, 1]"],
    ),
    "all_reduce shape": (lambda axis, odd: axis.all_reduce(np.zeros((2, 3) if odd else (3, 2))), ["(2, 3)", "(3, 2)"]),
    "all_reduce op": (lambda axis, odd: axis.start_all_reduce(np.zeros(3), op="max" if odd else "sum"), ["'max'", "'sum'"]),
    "broadcast root": (lambda axis, odd: axis.broadcast(np.zeros(3), root=int(odd)), ["root"]),
    "broadcast bad root": (lambda axis, odd: axis.broadcast(np.zeros(3), root=7 if odd else 0), ["root"]),
    "reduce shape": (lambda axis, odd: axis.reduce(np.zeros(3 + odd)), ["(3,)", "(4,)"]),
    "reduce unknown op": (lambda axis, odd: axis.reduce(np.zeros(3), op="median" if odd else "sum"), ["'median'"]),
    "all_to_all dims": (lambda axis, odd: axis.all_to_all(np.zeros((3, 2 + odd))), ["(2,)", "(3,)"]),
    "dtype that cannot travel": (lambda axis, odd: axis.all_gather(np.zeros(2, np.int8 if odd else np.int32)), ["int8", "int32"]),
}


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("name", PARAMETERS)
def test_ranks_that_differ_all_get_an_error_that_names_them(comm, make_grid, name):
    attempt, words = PARAMETERS[name]
    axis = make_grid(x=3)["x"]
    for odd in (2, 0):
        with pytest.raises(AgreementError) as caught:
            attempt(axis, comm.rank == odd)
        message = str(caught.value)
        for word in (*words, f"rank {odd}", "ranks 0, 1" if odd == 2 else "ranks 1, 2"):
            assert word in message, (name, message)
        assert len(set(comm.allgather(message))) == 1
    assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]


BLOCKS = {
    "a block that is not its size": lambda axis, odd: axis.all_gather(np.zeros(3 + odd), sizes=[3, 3, 3]),
    "an array that is not its sizes": lambda axis, odd: axis.reduce_scatter(np.zeros(3 + odd), sizes=[1, 1, 1]),
    "into of another shape": lambda axis, odd: axis.all_reduce(np.zeros(3), into=np.zeros(3 + odd)),
    "all_to_all pieces that nobody awaits": lambda axis, odd: axis.all_to_all(
        np.zeros(3 + odd), sizes=[1, 1, 1 + odd], receive_sizes=[1, 1, 1]
    ),
    "all_to_all sizes that do not sum": lambda axis, odd: axis.all_to_all(
        np.zeros(3), sizes=[1, 1, 1 + odd], receive_sizes=[1, 1, 1]
    ),
}


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_wrong_on_one_rank_only_is_an_error_on_all(comm, make_grid, name):
    axis = make_grid(x=3)["x"]
    with pytest.raises(Summa3dError, match=r"rank [12]"):
        BLOCKS[name](axis, int(comm.rank == 1))
    assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]


@pytest.mark.mpi(sizes=(8,))
def test_only_the_ranks_of_the_axis_compare(comm, make_grid):
    """Two x lines of different shapes at once are fine; within one line they are not."""
    grid = make_grid(x=2, y=2, z=2)
    rows = 3 + grid.coordinates["y"]
    assert grid["x"].all_gather(np.zeros(rows)).shape == (2 * rows,)
    with pytest.raises(AgreementError):
        grid["y"].all_gather(np.zeros(rows))


@pytest.mark.mpi(sizes=(2,))
def test_without_debug_mode_nothing_is_compared(comm, make_grid):
    axis = make_grid(x=2, check=False)["x"]
    assert axis.all_gather(np.full(1 + comm.rank, comm.rank), sizes=[1, 2]).tolist() == [0, 1, 1]
    assert not axis.check
