# A distributed matrix: this rank's block, its layout, the grid, the global shape; and `matmul` on such matrices.
# Imports layout, cuboid. Next: cuboid.py, the product underneath.
from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..comm.arrays import Array
from ..comm.grid import Grid
from ..errors import LayoutError, ShapeError
from ..layout.distribute import collect, distribute
from ..layout.layout import Layout, Sharding
from .cuboid import Cuboid, CuboidPlan


@dataclass
class DistMatrix:
    """A matrix split over a grid: `block` is this rank's part of the global matrix of `shape`, as `layout` says."""

    block: Array
    layout: Layout
    grid: Grid
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        expected = self.layout.local_shape(self.shape, self.grid.shape, self.grid.coordinates)
        if tuple(self.block.shape) != expected:
            raise ShapeError(f"{self.layout} of a {self.shape} matrix on {self.grid} gives blocks {expected} here, not {tuple(self.block.shape)}.")

    @classmethod
    def from_global(cls, whole: Array, grid: Grid, layout: Layout) -> DistMatrix:
        """The part that this rank holds of a matrix that every rank holds; a copy. Moves nothing."""
        return cls(distribute(whole, grid, layout), layout, grid, (whole.shape[0], whole.shape[1]))

    @classmethod
    def from_function(
        cls, function: Callable[[np.ndarray, np.ndarray], np.ndarray], shape: tuple[int, int], grid: Grid, layout: Layout, dtype: np.typing.DTypeLike = np.float64
    ) -> DistMatrix:
        """A matrix given by its global indices, each rank computing its own block. Moves nothing.

        `function` is called once with the block's global row indices [r, 1] and column indices [1, c] and returns [r, c].
        """
        rows, columns = Sharding(layout, shape).slices(grid)
        block = function(np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)[None, :])
        extent = (rows.stop - rows.start, columns.stop - columns.start)
        return cls(np.ascontiguousarray(np.broadcast_to(np.asarray(block, dtype), extent)), layout, grid, (shape[0], shape[1]))

    def to_global(self) -> Array:
        """The whole matrix, on every rank. Moves, per rank, the words it does not own."""
        return collect(self.block, self.grid, self.layout, self.shape)

    def __repr__(self) -> str:
        rows, columns = Sharding(self.layout, self.shape).slices(self.grid)
        here = f"rows {rows.start}:{rows.stop}, columns {columns.start}:{columns.stop} here"
        return f"DistMatrix({self.shape[0]}×{self.shape[1]} {self.block.dtype}, {self.layout} on {self.grid}, {here})"


def matmul(
    a: DistMatrix, b: DistMatrix, form: str = "nn", algorithm: str | None = None, alpha: float = 1, beta: float = 0, out: DistMatrix | None = None
) -> DistMatrix:
    """C = α·op(A)·op(B) + β·C, the algorithm and its axes' roles read off the operands' layouts.

    Parameters
    ----------
    a, b : the operands, on one grid, of one dtype, in the layouts that `CuboidPlan` lists for `form` (any axes in the roles)
    form : nn, nt, tn or tt: op is none (n) or the transpose (t)
    algorithm : None or "cuboid"
    out : C, overwritten in place; needed for β ≠ 0

    Returns C with layout m:(x,z) n:y, so that products chain: C has the layout of an A whose y and z change places.
    Moves [(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ) words per rank (mean).
    Raises ShapeError (sizes, dtypes) or LayoutError (grids, layouts) on every rank alike, before any communication.
    """
    if algorithm not in (None, "cuboid"):
        raise LayoutError(f"Algorithm {algorithm!r} is not known. Algorithms: cuboid.")
    plan = plan_for(a, b, form)
    if out is not None and (out.grid is not a.grid or out.layout != plan.c_layout or tuple(out.shape) != plan.c_shape):
        raise LayoutError(f"out is {out!r}; the product is {plan.c_shape[0]}×{plan.c_shape[1]} in {plan.c_layout} on {a.grid}.")
    block = Cuboid(plan, a.grid).run(a.block, b.block, None if out is None else out.block, alpha, beta)
    return DistMatrix(block, plan.c_layout, a.grid, plan.c_shape) if out is None else out


def plan_for(a: DistMatrix, b: DistMatrix, form: str) -> CuboidPlan:
    """The plan whose layouts the operands have."""
    if a.grid is not b.grid:
        raise LayoutError(f"A lives on {a.grid} and B on another grid, {b.grid}. Both operands must live on one grid.")
    if a.block.dtype != b.block.dtype:
        raise ShapeError(f"A has dtype {a.block.dtype} and B {b.block.dtype}; a product takes one dtype.")
    m, k = reversed(a.shape) if form[:1] == "t" else a.shape
    k_of_b, n = reversed(b.shape) if form[1:] == "t" else b.shape
    if k != k_of_b:
        raise ShapeError(f"op(A) is {m}×{k} and op(B) is {k_of_b}×{n} (form {form}): the inner sizes {k} and {k_of_b} must be equal.")
    names = [name for name in a.grid.names if name in a.layout.axes | b.layout.axes]
    spare = [name for name in a.grid.names if name not in names and a.grid.shape[name] == 1]
    for x, y, z in itertools.permutations(names + spare, 3):
        plan = CuboidPlan(form, m, n, k, x, y, z)
        if plan.a_layout == a.layout and plan.b_layout == b.layout:
            return plan
    roles = [*a.grid.names, *(name for name in ("x", "y", "z") if name not in a.grid.names)]
    expected = CuboidPlan(form, m, n, k, *roles[:3])
    raise LayoutError(
        f"A in {a.layout} and B in {b.layout} are not the operands of a cuboid product of form {form}.\n"
        f"  On this grid one would be A in {expected.a_layout}, B in {expected.b_layout}; any axes may take these places, alike in both."
    )
