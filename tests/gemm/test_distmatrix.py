"""A distributed matrix in a user's hands.

Files, transposes, algebra, norms, redistribution, ScaLAPACK's layout, what it prints.
"""

from __future__ import annotations

import warnings
from math import inf

import numpy as np
import pytest
from kinds import array, numbers, plain

from summa3d.comm.grid import Grid
from summa3d.errors import ConfigError, DataError, GridError, LayoutError, ShapeError, Summa3dError
from summa3d.gemm import CuboidPlan, DistMatrix, matmul, volume
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.layout import BlockCyclic, Layout

SIZES = pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8, 12))
GRIDS = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 1, 2), 6: (1, 3, 2), 8: (2, 2, 2), 12: (3, 2, 2)}


def grid_of(comm, make_grid):
    return make_grid(**dict(zip("xyz", GRIDS[comm.size], strict=True)))


def random(shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def ownerships():
    """Split every way, copied, root-only, dealt out in blocks."""
    return [
        Layout(("x", "y"), ("z",)),
        Layout(("z",), ()),
        Layout((), ()),
        Layout(("y",), ("x",), root_only=("z",)),
        BlockCyclic(rows=("x", 2), columns=(("z", "y"), 3)),
        BlockCyclic(rows=((), 4), columns=("y", 1)),
    ]


@SIZES
def test_a_matrix_goes_from_any_ownership_to_any_other_and_back(comm, make_grid):
    grid, whole = grid_of(comm, make_grid), random((11, 13))
    with Grid(comm, {"p": comm.size}) as line:
        for ownership in ownerships():
            matrix = DistMatrix.from_global(whole, grid, ownership)
            assert np.array_equal(matrix.to_global(), whole)
            for other in ownerships():
                assert np.array_equal(matrix.redistribute(other).block, DistMatrix.from_global(whole, grid, other).block)
            there = matrix.redistribute(Layout((), ("p",)), line)
            assert there.grid is line and np.array_equal(there.redistribute(ownership, grid).block, matrix.block)


@pytest.mark.mpi(sizes=(1, 2))
def test_shared_operands_are_refused_and_their_successor_named(comm, make_grid):
    grid = grid_of(comm, make_grid)
    for value in (True, False):
        with pytest.raises(ConfigError, match="node_memory=True"):
            DistMatrix.from_function(lambda rows, columns: rows + columns, (7, 5), grid, Layout((), ()), shared=value)


@SIZES
def test_a_matrix_from_a_function_of_its_indices(comm, make_grid):
    grid = grid_of(comm, make_grid)
    whole = np.arange(7)[:, None] * 100.0 + np.arange(5)
    for ownership in ownerships():
        matrix = DistMatrix.from_function(lambda rows, columns: rows * 100.0 + columns, (7, 5), grid, ownership)
        assert np.array_equal(matrix.block, DistMatrix.from_global(whole, grid, ownership).block)


@SIZES
@pytest.mark.parametrize("fortran", [False, True])
def test_files_each_rank_reads_and_writes_its_part(comm, make_grid, shared_tmp_path, fortran):
    grid = grid_of(comm, make_grid)
    dtypes = ["float64", "float32", "complex64", "int32", "float16", "bool"]
    for number, (ownership, dtype) in enumerate(zip(ownerships(), dtypes, strict=True)):
        whole = np.asarray(numbers(dtype, (6, 9), 4)).astype(dtype, order="F" if fortran else "C")
        path, copy = shared_tmp_path / f"{number}.npy", shared_tmp_path / f"{number} copy.npy"
        if comm.rank == 0:
            np.save(path, whole)
        comm.Barrier()
        with grid.ledger.watch() as moved:
            matrix = DistMatrix.from_file(path, grid, ownership)
        assert moved.words == 0 and matrix.block.flags.c_contiguous and matrix.block.base is None and matrix.block.dtype == dtype
        assert np.array_equal(matrix.block, DistMatrix.from_global(whole, grid, ownership).block)
        matrix.to_file(copy)
        assert np.array_equal(np.load(copy), whole)
        matrix.T.to_file(copy)
        assert np.array_equal(np.load(copy), whole.T)
        assert not list(shared_tmp_path.glob("*.part"))


@pytest.mark.mpi(sizes=(1, 3))
def test_empty_and_unreadable_files(comm, make_grid, shared_tmp_path):
    grid, rows = make_grid(x=comm.size), Layout(("x",), ())
    DistMatrix.from_global(np.zeros((0, 4)), grid, rows).to_file(shared_tmp_path / "empty.npy")
    assert DistMatrix.from_file(shared_tmp_path / "empty.npy", grid, rows).shape == (0, 4)
    if comm.rank == 0:
        np.save(shared_tmp_path / "vector.npy", np.zeros(3))
        (shared_tmp_path / "text.npy").write_text("nothing of the kind")
    comm.Barrier()
    refused = {"vector.npy": r"array of 2 dims.*\(3,\)", "text.npy": "is no .npy file", "none.npy": "No such file"}
    for name, words in refused.items():
        with pytest.raises(DataError, match=words):
            DistMatrix.from_file(shared_tmp_path / name, grid, rows)
    with pytest.raises(DataError, match="cannot be written"):
        DistMatrix.from_global(np.zeros((2, 2)), grid, rows).to_file(shared_tmp_path / "no folder" / "a.npy")


@SIZES
def test_a_matrix_goes_to_another_library_and_its_products_with_it(comm, make_grid):
    grid, whole = grid_of(comm, make_grid), random((7, 12))
    for ownership in ownerships():
        matrix = DistMatrix.from_global(whole, grid, ownership)
        with grid.ledger.watch() as moved:
            other = matrix.to("torch")
        assert moved.calls == 0 and (other.layout, other.shape) == (matrix.layout, matrix.shape)
        assert np.array_equal(plain((2 * other).to_global()), 2 * whole) and np.array_equal(
            (other.to("numpy").T).block, matrix.T.block
        )


@SIZES
def test_a_transpose_moves_and_copies_nothing(comm, make_grid):
    grid, whole = grid_of(comm, make_grid), random((7, 12))
    for ownership in ownerships():
        matrix = DistMatrix.from_global(whole, grid, ownership)
        with grid.ledger.watch() as moved:
            turned = matrix.T
        assert moved.calls == 0 and (np.shares_memory(turned.block, matrix.block) or matrix.block.size == 0)
        assert turned.shape == (12, 7) and turned.layout == ownership.transposed() and turned.T.layout == ownership
        assert np.array_equal(turned.to_global(), whole.T)
        assert np.array_equal(turned.redistribute(ownership).block, DistMatrix.from_global(whole.T, grid, ownership).block)


@pytest.mark.mpi(sizes=(1, 8, 12))
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_a_product_of_transposes_takes_the_form_that_they_have_in_memory(comm, make_grid, form):
    grid, plan = grid_of(comm, make_grid), CuboidPlan(form, 23, 19, 31)
    a, b = random(plan.a_shape, 1), random(plan.b_shape, 2)
    left, right = DistMatrix.from_global(a, grid, plan.a_layout), DistMatrix.from_global(b, grid, plan.b_layout)
    with grid.ledger.watch() as moved:
        c = (left.T if form[0] == "t" else left) @ (right.T if form[1] == "t" else right)
    assert c.layout == plan.c_layout and np.array_equal(c.block, matmul(left, right, form).block)
    assert np.allclose(c.to_global(), (a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b), rtol=0, atol=1e-12)
    assert moved.words == volume.of_plan(plan, grid.shape).words_of(grid.coordinates)


@pytest.mark.mpi(sizes=(1, 4, 6, 8))
@pytest.mark.parametrize("form", ["nn", "tn"])
def test_every_algorithm_is_found_by_name_and_by_its_layouts(comm, form):
    for found in ALGORITHMS.values():
        for shape in found.grids(comm.size):
            with Grid(comm, shape) as grid:
                plan = found.plan(form, 13, 11, 17)
                a, b = random(plan.a_shape, 1), random(plan.b_shape, 2)
                left, right = DistMatrix.from_global(a, grid, plan.a_layout), DistMatrix.from_global(b, grid, plan.b_layout)
                want = (a.T if form[0] == "t" else a) @ b
                turned = left.T @ right if form[0] == "t" else left @ right
                for c in (matmul(left, right, form, algorithm=found.name), matmul(left, right, form), turned):
                    assert np.allclose(c.to_global(), want, rtol=0, atol=1e-12), (found.name, shape)


@pytest.mark.mpi(sizes=(6,))
def test_options_reach_the_algorithms_that_have_them(comm, make_grid):
    grid, layout = make_grid(x=2, y=3), Layout(("x",), ("y",))
    a = DistMatrix.from_global(random((12, 12)), grid, layout)
    with grid.ledger.watch() as wide:
        matmul(a, a)
    with grid.ledger.watch() as narrow:
        matmul(a, a, panel=1)
    assert narrow.words == wide.words and narrow.messages > wide.messages
    with pytest.raises(ConfigError, match="has the options panel"):
        matmul(a, a, algorithm="cuboid", panel=1)
    with pytest.raises(GridError, match="Cannon cannot use"):
        matmul(a, a, algorithm="cannon")


@SIZES
def test_sums_and_scalings(comm, make_grid):
    grid, a, b = grid_of(comm, make_grid), random((6, 11), 1), random((6, 11), 2)
    for ownership in ownerships():
        left, right = DistMatrix.from_global(a, grid, ownership), DistMatrix.from_global(b, grid, ownership)
        with grid.ledger.watch() as moved:
            result = 2 * left - right / 4 + (-right.T).T + left * np.float64(0.5)
        assert moved.calls == 0
        assert np.allclose(result.to_global(), 2.5 * a - 1.25 * b, rtol=0, atol=1e-14)
    single = DistMatrix.from_global(a.astype(np.float32), grid, Layout(("x",), ()))
    assert (np.float64(2) * single).block.dtype == (single / 3).block.dtype == np.float32


@SIZES
@pytest.mark.parametrize("dtype", ["float64", "complex64", "float16", "int32"])
def test_norms_count_each_element_once(comm, make_grid, dtype):
    grid, whole = grid_of(comm, make_grid), np.asarray(numbers(dtype, (9, 14), 3)).astype(dtype) - np.asarray(2).astype(dtype)
    wide = np.abs(whole.astype(np.complex128))
    want = {"fro": np.sqrt(np.sum(wide**2)), "max": wide.max(), 1: wide.sum(0).max(), inf: wide.sum(1).max()}
    for ownership in ownerships():
        matrix = DistMatrix.from_global(whole, grid, ownership)
        for order, value in want.items():
            assert matrix.norm(order) == pytest.approx(value, rel=1e-12)
        assert matrix.T.norm() == pytest.approx(want["fro"], rel=1e-12) and matrix.T.norm(1) == matrix.norm(inf)


@pytest.mark.mpi(sizes=(6,))
def test_norms_count_a_matrix_held_at_two_indices_once(comm, make_grid):
    grid, whole = make_grid(x=2, pp=3), random((5, 7))
    for layout in ("m:x k @pp=0+2", "m:x k @pp=1"):
        matrix = DistMatrix.from_global(whole, grid, layout)
        assert matrix.norm() == pytest.approx(np.linalg.norm(whole), rel=1e-12)
        assert [matrix.norm(order) for order in (1, inf)] == pytest.approx([np.linalg.norm(whole, order) for order in (1, inf)])


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("block", [np.full((3, 2), "a"), np.full((3, 2), {}), np.zeros((3, 2), [("a", "f4"), ("b", "i4")])])
def test_what_is_no_number_has_no_norm(comm, make_grid, block):
    matrix = DistMatrix(np.zeros((3, 2)), Layout(("x",), ()), make_grid(x=2), (6, 2))
    matrix.block = block
    with pytest.raises(ShapeError, match="A norm is one of numbers; the block's dtype is"):
        matrix.norm()


@pytest.mark.mpi(sizes=(1, 6))
def test_norms_of_empty_matrices_and_of_nan(comm, make_grid):
    grid, ownership = grid_of(comm, make_grid), Layout(("x", "y"), ("z",))
    for shape in ((0, 3), (1, 1), (2, 0)):
        matrix = DistMatrix.from_global(np.ones(shape), grid, ownership)
        assert [matrix.norm(order) for order in ("fro", "max", 1, inf)] == [float(shape == (1, 1))] * 4
    whole = np.ones((5, 4))
    whole[3, 2] = np.nan
    assert all(np.isnan(DistMatrix.from_global(whole, grid, ownership).norm(order)) for order in ("fro", "max", 1, inf))


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize("value", [np.nan, inf, 1e308])
def test_matrices_of_nan_and_inf_and_sums_that_overflow_print_no_warnings(comm, make_grid, value):
    whole = np.full((4, 6), value)
    whole[1], whole[:, 2] = -whole[1], inf
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for node in (False, True):
            grid = make_grid(x=comm.size, y=1, z=1, node_memory=node)
            a = DistMatrix.from_global(whole, grid, "m:(x,y) k:z")
            b = DistMatrix.from_global(whole.T.copy(), grid, "k:(z,x) n:y")
            found = [a @ b, a + a, a - a, a * 0, 2 * a, a / 3, a.T, -a, a.redistribute("m:z k:x")]
            norms = [one.norm(order) for one in found for order in ("fro", "max", 1, inf)]
            grid["x"].all_reduce(whole)
            grid["x"].reduce_scatter(whole)
    assert len(norms) == 36 and [str(one.message) for one in caught] == []


@pytest.mark.mpi(sizes=(1,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_scalar_leaves_the_dtype_as_it_is(comm, make_grid, dtype, kind):
    matrix = DistMatrix.from_global(array(kind, dtype, np.ones((2, 3))), make_grid(x=1), Layout(("x",), ()))
    for scaled in (matrix * 0.5, matrix / 2, 2 * matrix, -matrix, matrix * np.float64(0.5)):
        assert scaled.block.dtype == matrix.block.dtype
    assert (plain((matrix + matrix * 0.5).to_global()) == 1.5).all()


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
def test_torch_matrices(comm, make_grid, dtype):
    grid, values = grid_of(comm, make_grid), numbers(dtype, (6, 9), 4)
    for ownership in ownerships():
        matrix = DistMatrix.from_global(array("torch", dtype, values), grid, ownership)
        assert np.array_equal(plain((matrix + matrix.T.T * 2).to_global()), 3 * values)
        assert matrix.norm("max") == pytest.approx(np.abs(values).max(), rel=1e-6)
        other = matrix.redistribute(Layout((), ("x", "z")))
        assert np.array_equal(plain(other.T.to_global()), values.T)
    assert f"6×9 {dtype}" in repr(matrix)


@pytest.mark.mpi(sizes=(6,))
def test_scalapack_users_come_and_go(comm, make_grid):
    grid, whole = make_grid(x=2, y=3), random((13, 17))
    rows = [row for row in range(13) if row // 2 % 2 == grid["x"].index]
    columns = [column for column in range(17) if column // 3 % 3 == grid["y"].index]
    local = np.asfortranarray(whole[np.ix_(rows, columns)])
    matrix = DistMatrix.from_scalapack(local, (13, 17), grid, rows=("x", 2), columns=("y", 3))
    assert matrix.block is local
    plan = CuboidPlan("nt", 13, 13, 17)
    with Grid(comm, {"x": 1, "y": 2, "z": 3}) as cube:
        a, b = matrix.redistribute(plan.a_layout, cube), matrix.redistribute(plan.b_layout, cube)
        c = matmul(a, b, "nt").to_scalapack(rows=("x", 4), columns=("y", 4), grid=grid)
    assert c.block.flags.f_contiguous and np.allclose(c.to_global(), whole @ whole.T, rtol=0, atol=1e-12)
    assert c.layout.descriptor(c.shape, grid.shape, grid.coordinates)[2:6] == (13, 13, 4, 4)


@pytest.mark.mpi(sizes=(4,))
def test_its_repr_is_a_picture_of_who_owns_what(comm, make_grid):
    grid = make_grid(x=2, y=2)
    lines = repr(DistMatrix.from_global(np.zeros((7, 5)), grid, Layout(("x",), ("y",)))).splitlines()
    assert [line.split() for line in lines[1:]] == [["rows", "\\", "columns", "0:3", "3:5"], ["0:4", "0", "1"], ["4:7", "2", "3"]]
    lines = repr(DistMatrix.from_global(np.zeros((7, 5)), grid, Layout((), ("y",)))).splitlines()
    assert [line.split() for line in lines[2:]] == [["0:7", "0", "2", "1", "3"]]
    lines = repr(DistMatrix.from_global(np.zeros((9, 1)), grid, BlockCyclic(rows=("x", 1), columns=("y", 1)))).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["rows", "\\", "columns", "none", "0:1"],
        ["0:1,2:3,4:5,…", "1", "0"],
        ["1:2,3:4,5:6,…", "3", "2"],
    ]


@pytest.mark.mpi(sizes=(4,))
def test_what_cannot_be_combined_is_refused_on_every_rank_before_anything_moves(comm, make_grid):
    grid = make_grid(x=2, y=2)
    rows, both = Layout(("x",), ()), Layout(("x",), ("y",))
    a = DistMatrix.from_global(np.ones((4, 4)), grid, both)
    whole = DistMatrix.from_global(np.ones((4, 4), np.int32), grid, rows)
    refused = [
        (lambda: a - DistMatrix.from_global(np.ones((4, 4), np.float32), grid, both), ShapeError, "float64 and B float32"),
        (lambda: a + DistMatrix.from_global(np.ones((4, 5)), grid, both), ShapeError, "(4, 4) and (4, 5)"),
        (lambda: a * 2j, ShapeError, "A * 2j of a float64 matrix is not float64. Take A.astype('complex128')"),
        (lambda: 1 - whole * 0.5, ShapeError, "A * 0.5 of a int32 matrix is not int32. Take A.astype('float64')"),
        (lambda: whole / 2, ShapeError, "A quotient of int32 matrices is not int32"),
        (lambda: whole / whole, ShapeError, "A quotient of int32 matrices is not int32"),
        (lambda: whole.astype("int8") * 300, ShapeError, "of a int8 matrix"),
        (lambda: -whole.astype(bool), ShapeError, "-A of a bool matrix"),
        (lambda: (a * 1.0).astype(complex).astype("float32"), ShapeError, "drops imaginary parts"),
        (lambda: a.sum(2), ShapeError, "sum over dim 2"),
        (lambda: a.astype(complex).max(), ShapeError, "complex numbers have no order"),
        (lambda: DistMatrix.zeros((0, 4), grid, both).min(), ShapeError, "min of a 0×4 matrix"),
        (lambda: DistMatrix.zeros((0, 4), grid, both).mean(0), ShapeError, "mean of a 0×4 matrix"),
        (lambda: DistMatrix.random((4, 4), grid, both, "int32"), ShapeError, "int32 numbers are not drawn"),
        (lambda: DistMatrix.random((4, 4), grid, both, seed=1.5), ShapeError, "seed is 1.5"),
        (lambda: a.norm(2), ShapeError, "norm 2 is not one of 'fro'"),
        (lambda: a.redistribute(Layout(("z",), ())), LayoutError, "names axis 'z'"),
    ]
    with grid.ledger.watch() as moved:
        for attempt, kind, words in refused:
            with pytest.raises(Summa3dError) as caught:
                attempt()
            assert isinstance(caught.value, kind) and words in str(caught.value), str(caught.value)
        array = np.ones((4, 4))
        for nonsense in (lambda: a @ 2, lambda: a - "x", lambda: list(a), lambda: np.sin(a), lambda: np.asarray(a)):
            with pytest.raises(TypeError):
                nonsense()
        for mixed in (lambda: a @ array, lambda: array @ a, lambda: a + array, lambda: array / a):
            with pytest.raises(
                TypeError, match=r"a numpy.ndarray of shape \(4, 4\). DistMatrix.from_global\(array, A.grid, A.layout\)"
            ):
                mixed()
        with pytest.raises(TypeError, match=r"array.item\(\) makes a number of it"):
            a * np.array(2.0)
    assert moved.calls == 0


@pytest.mark.mpi(sizes=(4,))
def test_a_file_in_the_other_byte_order_is_read_as_this_machines(comm, make_grid, shared_tmp_path):
    grid, whole, path = grid_of(comm, make_grid), random((6, 9)), shared_tmp_path / "other.npy"
    if comm.rank == 0:
        np.save(path, whole.astype(whole.dtype.newbyteorder()))
    comm.Barrier()
    matrix = DistMatrix.from_file(path, grid, Layout(("x",), ("z",)))
    assert matrix.block.dtype.isnative and matrix.block.dtype == np.float64 and np.array_equal(matrix.to_global(), whole)


@pytest.mark.mpi(sizes=(4,))
def test_a_vectors_diagonal_is_written_by_who_holds_it(comm, make_grid, shared_tmp_path):
    grid, whole, path = make_grid(y=2, z=2), random((6, 9)), shared_tmp_path / "diagonal.npy"
    matrix = DistMatrix.from_global(whole, grid, Layout(("z",), (), root_only=("y",), follows={"y": "z"}))
    matrix.to_file(path)
    assert np.array_equal(np.load(path), whole)


@pytest.mark.mpi(sizes=(2,))
def test_a_file_that_does_not_fit_is_an_error_on_all_ranks_and_leaves_nothing(comm, make_grid, shared_tmp_path):
    import resource

    grid, before = make_grid(x=2), resource.getrlimit(resource.RLIMIT_FSIZE)
    matrix = DistMatrix.from_function(np.add, (1000, 100), grid, Layout(("x",), ()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # as a full disk, or a quota
    try:
        with pytest.raises(DataError, match=r"whole\.npy\.part cannot be written: .*too large"):
            matrix.to_file(shared_tmp_path / "whole.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.Barrier()
    assert not list(shared_tmp_path.iterdir())
