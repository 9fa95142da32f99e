"""Closed forms of all algorithms but the cuboid: words, messages and workspace of each rank, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ...comm.arrays import HALVES
from ...layout.layout import Layout, split_range, split_sizes
from ...layout.redistribute import Placement, Redistribution
from ..algorithms.agarwal import AgarwalPlan, everywhere
from ..algorithms.ca25d import Ca25dPlan
from ..algorithms.cannon import CannonPlan
from ..algorithms.oned import OnedColumnPlan, OnedRowPlan
from ..algorithms.panels import panels
from ..algorithms.plan import ProductPlan
from ..algorithms.summa import SummaPlan, normal
from ..algorithms.tesseract import TesseractPlan
from ..algorithms.transpose import exchange
from ..local.blas import adds_in_place
from .volume import Coordinates, Cost, Volume

Shape = Mapping[str, int]


@dataclass(frozen=True)
class Kind:
    """What a dtype means for workspace: `wide` words hold one summed element; `scratch`: products are not added in place.

    `widened` words hold an element of an operand in the float32 that it is copied to; 0 where it is multiplied as it is.
    """

    wide: int
    widened: int
    scratch: bool
    complex: bool

    @classmethod
    def of(cls, dtype: str, device: bool) -> Kind:
        half = dtype in HALVES
        return cls(2 if half else 1, 2 if half and not device else 0, not adds_in_place(dtype), dtype.startswith("complex"))


def volume(plan: ProductPlan, grid_shape: Shape, dtype: str = "float64", device: bool = False) -> Volume:
    """The cost of `run` for C-ordered blocks of `dtype` on every rank; workspace in words of that dtype.

    Mean words are those of the plan's table. A transposed product adds its exchange; 16-bit floats add operands and C in float32,
    on a `device` C alone, unless the plan sums it once.
    """
    plan.check_grid(grid_shape)
    kind = Kind.of(str(dtype), device)
    inner = plan.swapped() if plan.by_transpose else plan
    algorithm = COSTS[type(plan)]
    exchanged = transposition(plan, grid_shape, kind) if plan.by_transpose else None
    summed = kind.wide > 1 and not (device and plan.sums_once(grid_shape))

    def cost_of(at: Coordinates) -> Cost:
        cost = algorithm(inner, grid_shape, at, kind)
        if exchanged is not None:
            cost = together(cost, exchanged(at))
        return together(cost, Cost(0, 0, kind.wide * size_of(plan.c_layout, plan.c_shape, grid_shape, at) if summed else 0))

    return Volume(grid_shape, cost_of)


def together(*costs: Cost) -> Cost:
    """The sum of costs whose workspace is held at one time."""
    return Cost(sum(cost.words for cost in costs), sum(cost.messages for cost in costs), sum(cost.workspace for cost in costs))


def size_of(layout: Layout, shape: tuple[int, ...], grid_shape: Shape, at: Coordinates) -> int:
    return prod(layout.local_shape(shape, grid_shape, at))


def share(n: int, parts: int, index: int) -> int:
    """Part `index` of the balanced split of n: what a rank reduces."""
    return n // parts + (index < n % parts)


# -- panels: summa, tesseract, ca25d ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """The panels of a range in numbers: how many, the widest, how many of each width, and how many each x and y index owns."""

    count: int
    widest: int
    widths: Counter[int]
    owned: Mapping[str, Counter[int]]


@lru_cache(maxsize=256)
def cuts(start: int, stop: int, x_parts: int, y_parts: int, width: int | None) -> Cuts:
    """The panels of start:stop, counted."""
    found = panels(start, stop, x_parts, y_parts, width)
    widths = Counter(panel.width for panel in found)
    owned = {"x": Counter(panel.x_owner for panel in found), "y": Counter(panel.y_owner for panel in found)}
    return Cuts(len(found), max(widths, default=0), widths, owned)


def stream(
    plan: SummaPlan,
    role: str,
    block: tuple[int, ...],
    dim: int,
    extent: int,
    cut: Cuts,
    grid_shape: Shape,
    at: Coordinates,
    kind: Kind,
) -> Cost:
    """Broadcast an operand's panels along the axis that splits its dim `dim`: what others own of `extent`, times its rest."""
    axis = plan.x if role == "x" else plan.y
    rest = block[1 - dim]
    wide = kind.widened * cut.widest * rest
    if grid_shape[axis] == 1:
        return Cost(0, 0, wide)
    return Cost(
        rest * (extent - block[dim]), cut.count - cut.owned[role][at[axis]], buffers(plan, cut) * cut.widest * rest + wide
    )


def buffers(plan: SummaPlan, cut: Cuts) -> int:
    return 2 if plan.lookahead and cut.count > 1 else 1


