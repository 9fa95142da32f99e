"""A product that one rank alone refuses is an error on all ranks where they compare it: at the first product, and with check."""

from __future__ import annotations

import numpy as np
import pytest

from summa3d import DistMatrix
from summa3d.comm.grid import Grid
from summa3d.errors import AgreementError, ShapeError
from summa3d.gemm.matmul import matmul


def operands(grid):
    a = DistMatrix.from_function(lambda i, j: np.sin(i + 2 * j), (7, 11), grid, "m:(x,y) k:z")
    b = DistMatrix.from_function(lambda i, j: np.cos(3 * i - j), (11, 5), grid, "k:(z,x) n:y")
    return a, b


def wrong_layout(grid, a, b):
    return (
        a,
        DistMatrix(
            np.zeros(b.layout.transposed().local_shape((11, 5), grid.shape, grid.coordinates)), "k:y n:(z,x)", grid, (11, 5)
        ),
        "nn",
    )


WRONG = {
    "layout": wrong_layout,
    "form": lambda grid, a, b: (a, b, "tn"),
    "no such form": lambda grid, a, b: (a, b, 3),
    "transposed": lambda grid, a, b: (a, b.T, "nn"),
    "dtype": lambda grid, a, b: (a, DistMatrix(b.block.astype("f4"), b.layout, grid, (11, 5)), "nn"),
    "no matrix": lambda grid, a, b: (a, b.block, "nn"),
}


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_product_that_one_rank_refuses_is_an_error_on_all(comm, name, check):
    with Grid(comm, {"x": comm.size, "y": 1, "z": 1}, check=check) as grid:
        a, b = operands(grid)
        if check:
            a @ b  # without it only the first product is compared
        left, right, form = WRONG[name](grid, a, b) if comm.rank == 1 else (a, b, "nn")
        differs = r"b: .* in k:\(z,x\) n:y' on ranks? 0(, 2)?; .* in k:y n:\(z,x\)' on rank 1"
        refused = r"refused: no on ranks? 0(, 2)?; .* on rank 1"
        with pytest.raises(AgreementError, match=f"(?s)do not agree on matmul.*{differs if name == 'layout' else refused}"):
            matmul(left, right, form)
        want = a.to_global() @ b.to_global()
        assert np.allclose((a @ b).to_global(), want, rtol=1e-12)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("check", [False, True])
def test_another_grid_on_one_rank_is_an_error_on_all(comm, check):
    with Grid(comm, {"x": 2, "y": 1, "z": 1}, check=check) as grid, Grid(comm, {"x": 2, "y": 1, "z": 1}) as other:
        (a, b), foreign = operands(grid), operands(other)[1]
        with pytest.raises(AgreementError, match=r"(?s)do not agree on matmul.*grids: .* on rank 0; .* on rank 1"):
            a @ (foreign if comm.rank == 1 else b)


@pytest.mark.mpi(sizes=(3,))
def test_a_product_that_all_ranks_refuse_is_the_error_of_each(comm, make_grid):
    grid = make_grid(x=3, y=1, z=1)
    a, b = operands(grid)
    for _ in range(2):
        with pytest.raises(ShapeError, match="inner sizes 7 and 5 must be equal"):
            matmul(a, b, "tt")


@pytest.mark.mpi(sizes=(2,))
def test_comparing_is_counted_as_control_and_in_no_line(comm):
    with Grid(comm, {"x": 2, "y": 1, "z": 1}) as grid:
        a, b = operands(grid)
        before = grid.ledger.control
        a @ b
        first, words = grid.ledger.control, grid.ledger.total().words
        a @ b
        assert first > before == 0 and grid.ledger.control == first
        assert grid.ledger.total().words == 2 * words == 2 * comm.allreduce(b.block.size) - 2 * b.block.size
    with Grid(comm, {"x": 2}, check=True) as grid:
        grid["x"].all_reduce(np.ones(4))
        once = grid.ledger.control
        grid["x"].all_reduce(np.ones(4))
        assert grid.ledger.control == 2 * once > 0


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize(
    "block", [np.zeros(()), np.zeros((1, 3)), np.zeros((3, 7)), [[0.0]], None], ids=lambda block: str(np.shape(block))
)
def test_a_block_that_was_replaced_by_no_block_of_this_matrix_is_refused(comm, block):
    """Numpy would broadcast the first two, to a matrix of another matrix's numbers."""
    with Grid(comm, {"x": 2}) as grid:
        a, b = (DistMatrix.from_global(np.ones((6, 3)), grid, "m:x k") for _ in range(2))
        a.block = block
        for call in (lambda: a + b, lambda: b - a, lambda: 2 * a, lambda: a.norm("max"), lambda: a @ b.T):
            with pytest.raises(ShapeError, match=r"gives blocks \(3, 3\) here|is no array"):
                call()
        a.block = np.full((3, 3), b"ab")
        with pytest.raises(ShapeError, match=r"The block's dtype is \|S2"):
            2 * a


@pytest.mark.mpi(sizes=(3, 6))
def test_ranks_whose_blocks_still_fit_hear_of_those_whose_do_not(comm):
    """Of thirteen columns over y the first rank has one more: it refuses, where the others would wait for it."""
    with Grid(comm, {"x": comm.size // 3, "y": 3}) as grid:
        a = DistMatrix.from_global(np.arange(144.0).reshape(12, 12), grid, "m:x k:y")
        a.shape = (12, 13)
        with pytest.raises(AgreementError, match=r"gives \(\d+, 5\)"):
            a.to_global()
