# A tensor taken from one layout to another, with its gradient, which goes back the same way. Needs torch.
# Next: nn/bert.py, whose head reads the stream after one linear instead of two.
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
    """This rank's block in `target` of the tensor of global `shape` whose block in `source` is given, with gradient.

    An axis that a layout does not name holds equal copies, of the tensor and of its gradient alike. Words: those of the new
    block that the rank lacks (`layout.Redistribution.words_of`), forward and backward; nothing where the layouts are equal.
    """
    return block if source == target else _Relayout.apply(block, tuple(shape), grid, source, target)
