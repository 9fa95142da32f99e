"""C = α·op(A)·op(B) + β·C of distributed matrices: the operands' layouts select the algorithm, its executor is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..comm.device.arrays import Array, empty
from ..comm.grid import agree_on_call
from ..errors import AgreementError, LayoutError, ShapeError, Summa3dError
from ..layout.cyclic import Ownership
from ..layout.redistribute import check_common
from .algorithms.checks import agree_on_out
from .any_layout.executor import AnyProduct
from .any_layout.planned import check_objective
from .binding import Binding, Wanted, binding_of, kept_binding
from .describe import summary
from .distributed import Distributed, Matrix, check_kind, resolved
from .executors import executors_of
from .one_matrix import product_of_one
from .recognise import sizes


def matmul(
    a: Matrix,
    b: Matrix,
    form: str = "nn",
    algorithm: str | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    *,
    out_layout: Ownership | str | None = None,
    objective: str = "seconds",
    workspace: int | None = None,
    **options: Any,
) -> Matrix:
    """C = α·op(A)·op(B) + β·C, with the algorithm and its axes' roles from the operands' layouts.

    Parameters
    ----------
    a, b : the operands, of one dtype, in any layouts, on one grid or on two of one communicator. Where an algorithm's plan lists
        their layouts for `form` (any axes in the roles), or the .T of what it lists for the form with the other op, it multiplies
    form : nn, nt, tn or tt: op is none (n) or the transpose (t); with c, where the algorithm has it, the conjugate transpose
    algorithm : a name from `registry.ALGORITHMS`, whose layouts the operands must have, or `any`; None takes the first whose
        layouts these are, the cuboid before all, and where there is none `any`
    out : C, overwritten in place; needed for β ≠ 0. The ranks agree first, by a byte, that it can be written and lies apart
    out_layout : the output layout of C, on A's grid; None, where the algorithm leaves it, and with `any` where it falls cheapest
    objective : of `any`: fewest predicted "seconds", or "words"
    workspace : bytes of workspace of each rank at most: `any` multiplies, and what must move comes in panels of k
    options : of the algorithm, such as panel=256 for summa

    Returns C in the plan's layout, on a rank outside the grid without elements. The cuboid's is m:(x,z) n:y, so that products
    chain, and it moves [(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ) words per rank (mean); `plan_any` has those of `any`, which each rank
    receives, and `plan_syrk` those where both operands are one matrix: without `algorithm` that is `syrk`, with C where it was.
    The grid keeps the executor and its workspace for products alike, up to `executors.KEPT_BYTES`, until `grid.free()`.
    Raises ShapeError (sizes, dtypes), LayoutError (grids, layouts), GridError (a grid that the algorithm cannot use) or
    ConfigError (an unknown name, out_layout where C's is fixed, too small a workspace) on every rank alike, before communication;
    AgreementError on all ranks where the first product of a kind, with `check` each, is called differently.
    """
    try:
        is_related = a.view_of is not None or b.view_of is not None or a is b
    except AttributeError:  # no matrices
        is_related = False
    if is_related:
        if algorithm is None and not options and workspace is None:
            result = product_of_one(a, b, Wanted(form, algorithm, options, out_layout, objective), alpha, beta, out)
            if result is not None:
                return result
        a, b = resolved(a), resolved(b)
    bound = kept_binding(a, b, form, algorithm, options, out_layout, objective, workspace) if out is None else None
    bound = bound or _checked(a, b, Wanted(form, algorithm, options, out_layout, objective, workspace), alpha, beta, out)
    block = _block_of(bound, a, b, out, alpha, beta)
    return a.with_block(block, bound.c_layout, bound.c_shape) if out is None else out


def _block_of(bound: Binding, a: Matrix, b: Matrix, out: Matrix | None, alpha: complex, beta: complex) -> Array:
    """This rank's block of C, by what a binding says."""
    grid, left, right = a.grid, a.block.T if bound.a_transposed else a.block, b.block.T if bound.b_transposed else b.block
    if bound.product is not None:
        return any_product(bound.product, left, right, out, alpha, beta)
    if grid.inside:
        if out is not None:
            agree_on_out(grid.comm, out.block, a.block, b.block)
        executors = executors_of(grid)
        executor = executors.take(bound.executor)
        block = executor.run(left, right, None if out is None else out.block, alpha, beta)
        executors.keep(bound.executor, executor)
        return block
    return empty((0, 0), left)


def any_product(product: AnyProduct, left: Array, right: Array, out: Distributed | None, alpha: complex, beta: complex) -> Array:
    """This rank's block of C of operands in no algorithm's layouts, whose blocks are `left` and `right`."""
    block = None if out is None else out.block
    product.check(left, right, block, alpha, beta)
    if out is not None:
        agree_on_out(product.axis.comm, block, left, right)
    return product.run(left, right, block, alpha, beta)


def _checked(a: Any, b: Any, wanted: Wanted, alpha: complex, beta: complex, out: Any) -> Binding:
    """The binding of a product, once all ranks know that it can be taken; raises what `matmul` raises."""
    try:
        _check_operands(a, b, out)
        if not isinstance(wanted.form, str):
            raise ShapeError(f"form {wanted.form!r} is none of nn, nt, tn and tt, nor of those with c.")
        check_objective(wanted.objective)
        check_kind(a, b, f"No product of form {wanted.form}", one_grid=not wanted.takes_any)
        if out is not None:
            check_out(out, a, b, sizes(a.shape, b.shape, wanted.form)[:2])
        bound = binding_of(a, b, wanted, out)
        if out is not None and (out.layout != bound.c_layout or (bound.product is None and out.grid is not a.grid)):
            m, n = bound.c_shape
            raise LayoutError(f"out is {summary(out)}; the product is {m}×{n} in {bound.c_layout} on {a.grid}.")
    except AgreementError:
        raise
    except Summa3dError as refusal:
        tell("matmul", refusal, a, b)
        raise
    if a.grid.job.check and a.grid.inside:
        agree_on_call(a.grid, "matmul", {"alpha": repr(alpha), "beta": repr(beta), "out": out is not None})
    return bound


def _check_operands(a: Any, b: Any, out: Any) -> None:
    for name, operand in (("a", a), ("b", b), ("out", out)):
        if not isinstance(operand, Distributed) and not (name == "out" and operand is None):
            kind = type(operand).__name__
            raise ShapeError(f"{name} is a {kind}; matmul takes DistMatrix. DistMatrix.from_global makes one of an array.")
        if operand is not None and len(operand.shape) != 2:
            raise ShapeError(f"{name} has the shape {operand.shape}; matmul takes matrices. einsum takes tensors of any dims.")


def check_out(out: Distributed, a: Distributed, b: Distributed, shape: Sequence[int]) -> None:
    """Raise an error unless `out` has the product's shape, and is neither operand: alike on every rank."""
    if out.shown.conjugated:
        raise ShapeError("out is the conjugate of a matrix, which shows that matrix's elements and cannot be written.")
    if out.block is a.block or out.block is b.block:
        raise ShapeError(
            f"out is {'a' if out.block is a.block else 'b'} itself, read while C is written. Pass an out of its own."
        )
    if tuple(out.shape) != tuple(shape):
        raise LayoutError(f"out is {summary(out)}; the product is {'×'.join(map(str, shape))}.")


def tell(name: str, refusal: Summa3dError, a: object, b: object) -> None:
    """Let the other ranks that may be in this product hear that this one refuses it: of two grids, all of their communicator."""
    grids = [item.grid for item in (a, b) if isinstance(item, Distributed)]
    if not grids:
        return
    axis = None
    if grids[0] is not grids[-1]:
        with suppress(LayoutError):
            check_common(*grids)
            axis = grids[0].everyone
    if grids[0].inside or axis is not None:
        agree_on_call(grids[0], name, {}, axis, str(refusal))
