# Conjugate pairs of collectives: what one does forward, its partner does to the gradient. Needs torch.
# Next: nn/embedding.py, which is written with them.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Axis


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.all_gather(block.detach(), dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.reduce_scatter(grad, ctx.dim, ctx.sizes), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.reduce_scatter(partial.detach(), dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_gather(grad, ctx.dim, ctx.sizes), None, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(grad), None


def all_gather(block: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Gather along `axis`; the gradient is summed and scattered back. Words n − n_r forward, (g−1)·n_r backward."""
    return block if axis.size == 1 else _Gather.apply(block, axis, dim, sizes)


def reduce_scatter(partial: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Sum along `axis` and scatter; the gradient is gathered. Words (g−1)·n_r forward, n − n_r backward."""
    return partial if axis.size == 1 else _Scatter.apply(partial, axis, dim, sizes)


def sum_gradient(value: Tensor, axis: Axis) -> Tensor:
    """`value` itself, equal on the ranks of `axis`, each of which uses it for other rows: its gradient is summed over them."""
    return value if axis.size == 1 else _SumGradient.apply(value, axis)
