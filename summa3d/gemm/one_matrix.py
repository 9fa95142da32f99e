"""Whether both operands of a product are one matrix, and the symmetric product that a grid then keeps for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..comm.device.arrays import dtype_name, empty, place_of
from ..comm.grid import BaseGrid, agree_on_call
from ..errors import AgreementError, Summa3dError
from ..layout.cyclic import Ownership, ownership
from .algorithms.checks import agree_on_out, check_dtype, is_whole
from .binding import KEPT_BINDINGS, Wanted, facts_of, target_of
from .cost.machine import Machine
from .distributed import Distributed, Matrix
from .recognise import matching
from .symmetric.executor import SymmetricProduct
from .symmetric.plan import FORMS, SymmetricPlan, check_form, check_storage, planned

SLOWER, NOTICED = 1.25, 1e-4
"""The general product is taken where words and arithmetic alone are predicted to take that factor longer than it, and as many
seconds: those that Python takes for a call."""


class OneMatrix(NamedTuple):
    """A product of a matrix with itself: `form` of it, nt, tn, nc or cn, and whether C is the conjugate of that."""

    matrix: Any
    form: str
    conjugates: bool


class SymmetricBinding(NamedTuple):
    """How a grid executes such a product. product : None, this rank is outside the grid, or it is not `taken`."""

    taken: bool
    product: SymmetricProduct | None
    plan: SymmetricPlan


def one_matrix(a: Any, b: Any, form: str) -> OneMatrix | None:
    """The one matrix of a product, where both operands show the same and it is symmetric or Hermitian; else None."""
    if not (isinstance(a, Distributed) and isinstance(b, Distributed)):
        return None
    first, second = a.shown, b.shown
    if first.matrix is not second.matrix or not isinstance(form, str) or len(form) != 2 or not set(form) <= set("ntc"):
        return None
    turns = [seen.transposed != (letter != "n") for seen, letter in zip((first, second), form, strict=True)]
    if turns[0] == turns[1]:
        return None
    plain = "tn" if turns[0] else "nt"
    if not dtype_name(first.matrix.block).startswith("complex"):
        return OneMatrix(first.matrix, plain, False)
    conjugated, other = (seen.conjugated != (letter == "c") for seen, letter in zip((first, second), form, strict=True))
    if conjugated == other:
        return OneMatrix(first.matrix, plain, conjugated)
    return OneMatrix(first.matrix, plain.replace("t", "c"), conjugated != turns[0])


class Lying(NamedTuple):
    """Of a matrix, what says which algorithm multiplies it."""

    layout: Ownership
    shape: tuple[int, int]
    is_transposed: bool = False


def general_layout(a: Any, b: Any, grid: BaseGrid, form: str) -> Ownership | None:
    """Layout of C by the algorithm that has the operands' layouts; None where there is none."""
    result = matching(a, b, grid.shape, form, None, {})
    return None if result is None else result[0].c_layout


def plan_syrk(
    a_layout: Ownership | str,
    n: int,
    k: int,
    grid: BaseGrid,
    out_layout: Ownership | str | None = None,
    form: str = "n",
    dtype: Any = "float64",
    storage: str = "full",
    objective: str = "seconds",
    machine: Machine | None = None,
) -> SymmetricPlan:
    """The cheapest plan of C (n×n) = A·Aᵀ of one matrix (form n), Aᵀ·A (t), Aᴴ·A (c), or nt, tn, nc, cn. Moves nothing.

    Parameters
    ----------
    a_layout : where A lies, as it is stored: n×k, or k×n with forms t and c
    out_layout : the output layout of C; None, where the general product would leave it. storage : "lower" leaves the sums
        packed on their owners, and has no out_layout
    objective : "seconds", the fewest that are predicted; or "words". machine : as that of `plan_any`

    `general` of the plan is the product of A and its transpose by `plan_any`, to compare words, multiply-adds and seconds.
    Words of the ring X×K (A in m:x k:y, X odd), mean per rank: ½[(X−1)nk + (K−1)n(n+1)]/P, and of completion those of C
    that a rank does not own, n²/P at most where C is spread evenly.
    Raises what `plan_any` raises; ConfigError for another form or storage.
    """
    check_form(form)
    check_storage(storage, out_layout)
    form, target, layout = FORMS[form], out_layout, ownership(a_layout)
    if target is None and all(is_whole(size) and size >= 0 for size in (n, k)):
        item = Lying(layout, (n, k) if form[0] == "n" else (k, n))
        target = general_layout(item, item, grid, form)
    return planned(layout, n, k, grid, target, form, dtype, storage, objective, machine)


