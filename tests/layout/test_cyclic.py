"""Block-cyclic ownership against the definition of ScaLAPACK's NUMROC and INDXG2P."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from summa3d.errors import LayoutError, ShapeError
from summa3d.layout import BlockCyclic
from summa3d.layout.cyclic import numroc

EXTENT, SMALL = st.integers(0, 40), st.integers(1, 5)
SIZES = {"n": st.integers(0, 60), "block": st.integers(1, 9), "processes": st.integers(1, 7)}


@given(**SIZES)
def test_numroc_counts_the_rows_dealt_to_each_process(n, block, processes):
    dealt = [row // block % processes for row in range(n)]
    for index in range(processes):
        assert numroc(n, block, index, processes) == dealt.count(index)


@given(shape=st.tuples(EXTENT, EXTENT), block=st.tuples(SMALL, SMALL), processes=st.tuples(SMALL, SMALL))
def test_runs_are_the_blocks_dealt_in_turn(shape, block, processes):
    (rows, columns), (mb, nb), (x, y) = shape, block, processes
    cyclic, grid_shape = BlockCyclic(rows=("x", mb), columns=("y", nb)), {"x": x, "y": y}
    for ix, iy in itertools.product(range(x), range(y)):
        at = {"x": ix, "y": iy}
        held = [[index for run in runs for index in range(run.start, run.stop)] for runs in cyclic.runs(shape, grid_shape, at)]
        assert held[0] == [row for row in range(rows) if row // mb % x == ix]
        assert held[1] == [column for column in range(columns) if column // nb % y == iy]
        assert cyclic.local_shape(shape, grid_shape, at) == (len(held[0]), len(held[1]))


def test_a_plane_of_axes_counts_the_last_fastest():
    cyclic = BlockCyclic(rows=(("x", "z"), 2), columns=((), 5))
    grid_shape = {"x": 2, "y": 3, "z": 2}
    rows, columns = cyclic.runs((16, 7), grid_shape, {"x": 1, "y": 2, "z": 0})
    assert rows == (slice(4, 6), slice(12, 14)) and columns == (slice(0, 5), slice(5, 7))
    assert cyclic.axes == {"x", "z"} and cyclic.dims == (("x", "z"), ())


def test_transpose_and_descriptor():
    cyclic = BlockCyclic(rows=("x", 2), columns=("y", 3))
    assert cyclic.transposed() == BlockCyclic(rows=("y", 3), columns=("x", 2)) and cyclic.transposed().transposed() == cyclic
    assert cyclic.descriptor((7, 9), {"x": 2, "y": 2}, {"x": 1, "y": 0}, context=4) == (1, 4, 7, 9, 2, 3, 0, 0, 3)
    assert cyclic.descriptor((1, 9), {"x": 2, "y": 2}, {"x": 1, "y": 0})[-1] == 1


def test_what_cannot_be_dealt_is_an_error():
    with pytest.raises(LayoutError, match="a block of 0"):
        BlockCyclic(rows=("x", 0), columns=("y", 3))
    with pytest.raises(LayoutError, match="splits both rows and columns"):
        BlockCyclic(rows=("x", 2), columns=(("y", "x"), 3))
    cyclic = BlockCyclic(rows=("x", 2), columns=("y", 3))
    with pytest.raises(ShapeError, match="has 3 dims"):
        cyclic.local_shape((1, 2, 3), {"x": 1, "y": 1}, {"x": 0, "y": 0})
    with pytest.raises(LayoutError, match="names axis 'y'; the grid has the axes x"):
        cyclic.local_shape((1, 2), {"x": 1}, {"x": 0})
