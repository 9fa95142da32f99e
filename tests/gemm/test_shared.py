# Operands in node-shared memory: the same numbers and words, no copies and no workspace.
from __future__ import annotations

import numpy as np
import pytest

from summa3d.errors import LayoutError
from summa3d.gemm import Cuboid, CuboidPlan, DistMatrix, matmul, volume
from summa3d.layout.cyclic import BlockCyclic

GRIDS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 1, 2)], 8: [(2, 2, 2)], 12: [(3, 2, 2)]}
M, N, K = 43, 29, 37


def value(turn):
    return lambda rows, columns: np.sin(rows * 1.7 + turn) + np.cos(columns * 0.9 - turn * rows)


def whole(shape, turn):
    return value(turn)(np.arange(shape[0])[:, None], np.arange(shape[1])[None, :])


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "windows"])
def test_shared_operands_give_the_same_product_without_workspace(make_grid, world_size, form, slots):
    """C is summed in the node's slots, or where there are none in place, in the memory of C itself."""
    for x, y, z in GRIDS[world_size]:
        grid = make_grid(x=x, y=y, z=z, check=False, node_memory=slots)
        plan = CuboidPlan(form, M, N, K)
        a = DistMatrix.from_function(value(0), plan.a_shape, grid, plan.a_layout, shared=True)
        b = DistMatrix.from_function(value(1), plan.b_shape, grid, plan.b_layout, shared=True)
        c = DistMatrix.from_function(value(2), plan.c_shape, grid, plan.c_layout, shared=True)
        executor = Cuboid(plan, grid)
        cost = volume.of_plan(plan, grid.shape, shared=True, staged=grid.staged).cost_of(grid.coordinates)
        want = whole(plan.c_shape, 2)
        for turn in range(3):  # operands change between runs: nobody may read too early or write too soon
            for matrix, number in ((a, turn), (b, turn + 1)):
                rows, columns = matrix.layout.slices(matrix.shape, grid.shape, grid.coordinates)
                matrix.block[...] = whole(matrix.shape, number)[rows, columns]
            left, right = whole(plan.a_shape, turn), whole(plan.b_shape, turn + 1)
            want = 2 * (left.T if form[0] == "t" else left) @ (right.T if form[1] == "t" else right) - turn * want
            with grid.ledger.watch() as moved:
                executor.run(a.block, b.block, c.block, 2, -turn)
            assert (moved.words, moved.messages) == (cost.words, cost.messages)
            assert {row.collective for row in moved.rows} <= ({"view", "reduce_scatter"} if slots else {"view"})
            assert np.linalg.norm(c.to_global() - want) <= 1e-14 * np.linalg.norm(want)
        assert grid.ledger.workspace_peak == cost.workspace == 0


@pytest.mark.mpi(sizes=(4,))
def test_matmul_takes_shared_and_private_operands_together(make_grid):
    grid = make_grid(x=2, y=1, z=2)
    plan = CuboidPlan("nn", M, N, K)
    a = DistMatrix.from_function(value(0), plan.a_shape, grid, plan.a_layout)
    b = DistMatrix.from_function(value(1), plan.b_shape, grid, plan.b_layout, shared=True)
    want = whole(plan.a_shape, 0) @ whole(plan.b_shape, 1)
    assert np.linalg.norm(matmul(a, b).to_global() - want) <= 1e-14 * np.linalg.norm(want)


@pytest.mark.mpi(sizes=(2,))
def test_block_cyclic_blocks_cannot_share(make_grid):
    grid = make_grid(x=2, y=1, z=1)
    with pytest.raises(LayoutError, match="cannot share memory"):
        DistMatrix.from_function(value(0), (5, 5), grid, BlockCyclic(("x", 2), ("y", 2)), shared=True)
