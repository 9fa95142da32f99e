"""Parts of a grid: the inner grid of one replica of one pipeline stage, picked members of an axis, and the seal."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from summa3d.comm.grid import Grid, Place
from summa3d.comm.topology import Topology
from summa3d.errors import GridError
from summa3d.layout import collect, distribute, redistribute

JOB = {"x": 1, "y": 2, "z": 2, "dp": 1, "pp": 2}


def groups(axis: str, order: str) -> list[list[int]]:
    """The ranks that differ on `axis` alone, on the 8 ranks of the post on 3-D parallelism: 2 × 2 × 2."""
    topology = Topology.checked({"y": 2, "dp": 2, "pp": 2}, order)
    return sorted({tuple(topology.members((axis,), topology.coordinates_of(rank))) for rank in range(8)})


def test_both_groupings_of_replicas_and_stages_are_orders_of_the_grid():
    """The post's text says (pipeline, data, tensor), so that data-parallel ranks are nearer; its printed lists swap the two."""
    said, printed = "y,dp,pp", "y,pp,dp"
    near, far = [(0, 2), (1, 3), (4, 6), (5, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert (groups("dp", said), groups("pp", said)) == (near, far)
    assert (groups("pp", printed), groups("dp", printed)) == (near, far)
    assert groups("y", said) == groups("y", printed) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_stages_are_outermost_by_default_and_replicas_next():
    topology = Topology.checked({"pp": 2, "dp": 3, "x": 2, "z": 2})
    assert topology.order == ("z", "x", "dp", "pp")
    with pytest.raises(GridError, match="order 'z,x,cp' must name each axis at most once; the axes are x, z"):
        Topology.checked({"x": 2, "z": 2}, "z,x,cp")


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("order", ["z,y,x,dp,pp", "pp,z,y"])
def test_a_part_is_a_grid_whose_axes_are_the_jobs(make_grid, order):
    grid = make_grid(**JOB, order=order)
    with grid.ledger.watch() as moved:
        inner = grid.part("z", "x", "y")
    assert moved.messages == 0 and inner is grid.part("x", "y", "z") and inner.whole is grid.whole is grid
    assert inner.shape == {"x": 1, "y": 2, "z": 2}
    assert inner.topology.order == tuple(name for name in grid.topology.order if name in "xyz")
    assert inner.coordinates == {name: grid.coordinates[name] for name in "xyz"} and inner.size == 4
    assert inner.rank == inner.rank_of(inner.coordinates) == inner.ranked.index == inner.comm.rank
    for names in ("y", ("z", "y"), ("x", "y", "z")):
        assert inner[names] is grid[names]
    assert inner.world is grid["x", "y", "z"]
    assert inner.contiguous_sub_axis(("y", "z"), 2) is grid.contiguous_sub_axis(("y", "z"), 2)
    assert inner.part("x", "y") is grid.part("x", "y") and grid.part(*grid.shape) is grid
    with pytest.raises(GridError, match=r"The grid has no axis 'pp'\. Its axes: x, y, z"):
        inner["pp"]
    inner.free()
    assert not grid.job.freed and grid.world.all_reduce(np.ones(1)) == [8]


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("order", ["z,y,x,dp,pp", "pp,y,dp,z"])
def test_each_part_collects_and_redistributes_its_own_tensor(make_grid, order):
    grid = make_grid(**JOB, order=order)
    inner = grid.part("x", "y", "z")
    whole = np.arange(35.0).reshape(5, 7) + 100 * grid.coordinates["pp"]
    block = distribute(whole, inner, "m:(z,y) n")
    block = redistribute(block, whole.shape, inner, "m:(z,y) n", "m:y n:z")
    assert np.array_equal(collect(block, inner, "m:y n:z", whole.shape), whole)
    assert np.array_equal(block, distribute(whole, inner, "m:y n:z"))
    moved = {(row.collective, row.axis): row.amounts.messages for row in grid.ledger.rows()}
    assert moved == {("all_to_all", "x·y·z"): 3, ("all_gather", "x·y·z"): 3}


@pytest.mark.mpi(sizes=(8,))
def test_freeing_the_job_frees_its_parts(make_grid):
    grid = make_grid(**JOB)
    inner = grid.part("y", "z")
    inner.ranked.barrier()
    inner.job.kept[inner]["an executor"] = 1
    grid.free()
    assert inner.job.freed and not inner.job.kept[inner]
    with pytest.raises(GridError, match="freed"):
        inner["y"]


@pytest.mark.mpi(sizes=(8,))
def test_some_ranks_of_a_job_form_a_grid_with_axes_of_their_own(make_grid):
    grid = make_grid(**JOB)
    ranks = [[6, 1, 3, 4, 0, 7], [5, 2]]
    mine = next(group for group in ranks if grid.rank in group)
    axes = {"i": len(mine) // 2, "j": 2}
    own = grid.part("y", "z").regrouped(mine, axes)
    assert own is grid.regrouped(mine, axes) and own.rank == own.ranked.index == mine.index(grid.rank)
    assert own.coordinates == {"i": own.rank // 2, "j": own.rank % 2} and own.size == len(mine)
    whole = np.arange(77.0).reshape(7, 11) + 1000 * len(mine)
    with grid.ledger.watch() as moved:
        block = redistribute(distribute(whole, own, "m:i n:j"), whole.shape, own, "m:i n:j", "m n:(j,i)")
        assert np.array_equal(collect(block, own, "m n:(j,i)", whole.shape), whole)
        assert own["i"].all_reduce(np.array([2.0**grid.rank])) == [
            sum(2.0 ** mine[at] for at in range(own.rank % 2, own.size, 2))
        ]
    assert {row.axis for row in moved.rows} == {"i·j", "i"} - ({"i"} if own.shape["i"] == 1 else set())
    with pytest.raises(GridError, match="none of"):
        grid.regrouped([(grid.rank + 1) % 8], {"i": 1})
    with pytest.raises(GridError, match=r"Start 3 ranks"):
        grid.regrouped(mine, {"i": 3})
    grid.free()
    with pytest.raises(GridError, match="freed"):
        own["i"]


@pytest.mark.mpi(sizes=(6,))
def test_picked_members_of_an_axis_form_an_axis_of_their_own(make_grid):
    grid = make_grid(pp=3, y=2)
    first_and_last = grid.sub_axis("pp", (2, 0))
    if grid.coordinates["pp"] == 1:
        assert first_and_last is None
    else:
        assert (first_and_last.size, first_and_last.index, first_and_last.label) == (2, grid.coordinates["pp"] // 2, "pp=0+2")
        value = np.array([10.0 * grid.coordinates["pp"] + grid.coordinates["y"]])
        assert first_and_last.all_reduce(value) == [20 + 2 * grid.coordinates["y"]]
        assert grid.sub_axis("pp", [0, 2, 2]) is first_and_last
    assert grid.sub_axis("pp", range(3)) is grid["pp"]
    with pytest.raises(GridError, match=re.escape("Axis pp has the indices 0 to 2; grid.sub_axis asks for [0, 3].")):
        grid.sub_axis("pp", [0, 3])


@pytest.mark.mpi(sizes=(8,))
def test_a_sealed_grid_makes_no_new_communicator(make_grid):
    grid = make_grid(**JOB)
    inner = grid.part("x", "y", "z")
    line = inner["y", "z"]
    inner.seal()
    assert grid.job.sealed and inner["y", "z"] is line and grid["pp"].size == 2 and grid["x", "dp"].size == 1
    for ask, named in (
        (lambda: inner["z", "y"], "grid['z', 'y']"),
        (lambda: grid["dp", "pp", "y"], "grid['dp', 'pp', 'y']"),
        (lambda: grid.contiguous_sub_axis(("y", "z"), 2), "grid.contiguous_sub_axis(('y', 'z'), 2)"),
        (lambda: inner.ranked, "grid.part('x', 'y', 'z').comm"),
    ):
        with pytest.raises(GridError, match=re.escape(f"Ask for {named} on every rank before grid.seal().")):
            ask()


def test_a_place_has_the_parts_and_picks_of_the_rank_it_stands_for():
    shape = {"x": 2, "z": 3, "pp": 4}
    for rank, order in itertools.product(range(24), (None, "pp,x,z")):
        place = Place(shape, rank, order)
        inner = place.part("x", "z")
        assert (inner.size, inner.world.size, inner.rank) == (6, 6, inner.rank_of(place.coordinates))
        assert inner.world.index == place.coordinates["x"] * 3 + place.coordinates["z"] and inner.ranked.index == inner.rank
        ends = place.sub_axis("pp", (0, 3))
        assert (ends is None) == (place.coordinates["pp"] in (1, 2)) and (ends is None or ends.size == 2)
    place.seal()
    with pytest.raises(GridError, match="is sealed"):
        place["x", "pp"]
    with pytest.raises(GridError, match="cannot add axis pp, which has size 4"):
        inner.add_axes("pp")


@pytest.mark.mpi(sizes=(4,))
def test_a_part_of_a_grid_that_leaves_ranks_outside(comm):
    with Grid(comm, {"y": 1, "pp": 3}, ranks=range(3)) as grid:
        inner = grid.part("y")
        assert inner.inside == grid.inside == (comm.rank < 3)
        if grid.inside:
            assert inner.world.size == 1
