"""Distributed matrices: making them, collecting them, and products whose algorithm and roles are read off the layouts."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import array

from summa3d.errors import ConfigError, LayoutError, ShapeError, Summa3dError
from summa3d.gemm import Cuboid, CuboidPlan, DistMatrix, matmul, volume
from summa3d.layout import Layout

GRIDS = {1: (1, 1, 1), 4: (2, 1, 2), 6: (1, 3, 2), 8: (2, 2, 2), 12: (3, 2, 2)}


def grid_of(comm, make_grid):
    return make_grid(**dict(zip("xyz", GRIDS[comm.size], strict=True)))


def random(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.mpi(sizes=(1, 6, 8))
def test_a_matrix_given_by_a_function_or_as_a_whole_is_the_same_matrix(comm, make_grid):
    grid = grid_of(comm, make_grid)
    for layout in (Layout(("x", "y"), ("z",)), Layout((), ("z", "x")), Layout((), ())):
        whole = np.arange(7)[:, None] * 100.0 + np.arange(5)
        one = DistMatrix.from_function(lambda rows, columns: rows * 100.0 + columns, (7, 5), grid, layout)
        two = DistMatrix.from_global(whole, grid, layout)
        assert one.shape == two.shape == (7, 5) and one.block.dtype == np.float64
        assert np.array_equal(one.block, two.block) and one.block.flags.c_contiguous and one.block.flags.writeable
        assert np.array_equal(one.to_global(), whole) and np.array_equal(two.to_global(), whole)
        ones = DistMatrix.from_function(lambda rows, columns: 1, (7, 5), grid, layout, "float32")
        assert ones.block.dtype == np.float32 and np.array_equal(ones.to_global(), np.ones((7, 5)))


@pytest.mark.mpi(sizes=(6,))
def test_its_repr_says_who_owns_what(comm, make_grid):
    grid = grid_of(comm, make_grid)
    matrix = DistMatrix.from_global(np.zeros((7, 5)), grid, Layout(("x", "y"), ("z",)))
    rows, columns = matrix.layout.slices((7, 5), grid.shape, grid.coordinates)
    for words in (
        "7×5 float64",
        "0:(x,y) 1:z",
        "x=1, y=3, z=2",
        f"rows {rows.start}:{rows.stop}",
        f"columns {columns.start}:{columns.stop}",
    ):
        assert words in repr(matrix)


@pytest.mark.mpi(sizes=(1, 6, 12))
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_roles_are_read_off_the_layouts_and_words_are_the_formulas(comm, make_grid, form):
    grid = grid_of(comm, make_grid)
    for roles in ("xyz", "xzy", "yxz", "zxy"):
        plan = CuboidPlan(form, 23, 19, 31, *roles)
        a, b = random(plan.a_shape, 1), random(plan.b_shape, 2)
        left, right = DistMatrix.from_global(a, grid, plan.a_layout), DistMatrix.from_global(b, grid, plan.b_layout)
        with grid.ledger.watch() as moved:
            c = matmul(left, right, form)
        assert c.layout == plan.c_layout and c.shape == (23, 19)
        want = (a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b)
        assert np.allclose(c.to_global(), want, rtol=0, atol=1e-12)
        assert moved.words == volume.of_plan(plan, grid.shape).words_of(grid.coordinates)


@pytest.mark.mpi(sizes=(8, 12))
def test_two_products_in_a_row_return_to_the_layout_they_began_with(comm, make_grid):
    """After each product y and z change places, as in the two linear layers of a transformer's MLP."""
    grid = grid_of(comm, make_grid)
    a, w1, w2 = random((17, 11), 1), random((11, 29), 2), random((29, 11), 3)
    start = DistMatrix.from_global(a, grid, Layout(("x", "y"), ("z",)))
    first = matmul(start, DistMatrix.from_global(w1, grid, Layout(("z", "x"), ("y",))))
    assert first.layout == Layout(("x", "z"), ("y",))
    second = matmul(first, DistMatrix.from_global(w2, grid, Layout(("y", "x"), ("z",))))
    assert second.layout == start.layout
    assert np.allclose(second.to_global(), a @ w1 @ w2, rtol=0, atol=1e-11)


@pytest.mark.mpi(sizes=(8,))
def test_alpha_beta_and_out(comm, make_grid):
    grid = grid_of(comm, make_grid)
    plan = CuboidPlan("tn", 13, 11, 17)
    a, b, old = random(plan.a_shape, 1), random(plan.b_shape, 2), random(plan.c_shape, 3)
    left, right = DistMatrix.from_global(a, grid, plan.a_layout), DistMatrix.from_global(b, grid, plan.b_layout)
    out = DistMatrix.from_global(old, grid, plan.c_layout)
    block = out.block
    assert matmul(left, right, "tn", algorithm="cuboid", alpha=-2, beta=0.5, out=out) is out and out.block is block
    assert np.allclose(out.to_global(), -2 * a.T @ b + 0.5 * old, rtol=0, atol=1e-12)


