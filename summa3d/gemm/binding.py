"""What a grid keeps of each kind of product: its plan, how its operands are read, and what executes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..comm.device.arrays import dtype_name, place_of
from ..comm.grid import BaseGrid, agree_on_call
from ..errors import ConfigError, LayoutError
from ..layout.cyclic import Ownership, ownership
from ..layout.redistribute import check_common
from .algorithms.checks import check_dtype
from .any_layout.executor import AnyProduct
from .any_layout.plan import AnyPlan
from .any_layout.planned import plan_any
from .describe import summary
from .distributed import Distributed
from .executors import executors_of
from .recognise import matching, product_of, readings, sizes

KEPT_BINDINGS = 1024
ANY = "any"
"""The name by which `matmul` is asked for a product of any layouts, where an algorithm would have them too."""


class Binding(NamedTuple):
    """How a product is executed: whether each operand is read as its .T, and C's layout and shape.

    executor : the number of an algorithm's. product : what multiplies operands in no algorithm's layouts; None, an algorithm's
    executor does, or this rank is outside the grid.
    """

    a_transposed: bool
    b_transposed: bool
    executor: int
    c_layout: Ownership
    c_shape: tuple[int, ...]
    product: AnyProduct | None = None


class Wanted(NamedTuple):
    """What a call asks for beside its operands."""

    form: str
    algorithm: str | None
    options: dict[str, Any]
    out_layout: Ownership | str | None
    objective: str
    workspace: int | None = None

    @property
    def takes_any(self) -> bool:
        """Return whether operands in no algorithm's layouts are multiplied too."""
        return self.algorithm in (None, ANY) and not self.options


def kept_binding(
    a: Distributed,
    b: Distributed,
    form: str,
    algorithm: str | None,
    options: dict[str, Any],
    out_layout: Any,
    objective: str,
    workspace: int | None,
) -> Binding | None:
    """The binding of a product on one grid that was checked before; None where it must be checked."""
    if not isinstance(a, Distributed) or not isinstance(b, Distributed) or a.grid is not b.grid or a.grid.job.check:
        return None
    kept: dict[Any, Binding] | None = a.grid.job.kept[a.grid].get(Binding)
    try:
        return None if kept is None else kept.get(key_of(a, b, form, algorithm, options, out_layout, objective, workspace))
    except (AttributeError, TypeError):  # a block that is none, or an option without a hash
        return None


def key_of(
    a: Distributed,
    b: Distributed,
    form: str,
    algorithm: str | None,
    options: dict[str, Any],
    out_layout: Any,
    objective: str,
    workspace: int | None,
) -> tuple[Any, ...]:
    """Key that products of one binding share."""
    left, right = a.block, b.block
    kinds = left.dtype, place_of(left), right.dtype, place_of(right)
    own = a.layout, a.shape, a.is_transposed, b.layout, b.shape, b.is_transposed
    return *own, kinds, form, algorithm, out_layout, objective, workspace, *options.items()


def binding_of(a: Distributed, b: Distributed, wanted: Wanted, out: Distributed | None) -> Binding:
    """The binding of a product, kept with A's grid; the ranks agree on a new one. Raises what `matmul` raises for layouts."""
    grid = a.grid
    kept: dict[Any, Binding] = grid.job.kept[grid].setdefault(Binding, {})
    key = key_of(a, b, *wanted)
    if out is not None or b.grid is not grid:
        key = (*key, b.grid, None if out is None else (out.layout, out.grid))
    try:
        bound = kept.get(key)
    except TypeError as error:
        asked = f"{wanted.form!r}, {wanted.algorithm!r}, {wanted.options}"
        raise ConfigError(
            f"matmul takes no such form, algorithm, options or out_layout: {asked}, {wanted.out_layout!r}."
        ) from error
    if bound is None or grid.job.check:
        bound = _new_binding(a, b, wanted, out)
        keep(kept, key, bound)
    return bound


def keep(kept: dict[Any, Binding], key: object, bound: Binding) -> None:
    """Keep a binding; of too many none but the last."""
    if len(kept) >= KEPT_BINDINGS:
        kept.clear()
    kept[key] = bound


