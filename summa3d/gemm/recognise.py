"""Recognise the algorithm, and the axes in its roles, from the layouts of two operands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import ConfigError, GridError, LayoutError, ShapeError
from ..layout.redistribute import Ownership
from .algorithms.plan import ProductPlan
from .algorithms.registry import ALGORITHMS
from .algorithms.registry import algorithm as named
from .distributed import Distributed
from .local.strides import OTHER_OP


class Reading(NamedTuple):
    """An operand in a layout under op `letter`: as it is, or its transpose."""

    layout: Ownership
    letter: str
    transposed: bool


def product_of(
    a: Distributed, b: Distributed, grid_shape: Mapping[str, int], form: str, algorithm: str | None, options: Mapping[str, Any]
) -> tuple[ProductPlan, bool, bool]:
    """The plan whose layouts the operands have, and whether it reads A, and B, as the transpose of their .T.

    Each operand may be read as the transpose of its .T, under the other op; the reading that is no .T is tried first, so that a
    transpose costs no copy. Of several algorithms with the same layouts the first of the table is taken.
    Raises LayoutError if no plan has these layouts, GridError if one has but cannot use the grid, ConfigError for options that
    the algorithm does not have.
    """
    result = matching(a, b, grid_shape, form, algorithm, options)
    if result is None:
        extents, names = sizes(a.shape, b.shape, form), _names(algorithm, options)
        raise LayoutError(_no_plan(a.layout, b.layout, tuple(grid_shape), form, extents, names, options))
    return result


def matching(
    a: Distributed, b: Distributed, grid_shape: Mapping[str, int], form: str, algorithm: str | None, options: Mapping[str, Any]
) -> tuple[ProductPlan, bool, bool] | None:
    """As `product_of`; None if no plan has these layouts."""
    extents, names = sizes(a.shape, b.shape, form), _names(algorithm, options)
    grid_items, settings = tuple(grid_shape.items()), tuple(sorted(options.items()))
    for name in names:
        for left, right in itertools.product(readings(a, form[0]), readings(b, form[1])):
            plan = plan_of(
                name, left.letter + right.letter, extents, left.layout, right.layout, grid_items, settings, algorithm is None
            )
            if plan is not None:
                return plan, left.transposed, right.transposed
    return None


def _names(algorithm: str | None, options: Mapping[str, Any]) -> list[str]:
    """The algorithms to try: the requested one, or all that have the options."""
    asked = [named(algorithm)] if algorithm else list(ALGORITHMS.values())
    names = [candidate.name for candidate in asked if set(options) <= set(candidate.options)]
    if not names:
        has = " · ".join(f"{candidate.name}: {', '.join(candidate.options) or 'none'}" for candidate in asked)
        raise ConfigError(f"No algorithm asked for has the options {', '.join(options)}. Options: {has}.")
    return names


def sizes(a: tuple[int, ...], b: tuple[int, ...], form: str) -> tuple[int, int, int]:
    """m, n, k of the product. Raises ShapeError if the operands' inner sizes differ or the form is invalid."""
    if len(form) != 2 or any(letter not in "ntc" for letter in form):
        raise ShapeError(f"form {form!r} is not one of nn, nt, tn, tt, or one with c (conjugate transpose) in place of t.")
    m, k = a if form[0] == "n" else a[::-1]
    k_of_b, n = b if form[1] == "n" else b[::-1]
    if k != k_of_b:
        operands = f"op(A) is {m}×{k} and op(B) is {k_of_b}×{n} (form {form})"
        raise ShapeError(f"{operands}: the inner sizes {k} and {k_of_b} must be equal.")
    return m, n, k


@lru_cache(maxsize=1024)
def plan_of(
    name: str,
    form: str,
    extents: tuple[int, int, int],
    a_layout: Ownership,
    b_layout: Ownership,
    grid_shape: tuple[tuple[str, int], ...],
    options: tuple[tuple[str, Any], ...],
    any_algorithm: bool,
) -> Any:
    """The plan of an algorithm that has these layouts, its axes in any roles; None if no plan has them.

    A form that the algorithm lacks, or a grid that it cannot use, gives None with `any_algorithm`, and raises if this algorithm
    was requested.
    """
    candidate, shape = ALGORITHMS[name], dict(grid_shape)
    held = {*a_layout.axes, *b_layout.axes, *a_layout.root_only, *b_layout.root_only}
    names = [axis for axis in shape if axis in held] + [axis for axis in shape if axis not in held and shape[axis] == 1]
    variants = [{**variant, **dict(options)} for variant in candidate.variants]
    for axes, variant in itertools.product(itertools.permutations(names, len(candidate.axes)), variants):
        try:
            plan = candidate.plan(form, *extents, **dict(zip(candidate.axes, axes, strict=True)), **variant)
            if (plan.a_layout, plan.b_layout) == (a_layout, b_layout):
                plan.check_grid(shape)
                return plan
        except (GridError, ShapeError):
            if not any_algorithm:
                raise
    return None


def readings(operand: Distributed, letter: str) -> list[Reading]:
    """The matrix under op `letter`, and its transpose under the other op; what lies C-ordered in memory first.

    Blocks are not asked: an empty one has every order, and ranks must read alike.
    """
    readings = [Reading(operand.layout, letter, False)]
    if letter in OTHER_OP:
        readings.append(Reading(operand.layout.transposed(), OTHER_OP[letter], True))
    return readings[::-1] if operand.is_transposed else readings


def _no_plan(
    a: Ownership,
    b: Ownership,
    grid_names: tuple[str, ...],
    form: str,
    extents: tuple[int, int, int],
    names: list[str],
    options: Mapping[str, Any],
) -> str:
    """Layouts that there would be a plan for. Raises the plan's own ShapeError where an option has a value that none takes."""
    wanted, others = ALGORITHMS[names[0]], ", ".join(names[1:])
    lacking = [axis for axis in wanted.axes if axis not in grid_names][: max(0, len(wanted.axes) - len(grid_names))]
    expected = wanted.plan(form, *extents, **dict(zip(wanted.axes, [*grid_names, *lacking], strict=False)), **options)
    grid = f"On a grid with the axes {', '.join([*grid_names, *lacking])}" if lacking else "On this grid"
    return (
        f"A in {a} and B in {b} are not the operands of a {wanted.name} product of form {form}"
        f"{f' (nor of {others})' if others else ''}.\n"
        f"  {grid} one would be A in {expected.a_layout}, B in {expected.b_layout}; any axes may take these places, alike in "
        "both.\n  A.redistribute(layout) brings it there; without an algorithm and its options, matmul multiplies any layouts."
    )
