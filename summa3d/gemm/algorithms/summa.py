"""SUMMA, the 2-D product on any R×C grid: the plan, and its two loops (C stays, or an operand stays)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...comm.axis import Axis
from ...comm.device.arrays import Array, dtype_name
from ...comm.pending import Completed
from ...comm.prepared import Prepared
from ...errors import ShapeError
from ...layout.layout import Layout
from ..local.blas import add, adds_in_place, scale
from .checks import is_whole
from .executor import Executor
from .panels import BroadcastPanels, panels
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
    the product of the current ones.
    """

    x: str = "x"
    y: str = "y"
    panel: int | None = None
    lookahead: bool = False

    transposes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.panel is not None and (not is_whole(self.panel) or self.panel < 1):
            raise ShapeError(f"panel is {self.panel!r}; its width is a whole number of at least 1.")

    def layout_of(self, operand: str, names: str) -> Layout:
        """rows:x columns:y, as each is stored."""
        return Layout((self.x,), (self.y,), names=names)


class Summa(Executor):
    """SUMMA: products of one panel at a time, by one of two loops.

    Source: van de Geijn and Watts 1997, here on splits that may be uneven.
    """

    plan: SummaPlan

    def _prepare(self) -> None:
        plan, x, y = self.plan, self.grid[self.plan.x], self.grid[self.plan.y]
        extent = {"nn": plan.k, "nt": plan.n, "tn": plan.m}[normal(plan.form)]
        cuts = panels(0, extent, x.size, y.size, plan.panel)
        left = BroadcastPanels(self.workspace, "a", y, "y", 1, cuts, plan.lookahead)
        right = BroadcastPanels(self.workspace, "b", x, "x", 0, cuts, plan.lookahead)
        if normal(plan.form) == "nn":
            self.multiply_into = Outer(self.workspace, plan.form, left, right)
        else:
            self.multiply_into = Inner(self.workspace, plan.form, *((right, y) if normal(plan.form) == "nt" else (left, x)))


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
        for left, right in zip(self.left.each(a), self.right.each(b), strict=True):
            self.workspace.accumulate(left, right, self.form, out, alpha, beta, scratch)
            beta = 1


class Inner:
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
        last: Callable[[], None] = lambda: None  # noqa: E731
        for count, panel in enumerate(self.moving.each(a if self.a_moves else b)):
            operands = (panel, staying) if self.a_moves else (staying, panel)
            target = self._home(count, out)
            if direct:
                self.workspace.accumulate(*operands, self.form, target, alpha, beta)
                continue
            width = self.moving.cuts[count].width
            shape = (width, out.shape[1]) if self.a_moves else (out.shape[0], width)
            slot = count % 2 if self.moving.lookahead else 0
            partial = self.workspace.buffer(f"partial {slot}", shape, out, capacity)
            self.workspace.accumulate(*operands, self.form, partial, alpha, 0)
            last()
            last = self._reduced(count, partial, target, beta)
            if not self.moving.lookahead:
                last()
                last = lambda: None  # noqa: E731
        last()

    def _home(self, count: int, out: Array) -> Array:
        """Panel `count` of C, on the member of the summing axis that owns it."""
        cut = self.moving.cuts[count]
        start = cut.x_start if self.a_moves else cut.y_start
        part = slice(start, start + cut.width)
        return out[part] if self.a_moves else out[:, part]

    def _reduced(self, count: int, partial: Array, target: Array, beta: Any) -> Callable[[], None]:
        """Start reducing panel `count` onto its owner; the returned function waits for it and adds the sum to C."""
        summed = self._sums[count].of(partial)
        lookahead = self.moving.lookahead
        pending = summed.start(partial, into=partial) if lookahead else Completed(summed.run(partial, into=partial))

        def end() -> None:
            pending.wait()
            if self.along.index == summed.route.root:
                add(partial, target, beta)

        return end