def _new_binding(a: Distributed, b: Distributed, wanted: Wanted, out: Distributed | None) -> Binding:
    """The binding of an algorithm whose layouts the operands have, if C has the output layout; else of any layouts."""
    if wanted.algorithm == ANY and wanted.options:
        raise ConfigError(f"Products of any layouts have no options; leave {', '.join(wanted.options)} out.")
    if wanted.workspace is not None and not wanted.takes_any:
        raise ConfigError(f"workspace is of products of any layouts; leave it out, or algorithm={wanted.algorithm!r}.")
    target = target_of(a, wanted, out)
    grid, result = a.grid, None
    if wanted.algorithm != ANY and wanted.workspace is None and b.grid is grid:
        take = matching if wanted.takes_any else product_of
        result = take(a, b, grid.shape, wanted.form, wanted.algorithm, wanted.options)
    if result is not None:
        plan, a_transposed, b_transposed = result
        fits = target is None or (target == plan.c_layout and (out is None or out.grid is grid))
        if not fits and wanted.out_layout is not None and not wanted.takes_any:
            raise ConfigError(f"{plan.name} leaves C in {plan.c_layout}: leave out_layout={str(target)!r} out, or the algorithm.")
        if fits or not wanted.takes_any:
            number = executors_of(grid).number_of(plan, a.block) if grid.inside else 0
            if grid.inside:
                agree_on_call(grid, "matmul", facts_of(a, b, wanted, None if wanted.out_layout is None else target, [grid]))
            return Binding(a_transposed, b_transposed, number, plan.c_layout, plan.c_shape)
    return _any_binding(a, b, wanted, target, a.grid if out is None else out.grid)


def target_of(a: Distributed, wanted: Wanted, out: Distributed | None) -> Ownership | None:
    """The output layout of C; None where nothing is said. Raises LayoutError where `out` lies elsewhere than out_layout says."""
    target = None if wanted.out_layout is None else ownership(wanted.out_layout)
    if out is None:
        return target
    if target not in (None, out.layout):
        raise LayoutError(f"out is {summary(out)}; out_layout is {target}. Pass one of them.")
    return out.layout


def _any_binding(a: Distributed, b: Distributed, wanted: Wanted, target: Ownership | None, out_grid: BaseGrid) -> Binding:
    """The binding of operands in any layouts, on any grids of one communicator."""
    grid, form = a.grid, wanted.form
    extents = sizes(a.shape, b.shape, form)
    for other in (b.grid, out_grid):
        check_common(grid, other)
    check_dtype(a.block)
    left, right = readings(a, form[0])[0], readings(b, form[1])[0]
    letters, dtype = left.letter + right.letter, dtype_name(a.block)
    plan = plan_any(
        left.layout, right.layout, *extents, grid, target, letters, dtype, wanted.objective, b.grid,
        out_grid if target else None, workspace=wanted.workspace,
    )  # fmt: skip
    grids = list(dict.fromkeys([grid, b.grid, out_grid]))
    product = agreed_product("matmul", plan, facts_of(a, b, wanted, target, grids), grids)
    return Binding(left.transposed, right.transposed, 0, plan.c.layout, plan.c.shape, product)


def agreed_product(name: str, plan: AnyPlan, facts: dict[str, Any], grids: Sequence[BaseGrid]) -> AnyProduct | None:
    """Executor of a plan, once its ranks agree on it and the facts of the call `name`; None on a rank outside its one grid."""
    grid = grids[0]
    if not grid.inside and len(grids) == 1:
        return None
    agree_on_call(grid, name, {**facts, "plan": repr(plan)}, grid.ranked if len(grids) == 1 else grid.everyone)
    return AnyProduct(plan, grids)


def facts_of(
    a: Distributed, b: Distributed, wanted: Wanted, target: Ownership | None, grids: Sequence[BaseGrid]
) -> dict[str, Any]:
    """Facts of a product that the ranks compare."""
    asked = {"form": wanted.form, "algorithm": wanted.algorithm, "options": str(wanted.options)}
    goal = {"out_layout": None if target is None else str(target), "objective": wanted.objective, "workspace": wanted.workspace}
    return {"a": operand_text(a), "b": operand_text(b), **asked, **goal, "grids": len(grids)}


def operand_text(tensor: Distributed) -> str:
    """Description of an operand that is equal on all ranks."""
    size = "×".join(map(str, tensor.shape))
    return f"{size} {dtype_name(tensor.block)} in {tensor.layout}{', transposed' if tensor.is_transposed else ''}"
