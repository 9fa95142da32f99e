"""C = α·op(A)·op(B) + β·C of distributed matrices: the operands' layouts select the algorithm, its executor is kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..comm.device.arrays import dtype_name, empty, place_of
from ..comm.grid import agree_on_call
from ..errors import AgreementError, ConfigError, LayoutError, ShapeError, Summa3dError
from ..layout.layout import Layout
from .algorithms.checks import agree_on_out
from .algorithms.plan import ProductPlan
from .describe import summary
from .distributed import Distributed, Matrix, check_kind
from .executors import executors_of
from .recognise import product_of

KEPT_BINDINGS = 1024


class Binding(NamedTuple):
    """The plan of a product, whether it reads each operand as its .T, and C's layout and shape. executor : its number."""

    plan: ProductPlan
    a_transposed: bool
    b_transposed: bool
    executor: int
    c_layout: Layout
    c_shape: tuple[int, int]


def matmul(
    a: Matrix,
    b: Matrix,
    form: str = "nn",
    algorithm: str | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    **options: Any,
) -> Matrix:
    """C = α·op(A)·op(B) + β·C, with the algorithm and its axes' roles from the operands' layouts.

    Parameters
    ----------
    a, b : the operands, on one grid, of one dtype, in the layouts that the algorithm's plan lists for `form` (any axes in the
        roles), or the .T of what it lists for the form with the other op
    form : nn, nt, tn or tt: op is none (n) or the transpose (t); with c, where the algorithm has it, the conjugate transpose
    algorithm : a name from `registry.ALGORITHMS`; None takes the first whose layouts these are, the cuboid before all
    out : C, overwritten in place; needed for β ≠ 0. Its blocks can be written and lie apart from those of a and b, on which the
        ranks agree first, by one message round of a byte
    options : of the algorithm, such as panel=256 for summa

    Returns C in the plan's layout. The cuboid's is m:(x,z) n:y, so that products chain: C has the layout of an A whose y and z
    change places; it moves [(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ) words per rank (mean).
    The grid keeps the executor and its workspace for products alike, up to `executors.KEPT_BYTES`, until `grid.free()`.
    On a rank outside the grid C has no elements, and nothing is done.
    Raises ShapeError (sizes, dtypes), LayoutError (grids, layouts), GridError (a grid that the algorithm cannot use) or
    ConfigError (an unknown algorithm) on every rank alike, before any communication. The first product of a kind on a grid
    raises AgreementError on all ranks where they call it differently; with `check` each product does.
    """
    bound = _kept(a, b, form, algorithm, options) if out is None else None
    if bound is None:
        bound = _checked(a, b, form, algorithm, alpha, beta, out, options)
    grid, left, right = a.grid, a.block, b.block
    left, right = left.T if bound.a_transposed else left, right.T if bound.b_transposed else right
    if grid.inside:
        if out is not None:
            agree_on_out(grid.comm, out.block, a.block, b.block)
        executors = executors_of(grid)
        executor = executors.take(bound.executor)
        block = executor.run(left, right, None if out is None else out.block, alpha, beta)
        executors.keep(bound.executor, executor)
    else:
        block = empty((0, 0), left)
    return a.with_block(block, bound.c_layout, bound.c_shape) if out is None else out


def _kept(a: Any, b: Any, form: str, algorithm: str | None, options: dict[str, Any]) -> Binding | None:
    """The binding of a product that was checked before; None where it must be checked."""
    if not isinstance(a, Distributed) or not isinstance(b, Distributed) or a.grid is not b.grid or a.grid.job.check:
        return None
    kept: dict[Any, Binding] | None = a.grid.job.kept[a.grid].get(Binding)
    try:
        return None if kept is None else kept.get(_key(a, b, form, algorithm, options))
    except (AttributeError, TypeError):  # a block that is none, or an option without a hash
        return None