@pytest.mark.mpi(sizes=(4,))
def test_torch_matrices(comm, make_grid):
    import torch

    grid = grid_of(comm, make_grid)
    plan = CuboidPlan("nt", 13, 11, 17)
    a, b = torch.from_numpy(random(plan.a_shape, 1)), torch.from_numpy(random(plan.b_shape, 2))
    c = matmul(DistMatrix.from_global(a, grid, plan.a_layout), DistMatrix.from_global(b, grid, plan.b_layout), "nt")
    assert isinstance(c.block, torch.Tensor) and "float64" in repr(c)
    assert torch.allclose(c.to_global(), a @ b.T, rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match="dtype"):
        matmul(DistMatrix.from_global(a, grid, plan.a_layout), DistMatrix.from_global(b.numpy(), grid, plan.b_layout), "nt")


@pytest.mark.mpi(sizes=(4,))
def test_what_cannot_be_multiplied_is_refused_on_every_rank_before_anything_moves(comm, make_grid):
    grid, other = grid_of(comm, make_grid), make_grid(x=1, y=2, z=2)
    plan = CuboidPlan("nn", 8, 6, 4)
    a = DistMatrix.from_global(np.ones((8, 4)), grid, plan.a_layout)
    b = DistMatrix.from_global(np.ones((4, 6)), grid, plan.b_layout)
    c = DistMatrix.from_global(np.ones((8, 6)), grid, plan.c_layout)
    square = DistMatrix.from_global(np.ones((4, 4)), grid, Layout(("x",), ("z",)))
    refused = [
        (
            lambda: matmul(a, DistMatrix.from_global(np.ones((5, 6)), grid, plan.b_layout)),
            ShapeError,
            "8×4 and op(B) is 5×6 (form nn)",
        ),
        (lambda: matmul(a, b, "tn"), ShapeError, "op(A) is 4×8 and op(B) is 4×6 (form tn): the inner sizes 8 and 4"),
        (
            lambda: matmul(a, DistMatrix.from_global(np.ones((4, 6), np.float32), grid, plan.b_layout)),
            ShapeError,
            "float64 and B float32",
        ),
        (
            lambda: matmul(a, DistMatrix.from_global(np.ones((4, 6)), other, plan.b_layout), algorithm="cuboid"),
            LayoutError,
            "another grid",
        ),
        (
            lambda: matmul(a, DistMatrix.from_global(np.ones((4, 6)), grid, plan.a_layout), algorithm="cuboid"),
            LayoutError,
            "B in k:(z,x) n:y",
        ),
        (
            lambda: matmul(a, DistMatrix.from_global(np.ones((4, 6)), grid, Layout((), ())), panel=2),
            LayoutError,
            "summa product of form nn",
        ),
        (lambda: matmul(a, b, "xy"), ShapeError, "form 'xy' is not one of nn, nt, tn, tt"),
        (lambda: matmul(a, b, algorithm="strassen"), ConfigError, "'strassen' is not known"),
        (lambda: matmul(a, b, beta=1), ShapeError, "beta = 1 needs the block of C"),
        (
            lambda: matmul(a, b, out=DistMatrix.from_global(np.ones((8, 6)), grid, plan.a_layout), algorithm="cuboid"),
            LayoutError,
            "the product is 8×6 in m:(x,z) n:y",
        ),
        (lambda: matmul(a, b, out=DistMatrix.from_global(np.ones((6, 8)), grid, plan.c_layout)), LayoutError, "out is"),
        (
            lambda: matmul(a, b, out=DistMatrix.from_global(np.ones((8, 6)), other, plan.c_layout), algorithm="cuboid"),
            LayoutError,
            "out is",
        ),
        (lambda: matmul(a, b, algorithm="cuboid", out_layout="m:x n"), ConfigError, "Cuboid leaves C in m:(x,z) n:y"),
        (lambda: matmul(a, b, out=c, out_layout="m:x n"), LayoutError, "out_layout is m:x n"),
        (lambda: matmul(a, b, out_layout="m:w n"), LayoutError, "names axis 'w'"),
        (lambda: matmul(a, b, out_layout="m n k"), LayoutError, "describes 3 dims"),
        (lambda: matmul(a, b, objective="bytes"), ConfigError, "objectives: seconds, words"),
        (
            lambda: matmul(a, b, out=DistMatrix.from_global(np.ones((8, 6), np.float32), grid, plan.c_layout)),
            ShapeError,
            "C has dtype float32",
        ),
        (lambda: DistMatrix(a.block, plan.b_layout, grid, (9, 9)), ShapeError, "gives blocks"),
        (lambda: DistMatrix.from_function(np.add, (-1, 5), grid, plan.a_layout), ShapeError, "cannot have the shape (-1, 5)"),
        (lambda: DistMatrix.eye(4, grid, plan.a_layout), ShapeError, "cannot have the shape 4; it takes 2 whole numbers"),
        (
            lambda: DistMatrix.from_function(lambda i, j: i + 1j * j, (4, 4), grid, plan.a_layout),
            ShapeError,
            "values are complex",
        ),
        (lambda: DistMatrix.from_function(np.add, (4.0, 5), grid, plan.a_layout), ShapeError, "2 whole numbers"),
        (lambda: matmul(a.block, b), ShapeError, "a is a ndarray; matmul takes DistMatrix"),
        (lambda: matmul(a, b, out=c.block), ShapeError, "out is a ndarray"),
        (lambda: matmul(square, square, panel=0), ShapeError, "panel is 0; its width is a whole number of at least 1"),
        (lambda: matmul(square, square, panel=1.5), ShapeError, "panel is 1.5"),
        (lambda: matmul(a, b, a_fine=2), ShapeError, "a_fine is 2"),
        (lambda: CuboidPlan("nn", 1.5, 2, 3), ShapeError, "m is 1.5; sizes are whole numbers"),
    ]
    with grid.ledger.watch() as moved:
        for attempt, kind, words in refused:
            with pytest.raises(Summa3dError) as caught:
                attempt()
            assert isinstance(caught.value, kind) and words in str(caught.value), str(caught.value)
    assert moved.calls == 0
    assert np.array_equal(matmul(a, b, out=c).to_global(), np.full((8, 6), 4))


