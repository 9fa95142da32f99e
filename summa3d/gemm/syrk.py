"""`syrk`: a matrix times its own transpose, whole or packed on its owners; and the packed result."""

from __future__ import annotations

from dataclasses import replace
from numbers import Number
from typing import Any

from ..comm.device.arrays import Array, cast, dtype_name, empty, is_half, quiet
from ..comm.grid import BaseGrid
from ..errors import LayoutError, ShapeError, Summa3dError
from ..layout.cyclic import Ownership, ownership
from ..layout.layout import Layout
from .algorithms.checks import check_factor
from .any_layout.plan import Owned
from .binding import Wanted
from .matmul import matmul, tell
from .matrix import DistMatrix
from .one_matrix import bound_of, one_matrix, product_of_one
from .symmetric.completion import Completion
from .symmetric.plan import FORMS, SymmetricPlan, check_form, check_storage


class PackedSymmetric:
    """Half of a symmetric or Hermitian matrix, n·(n+1)/2 elements over all ranks: `blocks` is this rank's share, a vector.

    Sums want shares of one plan. Products complete it first; `full` does, in any layout.
    """

    __array_ufunc__ = None

    def __init__(self, blocks: Array, plan: SymmetricPlan, grid: BaseGrid) -> None:
        self.blocks, self.plan, self.grid = blocks, plan, grid
        self.shape = (plan.n, plan.n)

    def full(self, out_layout: Ownership | str | None = None) -> DistMatrix:
        """The whole matrix in `out_layout`; None, where the general product would leave it.

        Moves, per rank, the words of its block that it does not own, mirror images included, in one all-to-all. Raises
        LayoutError for a layout that is none of this grid's.
        """
        plan, grid = self.plan, self.grid
        layout = plan.general.c.layout if out_layout is None else ownership(out_layout)
        plan = replace(plan, c=Owned(layout, self.shape, "mn", 0))
        layout.local_shape(self.shape, grid.shape, grid.coordinates)
        block = empty((0, 0), self.blocks)
        if grid.inside:
            completion = Completion(plan.shares, plan.c.placement((plan.space,)), plan.n, grid.ranked)  # type: ignore[union-attr]
            block = completion.run(self.blocks, bool(plan.received["c"].any()), plan.is_hermitian)
        return DistMatrix(block, layout, grid, self.shape)

    def to_global(self) -> Array:
        """The whole matrix, on every rank. Moves, per rank, the words it does not own."""
        return self.full(Layout((), ())).block

    @quiet
    def __add__(self, other: PackedSymmetric) -> PackedSymmetric:
        if not isinstance(other, PackedSymmetric):
            return NotImplemented
        mine, others = (
            (
                item.grid,
                item.plan.n,
                item.plan.is_hermitian,
                item.plan.way,
                item.plan.x,
                item.plan.y,
                item.plan.z,
                item.blocks.dtype,
            )
            for item in (self, other)
        )
        if mine != others:
            raise LayoutError(f"The shares of {self.plan!r} and {other.plan!r} differ: add what .full(layout) makes of each.")
        return PackedSymmetric(self.blocks + other.blocks, self.plan, self.grid)

    @quiet
    def __mul__(self, factor: complex) -> PackedSymmetric:
        if not isinstance(factor, Number):
            return NotImplemented
        check_scale(factor, self.plan, dtype_name(self.blocks))
        scaled = self.blocks * (int(factor.real) if dtype_name(self.blocks).startswith("int") else factor)
        return PackedSymmetric(cast(scaled, self.blocks) if is_half(self.blocks) else scaled, self.plan, self.grid)

    __rmul__ = __mul__

    def __matmul__(self, other: DistMatrix | PackedSymmetric) -> DistMatrix:
        return self.full() @ (other.full() if isinstance(other, PackedSymmetric) else other)

    def __rmatmul__(self, other: DistMatrix) -> DistMatrix:
        return other @ self.full()

    def __repr__(self) -> str:
        return f"PackedSymmetric({self.plan.n}×{self.plan.n} {dtype_name(self.blocks)} on {self.grid}, {len(self.blocks)} here)"


def check_scale(factor: Any, plan: SymmetricPlan, dtype: str) -> None:
    """Raise ShapeError for a factor that the dtype, or a Hermitian matrix, cannot be multiplied by."""
    check_factor("The factor", factor, dtype)
    if plan.is_hermitian and complex(factor).imag:
        raise ShapeError(f"{factor} times a Hermitian matrix is not Hermitian. Complete it first, by .full().")


def syrk(
    a: DistMatrix,
    form: str = "n",
    *,
    storage: str = "full",
    alpha: complex = 1,
    beta: complex = 0,
    out: DistMatrix | None = None,
    out_layout: Ownership | str | None = None,
    objective: str = "seconds",
) -> DistMatrix | PackedSymmetric:
    """C = α·A·Aᵀ + β·C by half of a product's arithmetic; C = α·A·Aᵀ is symmetric bit for bit, the real diagonal of ᴴ too.

    Parameters
    ----------
    a : the matrix, n×k, or k×n with forms t and c, in any layout
    form : n (A·Aᵀ), t (Aᵀ·A), c (Aᴴ·A), or as `matmul` has it nt, tn, nc, cn
    storage : "full", a matrix in `out_layout`, by default where the general product leaves it; or "lower", the packed half
    alpha, beta, out : as those of `matmul`; β·C may be any matrix. "lower" takes a real α alone for ᴴ, and no out
    objective : fewest predicted "seconds", or "words"

    Words are those of the plan, n·k/2·(X−1)/P and n·(n+1)/2·(K−1)/P of the ring X×K (X odd, A in m:x k:y), and with "full" those
    of C that a rank does not own; `plan_syrk` has them for each rank. Workspace: the parts of A that a rank multiplies, its
    blocks of C's half, and what is exchanged. `a @ a.T` is the same, where a general product is not predicted to be faster.
    Raises ShapeError (sizes, dtypes), LayoutError (layouts) or ConfigError (form, storage, objective) on every rank alike, before
    any communication; AgreementError on all ranks where the first call of a kind differs.
    Source: Al Daas et al. 2023 (SPAA), arXiv 2409.11304.
    """
    check_form(form)
    check_storage(storage, out_layout)
    wanted = Wanted(FORMS[form], None, {}, out_layout, objective)
    if storage == "full":
        result: DistMatrix | None = product_of_one(a, a, wanted, alpha, beta, out, True) if isinstance(a, DistMatrix) else None
        if result is not None:
            return result  # else the general product says what is wrong
        return matmul(a, a, FORMS[form], None, alpha, beta, out, out_layout=out_layout, objective=objective)
    try:
        if not isinstance(a, DistMatrix) or out is not None or beta != 0:
            raise ShapeError(f"syrk with storage lower takes a DistMatrix, no out and no beta; a is a {type(a).__name__}.")
        item = one_matrix(a, a, FORMS[form])
        assert item is not None
        bound = bound_of(item, a, a, wanted, None, True, storage)
        check_scale(alpha, bound.plan, dtype_name(item.matrix.block))
        if bound.product is not None:
            bound.product.check(item.matrix.block)
    except Summa3dError as refusal:
        tell("syrk", refusal, a, a)
        raise
    block = item.matrix.block
    if bound.product is None:
        return PackedSymmetric(empty((0,), block), bound.plan, a.grid)
    share = bound.product.share(block, alpha, item.conjugates)
    return PackedSymmetric(share if share.dtype == block.dtype else cast(share, block), bound.plan, a.grid)
