"""Products of two tensors whose dims have letters: batch, free and summed over, in any layouts."""

from __future__ import annotations

from typing import Any

from ..comm.device.arrays import dtype_name, empty
from ..errors import AgreementError, ShapeError, Summa3dError
from ..layout.cyclic import Ownership, ownership
from ..layout.redistribute import check_common
from .algorithms.checks import check_dtype
from .any_layout.planned import check_objective, plan_einsum
from .any_layout.subscripts import Subscripts
from .binding import Binding, agreed_product, keep, key_of, operand_text
from .distributed import Distributed, check_kind
from .matmul import tell
from .matrix import DistMatrix
from .tensor import DistTensor


def einsum(
    subscripts: str,
    a: DistTensor,
    b: DistTensor,
    out_layout: Ownership | str | None = None,
    *,
    objective: str = "seconds",
) -> DistTensor:
    """C of two distributed tensors by the letters of their dims, as numpy's einsum: ``einsum("bmk,bkn->bmn", a, b)``.

    Letters of both operands and of C are a batch, letters of both that C has not are summed over, the others are A's and B's own;
    there may be any number of each. Examples: ``bhsd,bhtd->bhst``, ``bsh,hf->bsf``, ``bij,bij->b``.

    Parameters
    ----------
    a, b : tensors or matrices of one dtype, in any layouts, on one grid or on two of one communicator
    out_layout : the output layout of C, on A's grid, its dims in C's order; None, where C falls cheapest
    objective : fewest predicted "seconds", or "words"

    Returns C on A's grid: a `DistMatrix` where it has two dims, else a `DistTensor`.
    Each axis of the grid is given to a letter, or to none; A and B are brought there, each rank multiplies its part by one call
    for all entries of the batch, and the summands of the ranks along the summed letters' axes are added. `gemm.plan_einsum` is
    the plan as data, with the exact words of each rank. Workspace: the operands fetched, one summand of C, and a copy of what has
    its letters in an order that no matrices lie in. Nothing of it is kept.
    On a rank outside the grid C has no elements.
    Raises ShapeError (letters, sizes, dtypes), LayoutError (layouts, grids) or ConfigError (an unknown objective) on every rank
    alike, before any communication. The first call of a kind on a grid raises AgreementError on all ranks where they call it
    differently; with `check` each call does.
    """
    try:
        bound = _checked(subscripts, a, b, out_layout, objective)
    except AgreementError:
        raise
    except Summa3dError as refusal:
        tell("einsum", refusal, a, b)
        raise
    if bound.product is None:
        block = empty((0,) * len(bound.c_shape), a.block)
    else:
        bound.product.check(a.block, b.block)
        block = bound.product.run(a.block, b.block)
    return (DistMatrix if len(bound.c_shape) == 2 else DistTensor)(block, bound.c_layout, a.grid, bound.c_shape)


def _checked(subscripts: str, a: Any, b: Any, out_layout: Ownership | str | None, objective: str) -> Binding:
    """The binding of a product, once all ranks know that it can be taken; raises what `einsum` raises."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Distributed):
            kind = type(operand).__name__
            raise ShapeError(
                f"{name} is a {kind}; einsum takes DistTensor and DistMatrix. Their from_global makes one of an array."
            )
    letters = Subscripts.read(subscripts)
    check_objective(objective)
    check_kind(a, b, f"No einsum {letters}", one_grid=False)
    extents = letters.extents(a.shape, b.shape)
    check_common(a.grid, b.grid)
    check_dtype(a.block)
    target = None if out_layout is None else ownership(out_layout)
    kept: dict[Any, Binding] = a.grid.job.kept[a.grid].setdefault(Binding, {})
    key = (*key_of(a, b, str(letters), "einsum", {}, target, objective), b.grid)
    bound = kept.get(key)
    if bound is None or a.grid.job.check:
        dtype = dtype_name(a.block)
        plan = plan_einsum(str(letters), a.layout, b.layout, extents, a.grid, target, dtype, objective, b.grid)
        asked = {"subscripts": str(letters), "out_layout": None if target is None else str(target), "objective": objective}
        facts = {"a": operand_text(a), "b": operand_text(b), **asked, "grids": 1 if b.grid is a.grid else 2}
        product = agreed_product("einsum", plan, facts, list(dict.fromkeys([a.grid, b.grid])))
        bound = Binding(False, False, 0, plan.c.layout, plan.c.shape, product)
        keep(kept, key, bound)
    return bound