@pytest.mark.mpi(sizes=(4,))
def test_operands_that_no_algorithm_has_are_multiplied_wherever_they_lie(comm, make_grid):
    grid, other = grid_of(comm, make_grid), make_grid(x=1, y=2, z=2)
    plan, left, right = CuboidPlan("nn", 8, 6, 4), random((8, 4), 1), random((4, 6), 2)
    a, want = DistMatrix.from_global(left, grid, plan.a_layout), left @ right
    for place, layout in ((other, plan.b_layout), (grid, plan.a_layout), (grid, Layout((), ()))):
        c = matmul(a, DistMatrix.from_global(right, place, layout))
        assert c.grid is grid and np.allclose(c.to_global(), want, rtol=0, atol=1e-14)
    b = DistMatrix.from_global(right, grid, plan.b_layout)
    for place, layout in ((grid, plan.a_layout), (other, plan.c_layout)):
        out = DistMatrix.from_global(np.ones((8, 6)), place, layout)
        assert matmul(a, b, out=out, beta=2) is out and np.allclose(out.to_global(), want + 2, rtol=0, atol=1e-14)


@pytest.mark.mpi(sizes=(2,))
def test_a_grid_with_fewer_axes_than_roles_multiplies_and_a_named_algorithm_says_what_it_lacks(comm, make_grid):
    grid, whole = make_grid(y=2), random((4, 4), 1)
    a = DistMatrix.from_global(whole, grid, Layout(("y",), ()))
    assert np.allclose((a @ a).to_global(), whole @ whole, rtol=0, atol=1e-14)
    with pytest.raises(LayoutError, match=r"(?s)not the operands of a cuboid product.*On a grid with the axes y, x, z one"):
        matmul(a, a, algorithm="cuboid")


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_output_that_shares_memory_with_an_operand_is_refused_and_one_beside_it_is_not(comm, make_grid, library):
    grid = make_grid(x=2, y=2) if comm.size == 4 else make_grid(x=1, y=1)
    side, layout, whole = 6 * grid.shape["x"], Layout(("x",), ("y",)), random((6, 18), 3)
    memory = whole.copy() if library == "numpy" else pytest.importorskip("torch").from_numpy(whole.copy())

    def of(block):
        return DistMatrix(block, layout, grid, (side, side))

    a, b, c = (of(memory[:, start : start + 6]) for start in (0, 6, 12))
    want = a.to_global() @ b.to_global()
    for out, name in ((a, "out is a itself"), (b, "out is b itself"), (of(memory[:, 1:7]), "shares memory with A")):
        with pytest.raises(ShapeError, match=name):
            matmul(a, b, out=out)
    with pytest.raises(ShapeError, match="shares memory with B"):
        matmul(a, b, "nt", out=of(b.block.T))
    assert np.array_equal(memory, whole)
    assert np.allclose(matmul(a, b, out=c).to_global(), want, rtol=1e-13)  # in columns beside them, of the same memory
    empty = DistMatrix.from_global(np.zeros((0, 0)), grid, layout)
    with pytest.raises(ShapeError, match="out is a itself"):
        matmul(empty, empty, out=empty)


