"""Reductions into buffers that the caller keeps: the same sums, words and messages, and nothing allocated for them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from kinds import array, numbers, plain

from summa3d.comm.transport.slot_collective import IN_ONE_COPY
from summa3d.errors import AgreementError, ShapeError


@pytest.fixture(params=[True, False], ids=["node", "mpi"])
def make_grid(request, make_grid):
    """Grids whose axes communicate through the node's memory, and grids whose axes do through MPI."""
    return partial(make_grid, node_memory=request.param)


@pytest.mark.mpi(sizes=(1, 2, 3))
@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_reduce_writes_into_the_roots_buffer_or_onto_its_own_summand(comm, make_grid, dtype):
    axis = make_grid(y=comm.size)["y"]
    summands = [numbers(dtype, (3, 5), 1, member) for member in range(comm.size)]
    for root in range(comm.size):
        own, into = array("numpy", dtype, summands[comm.rank]), np.full((3, 5), 7, dtype)
        result = axis.reduce(own, root, into=into)
        assert (result is into) == (comm.rank == root) and np.array_equal(plain(own), summands[comm.rank])
        assert np.array_equal(plain(into), sum(summands) if comm.rank == root else np.full((3, 5), 7))
        started = axis.start_reduce(own, root, into=own).wait()
        assert comm.rank != root or (started is own and np.array_equal(plain(own), sum(summands)))


@pytest.mark.mpi(sizes=(2, 3))
def test_reduce_scatter_uses_the_room_it_is_given_for_the_parts(comm, make_grid):
    grid = make_grid(y=comm.size)
    sizes = [2, 1, 0][: comm.size]
    summands = [array("numpy", "float64", numbers("float64", (sum(sizes), 4), member)) for member in range(comm.size)]
    start = sum(sizes[: comm.rank])
    room, out = np.empty(comm.size * sizes[comm.rank] * 4), np.empty((sizes[comm.rank], 4))
    grid.ledger.reset_peak()
    assert grid["y"].reduce_scatter(summands[comm.rank], sizes=sizes, into=out, parts=room) is out
    assert np.array_equal(out, sum(summands)[start : start + sizes[comm.rank]])
    if not grid.staged:  # else the parts are read where their owners laid them
        assert np.array_equal(
            room.reshape(comm.size, -1, 4)[:, : len(out)], [part[start : start + len(out)] for part in summands]
        )
    assert grid.ledger.workspace_peak == 0


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("alone", [False, True])
def test_strided_room_for_the_parts_is_refused_by_all_ranks(comm, make_grid, alone):
    grid = make_grid(y=2, check=alone)  # checks compare what one rank alone gives
    error = AgreementError if alone else ShapeError
    room = np.empty((8, 2))[:, 0] if comm.rank == 1 or not alone else np.empty(8)
    with pytest.raises(error, match="parts cannot be its workspace: it is not C-contiguous"):
        grid["y"].reduce_scatter(np.ones((2, 4)), parts=room)


@pytest.mark.mpi(sizes=(2, 3, 4))
@pytest.mark.parametrize("size", [2, IN_ONE_COPY // 8])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_result_may_be_written_over_what_is_sent(comm, make_grid, kind, size):
    axis = make_grid(y=comm.size)["y"]
    parts = [numbers("float64", (size * comm.size, 3), 5, member) for member in range(comm.size)]
    total, own = sum(parts), slice(size * comm.rank, size * (comm.rank + 1))

    def fresh():
        return array(kind, "float64", parts[comm.rank])

    for scatter in (axis.reduce_scatter, lambda *given, **also: axis.start_reduce_scatter(*given, **also).wait()):
        whole = fresh()
        scatter(whole, into=whole[own])
        assert np.array_equal(plain(whole[own]), total[own])
    whole = fresh()
    axis.all_gather(whole[own], into=whole)
    assert np.array_equal(plain(whole), np.concatenate([part[size * i : size * (i + 1)] for i, part in enumerate(parts)]))
    whole = fresh()
    axis.all_reduce(whole, into=whole[:])
    assert np.array_equal(plain(whole), total)


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_sum_in_place_is_refused_where_memory_repeats_or_is_read_only_though_one_like_it_came_before(comm, make_grid, kind):
    grid = make_grid(y=comm.size, check=False)  # which keeps the routes of its calls
    good = array(kind, "float64", numbers("float64", (3, 5), comm.rank))
    want = sum(numbers("float64", (3, 5), member) for member in range(comm.size))
    assert grid["y"].all_reduce(good, into=good) is good and np.array_equal(plain(good), want)
    if kind == "numpy":
        bad = np.zeros((3, 5))
        bad.flags.writeable = False
    else:
        bad = good.new_zeros((3, 1)).expand(3, 5)
    with pytest.raises(ShapeError, match="read-only"):
        grid["y"].all_reduce(bad, into=bad)
    assert np.array_equal(plain(grid["y"].all_reduce(good)), comm.size * want)
