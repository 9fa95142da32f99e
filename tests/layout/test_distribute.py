"""A global array to blocks and back: any layout, copies, empty blocks, numpy and torch; and the words that collecting moves."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import array, is_like, numbers, plain

from summa3d.errors import LayoutError, ShapeError
from summa3d.layout import Layout, Sharding, collect, distribute

GRIDS = {1: [(1, 1, 1)], 2: [(1, 2, 1)], 3: [(3, 1, 1)], 8: [(2, 2, 2), (1, 1, 8)], 12: [(3, 2, 2)]}
LAYOUTS = [Layout(("x", "y"), ("z",)), Layout((), ("z", "x")), Layout((), ()), Layout(("y",), ()), Layout((), ("y", "z", "x"))]


@pytest.mark.mpi(sizes=(1, 2, 3, 8, 12))
def test_distributing_and_collecting_gives_back_the_array_and_moves_what_is_not_owned(comm, make_grid):
    for x, y, z in GRIDS[comm.size]:
        for order in (None, "xyz"):
            grid = make_grid(x=x, y=y, z=z, order=order)
            for layout in LAYOUTS:
                for shape in ((7, 11), (1, 5), (0, 3), (2, 1)):
                    whole = numbers("int64", shape, 1)
                    with grid.ledger.watch() as moved:
                        block = distribute(whole, grid, layout)
                    assert moved.calls == 0
                    assert is_like(block, "numpy", "int64") and not np.shares_memory(block, whole)
                    assert np.array_equal(block, whole[layout.slices(shape, grid.shape, grid.coordinates)])
                    with grid.ledger.watch() as moved:
                        again = collect(block, grid, layout, shape)
                    assert np.array_equal(again, whole) and again.flags.c_contiguous
                    owned = block.size if Sharding(layout, shape).is_primary(grid) else 0
                    assert moved.words == (whole.size - owned if comm.size > 1 else 0)


@pytest.mark.mpi(sizes=(2,))
def test_three_dims_of_torch_tensors_of_every_float(comm, make_grid):
    grid = make_grid(x=2, y=1, z=1)
    layout = Layout((), ("y", "x"), ("z",))
    for dtype in ("float64", "float32", "bfloat16", "float16", "complex128", "bool"):
        whole = array("torch", dtype, numbers(dtype, (3, 5, 2), 2))
        block = distribute(whole, grid, layout)
        assert is_like(block, "torch", dtype) and block.data_ptr() != whole.data_ptr()
        assert np.array_equal(plain(collect(block, grid, layout, (3, 5, 2))), plain(whole))
        assert np.array_equal(plain(collect(block.mT.contiguous().mT, grid, layout, (3, 5, 2))), plain(whole))


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_strided_vector_is_collected(comm, make_grid, kind):
    whole = numbers("float64", (7,), 3)
    grid, layout = make_grid(x=2), Layout(("x",))
    block = array(kind, "float64", np.repeat(distribute(whole, grid, layout), 2))[::2]
    assert np.array_equal(plain(collect(block, grid, layout, (7,))), whole)


@pytest.mark.mpi(sizes=(2,))
def test_blocks_and_layouts_that_do_not_fit_are_refused(comm, make_grid):
    grid = make_grid(x=2)
    with pytest.raises(ShapeError, match=rf"Rank {comm.rank} holds a block of shape \(9, 9\)"):
        collect(np.zeros((9, 9)), grid, Layout(("x",), ()), (6, 4))
    with pytest.raises(LayoutError, match="has 3"):
        distribute(np.zeros((2, 2, 2)), grid, Layout(("x",), ()))
    with pytest.raises(LayoutError, match="axis 'y'; the grid has the axes x"):
        distribute(np.zeros((2, 2)), grid, Layout(("y",), ()))
