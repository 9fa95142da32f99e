"""What a grid keeps of its products: executors with their workspace, by plan, dtype and device, least recently used first."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
from kinds import array

from summa3d.comm.grid import Place
from summa3d.gemm import Cuboid, CuboidPlan, DistMatrix, matmul
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.algorithms.workspace import Workspace
from summa3d.gemm.executors import Executors, executors_of

GRIDS = {1: (1, 1, 1), 2: (1, 1, 2), 4: (2, 1, 2)}


def operands(grid, plan, seed=0, dtype="float64", kind="numpy"):
    random, found = np.random.default_rng(seed), []
    for shape, layout in ((plan.a_shape, plan.a_layout), (plan.b_shape, plan.b_layout)):
        whole = array(kind, dtype, random.standard_normal(shape))
        found.append((whole, DistMatrix.from_global(whole, grid, layout)))
    return found


def grid_of(comm, make_grid, **options):
    return make_grid(**dict(zip("xyz", GRIDS[comm.size], strict=True)), **options)


@pytest.mark.mpi(sizes=(1, 2, 4))
def test_a_product_that_comes_again_allocates_nothing_and_leaves_earlier_results_alone(comm, make_grid):
    grid = grid_of(comm, make_grid, node_memory=False)
    plan, results, held = CuboidPlan("nn", 23, 17, 19), [], []
    for turn in range(3):
        (a, A), (b, B) = operands(grid, plan, turn)
        results.append((a @ b, A @ B))
        held.append(grid.ledger.workspace_bytes)
        assert len(executors_of(grid)) == 1
    for want, C in results:
        assert np.linalg.norm(C.to_global() - want) <= 1e-14 * np.linalg.norm(want)
    assert held == [executors_of(grid).nbytes] * 3 and (comm.size == 1 or held[0] > 0)


@pytest.mark.mpi(sizes=(2,))
def test_transposes_forms_and_options_have_executors_of_their_own(comm, make_grid):
    grid = grid_of(comm, make_grid)
    (a, A), (b, B) = operands(grid, CuboidPlan("nn", 12, 12, 12))
    for _ in range(2):
        for product, want in ((A @ B, a @ b), ((B.T @ A.T).T, a @ b), (matmul(A, B, alpha=2), 2 * a @ b)):
            assert np.linalg.norm(product.to_global() - want) <= 1e-14 * np.linalg.norm(want)
    assert len(executors_of(grid)) == 2  # A·B, and Bᵀ·Aᵀ
    D = DistMatrix.from_global(np.ascontiguousarray(b.T), grid, B.layout.transposed())
    assert np.linalg.norm((A @ D.T).to_global() - a @ b) <= 1e-14 * np.linalg.norm(a @ b)
    assert len(executors_of(grid)) == 3  # D is read as it lies, by another form, though D.T has the layout and shape of B


@pytest.mark.mpi(sizes=(2,))
def test_forms_and_factors_of_the_same_two_matrices_take_turns(comm, make_grid):
    """Square matrices of SUMMA have one layout in every form: nothing but the form tells its products apart."""
    grid = make_grid(x=2, y=1, check=False)  # with checks nothing that is kept is used again
    a, b = np.random.default_rng(3).standard_normal((2, 9, 9))
    A, B = (DistMatrix.from_global(whole, grid, "m:x k:y") for whole in (a, b))
    for _ in range(2):
        for form, want in (("nn", a @ b), ("nt", a @ b.T), ("tn", a.T @ b)):
            for alpha in (1, -2):
                product = matmul(A, B, form, algorithm="summa", alpha=alpha)
                assert np.linalg.norm(product.to_global() - alpha * want) <= 1e-13 * np.linalg.norm(want), (form, alpha)


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize("check", [False, True])
def test_dtypes_and_libraries_do_not_share_workspace(comm, make_grid, check):
    grid = grid_of(comm, make_grid, check=check)
    kinds = [("numpy", "float64"), ("numpy", "float32"), ("torch", "float64"), ("numpy", "float16")]
    for count, (kind, dtype) in enumerate(kinds, 1):
        (_, A), (_, B) = operands(grid, CuboidPlan("nn", 8, 8, 8), dtype=dtype, kind=kind)
        assert str((A @ B).block.dtype).removeprefix("torch.") == dtype
        assert len(executors_of(grid)) == count


@pytest.mark.mpi(sizes=(1, 2))
def test_one_in_use_is_lent_to_nobody_else(comm, make_grid):
    grid, plan, like = grid_of(comm, make_grid), CuboidPlan("nn", 8, 8, 8), np.empty(0)
    executors = executors_of(grid)
    number = executors.number_of(plan, like)
    one, other = executors.take(number), executors.take(number)
    assert one is not other
    for used in (one, other):
        executors.keep(number, used)
    assert executors.take(number) in (one, other) and len(executors) == 0
    assert executors.nbytes == 0


@pytest.mark.mpi(sizes=(1, 2))
def test_one_whose_product_raises_is_dropped(comm, make_grid, monkeypatch):
    def refuse(*operands):
        raise KeyError

    grid = grid_of(comm, make_grid)
    (_, A), (_, B) = operands(grid, CuboidPlan("nn", 8, 8, 8))
    A @ B
    assert len(executors_of(grid)) == 1
    monkeypatch.setattr(Cuboid, "run", refuse)
    with pytest.raises(KeyError):
        A @ B
    assert len(executors_of(grid)) == 0  # its workspace may be half written
    assert executors_of(grid).nbytes == 0


@pytest.mark.mpi(sizes=(1,))
def test_the_least_recently_used_goes_when_the_bytes_are_too_many(comm, make_grid):
    grid = grid_of(comm, make_grid)
    executors, like = Executors(grid, limit=250 * 8), np.empty(0)

    def use(n, words=100):
        number = executors.number_of(CuboidPlan("nn", n, n, n), like)
        executor = executors.take(number)
        executor.workspace.buffer("a", (words,), like)
        executors.keep(number, executor)
        return executor

    one, two = use(1), use(2)
    assert use(1) is one and executors.nbytes == 200 * 8
    three = use(3)  # 2 was used longest ago
    assert executors.nbytes == 200 * 8 and use(1) is one and use(3) is three
    assert use(2) is not two
    use(4, words=300)  # more than all may hold: nothing is kept
    assert (len(executors), executors.nbytes) == (0, 0)


def test_workspace_that_grows_lets_go_of_what_it_had():
    """Of all shapes that it was used in, which come again and again."""
    place, like = Place({"x": 1}), np.empty(0)
    workspace = Workspace(place)
    for rows in (2, 3, 5):
        for columns in (2, 3):
            assert workspace.buffer("a", (rows, columns), like).shape == (rows, columns)
    assert workspace.nbytes == place.ledger.workspace_bytes == 5 * 3 * 8


@pytest.mark.mpi(sizes=(2,))
def test_a_freed_grid_holds_no_workspace(comm, make_grid):
    grid = grid_of(comm, make_grid, node_memory=False)
    (_, A), (_, B) = operands(grid, CuboidPlan("nn", 8, 8, 8))
    A @ B
    assert grid.ledger.workspace_bytes > 0
    grid.free()
    assert grid.ledger.workspace_bytes == 0


# Calls of Python and of C functions that a warm A @ B made before executors and plans were kept, the most over ranks.
BEFORE = {
    ("cuboid", (1, 1, 1)): 458,
    ("summa", (1, 1)): 739,
    ("cuboid", (1, 1, 2)): 575,
    ("summa", (1, 2)): 946,
}


@pytest.mark.mpi(sizes=(1, 2))
def test_a_warm_product_makes_at_most_60_percent_of_the_calls_that_it_made(comm, make_grid):
    for (name, sizes), before in BEFORE.items():
        if np.prod(sizes) != comm.size:
            continue
        grid = make_grid(**dict(zip("xyz", sizes, strict=False)), check=False)
        (_, A), (_, B) = operands(grid, ALGORITHMS[name].plan("nn", 64, 64, 64))
        for _ in range(3):
            A @ B
        count = calls_of(partial(matmul, A, B))
        assert count <= 0.6 * before, (name, sizes, count)


def calls_of(function):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.mpi(sizes=(2, 4))
@pytest.mark.parametrize("node_memory", [True, False])
def test_one_executor_multiplies_blocks_of_any_dtype_and_library_in_turn(comm, make_grid, node_memory):
    """What it has prepared for one is not taken for the other."""
    grid = grid_of(comm, make_grid, node_memory=node_memory, check=False)
    plan = CuboidPlan("nn", 8, 12, 16)
    executor = Cuboid(plan, grid)
    for _ in range(2):
        for dtype, kind in (("float64", "numpy"), ("float32", "numpy"), ("float64", "torch"), ("float32", "torch")):
            (a, A), (b, B) = operands(grid, plan, dtype=dtype, kind=kind)
            C = DistMatrix(executor.run(A.block, B.block), plan.c_layout, grid, plan.c_shape)
            want = np.asarray(a, dtype="float64") @ np.asarray(b, dtype="float64")
            assert np.linalg.norm(np.asarray(C.to_global(), dtype="float64") - want) <= 1e-5 * np.linalg.norm(want)
