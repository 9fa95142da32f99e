"""Parts of distributed matrices, read and overwritten, against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import array, plain
from matrices import GRIDS, cases, random

from summa3d.comm.grid import Grid
from summa3d.errors import ShapeError
from summa3d.gemm import DistMatrix
from summa3d.gemm.elements.slices import plan_of

KEYS = (
    np.s_[2:6, 1:9],
    np.s_[::2, ::-1],
    np.s_[6:0:-2, 3:],
    np.s_[-3:],
    np.s_[3],
    np.s_[:, -1],
    np.s_[4:2, :],
    np.s_[1:100:3, 10:2:-3],
)


def two_dims(whole, key):
    """numpy's part, a whole number keeping its dim."""
    keys = key if isinstance(key, tuple) else (key,)
    return whole[tuple(one if isinstance(one, slice) else slice(one, one + 1 or None) for one in keys)]


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_part_is_numpys_in_the_matrixs_layout_and_its_words_are_the_plans(comm, make_grid, kind):
    grid, whole = make_grid(**GRIDS[comm.size]), random((7, 11))
    for layout in cases(comm):
        matrix = DistMatrix.from_global(array(kind, "float64", whole), grid, layout)
        for key in KEYS:
            words, want = plan_of(matrix, key).words_of(grid.rank), two_dims(whole, key)
            with grid.ledger.watch() as moved:
                part = matrix[key]
            assert (part.shape, part.layout, moved.words) == (want.shape, matrix.layout, words), (layout, key)
            held = DistMatrix.from_global(array(kind, "float64", want), grid, layout)
            assert np.array_equal(plain(part.block), plain(held.block)), (layout, key)


@pytest.mark.mpi(sizes=(1, 6))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_part_is_overwritten_by_a_matrix_wherever_it_lies_and_by_a_number(comm, make_grid, kind):
    grid, whole = make_grid(**GRIDS[comm.size]), random((7, 11))
    for number, layout in enumerate(cases(comm)):
        for key in KEYS[:6:2]:
            matrix, want = DistMatrix.from_global(array(kind, "float64", whole), grid, layout), whole.copy()
            new = random(two_dims(whole, key).shape, number)
            two_dims(want, key)[...] = new
            matrix[key] = DistMatrix.from_global(array(kind, "float64", new), grid, cases(comm)[-1 - number])
            held = DistMatrix.from_global(array(kind, "float64", want), grid, layout)
            assert np.array_equal(plain(matrix.block), plain(held.block)), (layout, key)  # every copy is
            with grid.ledger.watch() as moved:
                matrix[key] = 2.5
            two_dims(want, key)[...] = 2.5
            assert moved.words == 0 and np.array_equal(plain(matrix.to_global()), want)


@pytest.mark.mpi(sizes=(6,))
def test_two_whole_numbers_are_an_element_on_every_rank_for_one_word(comm, make_grid):
    grid, whole = make_grid(**GRIDS[6]), random((7, 11))
    for layout in cases(comm):
        matrix = DistMatrix.from_global(whole, grid, layout)
        assert [matrix[0, 0], matrix[-1, 4], matrix[3, np.int64(-2)]] == [whole[0, 0], whole[-1, 4], whole[3, -2]], layout
    assert DistMatrix.from_global(whole > 0, grid, "m:x k:y")[2, 3] == (whole[2, 3] > 0)


@pytest.mark.mpi(sizes=(6,))
def test_a_part_of_a_matrix_may_come_from_itself_and_from_another_grid(comm, make_grid):
    grid, whole = make_grid(**GRIDS[6]), random((7, 11))
    matrix = DistMatrix.from_global(whole, grid, "m:x k:y")
    matrix[:, :5] = matrix[:, 6:]
    want = whole.copy()
    want[:, :5] = whole[:, 6:]
    assert np.array_equal(matrix.to_global(), want)
    with Grid(comm, {"p": 4}, ranks=range(4)) as part:
        held = DistMatrix.from_global(whole, part, "m k:p")
        matrix[1:5, ::2] = held[2:6, ::2]
        held[:2] = matrix[5:]
        assert held[1:3].shape == (2, 11)
        if part.inside:
            whole[:2] = want[5:]
            assert np.array_equal(held.to_global(), whole)


@pytest.mark.mpi(sizes=(4,))
def test_what_is_no_part_is_refused_before_anything_moves(comm, make_grid):
    grid = make_grid(**GRIDS[4])
    a = DistMatrix.from_global(np.ones((7, 5)), grid, "m:x k:y")
    fixed = DistMatrix.from_global(np.ones((7, 5)), grid, "m:x k:y")
    fixed.block.flags.writeable = comm.rank != 3
    refused = [
        (lambda: a[7], "rows 7 is none of the matrix's 7 rows, 0 to 6"),
        (lambda: a[:, -6], "columns -6 is none of the matrix's 5 columns"),
        (lambda: a[::0], "slice step cannot be zero"),
        (lambda: a[1.5:], "slice indices must be integers"),
        (lambda: a[[1, 2]], "A range start:stop:step or a whole number is taken"),
        (lambda: a[True], "rows True is none"),
        (lambda: a[1, 2, 3], "two dims"),
        (lambda: a.__setitem__(np.s_[:2], a), "A[…] is 2×5, and B 7×5"),
        (lambda: a.__setitem__(np.s_[:], a.astype("float32")), "float64 and B float32"),
        (lambda: a.__setitem__(np.s_[:], 1j), "is not float64"),
        (lambda: fixed.__setitem__(np.s_[:], a), "the block of A is read-only.\n  On rank 3 of 4 only"),
    ]
    with grid.ledger.watch() as moved:
        for attempt, words in refused:
            with pytest.raises(ShapeError) as caught:
                attempt()
            assert words in str(caught.value)
        with pytest.raises(TypeError, match="it takes a number, or a DistMatrix"):
            a[:] = np.ones((7, 5))
    assert moved.calls == 0 and np.array_equal(a.to_global(), np.ones((7, 5)))


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_conjugate_is_combined_and_cut_as_any_matrix_and_is_not_overwritten(comm, make_grid, kind):
    grid, whole = make_grid(x=2), random((7, 5)) + 1j * random((7, 5), 2)
    matrix = DistMatrix.from_global(array(kind, "complex128", whole), grid, "m:x k")
    turned, want = matrix.H, whole.conj().T
    found = {"sum": turned + turned, "imag": turned.imag, "part": turned[1:4, ::2], "line": turned.sum(1)}
    expected = {"sum": 2 * want, "imag": want.imag, "part": want[1:4, ::2], "line": want.sum(1, keepdims=True)}
    for name, one in found.items():
        assert np.allclose(plain(one.to_global()), expected[name], rtol=0, atol=1e-14), name
    assert turned.trace() == pytest.approx(np.trace(want)) and turned[2, 3] == want[2, 3]
    with pytest.raises(ShapeError, match="is the conjugate of a matrix"):
        turned[:2] = 0
    assert np.array_equal(plain(matrix.to_global()), whole)
