"""SUMMA, the 2-D product on any R×C grid: the plan, and its two loops (C stays, or an operand stays)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ...comm.axis import Axis
from ...comm.device.arrays import Array, dtype_name
from ...comm.grid import BaseGrid
from ...comm.pending import Completed
from ...comm.prepared import Prepared
from ...errors import ShapeError
from ...layout.layout import Layout
from ..local.blas import add, adds_in_place, scale
from ..pieces.slabs import multiply_in_slabs
from .checks import check_pieces, is_whole
from .executor import Executor, Multiply
from .panels import BroadcastPanels, divided, panels
from .plan import ProductPlan
from .workspace import Workspace


@dataclass(frozen=True)
class SummaPlan(ProductPlan):
    """A product on R×C ranks, R the size of axis x and C of y; every operand lies as rows:x columns:y, in every form.

    | form | panels of | what moves | words per rank (mean) |
    |---|---|---|---|
    | nn | k | A along y, B along x | [(C−1)mk + (R−1)kn]/P |
    | nt | n | B along x, then C reduced along y | [(R−1)kn + (C−1)mn]/P |
    | tn | m | A along y, then C reduced along x | [(C−1)mk + (R−1)mn]/P |
    | tt | k | (B·A) by nn, then one transpose | as nn with m and n exchanged, and the transpose |

    `panel` is the largest panel width (None: as wide as the splits allow); with `lookahead` the next panels are in flight during
    the product of the current ones. `pieces`, in place of either, cuts panels that leave the node into so many: the owners' first
    pieces, then their second, as many in flight as the larger axis has members, while others are multiplied; the same words.

    Raises ShapeError for a width or a number of pieces that is no whole number of at least 1, and pieces beside a width or
    look-ahead, which they bring along.
    """

    x: str = "x"
    y: str = "y"
    panel: int | None = None
    lookahead: bool = False
    pieces: int = 1

    takes_grains = True
    transposes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.panel is not None and (not is_whole(self.panel) or self.panel < 1):
            raise ShapeError(f"panel is {self.panel!r}; its width is a whole number of at least 1.")
        check_pieces(self.pieces)
        if self.pieces > 1 and (self.panel is not None or self.lookahead):
            raise ShapeError(
                f"pieces is {self.pieces} beside panel {self.panel} and lookahead {self.lookahead}: pieces are panels of a width "
                "of their own, and come ahead of their products. Leave panel and lookahead out, or pieces."
            )

    def layout_of(self, operand: str, names: str) -> Layout:
        """rows:x columns:y, as each is stored."""
        return Layout((self.x,), (self.y,), names=names)

    def pieces_on(self, grid_shape: Mapping[str, int], staged: Collection[str]) -> int:
        """Into how many pieces panels are cut where the axes `staged` communicate in the node's memory: one where all do."""
        return self.pieces if any(grid_shape[axis] > 1 and axis not in staged for axis in (self.x, self.y)) else 1

    def ahead(self, pieces: int, grid_shape: Mapping[str, int]) -> int:
        """Number of panels, cut into `pieces`, in flight while one is multiplied, through MPI."""
        return max(grid_shape[self.x], grid_shape[self.y]) if pieces > 1 else int(self.lookahead)


class Summa(Executor):
    """SUMMA: products of one panel at a time, by one of two loops.

    Source: van de Geijn and Watts 1997, here on splits that may be uneven.
    """

    plan: SummaPlan

    def _prepare(self) -> None:
        self.multiply_into = in_loops(self.plan, self.grid, partial(panel_loop, self.plan, self.grid, self.workspace))


def panel_loop(plan: SummaPlan, grid: BaseGrid, workspace: Workspace, pieces: int) -> Multiply:
    """The loop of a plan on a grid, its panels cut into so many pieces."""
    x, y, form = grid[plan.x], grid[plan.y], normal(plan.form)
    extent, ahead = {"nn": plan.k, "nt": plan.n, "tn": plan.m}[form], plan.ahead(pieces, grid.shape)
    grain = plan.grain({"nn": "k", "nt": "n", "tn": "m"}[form], 0)
    cuts = divided(panels(0, extent, x.size, y.size, plan.panel, grain), pieces)
    left = BroadcastPanels(workspace, "a", y, "y", 1, cuts, ahead)
    right = BroadcastPanels(workspace, "b", x, "x", 0, cuts, ahead)
    if form == "nn":
        return Outer(workspace, plan.form, left, right)
    return InnerProducts(workspace, plan.form, *((right, y) if form == "nt" else (left, x)))