def product_of_one(
    a: Distributed, b: Distributed, wanted: Wanted, alpha: complex, beta: complex, out: Matrix | None, forced: bool = False
) -> Any:
    """α·op(A)·op(B) + β·C where both are one matrix; None where they are not, or the general product is to be taken.

    So it is where that is predicted to be faster (not if `forced`), and where something is wrong, which it then says.
    """
    item = one_matrix(a, b, wanted.form)
    if item is None or (out is not None and not _fits(out, item)):
        return None
    root, grid = item.matrix, item.matrix.grid
    try:
        bound = bound_of(item, a, b, wanted, out, forced)
    except AgreementError:
        raise
    except (Summa3dError, TypeError):
        return None
    if not bound.taken:
        return None
    if grid.job.check and grid.inside:
        agree_on_call(grid, "matmul", {"alpha": repr(alpha), "beta": repr(beta), "out": out is not None})
    if bound.product is None:
        block = empty((0, 0), root.block)
    else:
        bound.product.check(root.block, None if out is None else out.block, alpha, beta)
        if out is not None:
            agree_on_out(bound.product.axis.comm, out.block, root.block, root.block)
        block = bound.product.run(root.block, None if out is None else out.block, alpha, beta, item.conjugates)
    assert bound.plan.c is not None
    return root.with_block(block, bound.plan.c.layout, bound.plan.c.shape) if out is None else out


def _fits(out: Any, operand: OneMatrix) -> bool:
    """Return whether C may be written to `out`, as far as all ranks know alike."""
    n = operand.matrix.shape[1 if operand.form[0] != "n" else 0]
    if not isinstance(out, Distributed) or out.grid is not operand.matrix.grid or tuple(out.shape) != (n, n):
        return False
    return out.shown.matrix is not operand.matrix and not out.shown.conjugated


def bound_of(
    operand: OneMatrix,
    a: Distributed,
    b: Distributed,
    wanted: Wanted,
    out: Distributed | None,
    forced: bool,
    storage: str = "full",
) -> SymmetricBinding:
    """The binding of a product, kept with the grid; the ranks agree on a new one.

    C lies where the general product leaves it, if nothing is said. Raises what that raises, TypeError for what has no hash.
    """
    root, grid = operand.matrix, operand.matrix.grid
    kept: dict[Any, SymmetricBinding] = grid.job.kept[grid].setdefault(SymmetricBinding, {})
    key = (root.layout, root.shape, root.block.dtype, place_of(root.block), forced, storage, *operand[1:], wanted.form)
    key = (*key, wanted.out_layout, wanted.objective, None if out is None else out.layout)  # type: ignore[assignment]
    bound = kept.get(key)
    if bound is None or grid.job.check:
        if len(kept) >= KEPT_BINDINGS:
            kept.clear()
        bound = kept[key] = _new_binding(operand, a, b, wanted, out, forced, storage)
    return bound


def _new_binding(
    operand: OneMatrix, a: Distributed, b: Distributed, wanted: Wanted, out: Distributed | None, forced: bool, storage: str
) -> SymmetricBinding:
    root, grid = operand.matrix, operand.matrix.grid
    root.check_block()
    check_dtype(root.block)
    target = target_of(a, wanted, out)
    if target is None:
        target = general_layout(a, b, grid, wanted.form)
    n, k = root.shape if operand.form[0] == "n" else root.shape[::-1]
    plan = planned(root.layout, n, k, grid, target, operand.form, dtype_name(root.block), storage, wanted.objective)
    slowest = max(SLOWER * plan.general.seconds, plan.general.seconds + NOTICED)
    taken = forced or plan.steady_seconds <= slowest
    if taken and grid.inside:
        agree_on_call(grid, "matmul", {**facts_of(a, b, wanted, target, [grid]), "plan": repr(plan)})
    product = SymmetricProduct(plan, grid) if taken and grid.inside else None
    return SymmetricBinding(taken, product, plan)
