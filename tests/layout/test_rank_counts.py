"""Grids of some ranks of a communicator, and redistribution between grids of different rank counts.

Who is outside holds nothing. The plan itself is tested by hypothesis in test_redistribute.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kinds import array, is_like, numbers, plain

from summa3d.comm.grid import Grid
from summa3d.errors import GridError, LayoutError, ShapeError
from summa3d.gemm import CuboidPlan, DistMatrix, matmul
from summa3d.layout import BlockCyclic, Layout, Redistribution, redistribute
from summa3d.layout.redistribute import Placement

SIZES = (1, 2, 3, 4, 6, 8, 9, 12)


def squares(ranks):
    """Square and oblong grids of fewer and fewer ranks, on the first, on the last, and on some in another order."""
    found = []
    for rows, columns in ((3, 4), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1)):
        used = rows * columns
        if used <= ranks:
            chosen = {0: range(used), 1: range(ranks - used, ranks), 2: range(used)[::-1]}[len(found) % 3]
            found.append(({"x": rows, "y": columns}, chosen))
    return found


def ownerships():
    return itertools.cycle(
        [
            Layout(("x",), ("y",)),
            BlockCyclic(rows=("x", 2), columns=("y", 3)),
            Layout(("y",), ()),
            Layout((), ("x", "y")),
            Layout(("y",), (), root_only=("x",)),
        ]
    )


@pytest.mark.mpi(sizes=SIZES)
def test_a_matrix_goes_from_any_grid_to_one_of_other_ranks_and_moves_the_words_of_the_formula(comm):
    owners, dtypes = ownerships(), itertools.cycle(["float64", "complex64", "int32", "float16"])
    for (axes, ranks), (to_axes, to_ranks) in itertools.product(squares(comm.size), repeat=2):
        layout, to, dtype = next(owners), next(owners), next(dtypes)
        whole = array("numpy", dtype, numbers("float64", (13, 17), 3))
        with Grid(comm, axes, ranks=ranks, check=True) as grid, Grid(comm, to_axes, ranks=to_ranks) as to_grid:
            matrix = DistMatrix.from_global(whole, grid, layout)
            plan = Redistribution(matrix.shape, Placement.among_everyone(grid, layout), Placement.among_everyone(to_grid, to))
            with grid.ledger.watch() as moved:
                there = matrix.redistribute(to, to_grid)
            assert there.grid is to_grid and np.array_equal(there.block, DistMatrix.from_global(whole, to_grid, to).block)
            assert there.block.dtype == whole.dtype
            assert (moved.words, moved.messages) == (plan.words_of(comm.rank), plan.messages_of(comm.rank))
            lacking = comm.allreduce(there.block.size - (plan.kept_by(comm.rank).words if plan.kept_by(comm.rank) else 0))
            assert comm.allreduce(moved.words) == lacking
            for inside, block in ((grid.inside, matrix.block), (to_grid.inside, there.block)):
                assert inside or block.size == 0
            back = there.redistribute(layout, grid)
            assert np.array_equal(back.block, matrix.block)


@pytest.mark.mpi(sizes=(6,))
def test_from_two_by_two_of_six_ranks_to_three_by_two_the_words_are_these(comm):
    layout, whole = Layout(("x",), ("y",)), numbers("float64", (12, 12), 1)
    with Grid(comm, {"x": 2, "y": 2}, ranks=range(4)) as four, Grid(comm, {"x": 3, "y": 2}) as six:
        with four.ledger.watch() as moved:
            matrix = DistMatrix.from_global(whole, four, layout).redistribute(layout, six)
        # Each gets 4×6. Ranks 0 and 1 held theirs (rows 0:4); rank 2 held rows 6:8 and lacks 4:6 of the left half; rank 3 alike.
        assert comm.allgather(moved.words) == [0, 0, 12, 12, 24, 24] and moved.messages == 5
        with six.ledger.watch() as moved:
            matrix.redistribute(layout, four)
        assert comm.allgather(moved.words) == [12, 12, 24, 24, 0, 0]


@pytest.mark.mpi(sizes=(6,))
def test_torch_blocks_of_any_number_of_dims(comm):
    whole = numbers("float64", (5, 4, 3), 2)
    for kind, dtype in (("torch", "bfloat16"), ("numpy", "float32")):
        with Grid(comm, {"x": 2, "y": 2}, ranks=[5, 1, 2, 3]) as grid, Grid(comm, {"x": 6}) as to_grid:
            source, target = Layout(("x",), (), ("y",)), Layout((), ("x",), ())
            block, want = (
                whole[layout.slices(whole.shape, one.shape, one.coordinates)]
                for one, layout in ((grid, source), (to_grid, target))
            )
            got = redistribute(array(kind, dtype, block), whole.shape, grid, source, target, to_grid)
            assert np.array_equal(plain(got), plain(array(kind, dtype, want))) and is_like(got, kind, dtype)


@pytest.mark.mpi(sizes=(6,))
def test_a_product_on_some_ranks_between_two_redistributions(comm, shared_tmp_path):
    rows, plan = Layout(("p",), ()), CuboidPlan("nn", 7, 5, 11)
    a, b = (array("numpy", "float64", numbers("float64", shape, 1)) for shape in ((7, 11), (11, 5)))
    with Grid(comm, {"p": 6}) as line, Grid(comm, {"x": 2, "y": 1, "z": 2}, ranks=[1, 2, 3, 5]) as part:
        A = DistMatrix.from_global(a, line, rows).redistribute(plan.a_layout, part)
        B = DistMatrix.from_global(b, line, rows).redistribute(plan.b_layout, part)
        C = 2 * matmul(A, B) + DistMatrix.from_function(lambda i, j: i - j, (7, 5), part, plan.c_layout)
        want = 2 * (a @ b) + np.arange(7)[:, None] - np.arange(5)
        got = C.redistribute(rows, line).to_global()
        assert np.linalg.norm(got - want) <= 1e-14 * np.linalg.norm(want)
        C.to_file(shared_tmp_path / "c.npy")
        again = DistMatrix.from_file(shared_tmp_path / "c.npy", part, plan.c_layout)
        assert again.shape == (7, 5) and np.array_equal(again.block, C.block)
        with part.ledger.watch() as moved:  # on one grid those outside move nothing, and need not call
            turned = A.redistribute(Layout((), ("z",))) if part.inside else A
        assert moved.messages == (3 if part.inside else 0)
        assert np.array_equal(turned.block, DistMatrix.from_global(a, part, turned.layout).block)
        assert C.redistribute(Layout((), ())).block.size == (35 if part.inside else 0)
        assert ("nothing here" in C.summary) == (comm.rank in (0, 4))
        assert [line.split()[-1] for line in repr(C).splitlines()[2:]] == ["1", "2", "3", "5"]


@pytest.mark.mpi(sizes=(6,))
def test_a_grid_of_some_ranks_knows_who_is_where(comm):
    with Grid(comm, {"x": 2, "y": 2}, order="xy", ranks=[4, 1, 2, 5]) as grid:
        assert grid.inside == (comm.rank in (4, 1, 2, 5)) and grid.size == 4 and "ranks=4,1,2,5" in repr(grid)
        assert grid.places() == [{}, {"x": 1, "y": 0}, {"x": 0, "y": 1}, {}, {"x": 0, "y": 0}, {"x": 1, "y": 1}]
        assert grid.coordinates == grid.places()[comm.rank]
        assert grid.everyone.all_gather(np.array([comm.rank])).tolist() == list(range(6))
        grid.add_axes("z")
        if grid.inside:
            line = grid["x"].all_gather(np.array([comm.rank])).tolist()
            assert line == ([4, 1] if comm.rank in (4, 1) else [2, 5])
        else:
            assert Layout(("x",), ("y", "z")).local_shape((5, 5), grid.shape, grid.coordinates) == (0, 0)
            with pytest.raises(GridError, match=rf"Rank {comm.rank} is outside Grid\(x=2, y=2.*it holds nothing"):
                grid["x"]


@pytest.mark.mpi(sizes=(4,))
def test_what_cannot_be_is_refused_on_every_rank_alike(comm):
    layout = Layout(("x",), ())
    for ranks, says in (([0, 4], "0 to 3"), ([1, 1], "at most once"), ([0, 1, 2], "2 places, but there are 3 ranks")):
        with pytest.raises(GridError, match=says):
            Grid(comm, {"x": 2}, ranks=ranks)
    half = comm.Split(comm.rank // 2)
    with Grid(half, {"x": 2}) as grid, Grid(comm, {"x": 4}) as whole, pytest.raises(LayoutError) as refused:
        DistMatrix.from_global(np.ones((4, 4)), grid, layout).redistribute(layout, whole)
    assert "no common communicator: one was made on 2 ranks, the other on 4" in str(refused.value)
    half.Free()
    with Grid(comm, {"x": 2}, ranks=[0, 1]) as part, Grid(comm, {"x": 4}) as whole:
        with pytest.raises(ShapeError, match="without dims"):
            redistribute(np.array(1.0), (), part, Layout(), Layout(), whole)
        with pytest.raises(ShapeError, match="holds a block of shape"):
            redistribute(np.ones((1, 1)), (4, 4), part, layout, Layout((), ("x",)), whole)


@pytest.mark.mpi(sizes=(4,))
def test_a_permutation_of_all_ranks_redistributes_on_the_grid_and_to_another_in_either_order(comm):
    layout, to = Layout(("x",), ()), Layout((), ("x",))
    whole = numbers("float64", (7, 6), 5)
    for first in ("within", "between"):
        with Grid(comm, {"x": 4}, ranks=[3, 1, 2, 0]) as grid, Grid(comm, {"x": 4}) as other:
            matrix = DistMatrix.from_global(whole, grid, layout)
            targets = [grid, other] if first == "within" else [other, grid]
            for target in targets:
                there = matrix.redistribute(to, target)
                assert np.array_equal(there.block, DistMatrix.from_global(whole, target, to).block), (first, target)


@pytest.mark.mpi(sizes=(4,))
def test_everyone_counts_in_the_order_of_the_communicator_and_ranked_in_that_of_the_grid(comm):
    for ranks in ([3, 1, 2, 0], range(4)):
        with Grid(comm, {"x": 2, "y": 2}, ranks=ranks) as grid:
            assert (grid.ranked.index, grid.everyone.index) == (grid.rank, comm.rank)
            assert list(grid.everyone.all_gather(np.array([comm.rank]))) == [0, 1, 2, 3]
            assert list(grid.ranked.all_gather(np.array([comm.rank]))) == list(ranks)
