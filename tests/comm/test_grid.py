"""Grids: where ranks are placed, which ranks an axis or a plane joins, and what a grid that does not fit is told."""

from __future__ import annotations

import contextlib
import itertools
from math import prod

import numpy as np
import pytest
from mpi4py import MPI

from summa3d.comm.grid import Grid
from summa3d.comm.topology import Topology, grids_of
from summa3d.errors import GridError

SHAPES = {
    1: [{"x": 1}, {"x": 1, "y": 1, "z": 1}],
    2: [{"x": 1, "y": 2, "z": 1}],
    6: [{"x": 3, "y": 2}, {"x": 1, "y": 2, "z": 3}, {"q": 6}],
    8: [{"x": 2, "y": 2, "z": 2}, {"dp": 2, "x": 1, "y": 4, "z": 1}],
    12: [{"x": 3, "y": 2, "z": 2}],
}


class Pretender:
    """A communicator in name: enough to place ranks without starting any."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def places(shape, **options):
    """Coordinates of every rank, by the same arithmetic that a real grid uses."""
    topology = Topology.checked(shape, **options)
    return topology, [topology.coordinates_of(rank) for rank in range(topology.size)]


def test_the_default_order_puts_z_then_y_fastest():
    _, points = places({"x": 2, "y": 3, "z": 5})
    want = [{"x": x, "y": y, "z": z} for x, y, z in itertools.product(range(2), range(3), range(5))]
    assert points == want


def test_order_names_the_fastest_axis_first_and_the_rest_follow():
    _, points = places({"x": 2, "y": 3, "z": 5}, order="xzy")
    assert points == [{"x": x, "y": y, "z": z} for y, z, x in itertools.product(range(3), range(5), range(2))]
    _, points = places({"dp": 2, "x": 3, "z": 2}, order=["dp"])
    assert points == [{"dp": dp, "x": x, "z": z} for z, x, dp in itertools.product(range(2), range(3), range(2))]


def test_tiles_hold_consecutive_ranks():
    """The bunched arrangement: a 2×2 tile of a 4×6 grid on each node of four ranks."""
    _, points = places({"x": 4, "y": 6}, tile={"x": 2, "y": 2})
    for first in range(0, 24, 4):
        tile = points[first : first + 4]
        assert len({(point["x"] // 2, point["y"] // 2) for point in tile}) == 1
        assert len({(point["x"], point["y"]) for point in tile}) == 4
    assert points[:5] == [{"x": 0, "y": 0}, {"x": 0, "y": 1}, {"x": 1, "y": 0}, {"x": 1, "y": 1}, {"x": 0, "y": 2}]


@pytest.mark.parametrize("shape", [{"x": 4, "y": 6, "z": 3}, {"x": 1, "y": 1}, {"p": 7}, {"x": 5, "y": 2, "z": 3, "d": 2}])
def test_rank_of_is_the_inverse_of_coordinates_of(shape):
    tilings = [
        None,
        {name: size for name, size in shape.items() if size in (4, 3)},
        {name: 2 for name, size in shape.items() if size % 2 == 0},
    ]
    for order, tile in itertools.product((None, list(shape), [list(shape)[-1]]), tilings):
        grid, points = places(shape, order=order, tile=tile)
        assert [grid.rank_of(point) for point in points] == list(range(len(points)))
        assert len({tuple(point.values()) for point in points}) == len(points)
        assert all(0 <= point[name] < shape[name] for point in points for name in shape)


def test_grids_of_lists_each_grid_once():
    found = grids_of(12, ["x", "y", "z"])
    want = [(x, y, z) for x in range(1, 13) for y in range(1, 13) for z in range(1, 13) if x * y * z == 12]
    assert sorted(tuple(grid.values()) for grid in found) == want


@pytest.mark.mpi(sizes=(1, 2, 6, 8, 12))
def test_axes_and_planes_join_the_ranks_that_share_the_other_coordinates(comm, make_grid):
    for shape in SHAPES[comm.size]:
        grid = make_grid(**shape, order=[next(iter(shape))])
        assert (grid.rank, grid.size, tuple(grid.shape)) == (comm.rank, comm.size, tuple(shape))
        everyone = comm.allgather(grid.coordinates)
        assert everyone == [grid.coordinates_of(rank) for rank in range(comm.size)]
        for count in range(1, len(shape) + 1):
            for names in itertools.permutations(shape, count):
                axis = grid[names]
                index = 0
                for name in names:
                    index = index * shape[name] + grid.coordinates[name]
                assert (axis.size, axis.index, axis.names) == (prod(shape[name] for name in names), index, names)
                line = sorted(
                    (
                        rank
                        for rank, point in enumerate(everyone)
                        if all(point[n] == grid.coordinates[n] for n in shape if n not in names)
                    ),
                    key=lambda rank: [everyone[rank][name] for name in names],
                )
                assert grid[names] is axis
                assert axis.comm.allgather(comm.rank) == line and axis.comm.rank == axis.index
        single = next(iter(shape))
        assert grid[single] is grid[(single,)]
        assert (grid.world.size, grid.world.names) == (comm.size, tuple(shape))


@pytest.mark.mpi(sizes=(8,))
def test_plane_index_is_ix_Y_plus_iy(comm, make_grid):
    grid = make_grid(x=2, y=4, z=1)
    x, y = grid.coordinates["x"], grid.coordinates["y"]
    assert grid["x", "y"].index == x * 4 + y
    assert grid["y", "x"].index == y * 2 + x
    assert grid["x", "y"].all_gather(np.array([[x, y]])).tolist() == [[i, j] for i in range(2) for j in range(4)]


@pytest.mark.mpi(sizes=(4,))
def test_every_rank_knows_the_node_of_every_rank(comm, make_grid):
    grid = make_grid(x=2, y=2)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = comm.allgather(node.bcast(comm.rank))
    node.Free()
    assert grid.job.nodes == [sorted(set(leaders)).index(leader) for leader in leaders]


def refuse(axes, size=12, **options):
    with pytest.raises(GridError) as caught:
        Grid(Pretender(0, size), axes, **options)
    return str(caught.value)


def test_a_grid_that_does_not_fit_the_ranks_names_those_that_do():
    message = refuse({"x": 2, "y": 2, "z": 2})
    assert "Grid x=2,y=2,z=2 has 8 places, but there are 12 ranks." in message
    assert "Start 8 ranks, or choose a grid of 12:" in message
    for fitting in ("x=3,y=2,z=2", "x=2,y=3,z=2", "x=2,y=2,z=3"):  # the nearest come first
        assert fitting in message
    assert "x=13,y=1" in refuse({"x": 2, "y": 7}, size=13)


def test_errors_name_the_axis_and_what_would_work():
    assert "Axis y has size 0" in refuse({"x": 12, "y": 0})
    assert "Axis x has size 2.0" in refuse({"x": 2.0, "y": 6})
    assert "at least one axis" in refuse({})
    assert "order 'xw' must name each axis at most once; the axes are x, y." in refuse({"x": 3, "y": 4}, order="xw")
    assert "order 'xx'" in refuse({"x": 3, "y": 4}, order="xx")
    assert "tile names axis 'w'; the axes are x, y." in refuse({"x": 3, "y": 4}, tile={"w": 2})
    assert "tile y=3 does not divide axis y = 4. Tiles that fit: 1, 2, 4." in refuse({"x": 3, "y": 4}, tile={"y": 3})
    assert "tile y=0" in refuse({"x": 3, "y": 4}, tile={"y": 0})


@pytest.mark.mpi(sizes=(1, 4))
def test_an_axis_that_the_grid_lacks_or_that_is_named_twice_is_refused(comm, make_grid):
    grid = make_grid(x=comm.size, y=1)
    with pytest.raises(GridError, match=r"no axis 'z'\. Its axes: x, y"):
        grid["z"]
    with pytest.raises(GridError, match="no axis 'w'"):
        grid["x", "w"]
    with pytest.raises(GridError, match="twice"):
        grid["x", "x"]


@pytest.mark.mpi(sizes=(4,))
def test_free_releases_every_communicator_and_leaves_the_users_alone(comm):
    with Grid(comm, {"x": 2, "y": 2}) as grid:
        axes = [grid["x"], grid["y"], grid["y", "x"]]
        assert all(axis.comm != MPI.COMM_NULL for axis in axes)
    assert all(axis.comm == MPI.COMM_NULL for axis in axes)
    assert comm.allreduce(1) == 4


@pytest.mark.mpi(sizes=(4,))
def test_grids_made_and_freed_again_and_again_do_not_use_up_the_mpi_librarys_communicators(comm):
    """MPICH has about 2000 of them at a time: all but some are taken before."""
    taken, some = [], 64
    with contextlib.suppress(MPI.Exception):
        while len(taken) < 3000:
            taken.append(MPI.COMM_SELF.Dup())
    try:
        for _ in range(some):
            taken.pop().Free()
        for _ in range(some + 1):
            with Grid(comm, {"x": 2, "y": 2}) as grid:
                grid["y", "x"]
    finally:
        for one in taken:
            one.Free()


@pytest.mark.mpi(sizes=(2,))
def test_two_grids_on_one_communicator_do_not_meet(comm, make_grid):
    one, two = make_grid(x=2, check=False), make_grid(x=2, order="x", check=False)
    first = one["x"].start_all_gather(np.array([comm.rank]))
    second = two["x"].start_all_gather(np.array([10 + comm.rank]))
    assert second.wait().tolist() == [10, 11] and first.wait().tolist() == [0, 1]
    assert one.ledger is not two.ledger


@pytest.mark.mpi(sizes=(2,))
def test_a_freed_grid_says_so_and_may_be_freed_again(comm):
    grid = Grid(comm, {"x": 2})
    grid.free()
    grid.free()
    for use in (lambda: grid["x"], lambda: grid.world, lambda: grid.everyone, lambda: grid.ranked):
        with pytest.raises(GridError, match=r"Grid\(x=2, order=x\) was freed: its axes communicate no more"):
            use()


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("node_memory", [False, True])
def test_an_axis_that_never_communicated_says_that_it_was_freed_and_a_grid_made_on_its_communicator_lives_on(comm, node_memory):
    with Grid(comm, {"x": 2, "y": 2}, node_memory=node_memory) as grid:
        axis, inner = grid["x"], Grid(grid["x"].comm, {"x": 1, "y": 2}, node_memory=False)
    with pytest.raises(GridError, match="axis x was freed with its grid"):
        axis.start_send(np.ones(2), 1 - axis.index)
    for use in (inner["y"], inner.everyone):
        assert use.all_reduce(np.ones(2)).tolist() == [2, 2]
    inner.free()


def test_what_is_no_communicator_makes_no_grid():
    for wrong in (None, 3, Grid(MPI.COMM_SELF, {"x": 1})):
        with pytest.raises(GridError, match="A grid takes an MPI communicator, as"):
            Grid(wrong, {"x": 1})
    with pytest.raises(GridError, match="a grid: its communicator was freed"):
        Grid(MPI.COMM_NULL, {"x": 1})


def test_sizes_may_be_numpys_whole_numbers_and_axes_must_be_named():
    grid = Grid(MPI.COMM_SELF, {"x": np.int64(1), "y": 1})
    assert grid.shape == {"x": 1, "y": 1} and all(type(size) is int for size in grid.shape.values())
    with pytest.raises(GridError, match=r"axes is \[1, 1\]; a grid takes names and sizes"):
        Grid(MPI.COMM_SELF, [1, 1])