def in_loops(plan: SummaPlan, grid: BaseGrid, loop: Callable[[int], Multiply]) -> Multiply:
    """The loop that `loop` makes for a number of pieces: the plan's, or one where no axis of panels leaves the node.

    loop : holds no executor, which would then hold itself, and its workspace
    """
    if plan.pieces == 1:
        return loop(1)
    loops: dict[int, Multiply] = {}

    def run(a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        pieces = plan.pieces_on(grid.shape, [axis for axis in (plan.x, plan.y) if grid[axis].offers_views(a)])
        if pieces not in loops:
            loops[pieces] = loop(pieces)
        loops[pieces](a, b, out, alpha, beta)

    return run


def normal(form: str) -> str:
    """The form with c replaced by t: ownership and communication do not depend on conjugation."""
    return form.replace("c", "t")


class Outer:
    """C stays: C += (panel of A)·(panel of B), for every panel of k."""

    def __init__(self, workspace: Workspace, form: str, left: BroadcastPanels, right: BroadcastPanels) -> None:
        self.workspace, self.form, self.left, self.right = workspace, form, left, right

    def __call__(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        scratch = self.workspace.scratch(out)
        if not self.left.cuts:
            scale(out, beta)
        whole = prod(out.shape) * sum(cut.width for cut in self.left.cuts)
        for left, right in zip(self.left.each(a), self.right.each(b), strict=True):
            if self.left.in_slabs:
                multiply_in_slabs(self.workspace, self.form, left, right, out, whole, alpha, beta, scratch)
            else:
                self.workspace.accumulate(left, right, self.form, out, alpha, beta, scratch)
            beta = 1


class InnerProducts:
    """An operand stays: with each panel of the other, one panel of C, summed along an axis onto the member that owns it."""

    def __init__(self, workspace: Workspace, form: str, moving: BroadcastPanels, along: Axis) -> None:
        self.workspace, self.form, self.moving, self.along = workspace, form, moving, along
        self.a_moves = moving.name == "a"
        owners = (cut.x_owner if self.a_moves else cut.y_owner for cut in moving.cuts)
        self._sums = [Prepared(along, "reduce", root=owner) for owner in owners]

    def __call__(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        staying = self.workspace.widened("staying", b if self.a_moves else a)
        capacity = self.moving.widest * out.shape[1 if self.a_moves else 0]
        direct = self.along.size == 1 and adds_in_place(dtype_name(out))
        ahead = min(self.moving.most_ahead, 1) if self.along.offers_views(out) else self.moving.most_ahead
        whole = prod(staying.shape) * sum(cut.width for cut in self.moving.cuts)
        sums: deque[Callable[[], None]] = deque()
        for count, panel in enumerate(self.moving.each(a if self.a_moves else b)):
            operands = (panel, staying) if self.a_moves else (staying, panel)
            target = self._home(count, out)
            if direct:
                self._multiply(*operands, target, alpha, beta, whole)
                continue
            width = self.moving.cuts[count].width
            shape = (width, out.shape[1]) if self.a_moves else (out.shape[0], width)
            summand = self.workspace.buffer(f"partial {count % (ahead + 1)}", shape, out, capacity)
            self._multiply(*operands, summand, alpha, 0, whole)
            while len(sums) >= max(1, ahead):
                sums.popleft()()
            sums.append(self._reduced(count, summand, target, beta, ahead > 0))
            if not ahead:
                sums.popleft()()
        for end in sums:
            end()

    def _multiply(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any, whole: int) -> None:
        if self.moving.in_slabs:
            multiply_in_slabs(self.workspace, self.form, a, b, out, whole, alpha, beta)
        else:
            self.workspace.accumulate(a, b, self.form, out, alpha, beta)

    def _home(self, count: int, out: Array) -> Array:
        """Panel `count` of C, on the member of the summing axis that owns it."""
        cut = self.moving.cuts[count]
        start = cut.x_start if self.a_moves else cut.y_start
        part = slice(start, start + cut.width)
        return out[part] if self.a_moves else out[:, part]

    def _reduced(self, count: int, summand: Array, target: Array, beta: Any, in_flight: bool) -> Callable[[], None]:
        """Start reducing panel `count` onto its owner; the returned function waits for it and adds the sum to C."""
        summed = self._sums[count].of(summand)
        pending = summed.start(summand, into=summand) if in_flight else Completed(summed.run(summand, into=summand))

        def end() -> None:
            pending.wait()
            if self.along.index == summed.route.root:
                add(summand, target, beta)

        return end
