"""The cuboid product against numpy on one process.

Its words, messages and workspace against the closed forms, rank by rank.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuboids import FORMS, GRIDS, RAGGED, check_product, relative_error, wholes

from summa3d.errors import ShapeError
from summa3d.gemm import Cuboid, CuboidPlan, DistMatrix, volume
from summa3d.layout import Layout


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8, 12, 27))
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["turns", "all"])
def test_every_form_on_every_grid_is_right_and_costs_its_formula(comm, make_grid, every):
    """Sizes take turns over forms and grids; alpha, beta and out over all."""
    turns = [(1, 0, False), (-1.5, 0, True), (1, 1, True), (0.5, -2, True), (2, 0, False)]
    for place, (x, y, z) in enumerate(GRIDS[comm.size]):
        grid, turn = make_grid(x=x, y=y, z=z, check=comm.size <= 4, node_memory=place % 2 == 1), place
        for form in FORMS:
            for m, n, k in RAGGED if every else [RAGGED[(turn + comm.size) % len(RAGGED)]]:
                check_product(grid, CuboidPlan(form, m, n, k), "numpy", "float64", *turns[turn % len(turns)])
                turn += 1


@pytest.mark.mpi(sizes=(1, 4, 12))
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128"])
def test_numpy_dtypes(comm, make_grid, dtype):
    grid = make_grid(**dict(zip("xyz", GRIDS[comm.size][0], strict=True)), check=False)
    other = make_grid(x=1, y=1, z=comm.size, check=False)
    for form in FORMS:
        check_product(grid, CuboidPlan(form, 23, 19, 37), "numpy", dtype, 1, 0, False)
        check_product(other, CuboidPlan(form, 23, 19, 37), "numpy", dtype, 0.5, 2, True)


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex128"])
def test_torch_dtypes(comm, make_grid, dtype):
    for shape in GRIDS[comm.size][:2]:
        grid = make_grid(**dict(zip("xyz", shape, strict=True)), check=False)
        for form in FORMS:
            check_product(grid, CuboidPlan(form, 23, 19, 37), "torch", dtype, 1, 0, False)
        check_product(grid, CuboidPlan("nt", 23, 19, 37), "torch", dtype, -1.5, 0, True)
        check_product(grid, CuboidPlan("tn", 23, 19, 37), "torch", dtype, 0.5, 2, True)


@pytest.mark.mpi(sizes=(6, 12))
def test_any_axes_may_take_the_roles(comm, make_grid):
    grid = make_grid(**dict(zip("xyz", GRIDS[comm.size][0], strict=True)), check=False)
    for x, y, z in ("xyz", "xzy", "zyx", "yxz", "yzx", "zxy"):
        for form in FORMS:
            check_product(grid, CuboidPlan(form, 29, 31, 17, x, y, z), "numpy", "float64", 1, 0, False)


@pytest.mark.mpi(sizes=(4, 8, 12))
def test_the_fine_split_may_lie_on_the_columns_of_any_operand_for_the_same_words(comm, make_grid):
    grid = make_grid(**dict(zip("xyz", GRIDS[comm.size][0], strict=True)))
    for fine in ((0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1)):
        for turn, form in enumerate(FORMS):
            options = dict(zip(("a_fine", "b_fine", "c_fine"), fine, strict=True))
            plan, rows = CuboidPlan(form, 24, 48, 72, **options), CuboidPlan(form, 24, 48, 72)
            costs = (volume.of_plan(each, grid.shape).cost_of(grid.coordinates) for each in (plan, rows))
            assert len({(cost.words, cost.messages) for cost in costs}) == 1
            ragged = CuboidPlan(form, 23, 19, 37, **options)
            check_product(grid, ragged, *(("numpy", "float64"), ("torch", "bfloat16"))[turn % 2 * (comm.size == 4)], 0.5, 2, True)


@pytest.mark.mpi(sizes=(4,))
def test_the_papers_storage_of_b_is_recognised_by_its_layout(comm, make_grid):
    grid = make_grid(x=2, y=1, z=2)
    plan = CuboidPlan("nt", 13, 11, 17, b_fine=1)
    (a, b, _), left, right, _ = wholes(plan, "numpy", "float64")
    c = DistMatrix.from_global(a, grid, plan.a_layout) @ DistMatrix.from_global(b, grid, plan.b_layout).T
    assert np.allclose(c.to_global(), left @ right, rtol=1e-12, atol=1e-12)
    assert plan.b_layout == Layout(("y",), ("z", "x"))


@pytest.mark.mpi(sizes=(8,))
def test_a_grid_may_have_more_axes_than_the_product_uses(comm, make_grid):
    """Each copy along d multiplies for itself."""
    grid = make_grid(d=2, x=2, y=1, z=2)
    check_product(grid, CuboidPlan("nn", 11, 7, 13), "numpy", "float64", 1, 1, True)


@pytest.mark.mpi(sizes=(4,))
def test_blocks_that_are_not_the_plans_are_refused_before_anything_moves(comm, make_grid):
    grid = make_grid(x=2, y=1, z=2)
    plan = CuboidPlan("nn", 8, 6, 4)
    cuboid = Cuboid(plan, grid)
    a, b, c = np.zeros((4, 2)), np.zeros((1, 6)), np.zeros((2, 6))
    assert cuboid.run(a, b, c) is c
    assert cuboid.run(a, b).shape == c.shape  # blocks like these are known to be right from now on
    with grid.ledger.watch() as moved:
        for blocks, message in (
            ((a.T, b), r"block of A has shape \(2, 4\); .* expects \(4, 2\)"),
            ((a, np.zeros((2, 6))), r"block of B has shape \(2, 6\)"),
            ((a, b, np.zeros((6, 2))), r"block of C has shape \(6, 2\)"),
            ((a, b.astype(np.float32)), "B has dtype float32, A has float64"),
            ((a, b, c.astype(np.float16)), "C has dtype float16, A has float64"),
            ((a, b, None, 1, 2.0), "beta = 2.0 needs the block of C"),
        ):
            with pytest.raises(ShapeError, match=message):
                cuboid.run(*blocks)
    assert moved.calls == 0
    with pytest.raises(ShapeError, match="form 'xn' is not two of the letters n"):
        CuboidPlan("xn", 1, 1, 1)
    with pytest.raises(ShapeError, match="b_fine is 2; the fine split lies on dim 0"):
        CuboidPlan("nn", 1, 1, 1, b_fine=2)


@pytest.mark.mpi(sizes=(1, 2, 4, 8, 12))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "messages"])
def test_a_reused_executor_never_reads_operands_too_early_or_writes_them_too_soon(make_grid, world_size, form, slots):
    """Operands change between runs and C accumulates: in the node's slots, and in messages."""
    for x, y, z in GRIDS[world_size][:1]:
        grid = make_grid(x=x, y=y, z=z, check=False, node_memory=slots)
        plan = CuboidPlan(form, 43, 29, 37)
        operands = ((plan.a_shape, plan.a_layout), (plan.b_shape, plan.b_layout), (plan.c_shape, plan.c_layout))
        a, b, c = (DistMatrix.from_global(_turned(shape, 2), grid, layout) for shape, layout in operands)
        executor, cost = Cuboid(plan, grid), volume.of_plan(plan, grid.shape, staged=grid.staged).cost_of(grid.coordinates)
        grid.ledger.reset_peak()
        before, want = grid.ledger.workspace_bytes, _turned(plan.c_shape, 2)
        for turn in range(3):
            for matrix, number in ((a, turn), (b, turn + 1)):
                matrix.block[...] = DistMatrix.from_global(_turned(matrix.shape, number), grid, matrix.layout).block
            left, right = _turned(plan.a_shape, turn), _turned(plan.b_shape, turn + 1)
            want = 2 * (left.T if form[0] == "t" else left) @ (right.T if form[1] == "t" else right) - turn * want
            with grid.ledger.watch() as moved:
                executor.run(a.block, b.block, c.block, 2, -turn)
            assert (moved.words, moved.messages) == (cost.words, cost.messages)
            assert relative_error(c.to_global(), want) <= 1e-14
        assert grid.ledger.workspace_peak - before == 8 * cost.workspace


def _turned(shape, turn):
    rows, columns = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
    return np.sin(rows * 1.7 + turn) + np.cos(columns * 0.9 - turn * rows)
