"""Closed forms of words, messages and workspace of one rank, for every algorithm.

Each is ``(plan, grid_shape, coordinates, conditions) → Cost``; the registry maps algorithms to closed forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ...comm.device.arrays import share
from ...layout.layout import Coordinates, Layout, split_range, split_sizes
from ...layout.redistribute import Placement, Redistribution
from ..algorithms.agarwal import AgarwalPlan, broadcast_layout
from ..algorithms.ca25d import Ca25dPlan
from ..algorithms.cannon import CannonPlan
from ..algorithms.cuboid import CuboidPlan
from ..algorithms.oned import OnedColumnPlan, OnedRowPlan, with_alone
from ..algorithms.panels import divided, panels
from ..algorithms.plan import ProductPlan
from ..algorithms.summa import SummaPlan, normal
from ..algorithms.tesseract import TesseractPlan
from ..pieces.schedule import names_of, pieces_of, schedule_of
from .steps import Conditions, Cost, GridShape, all_reduce, block_words, combined, gather, scatter

CostOf = Callable[[Any, GridShape, Coordinates, Conditions], Cost]


# -- gathers and a scatter: cuboid ---------------------------------------------------------------------------------------------


def plan_steps(plan: CuboidPlan, grid_shape: GridShape, at: Coordinates) -> tuple[Cost, Cost, Cost]:
    """Gather A along y, gather B along x, scatter C along z."""
    return (
        gather(plan.a_layout, plan.a_shape, plan.y, grid_shape, at),
        gather(plan.b_layout, plan.b_shape, plan.x, grid_shape, at),
        scatter(plan.c_layout, plan.c_shape, plan.z, grid_shape, at),
    )


def cuboid(plan: CuboidPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """[(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ). Workspace: the gathered A and B, the partial C and the Z parts to be summed.

    An axis of size 1 needs none of its own, nor does an operand that is read in the node's memory: one whose axis is staged, if
    its fine split lies on its rows. In pieces, columns travel through memory where they are adjacent, as much as the gathered
    operand; the own part of C is summed where it is; and pieces of k that no BLAS adds in place need a product. Not counted,
    since it depends on β: where dtypes that no BLAS adds to C in place meet β ≠ 0 and Z = 1, a product.
    """
    a, b, c = moves_of(plan, grid_shape, at, conditions.staged)
    m, n, k = plan.local_extents(grid_shape, at)
    operands = ((a, plan.a_fine, plan.y), (b, plan.b_fine, plan.x))
    workspace = sum(0 if fine == 0 and axis in conditions.staged else step.workspace for step, fine, axis in operands)
    if grid_shape[plan.z] > 1 and plan.z not in conditions.staged:
        workspace += conditions.wide * (c.workspace + m * n)
    workspace += conditions.widened * (m * k + k * n)
    cost = Cost(a.words + b.words + c.words, a.messages + b.messages + c.messages, workspace)
    return cost if plan.pieces == 1 else combined(cost, in_pieces(plan, grid_shape, at, conditions))


def moves_of(plan: CuboidPlan, grid_shape: GridShape, at: Coordinates, staged: Collection[str]) -> tuple[Cost, ...]:
    """`plan_steps` with the messages of the plan's pieces."""
    steps = plan_steps(plan, grid_shape, at)
    if plan.pieces == 1:
        return steps
    order = schedule_of(plan, grid_shape, at, staged)
    moves = zip("abc", (plan.y, plan.x, plan.z), steps, strict=True)
    return tuple(
        replace(step, messages=order.messages(operand, grid_shape[axis], at[axis]))
        if grid_shape[axis] > 1 and axis not in staged
        else step
        for operand, axis, step in moves
    )


def in_pieces(plan: CuboidPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """Workspace that pieces add: memory of columns and of sums that are not taken in place, less C's own."""
    memory, order = 0, schedule_of(plan, grid_shape, at, conditions.staged)
    steps = zip("abc", (plan.y, plan.x, plan.z), plan_steps(plan, grid_shape, at), strict=True)
    names, split = names_of(plan), plan.fine_dims
    for operand, axis, step in steps:
        if grid_shape[axis] == 1 or axis in conditions.staged:
            continue
        if operand == "c":
            memory -= conditions.wide * step.workspace // grid_shape[axis]
        else:
            dim, width = names[operand].index(split[operand]), order.extents[names[operand][1]]
            memory += step.workspace * order.in_columns(operand, dim, width)
    m, n, _ = plan.local_extents(grid_shape, at)
    return Cost(0, 0, memory + m * n * (order.adds and conditions.scratch))


# -- panels: summa, tesseract, ca25d ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """The panels of a range in numbers: how many, the widest, how many of each width, and how many each x and y index owns."""

    count: int
    widest: int
    widths: Counter[int]
    count_of_owner: Mapping[str, Counter[int]]


@lru_cache(maxsize=256)
def cuts(start: int, stop: int, x_parts: int, y_parts: int, width: int | None, pieces: int = 1, grain: int = 1) -> Cuts:
    """The panels of start:stop, counted."""
    result = divided(panels(start, stop, x_parts, y_parts, width, grain), pieces)
    widths = Counter(panel.width for panel in result)
    count_of_owner = {"x": Counter(panel.x_owner for panel in result), "y": Counter(panel.y_owner for panel in result)}
    return Cuts(len(result), max(widths, default=0), widths, count_of_owner)


def panel_broadcasts(
    plan: SummaPlan,
    role: str,
    block: tuple[int, ...],
    dim: int,
    extent: int,
    cut: Cuts,
    grid_shape: GridShape,
    at: Coordinates,
    conditions: Conditions,
) -> Cost:
    """Broadcast an operand's panels along the axis that splits its dim `dim`: what others own of `extent`, times its rest."""
    axis = plan.x if role == "x" else plan.y
    rest = block[1 - dim]
    wide = conditions.widened * cut.widest * rest
    if grid_shape[axis] == 1:
        return Cost(0, 0, wide)
    messages = cut.count - cut.count_of_owner[role][at[axis]]
    held = buffers(plan, cut, axis, grid_shape, conditions)
    return Cost(rest * (extent - block[dim]), messages, held * cut.widest * rest + wide)


def buffers(plan: SummaPlan, cut: Cuts, axis: str, grid_shape: GridShape, conditions: Conditions) -> int:
    """Number of panels along an axis that are held at a time: one, and those that are in flight, in a node's memory one."""
    ahead = plan.ahead(plan.pieces_on(grid_shape, conditions.staged), grid_shape)
    return min(cut.count, 1 + (min(ahead, 1) if axis in conditions.staged else ahead)) or 1


def outer(plan: SummaPlan, span: tuple[int, int], grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """C stays; panels of the part `span` of k."""
    a, b = (plan.a_layout.local_shape(plan.a_shape, grid_shape, at), plan.b_layout.local_shape(plan.b_shape, grid_shape, at))
    pieces, grain = plan.pieces_on(grid_shape, conditions.staged), plan.grain("k", 0)
    cut = cuts(*span, grid_shape[plan.x], grid_shape[plan.y], plan.panel, pieces, grain)
    extent = span[1] - span[0]
    a_dim, b_dim = (1 if plan.form[0] == "n" else 0), (0 if plan.form[1] == "n" else 1)
    scratch = a[1 - a_dim] * b[1 - b_dim] if conditions.scratch else 0
    return combined(
        panel_broadcasts(plan, "y", a, a_dim, extent, cut, grid_shape, at, conditions),
        panel_broadcasts(plan, "x", b, b_dim, extent, cut, grid_shape, at, conditions),
        Cost(0, 0, scratch),
    )


def inner(plan: SummaPlan, a_moves: bool, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """An operand stays; panels of the other, and of C summed along the other axis."""
    a, b = (plan.a_layout.local_shape(plan.a_shape, grid_shape, at), plan.b_layout.local_shape(plan.b_shape, grid_shape, at))
    extent, role, along = (plan.m, "y", plan.x) if a_moves else (plan.n, "x", plan.y)
    moving, dim, staying, rest = (a, 1, b, b[1]) if a_moves else (b, 0, a, a[0])
    pieces, grain = plan.pieces_on(grid_shape, conditions.staged), plan.grain("m" if a_moves else "n", 0)
    cut = cuts(0, extent, grid_shape[plan.x], grid_shape[plan.y], plan.panel, pieces, grain)
    size, index = grid_shape[along], at[along]
    reduced = (size - 1) * sum(times * share(rest * width, size, index) for width, times in cut.widths.items())
    held = buffers(plan, cut, along, grid_shape, conditions)
    partial = 0 if size == 1 and not conditions.scratch else held * cut.widest * rest * conditions.wide
    return combined(
        panel_broadcasts(plan, role, moving, dim, extent, cut, grid_shape, at, conditions),
        Cost(reduced, (size - 1) * cut.count, partial + conditions.widened * prod(staying)),
    )


def summa(plan: SummaPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """nn [(C−1)mk + (R−1)kn]/P; nt [(R−1)kn + (C−1)mn]/P; tn [(C−1)mk + (R−1)mn]/P."""
    if normal(plan.form) == "nn":
        return outer(plan, (0, plan.k), grid_shape, at, conditions)
    return inner(plan, normal(plan.form) == "tn", grid_shape, at, conditions)


def tesseract(plan: TesseractPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """That of summa on each depth, and for tn an all-reduce of C's block over the depths."""
    cost = summa(plan, grid_shape, at, conditions)
    if normal(plan.form) != "tn":
        return cost
    return combined(cost, all_reduce(block_words(plan.c_layout, plan.c_shape, grid_shape, at), (plan.d,), grid_shape, at))


def ca25d(plan: Ca25dPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """[(q−1)(mk + kn) + (d−1)mn]/P. Workspace: the panels, the copy of C, and the parts of it to be summed."""
    depth = grid_shape[plan.d]
    cost = outer(plan, split_range(0, plan.k, depth, at[plan.d]), grid_shape, at, conditions)
    if depth == 1:
        return cost
    copy = block_words(Layout((plan.x,), (plan.y,)), plan.c_shape, grid_shape, at)
    own = block_words(plan.c_layout, plan.c_shape, grid_shape, at)
    return combined(cost, Cost((depth - 1) * own, depth - 1, conditions.wide * (copy + depth * own)))


# -- rings: cannon -------------------------------------------------------------------------------------------------------------


def cannon(plan: CannonPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """Each ring: q−1 blocks, and one more on the ranks that a skew moves; two buffers of the largest block, or one."""
    q, i, j, form = grid_shape[plan.x], at[plan.x], at[plan.y], normal(plan.form)
    m, n, k = (split_sizes(extent, q) for extent in (plan.m, plan.n, plan.k))
    scratch = Cost(0, 0, m[i] * n[j] * conditions.scratch)
    if q == 1:
        return combined(scratch, Cost(0, 0, conditions.widened * (m[0] * k[0] + k[0] * n[0])))
    if form == "nn":
        arriving = range(i + j, i + j + q)
        a = ring([m[i] * k[index % q] for index in arriving], i != 0, m[i] * k[0], conditions)
        b = ring([k[index % q] * n[j] for index in arriving], j != 0, k[0] * n[j], conditions)
        return combined(a, b, scratch)
    arriving = range(i + j + 1, i + j + 1 + q)
    if form == "nt":
        rest, extent, staying, sum_rest, skewed, home = k[j], n, m[i] * k[j], m[i], j != q - 1, i != 0
    else:
        rest, extent, staying, sum_rest, skewed, home = k[i], m, k[i] * n[j], n[j], i != q - 1, j != 0
    moving = ring([rest * extent[index % q] for index in arriving], skewed, rest * extent[0], conditions)
    passing = [sum_rest * extent[index % q] for index in arriving][1:] + [m[i] * n[j]] * home
    capacity = sum_rest * extent[0]
    workspace = conditions.wide * 2 * capacity + conditions.widened * staying + (capacity if conditions.scratch else 0)
    return combined(moving, Cost(sum(passing), len(passing), workspace))


def ring(blocks: list[int], skewed: bool, capacity: int, conditions: Conditions) -> Cost:
    """The words of the blocks in the order in which a rank multiplies them; the first is its own unless it is skewed."""
    moves = len(blocks) - 1 + skewed
    return Cost(sum(blocks) - (0 if skewed else blocks[0]), moves, (min(2, moves) + conditions.widened) * capacity)


# -- faces and lines: agarwal, oned --------------------------------------------------------------------------------------------


def agarwal(plan: AgarwalPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """(q−1)(mk + kn + mn)/P. Workspace: what is broadcast to the rank, and off C's face the partial C."""
    a, b, c = (block_words(broadcast_layout(layout), shape, grid_shape, at) for layout, shape in plan.stored)
    size, index = grid_shape[plan.z], at[plan.z]
    received = [block for block, axis in ((a, plan.y), (b, plan.x)) if at[axis] != 0]
    partial = c * (conditions.wide * (index > 0) + conditions.scratch)
    workspace = sum(received) + partial + conditions.widened * (a + b)
    return Cost(sum(received) + (size - 1) * share(c, size, index), len(received) + size - 1, workspace)


def oned_column(plan: OnedColumnPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """No words; with `sequence` (t−1)/t·mk."""
    size, a, b = grid_shape[plan.y], plan.m * plan.k, block_words(plan.b_layout, plan.b_shape, grid_shape, at)
    if plan.sequence and plan.pieces > 1 and size > 1 and plan.y not in conditions.staged:
        return cuboid(plan.as_cuboid(), with_alone(grid_shape, 1), with_alone(at, 0), conditions)
    product = block_words(plan.c_layout, plan.c_shape, grid_shape, at) if conditions.scratch else 0
    local = Cost(0, 0, conditions.widened * (a + b) + product)
    if not plan.sequence or size == 1:
        return local
    return combined(local, Cost(a - block_words(plan.a_layout, plan.a_shape, grid_shape, at), size - 1, a))


def oned_row(plan: OnedRowPlan, grid_shape: GridShape, at: Coordinates, conditions: Conditions) -> Cost:
    """2(t−1)/t·mn; scattered (t−1)/t·mn."""
    size, c = grid_shape[plan.y], plan.m * plan.n
    cut = plan.pieces > 1 and size > 1 and plan.y not in conditions.staged
    if plan.sequence and cut:
        return cuboid(plan.as_cuboid(), with_alone(grid_shape, 1), with_alone(at, 0), conditions)
    operands = block_words(plan.a_layout, plan.a_shape, grid_shape, at) + block_words(plan.b_layout, plan.b_shape, grid_shape, at)
    local = Cost(0, 0, conditions.widened * operands + (c if conditions.scratch else 0))
    if not plan.sequence or size == 1:
        return combined(local, *sums_in_pieces((plan.m, plan.n), plan.pieces if cut else 1, (plan.y,), grid_shape, at))
    own = block_words(plan.c_layout, plan.c_shape, grid_shape, at)
    return combined(local, Cost((size - 1) * own, size - 1, conditions.wide * (c + size * own)))


def sums_in_pieces(
    block: Sequence[int], pieces: int, axes: tuple[str, ...], grid_shape: GridShape, at: Coordinates
) -> list[Cost]:
    """All-reduces of a block whose rows are cut into pieces."""
    rows, columns = block
    if pieces == 1:
        return [all_reduce(rows * columns, axes, grid_shape, at)]
    return [all_reduce((stop - start) * columns, axes, grid_shape, at) for start, stop in pieces_of(rows, pieces)]


# -- the transpose ---------------------------------------------------------------------------------------------------------------


def transposition(plan: ProductPlan, grid_shape: GridShape, conditions: Conditions) -> Callable[[Coordinates], Cost]:
    """Cost that `transpose.Transposed` adds to the product B·A: the words of C's block that a rank does not hold after it."""
    points = [coordinates for coordinates, _ in Layout().blocks((), grid_shape)]
    layout = plan.swapped().c_layout.transposed()
    source, target = (Placement(item, grid_shape, points) for item in (layout, plan.c_layout))
    moves = Redistribution(plan.c_shape, source, target)

    def cost_of(at: Coordinates) -> Cost:
        rank = points.index(dict(at))
        received, sent = moves.received_by(rank), moves.sent_by(rank)
        words = sum(piece.words for piece in received)
        transposed = prod(layout.local_shape(plan.c_shape, grid_shape, at))
        conjugated = (operand for letter, operand in zip(plan.form, plan.stored, strict=False) if letter == "c")
        conjugates = sum(block_words(*operand, grid_shape, at) for operand in conjugated) * conditions.complex
        held = transposed + words + sum(piece.words for piece in sent)
        return Cost(words, len(received), conditions.wide * held + conjugates)

    return cost_of
