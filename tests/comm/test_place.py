# A place on a grid that nobody has started knows what a rank of the real one knows. May import comm and layout only.
# Next: ../nn/test_memory.py, which predicts with it.
from __future__ import annotations

import pytest

from summa3d.comm.grid import Place
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
