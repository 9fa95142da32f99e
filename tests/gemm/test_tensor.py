"""Distributed tensors of any dims: making them, collecting, redistribution, views, arithmetic and norms."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from kinds import array, plain

from summa3d.comm.grid import Grid
from summa3d.errors import LayoutError, ShapeError
from summa3d.gemm import DistMatrix, DistTensor
from summa3d.layout import Layout
from summa3d.layout.redistribute import Placement, Redistribution

CASES = (
    ((7,), "n:(x,y)", "n @y=1"),
    ((5, 3), "m:x n", "m:y[2] n:x[1]"),
    ((5, 3, 7), "b:x m n:y", "b m:(y,x) n"),
    ((2, 3, 1, 5), "b:x h:y s d", "b h s d:x @y=x"),
    ((2, 3, 2, 3, 2), "a b:x c d e:y", "a:(x,y) b c d e"),
)


def whole_of(shape):
    return np.random.default_rng(len(shape)).integers(-9, 9, shape).astype(float)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape, layout, to", CASES)
def test_what_is_distributed_and_redistributed_is_collected_again(comm, make_grid, shape, layout, to, kind):
    grid, whole = make_grid(x=2, y=2), whole_of(shape)
    tensor = DistTensor.from_global(array(kind, "float64", whole), grid, layout)
    assert np.array_equal(plain(tensor.to_global()), whole)
    with grid.ledger.watch() as moved:
        other = tensor.redistribute(to)
    assert np.array_equal(plain(other.to_global()), whole) and str(other.layout.dims) and type(other) is DistTensor
    plan = Redistribution(shape, Placement.on(grid, tensor.layout), Placement.on(grid, other.layout))
    assert moved.words == plan.words_of(grid.rank)


@pytest.mark.mpi(sizes=(4,))
def test_a_function_is_called_with_the_indices_of_the_block(comm, make_grid):
    grid = make_grid(x=2, y=2)
    tensor = DistTensor.from_function(lambda b, m, n: 100 * b + 10 * m + n, (5, 3, 7), grid, "b:x m n:y", dtype="int64")
    b, m, n = np.indices((5, 3, 7))
    assert np.array_equal(tensor.to_global(), 100 * b + 10 * m + n) and tensor.block.dtype == np.int64


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_permuted_is_numpys_transpose_a_view_and_moves_nothing(comm, make_grid, kind):
    grid, whole = make_grid(x=2, y=2), whole_of((5, 3, 7))
    tensor = DistTensor.from_global(array(kind, "float64", whole), grid, "b:x m n:y")
    with grid.ledger.watch() as moved:
        views = [(tensor.permuted(*dims), dims) for dims in ((2, 0, 1), (0, 2, 1), (2, 1, 0), (0, 1, 2))] + [
            (tensor.T, (2, 1, 0))
        ]
    assert moved.calls == 0
    for view, dims in views:
        assert np.array_equal(plain(view.to_global()), whole.transpose(dims))
        assert np.shares_memory(np.asarray(view.block), np.asarray(tensor.block))
    assert str(tensor.permuted(2, 0, 1).layout) == "n:y b:x m"
    assert str(tensor.T.layout) == "n:y m b:x" and tensor.T.is_transposed and not tensor.T.T.is_transposed
    matrix = DistMatrix.from_global(array(kind, "float64", whole[0]), grid, "m:x[2] n:y[3]")
    assert matrix.permuted(1, 0).layout == matrix.T.layout and matrix.permuted(0, 1).layout == matrix.layout
    for dims in ((0, 1), (0, 0, 1), (1, 2, 3)):
        with pytest.raises(ShapeError, match="each of their numbers once"):
            tensor.permuted(*dims)


@pytest.mark.mpi(sizes=(4,))
def test_arithmetic_and_norms_are_numpys_and_copies_count_once(comm, make_grid):
    grid, whole = make_grid(x=2, y=2), whole_of((5, 3, 7))
    for layout in ("b:x m n", "b m n:(x,y)", "b m:y n @x=1"):
        tensor = DistTensor.from_global(whole, grid, layout)
        found = (2 * tensor - tensor / 4 + (-tensor)) * 3
        assert np.array_equal(found.to_global(), (2 * whole - whole / 4 - whole) * 3) and type(found) is DistTensor
        assert found.norm("max") == np.abs(found.to_global()).max()
        assert tensor.norm() == pytest.approx(np.linalg.norm(whole), rel=1e-14)
        assert np.array_equal(tensor.to("torch").to_global().numpy(), whole)


@pytest.mark.mpi(sizes=(2,))
def test_what_cannot_be_is_refused(comm, make_grid):
    grid = make_grid(x=2)
    tensor = DistTensor.from_global(whole_of((5, 3, 7)), grid, "b:x m n")
    for attempt, kind, words in (
        (lambda: DistTensor(tensor.block, "b m n:x", grid, (5, 3, 7)), ShapeError, "gives blocks"),
        (lambda: DistTensor(tensor.block, "b:x m n", grid, (5, -3, 7)), ShapeError, "one a dim"),
        (lambda: DistTensor.from_global(np.array(1.0), grid, Layout()), ShapeError, "one a dim"),
        (lambda: DistTensor.from_global(whole_of((5, 3)), grid, "b:x m n"), LayoutError, "describes 3 dims"),
        (lambda: DistMatrix(tensor.block, "b:x m n", grid, (5, 3, 7)), ShapeError, "it takes 2 whole numbers"),
        (lambda: DistMatrix.from_global(whole_of((5, 3, 7)), grid, "b:x m n"), ShapeError, "it takes 2 whole numbers"),
        (lambda: tensor - DistTensor.from_global(whole_of((5, 3, 6)), grid, "b:x m n"), ShapeError, "(5, 3, 7) and (5, 3, 6)"),
        (lambda: tensor.norm(1), ShapeError, "is one of matrices"),
        (lambda: tensor.norm(inf), ShapeError, "is one of matrices"),
    ):
        with pytest.raises(kind) as caught:
            attempt()
        assert words in str(caught.value), str(caught.value)


@pytest.mark.mpi(sizes=(2,))
def test_tensors_in_other_layouts_are_added_in_the_layout_of_the_first(comm, make_grid):
    whole = whole_of((5, 3, 7))
    tensor = DistTensor.from_global(whole, make_grid(x=2), "b:x m n")
    added = tensor + tensor.redistribute("b m:x n")
    assert added.layout == tensor.layout and np.array_equal(added.to_global(), 2 * whole)


@pytest.mark.mpi(sizes=(2,))
def test_a_tensor_says_what_it_is_and_what_this_rank_holds(comm):
    with Grid(comm, {"x": 2}) as grid:
        tensor = DistTensor.from_global(whole_of((5, 3, 7)), grid, "b:x m n")
        held = ("0:3", "3:5")[comm.rank]
        assert repr(tensor) == f"DistTensor(5×3×7 float64, b:x m n on Grid(x=2, order=x), [{held}, 0:3, 0:7] here)"
