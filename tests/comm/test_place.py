"""A place on a grid without processes knows what a rank of the real one knows, and counts what that would move."""

from __future__ import annotations

import numpy as np
import pytest

from summa3d.comm.grid import Grid, Place
from summa3d.comm.transport.host import HostTransport
from summa3d.comm.transport.transports import Transports
from summa3d.errors import GridError


@pytest.mark.mpi(sizes=(12,))
def test_a_place_has_the_coordinates_and_the_axes_of_the_rank_it_stands_for(make_grid):
    options = {"order": "yxz", "tile": {"z": 2}}
    grid = make_grid(x=3, y=2, z=2, **options)
    place = Place({"x": 3, "y": 2, "z": 2}, grid.rank, **options)
    assert place.coordinates == grid.coordinates and place.size == grid.size and place.rank_of(place.coordinates) == grid.rank
    for names in (("x",), ("z", "x"), ("x", "y", "z")):
        assert (place[names].size, place[names].index) == (grid[names].size, grid[names].index)


def test_a_place_outside_the_grid_is_refused():
    with pytest.raises(GridError, match=r"Grid x=2,y=3 has no rank 6; its ranks are 0 to 5\."):
        Place({"x": 2, "y": 3}, 6)


def test_a_place_that_is_freed_makes_no_further_axes():
    with Place({"x": 3, "y": 2}) as place:
        assert place["x"].size == 3 and place.world.size == place.ranked.size == 6
    with pytest.raises(GridError, match="was freed"):
        place["y", "x"]


def test_a_place_has_nobody_to_communicate_with():
    place = Place({"x": 2, "y": 1})
    assert place["y"].all_reduce(np.ones(2)).tolist() == [1, 1]
    with pytest.raises(GridError, match="all_reduce over axis x = 2: a Place stands for one rank of a grid without processes"):
        place["x"].all_reduce(np.ones(2))
    assert place["x"].allocate((2, 2), np.ones(1)) is None


class Still(HostTransport):
    """Calls that move nothing and return at once."""

    def nothing(self, *args, **options):
        return []

    all_gather = all_to_all = all_reduce = broadcast = reduce = send = receive = nothing


class StillTransports(Transports):
    def __init__(self, members):
        super().__init__(members)
        self.node, self.host = None, Still()


def communicate(grid: Grid) -> None:
    """Every collective once or more, along an axis, a plane and the world."""
    line, plane = grid["y"], grid["x", "y"]
    line.all_gather(np.ones((2 + line.index, 3)), sizes=[2, 3, 4])
    line.reduce_scatter(np.ones((5, 7), np.float16), 1, sizes=[3, 2, 2])
    plane.start_all_reduce(np.ones(11, np.float16)).wait()
    plane.all_reduce(np.ones(11))
    plane.broadcast(np.ones(3), 4)
    grid.world.reduce(np.ones((4, 2)), 3)
    grid.world.all_to_all(np.ones((12, 2)))
    grid.ranked.all_gather(np.ones(2))
    grid.everyone.all_gather(np.ones((1, 2)), 1)
    with grid.ledger.phase("backward"):
        pending = line.start_receive(np.ones(4), (line.index + 1) % 3)
        line.send(np.ones(4), (line.index - 1) % 3)
        pending.wait()


@pytest.mark.mpi(sizes=(6,))
def test_with_transports_that_move_nothing_a_place_counts_what_its_rank_moves(make_grid):
    grid = make_grid(x=2, y=3, check=False, node_memory=False)
    place = Place({"x": 2, "y": 3}, grid.rank, transports=StillTransports)
    communicate(grid)
    communicate(place)

    def counted(ledger):
        rows = ledger.rows()
        return [(row.collective, row.axis, row.phase, row.dtype, row.amounts.words, row.amounts.messages) for row in rows]

    assert counted(place.ledger) == counted(grid.ledger) and len(counted(grid.ledger)) == 10
