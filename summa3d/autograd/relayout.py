"""Redistribution of a tensor from one layout to another as an autograd function: the gradient is redistributed back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.grid import Grid
from ..layout.layout import Layout
from ..layout.redistribute import redistribute


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, shape: Sequence[int], grid: Grid, source: Layout, target: Layout) -> Tensor:
        ctx.shape, ctx.grid, ctx.source, ctx.target = shape, grid, source, target
        return redistribute(block.detach(), shape, grid, source, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Relayout.apply(grad, ctx.shape, ctx.grid, ctx.target, ctx.source), None, None, None, None


def relayout(block: Tensor, shape: Sequence[int], grid: Grid, source: Layout, target: Layout) -> Tensor:
    """Redistribute a tensor from layout `source` to layout `target`, with gradient.

    Parameters
    ----------
    block : this rank's block in `source`
    shape : the global shape of the tensor
    grid : the grid whose axes the layouts name

    Returns this rank's block in `target`. Along an axis that a layout does not name, ranks hold equal copies of the tensor
    and of its gradient. Words: the words of the new block that the rank does not hold yet
    (`layout.Redistribution.words_of`), forward and backward; none where the layouts are equal.
    """
    return block if source == target else _Relayout.apply(block, tuple(shape), grid, source, target)
