"""Tesseract, the 2.5-D product on q×q×d ranks: SUMMA on every depth, each with its own rows of A and C and a copy of B."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

from ...comm.axis import Axis
from ...comm.device.arrays import Array
from ...layout.layout import Layout
from .executor import Multiply
from .summa import Summa, SummaPlan, normal


@dataclass(frozen=True)
class TesseractPlan(SummaPlan):
    """A product on q×q×d ranks, axes x, y, d.

    | form | A | B | C | words per rank (mean) |
    |---|---|---|---|---|
    | nn | [m:(d,x), k:y] | [k:x, n:y] | [m:(d,x), n:y] | (q−1)(mk/d + kn)/q² |
    | nt | [m:(d,x), k:y] | [n:x, k:y] | [m:(d,x), n:y] | (q−1)(kn + mn/d)/q² |
    | tn | [k:(d,x), m:y] | [k:(d,x), n:y] | [m:x, n:y] | [(q−1)(mk/d + mn) + 2(d−1)/d·mn]/q² |
    | tt | [k:x, m:y] | [n:(d,x), k:y] | [m:(d,x), n:y] | nn of B·A, and one transpose |

    What a form does not split by d is copied on every depth.
    """

    d: str = "d"

    def layout_of(self, operand: str, names: str) -> Layout:
        """rows:(d,x) columns:y, or rows:x with a copy on every depth: C for tn, A for tt, B for nn and nt."""
        copied = {"nn": "b", "nt": "b", "tn": "c", "tt": "a"}[normal(self.form)]
        return Layout((self.x,) if operand == copied else (self.d, self.x), (self.y,), names=names)

    @classmethod
    def grids(cls, ranks: int) -> list[dict[str, int]]:
        """Every q×q×d of this many ranks, the squarest first."""
        return square_grids(ranks)


def square_grids(ranks: int) -> list[dict[str, int]]:
    """Every q×q×d of this many ranks, as axes x, y, d; the squarest first."""
    roots = [root for root in range(isqrt(ranks), 0, -1) if ranks % (root * root) == 0]
    return [{"x": root, "y": root, "d": ranks // (root * root)} for root in roots]


class Tesseract(Summa):
    """SUMMA on each depth; form tn sums C over the depths. Source: Wang et al. 2021, with its two transposed forms."""

    plan: TesseractPlan

    def _prepare(self) -> None:
        super()._prepare()
        if normal(self.plan.form) == "tn":
            self.multiply_into = Summed(self.multiply_into, self.grid[self.plan.d])


class Summed:
    """SUMMA's loop on this depth, and an all-reduce of C along d."""

    def __init__(self, loop: Multiply, depth: Axis) -> None:
        self.loop, self.depth = loop, depth

    def __call__(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        self.loop(a, b, out, alpha, beta if self.depth.index == 0 else 0)  # one depth brings what C held
        self.depth.all_reduce(out, into=out)
