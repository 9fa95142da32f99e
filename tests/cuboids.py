"""The check of a cuboid product against numpy on one process, and of its costs against the closed form."""

from __future__ import annotations

import gc
from math import sqrt

import numpy as np
from kinds import array, plain

from summa3d.gemm import Cuboid, volume
from summa3d.layout import collect, distribute

GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
    4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)],
    6: [(2, 1, 3), (1, 3, 2), (3, 2, 1)],
    8: [(2, 2, 2), (1, 2, 4), (1, 1, 8)],
    12: [(3, 2, 2), (2, 1, 6)],
    27: [(3, 3, 3)],
}
FORMS = ("nn", "nt", "tn", "tt")
RAGGED = [(67, 41, 101), (13, 11, 2), (3, 1, 29)]  # k < Z, m < X·Y, n < Y·X on most grids
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "complex128": 2.0**-53}


def wholes(plan, kind, dtype):
    """Global A, B, C of a plan in `dtype`, the same on every rank, and op(A), op(B), C as float64 numpy."""
    random = np.random.default_rng(7)
    made = []
    for shape in (plan.a_shape, plan.b_shape, plan.c_shape):
        values = random.standard_normal(shape)
        made.append(array(kind, dtype, values + 1j * random.standard_normal(shape) if dtype.startswith("complex") else values))
    a, b, c = (plain(whole) for whole in made)
    return made, a.T if plan.form[0] == "t" else a, b.T if plan.form[1] == "t" else b, c


def relative_error(got, want):
    return np.linalg.norm(plain(got) - want) / np.linalg.norm(want)


def check_product(grid, plan, kind, dtype, alpha, beta, given):
    (a, b, c), left, right, old = wholes(plan, kind, dtype)
    blocks = distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout)
    out = distribute(c, grid, plan.c_layout) if given else None
    if given and beta == 0:
        out[...] = float("nan")  # never read
    cuboid = Cuboid(plan, grid)
    gc.collect()
    grid.ledger.reset_peak()
    before = grid.ledger.workspace_bytes
    with grid.ledger.watch() as moved:
        block = cuboid.run(*blocks, out, alpha, beta)
    case = (plan, dict(grid.shape), kind, dtype, alpha, beta, given)
    assert out is None or block is out, case
    bound = 8 * UNIT[dtype] * sqrt(plan.k)
    assert relative_error(collect(block, grid, plan.c_layout, plan.c_shape), alpha * left @ right + beta * old) <= bound, case
    cost = volume.of_plan(plan, grid.shape, dtype, staged=grid.staged).cost_of(grid.coordinates)
    assert (moved.words, moved.messages) == (cost.words, cost.messages), case
    gathered_a, gathered_b, scattered = volume.plan_steps(plan, grid.shape, grid.coordinates)
    summed_in = 4 if dtype in ("float16", "bfloat16") else a.itemsize  # 16-bit floats travel in float32 where they are summed
    assert moved.bytes == (gathered_a.words + gathered_b.words) * a.itemsize + scattered.words * summed_in, case
    moving = {role for role in (plan.x, plan.y, plan.z) if grid.shape[role] > 1}
    axes = {row.axis for row in moved.rows}
    assert axes <= moving if plan.pieces > 1 else axes == moving, case  # of a block without elements there is no piece
    assert grid.ledger.workspace_peak - before == cost.workspace * a.itemsize, case
    with grid.ledger.watch():
        assert cuboid.run(*blocks, out, alpha, beta) is not None
    assert grid.ledger.workspace_peak - before == cost.workspace * a.itemsize, case  # kept, not allocated again
    del cuboid
    assert grid.ledger.workspace_bytes == before, case
    assert np.array_equal(plain(blocks[0]), plain(distribute(a, grid, plan.a_layout))), case
