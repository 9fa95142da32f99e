"""The arithmetic of distributed matrices, their sums and extremes, and matrices that are made, against numpy."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from kinds import array, plain
from matrices import GRIDS, LAYOUTS, cases, random

from summa3d.comm.grid import Grid
from summa3d.errors import GridError, LayoutError
from summa3d.gemm import DistMatrix
from summa3d.gemm.elements.counting import along, without
from summa3d.layout import BlockCyclic, Layout, ownership
from summa3d.layout.random import key
from summa3d.layout.redistribute import Placement, Redistribution


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_matrices_that_lie_alike_and_scalars_combine_locally(comm, make_grid, kind):
    grid, a, b = make_grid(**GRIDS[comm.size]), random((7, 11), 1), random((7, 11), 2)
    for layout in cases(comm):
        left, right = (DistMatrix.from_global(array(kind, "float64", one), grid, layout) for one in (a, b))
        with grid.ledger.watch() as moved:
            found = [left + right, left - right, left * right, left / right, 1 - left, 2 / left, left + 1, left / 3, abs(left)]
        with pytest.raises(TypeError, match=r"abs\(A - B\).max\(\)"):  # no False for equal elements
            bool(left == right)
        assert left == left and left in {left} and left != 1
        want = [a + b, a - b, a * b, a / b, 1 - a, 2 / a, a + 1, a / 3, abs(a)]
        assert moved.calls == 0 and all(one.layout == left.layout for one in found)
        for one, value in zip(found, want, strict=True):
            assert np.array_equal(plain(one.to_global()), value), layout


@pytest.mark.mpi(sizes=(1, 6))
def test_a_matrix_that_lies_elsewhere_is_brought_to_the_first_ones_layout_and_its_words_are_the_redistributions(comm, make_grid):
    grid, a, b = make_grid(**GRIDS[comm.size]), random((7, 11), 1), random((7, 11), 2)
    for layout in cases(comm):
        left = DistMatrix.from_global(a, grid, layout)
        for other in cases(comm)[::2]:
            right = DistMatrix.from_global(b, grid, other)
            plan = Redistribution((7, 11), Placement.on(grid, right.layout), Placement.on(grid, left.layout))
            with grid.ledger.watch() as moved:
                found = left * right
            assert (moved.words, found.layout) == (plan.words_of(grid.rank), left.layout)
            assert np.array_equal(found.to_global(), a * b), (layout, other)


@pytest.mark.mpi(sizes=(6,))
def test_a_matrix_of_another_grid_comes_to_the_first_ones_grid_and_one_of_other_ranks_is_refused(comm, make_grid):
    grid, a, b = make_grid(**GRIDS[6]), random((7, 11), 1), random((7, 11), 2)
    left = DistMatrix.from_global(a, grid, "m:x k:y")
    with Grid(comm, {"p": 4}, ranks=range(4)) as part:
        right = DistMatrix.from_global(b, part, "m:p k")
        found = left - right
        assert found.grid is grid and np.array_equal(found.to_global(), a - b)
        back = right - left
        assert back.grid is part and (not part.inside or np.array_equal(back.to_global(), b - a))
        lines = [right.sum(0), right.max(1)]
        assert [line.shape for line in lines] == [(1, 11), (7, 1)]
        if part.inside:
            assert np.allclose(lines[0].to_global(), b.sum(0)[None], rtol=0, atol=1e-14)
        else:
            with pytest.raises(GridError, match="is outside"):
                right.sum()
            with pytest.raises(GridError, match="is outside"):
                right.max()
    halves = comm.Split(comm.rank % 2)
    with Grid(halves, {"p": 3}) as half, pytest.raises(LayoutError, match="no common communicator"):
        left + DistMatrix.from_global(b, half, "m:p k")
    halves.Free()


@pytest.mark.mpi(sizes=(1, 6))
def test_a_row_or_a_column_meets_each_of_the_other_matrix(comm, make_grid):
    grid, a = make_grid(**GRIDS[comm.size]), random((7, 11), 1)
    row, column = random((1, 11), 2), random((7, 1), 3)
    for layout in cases(comm):
        matrix = DistMatrix.from_global(a, grid, layout)
        for line in (row, column):
            for other in ("m k:y", layout):
                small = DistMatrix.from_global(line, grid, other)
                assert np.array_equal((matrix - small).to_global(), a - line), (layout, other)
                assert np.array_equal((small / matrix).to_global(), line / a), (layout, other)
        with grid.ledger.watch() as moved:
            centred = matrix - matrix.mean(0)
        axes, lines = along(matrix.layout, 0), matrix.mean(0).block
        assert moved.words == (all_reduce_words(grid, axes, lines.size) if axes else 0)
        assert np.allclose(centred.to_global(), a - a.mean(0), rtol=0, atol=1e-14)


def all_reduce_words(grid, axes, n):
    """The words of an all-reduce of n elements over a plane, by the documented n + (g − 2)·n_r."""
    axis = grid[axes]
    parts = [n // axis.size + (index < n % axis.size) for index in range(axis.size)]
    return n + (axis.size - 2) * parts[axis.index] if axis.size > 1 else 0


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_sums_and_extremes_count_each_element_once(comm, make_grid, kind):
    grid, a = make_grid(**GRIDS[comm.size]), random((7, 11))
    for layout in cases(comm):
        for whole in (a, a[:, 2:3]):
            matrix = DistMatrix.from_global(array(kind, "float64", whole), grid, layout)
            for name in ("sum", "mean", "max", "min"):
                assert getattr(matrix, name)() == pytest.approx(getattr(whole, name)(), abs=1e-12), (layout, name)
                for dim in (0, 1):
                    line = getattr(matrix, name)(dim)
                    want = getattr(whole, name)(dim, keepdims=True)
                    assert line.shape == want.shape and line.layout == without(matrix.layout, dim)
                    assert np.allclose(plain(line.to_global()), want, rtol=0, atol=1e-12), (layout, name, dim)
            assert matrix.trace() == pytest.approx(np.trace(whole), abs=1e-12), layout
            assert np.array_equal(plain(matrix.diagonal()), whole.diagonal()), layout
            assert matrix.norm(1) == pytest.approx(np.linalg.norm(whole, 1), abs=1e-12), layout
            assert matrix.norm(np.inf) == pytest.approx(np.linalg.norm(whole, np.inf), abs=1e-12), layout
            assert matrix.norm() == pytest.approx(np.linalg.norm(whole), abs=1e-12), layout


@pytest.mark.mpi(sizes=(6,))
def test_the_words_of_sums_and_of_a_diagonal(comm, make_grid):
    grid = make_grid(**GRIDS[6])
    matrix = DistMatrix.from_global(random((7, 11)), grid, "m:x k:y")
    rows, columns = matrix.layout.slices((7, 11), grid.shape, grid.coordinates)
    own = len({*range(rows.start, rows.stop)} & {*range(columns.start, columns.stop)})
    expected = {
        "sum": (matrix.sum, all_reduce_words(grid, ("x", "y"), 1)),
        "trace": (matrix.trace, all_reduce_words(grid, ("x", "y"), 1)),
        "max": (matrix.max, 5),
        "diagonal": (matrix.diagonal, 7 - own),
        "sum(0)": (lambda: matrix.sum(0), all_reduce_words(grid, ("x",), columns.stop - columns.start)),
        "sum(1)": (lambda: matrix.sum(1), all_reduce_words(grid, ("y",), rows.stop - rows.start)),
        "min(1)": (lambda: matrix.min(1), all_reduce_words(grid, ("y",), 2 * (rows.stop - rows.start))),
    }
    copies = DistMatrix.from_global(random((7, 11)), grid, "m k")
    expected |= {"copies": (lambda: (copies.sum(), copies.max(0), copies.diagonal(), copies.trace()), 0)}
    for name, (call, words) in expected.items():
        with grid.ledger.watch() as moved:
            call()
        assert (name, moved.words) == (name, words)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_sums_are_wide_and_rounded_once(comm, make_grid, dtype, kind):
    grid = make_grid(**GRIDS[4])
    whole = np.arange(3 * 1500).reshape(3, 1500) % (2 if dtype == "bool" else 7) + (0.5 if "float" in dtype else 0)
    whole = whole + (1j * whole[::-1] if dtype == "complex64" else 0)
    matrix = DistMatrix.from_global(array(kind, dtype, whole), grid, "m:x k:y")
    assert matrix.sum() == whole.sum() and matrix.mean() == pytest.approx(whole.mean())
    total, mean = matrix.sum(1), matrix.mean(1)
    names = [str(one.dtype).removeprefix("torch.") for one in (total, mean)]
    assert names == (["int64", "float64"] if dtype in ("bool", "int32") else [dtype, dtype])
    want = array("numpy", names[0], whole.sum(1, keepdims=True))
    assert np.array_equal(plain(total.to_global()), plain(want))
    if dtype != "complex64":
        assert (matrix.max(), matrix.min()) == (whole.max(), whole.min())
        assert str(matrix.max(0).dtype).removeprefix("torch.") == dtype
        assert np.array_equal(plain(matrix.max(0).to_global()), whole.max(0, keepdims=True))


@pytest.mark.mpi(sizes=(4,))
def test_a_nan_is_the_largest_and_the_smallest_wherever_it_lies(comm, make_grid):
    grid, whole = make_grid(node_memory=False, **GRIDS[4]), random((7, 5))
    for row in (0, 6):
        spoilt = whole.copy()
        spoilt[row, 1] = np.nan
        matrix = DistMatrix.from_global(spoilt, grid, "m:(x,y) k")
        assert np.isnan(matrix.max()) and np.isnan(matrix.min())
        for name in ("max", "min"):
            assert np.array_equal(getattr(matrix, name)(0).to_global(), getattr(spoilt, name)(0, keepdims=True), equal_nan=True)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_dtypes_and_parts_of_complex_matrices(comm, make_grid, kind):
    grid, whole = make_grid(**GRIDS[4]), random((7, 5)) + 1j * random((7, 5), 2)
    matrix = DistMatrix.from_global(array(kind, "complex128", whole), grid, "m:x k:y")
    with grid.ledger.watch() as moved:
        found = {"real": matrix.real, "imag": matrix.imag, "abs": abs(matrix), "less": matrix.astype("complex64")}
        found |= {"bits": matrix.real.astype("bfloat16"), "none": matrix.real.imag, "same": matrix.T.real.T}
    names = {name: str(one.dtype).removeprefix("torch.") for name, one in found.items()}
    assert names == {**dict.fromkeys(found, "float64"), "less": "complex64", "bits": "bfloat16"} and moved.calls == 0
    want = {"real": whole.real, "imag": whole.imag, "abs": abs(whole), "less": whole.astype("complex64"), "none": whole.real * 0}
    for name, value in want.items():
        assert np.allclose(plain(found[name].to_global()), value, rtol=0, atol=1e-15), name
    assert np.array_equal(plain((found["real"] + found["same"]).to_global()), 2 * whole.real)
    assert found["real"].astype(found["bits"].dtype).dtype == found["bits"].dtype  # the library's own dtype
    assert not np.shares_memory(matrix.block, matrix.astype("complex128").block)


@pytest.mark.mpi(sizes=(1, 6))
def test_zeros_ones_and_identities(comm, make_grid):
    grid = make_grid(**GRIDS[comm.size])
    for layout in cases(comm):
        for name, want in (("zeros", np.zeros((7, 5))), ("ones", np.ones((7, 5))), ("eye", np.eye(7, 5))):
            matrix = getattr(DistMatrix, name)((7, 5), grid, layout, "float32")
            assert matrix.dtype == np.float32 and np.array_equal(matrix.to_global(), want)


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
def test_a_random_matrix_is_the_same_on_every_grid(comm, make_grid, dtype, normal):
    grid = make_grid(**GRIDS[comm.size])
    whole = DistMatrix.random((7, 11), grid, "m k", dtype, seed=5, normal=normal).block
    each = 2 if normal or dtype == "complex64" else 1
    raw = np.random.Philox(key=key(5, "normal" if normal else "uniform")).random_raw(7 * 11 * each).reshape(7, 11, each) / 2.0**64
    want = raw @ [1, 1j][:each]
    if normal:  # Box and Muller
        want = np.sqrt(-2 * np.log(1 - raw[..., 0])) * np.exp(2j * np.pi * raw[..., 1])
    want = want if dtype == "complex64" else want.real
    assert np.allclose(plain(whole), want, rtol=0, atol={"float64": 1e-14, "bfloat16": 2e-2, "complex64": 1e-6}[dtype])
    for layout in cases(comm):
        matrix = DistMatrix.random((7, 11), grid, layout, dtype, seed=5, normal=normal)
        assert np.array_equal(matrix.block, DistMatrix.from_global(whole, grid, layout).block), layout


@pytest.mark.mpi(sizes=(1,))
def test_random_numbers_have_the_moments_asked_for(comm, make_grid):
    grid = make_grid(x=1)
    uniform = DistMatrix.random((300, 401), grid, "m k").block
    assert abs(uniform.mean() - 0.5) < 0.004 and abs(uniform.var() - 1 / 12) < 0.001 and 0 <= uniform.min() < uniform.max() < 1
    normal = DistMatrix.random((300, 401), grid, "m k", "complex128", normal=True).block
    for part in (normal.real, normal.imag):
        assert abs(part.mean()) < 0.01 and abs(part.std() - 1) < 0.01 and abs((part**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(normal.real.ravel(), normal.imag.ravel())[0, 1]) < 0.01
    halves = DistMatrix.random((300, 401), grid, "m k", "float16").block
    assert halves.max() < 1  # a uniform number is not rounded up to 1
    other = DistMatrix.random((300, 401), grid, "m k", seed=1).block
    assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_layout_of_a_line_is_held_wherever_the_lines_elements_are(text, dim):
    layout = ownership(text)
    found = without(layout, dim)
    assert isinstance(found, BlockCyclic if "[" in text else Layout) and found.dims[dim] == ()
    for x in range(2):
        for y in range(3):
            if layout.holds_block({"x": x, "y": y}):
                assert found.holds_block({"x": x, "y": y})


@pytest.mark.mpi(sizes=(1,))
def test_an_operator_keeps_the_order_of_its_operands(comm, make_grid):
    matrix = DistMatrix.from_global(np.array([[2.0, 4.0]]), make_grid(x=1), "m k")
    for apply in (operator.sub, operator.truediv):
        assert np.array_equal(apply(8, matrix).block, apply(8, np.array([[2.0, 4.0]])))
        assert np.array_equal(apply(matrix, np.float32(8)).block, apply(np.array([[2.0, 4.0]]), 8))
