"""The communication-avoiding 2.5-D product on q×q×d ranks: each depth runs its share of SUMMA's steps into a copy of C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...comm.device.arrays import Array
from ...layout.layout import Layout, split_range, split_sizes
from ..local.blas import seed
from .executor import Executor
from .panels import BroadcastPanels, divided, panels
from .summa import Outer, SummaPlan, in_loops
from .tesseract import square_grids


@dataclass(frozen=True)
class Ca25dPlan(SummaPlan):
    """A product on q×q×d ranks, axes x, y, d; C stays in every form, so that all of them move the same words.

    | form | A | B | C |
    |---|---|---|---|
    | n· | [m:x, k:(d,y)] | | [m:(x,d), n:y] |
    | t· | [k:(d,y), m:x] | | [m:(x,d), n:y] |
    | ·n | | [k:(d,x), n:y] | [m:(x,d), n:y] |
    | ·t | | [n:y, k:(d,x)] | [m:(x,d), n:y] |

    Words per rank (mean): [(q−1)(mk + kn) + (d−1)mn]/P.
    """

    d: str = "d"

    takes_grains = False
    transposes = False

    def layout_of(self, operand: str, names: str) -> Layout:
        """m:x k:(d,y), k:(d,x) n:y and m:(x,d) n:y."""
        k = (self.d, self.y if operand == "a" else self.x)
        axes = {"m": (self.x, self.d) if operand == "c" else (self.x,), "n": (self.y,), "k": k}
        return Layout(axes[names[0]], axes[names[1]], names=names)

    @classmethod
    def grids(cls, ranks: int) -> list[dict[str, int]]:
        """Every q×q×d of this many ranks, the squarest first."""
        return square_grids(ranks)


class Ca25d(Executor):
    """SUMMA over this depth's part of k into a copy of C, then a reduce-scatter of C over the depths.

    Source: Solomonik and Demmel 2011, Algorithm 2. Here C stays scattered over the depths, and A and B are split over the depths
    from the start instead of copied to them.
    """

    plan: Ca25dPlan

    def _prepare(self) -> None:
        plan, grid = self.plan, self.grid
        x, y, self.depth = grid[plan.x], grid[plan.y], grid[plan.d]
        span = split_range(0, plan.k, self.depth.size, self.depth.index)
        workspace = self.workspace

        def loop(pieces: int) -> Outer:
            ahead, cuts = plan.ahead(pieces, grid.shape), divided(panels(*span, x.size, y.size, plan.panel), pieces)
            left = BroadcastPanels(workspace, "a", y, "y", 1 if plan.form[0] == "n" else 0, cuts, ahead)
            right = BroadcastPanels(workspace, "b", x, "x", 0 if plan.form[1] == "n" else 1, cuts, ahead)
            return Outer(workspace, plan.form, left, right)

        self.loop = in_loops(plan, grid, loop)
        self.copy = Layout((plan.x,), (plan.y,)).local_shape(plan.c_shape, grid.shape, grid.coordinates)
        self.rows = split_sizes(self.copy[0], self.depth.size)

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """SUMMA over this depth's part of k, then a reduce-scatter of C along d."""
        if self.depth.size == 1:
            return self.loop(a, b, out, alpha, beta)
        copy = self.workspace.buffer("copy of c", self.copy, out)
        self.loop(a, b, copy, alpha, seed(copy, self.rows, self.depth.index, out, beta))
        parts = self.workspace.buffer("parts", (self.depth.size, *out.shape), out)
        self.depth.reduce_scatter(copy, sizes=self.rows, into=out, parts=parts)
