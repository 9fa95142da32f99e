"""The products of a block by the layouts of their operands alone: what a rank multiplies, and receives, on columns of grids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ...gemm.algorithms.plan import ProductPlan
from ..config import ModelConfig
from .registry import SCHEME_SPECS
from .scheme import Scheme

Numeric = Any
"""A number, or a column of them."""
A, B, C = OPERANDS = range(3)
SUMMED = "nmk"
"""The dim that is summed over where A, B, C is the result: dA = dC·Bᵀ, dB = Aᵀ·dC, C = A·B."""


class LaidOutProduct:
    """C (m×n) = A·B, and its gradients, on any grid, of which an axis may have any size.

    An axis that splits a dim in both operands that have it splits the work; along its other axes an operand is gathered, or, as
    the result, summed. Where the two split a dim by different axes, the product is taken in panels of it.

    sizes : dim → size. axes : of each operand, dim → axes. shared : dim → axes that split the work. panels : dim → the axes of
    either operand, of those that are taken in panels. factors : of each operand, how many times as many words it has as the
    plan says: of a mixture's feed-forward layer, whose tokens are sent to each of their experts, and whose weights are those of
    one (`holding`). expert : an expert's part of the weights in the plan
    """

    def __init__(self, plan: ProductPlan, factors: Sequence[Numeric] = (1.0, 1.0, 1.0), expert: float = 0.0) -> None:
        self.factors, self.expert = factors, expert
        names = plan.a_names, plan.b_names, "mn"
        self.sizes: dict[str, int] = {"m": plan.m, "n": plan.n, "k": plan.k}
        self.axes = [dict(zip(dims, layout.dims, strict=True)) for dims, (layout, _) in zip(names, plan.stored, strict=True)]
        both = {dim: tuple(axis[dim] for axis in self.axes if dim in axis) for dim in self.sizes}
        self.shared = {dim: tuple(axis for axis in item if axis in other) for dim, (item, other) in both.items()}
        self.panels = {dim: pair for dim, pair in both.items() if all(pair) and not self.shared[dim]}
        self._apart = [
            tuple(axis for dim, axes in of.items() for axis in axes if axis not in self.shared[dim]) for of in self.axes
        ]
        self.gathers = not self.panels and any(self.apart(A) + self.apart(B))

    def holding(self, experts: Numeric) -> LaidOutProduct:
        """The product on a rank that holds so many experts of a layer; the same where it is not theirs."""
        if not self.expert:
            return self
        result, (a, b, c) = copy(self), self.factors
        result.factors = a, b + (experts - 1) * self.expert, c
        return result

    def apart(self, operand: int) -> tuple[str, ...]:
        """The axes that split an operand, and not the work."""
        return self._apart[operand]

    def words(self, operand: int, grid: Mapping[str, Numeric], rows: Numeric) -> Numeric:
        """Words of a rank's block of an operand of the whole product, which has so many rows (m)."""
        dims = self.axes[operand]
        return self.factors[operand] * prod(
            (rows if dim == "m" else self.sizes[dim]) / parts(axes, grid) for dim, axes in dims.items()
        )

    def gathered(self, operand: int, grid: Mapping[str, Numeric], rows: Numeric) -> Iterator[tuple[str, Numeric]]:
        """(axis, words that a rank receives) of a gather of an operand."""
        apart = self.apart(operand)
        own = self.words(operand, grid, rows) if apart else 0
        for axis in apart:
            yield axis, (grid[axis] - 1) * own

    def summed(self, operand: int, grid: Mapping[str, Numeric], rows: Numeric) -> Iterator[tuple[str, bool, Numeric]]:
        """(axis, whether all ranks keep the sum, words that a rank receives) of the sums that make an operand."""
        apart, own = self.apart(operand), self.words(operand, grid, rows)
        for axis in self.shared[SUMMED[operand]]:
            kept = axis not in apart
            yield axis, kept, (grid[axis] - 1) * own * (2 / grid[axis] if kept else 1)

    def count(self, grid: Mapping[str, Numeric]) -> Numeric:
        """The fewest panels in which a rank takes the product."""
        return prod(np.maximum(*(parts(axes, grid) for axes in pair)) for pair in self.panels.values())

    def local(self, grid: Mapping[str, Numeric], rows: Numeric) -> tuple[Numeric, Numeric, Numeric]:
        """The m, n and k of a rank's products, of each panel."""
        sizes = {**self.sizes, "m": rows}
        cut = {dim: self.count(grid) if dim in self.panels else parts(axes, grid) for dim, axes in self.shared.items()}
        m, n, k = (sizes[dim] / cut[dim] for dim in "mnk")
        return m, n, k


def parts(axes: tuple[str, ...], grid: Mapping[str, Numeric]) -> Numeric:
    """In how many parts axes split a dim."""
    return prod(grid[axis] for axis in axes)


@cache
def alone(scheme: str) -> Scheme:
    """A scheme on one rank, for what does not depend on sizes of axes."""
    return Scheme.of(scheme, SCHEME_SPECS[scheme].grids(1)[0])


@cache
def products_of(scheme: str, model: ModelConfig) -> tuple[LaidOutProduct, ...]:
    """The products of a block with its weights, in order."""
    plans = alone(scheme).block(model, 1)
    if not model.num_experts:
        return tuple(map(LaidOutProduct, plans))
    width, sent = model.matrices[-1][0], float(model.num_chosen + (model.shared_width > 0))
    item, shared = (part / width for part in (model.expert_width, model.shared_width))
    up, down = ((sent, item + shared, 1.0), item), ((1.0, item + shared, sent), item)
    return *map(LaidOutProduct, plans[:2]), LaidOutProduct(plans[2], *up), LaidOutProduct(plans[3], *down)


@cache
def _one_of(scheme: str) -> LaidOutProduct:
    """A product of the stream, of one element."""
    own = alone(scheme)
    return LaidOutProduct(own.plan(own.residual, "nn", 1, 1, 1))


def family_of(scheme: str, shape: Mapping[str, int]) -> str:
    """The family of a scheme on a grid.

    >>> family_of("cuboid", {"x": 8, "y": 2, "z": 1}), family_of("cuboid", {"x": 2, "y": 2, "z": 2})
    ('FSDP', 'cuboid')
    """
    own, product = alone(scheme), _one_of(scheme)
    if product.panels:
        return "2.5-D" if len(own.spec.axes) > 2 else "2-D"
    if parts(own.residual.dims[-1], shape) > 1:
        return "cuboid"
    return "FSDP" if any(words > 0 for _, words in product.gathered(B, shape, 1)) else "1-D"