@pytest.mark.mpi(sizes=(1, 2))
def test_a_factor_that_the_dtype_cannot_hold_is_refused_before_anything_moves(comm, make_grid):
    grid = make_grid(x=1, y=comm.size, z=1)
    plan = CuboidPlan("nn", 4, 4, 4)

    def product(dtype, alpha):
        a, b = (DistMatrix.from_global(np.ones((4, 4), dtype), grid, layout) for layout in (plan.a_layout, plan.b_layout))
        return matmul(a, b, alpha=alpha).to_global()

    with grid.ledger.watch() as moved:
        for dtype, alpha, words in (
            ("float64", 1j, "alpha = 1j is complex; a product of float64 takes real numbers"),
            ("float32", np.complex64(2), "is complex"),
            ("float64", "2", "alpha is '2'; it must be a number"),
            ("float64", None, "alpha is None"),
            ("float64", np.ones(2), "it must be a number"),
            ("int32", 0.5, "alpha = 0.5 is not a whole number"),
            ("int32", np.nan, "alpha = nan is not a whole number"),
            ("int32", np.inf, "alpha = inf is not a whole number"),
            ("int32", 1j, "alpha = 1j is complex"),
        ):
            with pytest.raises(ShapeError, match=words):
                product(dtype, alpha)
        for dtype in ("bool", "int8", "longdouble", ">f8", "object"):
            with pytest.raises(ShapeError, match=r"is not supported by products; supported: float64, "):
                product(dtype, 1)
    assert moved.calls == 0
    for dtype, alpha in (
        ("float64", np.array(2.0)),
        ("int32", 2.0),
        ("complex128", 2j),
        ("float32", np.float64(2)),
        ("int64", True),
    ):
        assert np.array_equal(product(dtype, alpha), np.full((4, 4), 4 * alpha))


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize("alpha", [1, 2])
def test_an_output_that_cannot_be_written_on_one_rank_is_refused_on_all_and_is_as_it_was(comm, make_grid, shared_tmp_path, alpha):
    grid = make_grid(x=comm.size, y=1, z=1)
    plan = CuboidPlan("nn", 70, 60, 80)
    a = DistMatrix.from_global(random(plan.a_shape, 3), grid, plan.a_layout)
    b = DistMatrix.from_global(random(plan.b_shape, 4), grid, plan.b_layout)
    before = np.full(plan.c_layout.local_shape(plan.c_shape, grid.shape, grid.coordinates), 7.0)
    np.save(shared_tmp_path / f"{comm.rank}.npy", before)
    guarded = before.copy()
    guarded.flags.writeable = comm.rank != comm.size - 1
    mapped = np.load(shared_tmp_path / f"{comm.rank}.npy", mmap_mode="r" if comm.rank == comm.size - 1 else "r+")
    for block in (guarded, mapped):
        out = DistMatrix(block, plan.c_layout, grid, plan.c_shape)
        with grid.ledger.watch() as moved, pytest.raises(ShapeError, match="out is read-only"):
            matmul(a, b, out=out, alpha=alpha)
        assert moved.calls == 0 and np.array_equal(block, before)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_output_within_an_operand_is_refused_on_all_ranks_where_some_hold_nothing(comm, make_grid, library):
    grid = make_grid(x=2, y=1, z=1)
    plan = CuboidPlan("nn", 1, 4, 4)
    a, b = (
        DistMatrix.from_global(array(library, "float64", np.ones(shape)), grid, layout)
        for shape, layout in ((plan.a_shape, plan.a_layout), (plan.b_shape, plan.b_layout))
    )
    assert comm.allgather(len(a.block)) == [1, 0]
    out = DistMatrix(a.block[:], plan.c_layout, grid, plan.c_shape)
    with grid.ledger.watch() as moved, pytest.raises(ShapeError, match=r"(?s)shares memory with A.*On rank 0 of 2 only"):
        matmul(a, b, out=out)
    assert moved.calls == 0
    fresh = DistMatrix(array(library, "float64", np.zeros(tuple(a.block.shape))), plan.c_layout, grid, plan.c_shape)
    assert matmul(a, b, out=fresh).to_global().sum() == 16


@pytest.mark.mpi(sizes=(2,))
def test_executors_of_a_grid_that_checks_agree_on_an_output_too(comm, make_grid):
    grid = make_grid(check=True, x=2, y=1, z=1)
    plan = CuboidPlan("nn", 4, 4, 4)
    layouts = plan.a_layout, plan.b_layout, plan.c_layout
    a, b, out = (np.ones(layout.local_shape((4, 4), grid.shape, grid.coordinates)) for layout in layouts)
    out.flags.writeable = comm.rank == 0
    with pytest.raises(ShapeError, match=r"(?s)out is read-only.*On rank 1 of 2 only"):
        Cuboid(plan, grid).run(a, b, out)