def _key(a: Distributed, b: Distributed, form: str, algorithm: str | None, options: dict[str, Any]) -> tuple[Any, ...]:
    """What products of one binding have in common."""
    left, right = a.block, b.block
    kinds = left.dtype, place_of(left), right.dtype, place_of(right)
    return a.layout, a.shape, a.is_transposed, b.layout, b.shape, b.is_transposed, kinds, form, algorithm, *options.items()


def _checked(
    a: Any, b: Any, form: str, algorithm: str | None, alpha: complex, beta: complex, out: Any, options: dict[str, Any]
) -> Binding:
    """The binding of a product, once all ranks know that it can be taken; raises what `matmul` raises."""
    try:
        _check_operands(a, b, out)
        if not isinstance(form, str):
            raise ShapeError(f"form {form!r} is none of nn, nt, tn and tt, nor of those with c.")
        check_kind(a, b, f"No product of form {form}")
        bound = _bound(a, b, form, algorithm, options)
        if out is not None:
            _check_out(out, a, b, bound.plan)
    except AgreementError:
        raise
    except Summa3dError as refusal:
        _tell(refusal, a, b)
        raise
    if a.grid.job.check and a.grid.inside:
        agree_on_call(a.grid, "matmul", {"alpha": repr(alpha), "beta": repr(beta), "out": out is not None})
    return bound


def _check_operands(a: Any, b: Any, out: Any) -> None:
    for name, operand in (("a", a), ("b", b), ("out", out)):
        if not isinstance(operand, Distributed) and not (name == "out" and operand is None):
            kind = type(operand).__name__
            raise ShapeError(f"{name} is a {kind}; matmul takes DistMatrix. DistMatrix.from_global makes one of an array.")


def _check_out(out: Distributed, a: Distributed, b: Distributed, plan: ProductPlan) -> None:
    """Raise an error unless `out` has the product's grid, layout and shape, and is neither operand: alike on every rank."""
    if out.block is a.block or out.block is b.block:
        raise ShapeError(
            f"out is {'a' if out.block is a.block else 'b'} itself, read while C is written. Pass an out of its own."
        )
    shape = plan.c_shape
    if out.grid is not a.grid or out.layout != plan.c_layout or tuple(out.shape) != shape:
        product = f"the product is {shape[0]}×{shape[1]} in {plan.c_layout} on {a.grid}"
        raise LayoutError(f"out is {summary(out)}; {product}.")


def _bound(a: Distributed, b: Distributed, form: str, algorithm: str | None, options: dict[str, Any]) -> Binding:
    """The plan that the operands' layouts ask for, kept with the grid."""
    grid = a.grid
    kept: dict[Any, Binding] = grid.job.kept[grid].setdefault(Binding, {})
    key = _key(a, b, form, algorithm, options)
    try:
        bound = kept.get(key)
    except TypeError as error:
        raise ConfigError(f"matmul takes no such form, algorithm or options: {form!r}, {algorithm!r}, {options}.") from error
    if bound is None or grid.job.check:
        plan, a_transposed, b_transposed = product_of(a, b, grid.shape, form, algorithm, options)
        number = executors_of(grid).number_of(plan, a.block) if grid.inside else 0
        bound = Binding(plan, a_transposed, b_transposed, number, plan.c_layout, plan.c_shape)
        if grid.inside:
            facts = {"a": _operand(a), "b": _operand(b), "form": form, "algorithm": algorithm, "options": str(options)}
            agree_on_call(grid, "matmul", facts)
        if len(kept) >= KEPT_BINDINGS:
            kept.clear()
        kept[key] = bound
    return bound


def _tell(refusal: Summa3dError, *operands: object) -> None:
    """Let the other ranks of the operands' grid hear that this one refuses a product in which they may be."""
    grid = next((one.grid for one in operands if isinstance(one, Distributed)), None)
    if grid is not None and grid.inside:
        agree_on_call(grid, "matmul", {}, None, str(refusal))


def _operand(matrix: Distributed) -> str:
    """What all ranks know alike of an operand."""
    rows, columns = matrix.shape
    return f"{rows}×{columns} {dtype_name(matrix.block)} in {matrix.layout}{', transposed' if matrix.is_transposed else ''}"