def outer(plan: SummaPlan, span: tuple[int, int], grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """C stays; panels of the part `span` of k."""
    a, b = (plan.a_layout.local_shape(plan.a_shape, grid_shape, at), plan.b_layout.local_shape(plan.b_shape, grid_shape, at))
    cut = cuts(*span, grid_shape[plan.x], grid_shape[plan.y], plan.panel)
    extent = span[1] - span[0]
    a_dim, b_dim = (1 if plan.form[0] == "n" else 0), (0 if plan.form[1] == "n" else 1)
    scratch = a[1 - a_dim] * b[1 - b_dim] if kind.scratch else 0
    return together(
        stream(plan, "y", a, a_dim, extent, cut, grid_shape, at, kind),
        stream(plan, "x", b, b_dim, extent, cut, grid_shape, at, kind),
        Cost(0, 0, scratch),
    )


def inner(plan: SummaPlan, a_moves: bool, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """An operand stays; panels of the other, and of C summed along the other axis."""
    a, b = (plan.a_layout.local_shape(plan.a_shape, grid_shape, at), plan.b_layout.local_shape(plan.b_shape, grid_shape, at))
    extent, role, along = (plan.m, "y", plan.x) if a_moves else (plan.n, "x", plan.y)
    moving, dim, staying, rest = (a, 1, b, b[1]) if a_moves else (b, 0, a, a[0])
    cut = cuts(0, extent, grid_shape[plan.x], grid_shape[plan.y], plan.panel)
    size, index = grid_shape[along], at[along]
    reduced = (size - 1) * sum(times * share(rest * width, size, index) for width, times in cut.widths.items())
    partial = 0 if size == 1 and not kind.scratch else buffers(plan, cut) * cut.widest * rest * kind.wide
    return together(
        stream(plan, role, moving, dim, extent, cut, grid_shape, at, kind),
        Cost(reduced, (size - 1) * cut.count, partial + kind.widened * prod(staying)),
    )


def summa(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """nn [(C−1)mk + (R−1)kn]/P; nt [(R−1)kn + (C−1)mn]/P; tn [(C−1)mk + (R−1)mn]/P."""
    assert isinstance(plan, SummaPlan)
    if normal(plan.form) == "nn":
        return outer(plan, (0, plan.k), grid_shape, at, kind)
    return inner(plan, normal(plan.form) == "tn", grid_shape, at, kind)


def tesseract(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """That of summa on each depth, and for tn an all-reduce of C's block over the depths."""
    assert isinstance(plan, TesseractPlan)
    cost = summa(plan, grid_shape, at, kind)
    if normal(plan.form) != "tn":
        return cost
    return together(cost, all_reduce(size_of(plan.c_layout, plan.c_shape, grid_shape, at), grid_shape[plan.d], at[plan.d]))


def ca25d(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """[(q−1)(mk + kn) + (d−1)mn]/P. Workspace: the panels, the copy of C, and the parts of it to be summed."""
    assert isinstance(plan, Ca25dPlan)
    depth = grid_shape[plan.d]
    cost = outer(plan, split_range(0, plan.k, depth, at[plan.d]), grid_shape, at, kind)
    if depth == 1:
        return cost
    copy = size_of(Layout((plan.x,), (plan.y,)), plan.c_shape, grid_shape, at)
    own = size_of(plan.c_layout, plan.c_shape, grid_shape, at)
    return together(cost, Cost((depth - 1) * own, depth - 1, kind.wide * (copy + depth * own)))


def all_reduce(n: int, size: int, index: int) -> Cost:
    """n + (g−2)·n_r words, 2(g−1) messages; in place."""
    return Cost(n + (size - 2) * share(n, size, index), 2 * (size - 1)) if size > 1 else Cost(0, 0)


# -- rings: cannon -------------------------------------------------------------------------------------------------------------


def cannon(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """Each ring: q−1 blocks, and one more on the ranks that a skew moves; two buffers of the largest block, or one."""
    assert isinstance(plan, CannonPlan)
    q, i, j, form = grid_shape[plan.x], at[plan.x], at[plan.y], normal(plan.form)
    m, n, k = (split_sizes(extent, q) for extent in (plan.m, plan.n, plan.k))
    scratch = Cost(0, 0, m[i] * n[j] if kind.scratch else 0)
    if q == 1:
        return together(scratch, Cost(0, 0, kind.widened * (m[0] * k[0] + k[0] * n[0])))
    if form == "nn":
        arriving = range(i + j, i + j + q)
        a = ring([m[i] * k[index % q] for index in arriving], i != 0, m[i] * k[0], kind)
        b = ring([k[index % q] * n[j] for index in arriving], j != 0, k[0] * n[j], kind)
        return together(a, b, scratch)
    arriving = range(i + j + 1, i + j + 1 + q)
    if form == "nt":
        rest, extent, staying, sum_rest, skewed, home = k[j], n, m[i] * k[j], m[i], j != q - 1, i != 0
        own = m[i] * n[j]
    else:
        rest, extent, staying, sum_rest, skewed, home = k[i], m, k[i] * n[j], n[j], i != q - 1, j != 0
        own = m[i] * n[j]
    moving = ring([rest * extent[index % q] for index in arriving], skewed, rest * extent[0], kind)
    passing = [sum_rest * extent[index % q] for index in arriving][1:] + ([own] if home else [])
    room = sum_rest * extent[0]
    workspace = kind.wide * 2 * room + kind.widened * staying + (room if kind.scratch else 0)
    return together(moving, Cost(sum(passing), len(passing), workspace))


def ring(blocks: list[int], skewed: bool, room: int, kind: Kind) -> Cost:
    """The words of the blocks in the order in which a rank multiplies them; the first is its own unless it is skewed."""
    moves = len(blocks) - 1 + skewed
    return Cost(sum(blocks) - (0 if skewed else blocks[0]), moves, (min(2, moves) + kind.widened) * room)


# -- faces and lines: agarwal, oned --------------------------------------------------------------------------------------------


def agarwal(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """(q−1)(mk + kn + mn)/P. Workspace: what is broadcast to the rank, and off C's face the partial C."""
    assert isinstance(plan, AgarwalPlan)
    a, b, c = (
        size_of(everywhere(layout), shape, grid_shape, at)
        for layout, shape in ((plan.a_layout, plan.a_shape), (plan.b_layout, plan.b_shape), (plan.c_layout, plan.c_shape))
    )
    size, index = grid_shape[plan.z], at[plan.z]
    received = [block for block, axis in ((a, plan.y), (b, plan.x)) if at[axis] != 0]
    workspace = sum(received) + (kind.wide * c if index else 0) + kind.widened * (a + b) + (c if kind.scratch else 0)
    return Cost(sum(received) + (size - 1) * share(c, size, index), len(received) + size - 1, workspace)


def oned_column(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """Nothing; of a split input (t−1)/t·mk."""
    assert isinstance(plan, OnedColumnPlan)
    size, a, b = grid_shape[plan.y], plan.m * plan.k, size_of(plan.b_layout, plan.b_shape, grid_shape, at)
    local = Cost(
        0,
        0,
        kind.widened * (a + b) + (size_of(plan.c_layout, plan.c_shape, grid_shape, at) if kind.scratch else 0),
    )
    if not plan.sequence or size == 1:
        return local
    return together(local, Cost(a - size_of(plan.a_layout, plan.a_shape, grid_shape, at), size - 1, a))


def oned_row(plan: ProductPlan, grid_shape: Shape, at: Coordinates, kind: Kind) -> Cost:
    """2(t−1)/t·mn; scattered (t−1)/t·mn."""
    assert isinstance(plan, OnedRowPlan)
    size, index, c = grid_shape[plan.y], at[plan.y], plan.m * plan.n
    operands = size_of(plan.a_layout, plan.a_shape, grid_shape, at) + size_of(plan.b_layout, plan.b_shape, grid_shape, at)
    local = Cost(0, 0, kind.widened * operands + (c if kind.scratch else 0))
    if not plan.sequence or size == 1:
        return together(local, all_reduce(c, size, index))
    own = size_of(plan.c_layout, plan.c_shape, grid_shape, at)
    return together(local, Cost((size - 1) * own, size - 1, kind.wide * (c + size * own)))


# -- the transpose ---------------------------------------------------------------------------------------------------------------


def transposition(plan: ProductPlan, grid_shape: Shape, kind: Kind) -> Callable[[Coordinates], Cost]:
    """What `transpose.Transposed` adds to the product B·A: the words of C's block that a rank does not hold after it."""
    points = [coordinates for coordinates, _ in Layout().blocks((), grid_shape)]
    layout = plan.swapped().c_layout.transposed()
    moves: Redistribution = exchange(plan, Placement(layout, grid_shape, points), Placement(plan.c_layout, grid_shape, points))

    def cost_of(at: Coordinates) -> Cost:
        rank = points.index(dict(at))
        received, sent = moves.received_by(rank), moves.sent_by(rank)
        words = sum(piece.words for piece in received)
        turned = prod(layout.local_shape(plan.c_shape, grid_shape, at))
        conjugates = sum(
            prod(where.local_shape(shape, grid_shape, at))
            for letter, where, shape in zip(plan.form, (plan.a_layout, plan.b_layout), (plan.a_shape, plan.b_shape), strict=True)
            if letter == "c" and kind.complex
        )
        return Cost(words, len(received), kind.wide * (turned + words + sum(piece.words for piece in sent)) + conjugates)

    return cost_of


COSTS: dict[type, Callable[[ProductPlan, Shape, Coordinates, Kind], Cost]] = {
    SummaPlan: summa,
    TesseractPlan: tesseract,
    Ca25dPlan: ca25d,
    CannonPlan: cannon,
    AgarwalPlan: agarwal,
    OnedColumnPlan: oned_column,
    OnedRowPlan: oned_row,
}
