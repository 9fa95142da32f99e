"""Products of two tensors whose dims have letters: batch, free and summed over, in any layouts."""

from __future__ import annotations

from typing import Any

from ..comm.device.arrays import dtype_name, empty
from ..comm.grid import agree_on_call
from ..errors import AgreementError, LayoutError, ShapeError, Summa3dError
from ..layout.cyclic import Ownership
from ..layout.redistribute import check_common
from .algorithms.checks import check_dtype
from .any_layout.planned import check_objective, check_workspace, plan_einsum
from .any_layout.subscripts import Subscripts
from .binding import Binding, Wanted, agreed_product, facts_of, keep, key_of, target_of
from .describe import summary
from .distributed import Distributed, check_kind
from .matmul import any_product, check_out, tell
from .matrix import DistMatrix
from .tensor import DistTensor


def einsum(
    subscripts: str,
    a: DistTensor,
    b: DistTensor,
    out_layout: Ownership | str | None = None,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    out: DistTensor | None = None,
    objective: str = "seconds",
    workspace: int | None = None,
) -> DistTensor:
    """α·C (+ β·out) of two distributed tensors by letters of their dims, as numpy's einsum: ``einsum("bmk,bkn->bmn", a, b)``.

    Letters of both operands and of C are a batch, letters of both that C has not are summed over, the others are A's and B's own;
    there may be any number of each. Examples: ``bhsd,bhtd->bhst``, ``bsh,hf->bsf``, ``bij,bij->b``.

    Parameters
    ----------
    a, b : tensors or matrices of one dtype, in any layouts, on one grid or on two of one communicator
    out_layout : the output layout of C, on A's grid, its dims in C's order; None, where C falls cheapest
    out : C on A's grid, overwritten in place; needed for β ≠ 0, and not read with β = 0
    objective : fewest predicted "seconds", or "words"
    workspace : bytes of workspace of each rank at most, beside an `out`: what must move comes in panels of a summed letter

    Returns C on A's grid: a `DistMatrix` where it has two dims, else a `DistTensor`.
    Each axis of the grid is given to a letter, or to none; A and B are brought there, each rank multiplies its part by one call
    for all entries of the batch, and the summands of the ranks along the summed letters' axes are added. `gemm.plan_einsum` is
    the plan as data, with the exact words of each rank. Workspace: the operands fetched, one summand of C, and a copy of what has
    its letters in an order that no matrices lie in. Nothing of it is kept. 16-bit floats are summed in float32, and rounded once.
    On a rank outside the grid C has no elements.
    Raises ShapeError (letters, sizes, dtypes), LayoutError (layouts, grids) or ConfigError (an unknown objective, too small a
    workspace) on every rank alike, before any communication. The first call of a kind on a grid raises AgreementError on all
    ranks where they call it differently; with `check` each call does.
    """
    try:
        wanted = Wanted(subscripts, None, {}, out_layout, objective, workspace)
        bound = _checked(wanted, a, b, out)
    except AgreementError:
        raise
    except Summa3dError as refusal:
        tell("einsum", refusal, a, b)
        raise
    if a.grid.job.check and a.grid.inside:
        agree_on_call(a.grid, "einsum", {"alpha": repr(alpha), "beta": repr(beta), "out": out is not None})
    if bound.product is None:
        block = empty((0,) * len(bound.c_shape), a.block)
    else:
        block = any_product(bound.product, a.block, b.block, out, alpha, beta)
    if out is not None:
        return out
    return (DistMatrix if len(bound.c_shape) == 2 else DistTensor)(block, bound.c_layout, a.grid, bound.c_shape)


def _checked(wanted: Wanted, a: Any, b: Any, out: Any) -> Binding:
    """The binding of a product, whose form is its letters, once all ranks know that it can be taken. Raises as `einsum`."""
    for name, operand in (("a", a), ("b", b), *([] if out is None else [("out", out)])):
        if not isinstance(operand, Distributed):
            kind = type(operand).__name__
            raise ShapeError(
                f"{name} is a {kind}; einsum takes DistTensor and DistMatrix. Their from_global makes one of an array."
            )
    letters, objective = Subscripts.read(wanted.form), wanted.objective
    check_objective(objective)
    check_workspace(wanted.workspace)
    check_kind(a, b, f"No einsum {letters}", one_grid=False)
    extents = letters.extents(a.shape, b.shape)
    check_common(a.grid, b.grid)
    check_dtype(a.block)
    if out is not None:
        check_out(out, a, b, [extents[letter] for letter in letters.c])
        if out.grid is not a.grid:
            raise LayoutError(f"out is {summary(out)}; einsum leaves C on {a.grid}, the grid of a.")
    target = target_of(a, wanted, out)
    kept: dict[Any, Binding] = a.grid.job.kept[a.grid].setdefault(Binding, {})
    key = (*key_of(a, b, str(letters), "einsum", {}, target, objective, wanted.workspace), b.grid)
    bound = kept.get(key)
    if bound is None or a.grid.job.check:
        asked = (dtype_name(a.block), objective, b.grid, None, wanted.workspace)
        plan = plan_einsum(str(letters), a.layout, b.layout, extents, a.grid, target, *asked)
        grids = list(dict.fromkeys([a.grid, b.grid]))
        facts = {**facts_of(a, b, wanted, target, grids), "subscripts": str(letters), "form": ""}
        product = agreed_product("einsum", plan, facts, grids)
        bound = Binding(False, False, 0, plan.c.layout, plan.c.shape, product)
        keep(kept, key, bound)
    return bound
