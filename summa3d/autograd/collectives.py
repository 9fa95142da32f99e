"""Conjugate pairs of collectives as torch functions: what one does forward, its partner does to the gradient.

Each backward is its partner applied to the gradient, so that gradients have gradients too (create_graph=True).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.axis import Axis


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.all_gather(block.detach(), dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Scatter.apply(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.reduce_scatter(partial.detach(), dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Gather.apply(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(partial.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumGradient.apply(grad, ctx.axis), None


class _ScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, root: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.root, ctx.sizes = axis, root, sizes
        nothing = [0] * axis.size
        sent = whole.detach() if axis.index == root else whole.detach()[:0]
        return axis.all_to_all(sent, 0, sizes if axis.index == root else nothing, _only(root, sizes[axis.index], axis.size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherTo.apply(grad, ctx.axis, ctx.root, ctx.sizes), None, None, None


class _GatherTo(torch.autograd.Function):
    """The rows `sizes` that the members hold, joined on `root`; zeros of that shape elsewhere."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, root: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.root, ctx.sizes = axis, root, sizes
        received = sizes if axis.index == root else [0] * axis.size
        whole = axis.all_to_all(block.detach(), 0, _only(root, len(block), axis.size), received)
        return whole if axis.index == root else whole.new_zeros(sum(sizes), *whole.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ScatterFrom.apply(grad, ctx.axis, ctx.root, ctx.sizes), None, None, None


class _BroadcastFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, root: int, shape: Sequence[int]) -> Tensor:
        ctx.axis, ctx.root, ctx.block = axis, root, block.shape
        return axis.broadcast(block.clone() if axis.index == root else block.new_empty(shape), root)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ReduceTo.apply(grad, ctx.axis, ctx.root, ctx.block), None, None, None


class _ReduceTo(torch.autograd.Function):
    """The sum of the members' tensors on `root`; elsewhere a tensor without elements, of the shape `block`."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, root: int, block: Sequence[int]) -> Tensor:
        ctx.axis, ctx.root, ctx.shape = axis, root, partial.shape
        total: Tensor | None = axis.reduce(partial.detach().contiguous(), root)
        return partial.new_empty(block) if total is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _BroadcastFrom.apply(grad, ctx.axis, ctx.root, ctx.shape), None, None, None


def _only(member: int, count: int, size: int) -> list[int]:
    return [count if index == member else 0 for index in range(size)]


def all_gather(block: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Gather along `axis`; the gradient is summed and scattered back. Words n − n_r forward, (g−1)·n_r backward."""
    return block if axis.size == 1 else _Gather.apply(block, axis, dim, sizes)


def reduce_scatter(partial: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Sum along `axis` and scatter; the gradient is gathered. Words (g−1)·n_r forward, n − n_r backward."""
    return partial if axis.size == 1 else _Scatter.apply(partial, axis, dim, sizes)


def sum_gradient(value: Tensor, axis: Axis) -> Tensor:
    """`value` itself, equal on the ranks of `axis`, each of which uses it for other rows: its gradient is summed over them."""
    return value if axis.size == 1 else _SumGradient.apply(value, axis)


def all_reduce(partial: Tensor, axis: Axis) -> Tensor:
    """Sum along `axis`, each of whose members uses the sum alike: the gradient is theirs as it is. Words n + (g−2)·n_r; 0."""
    return partial if axis.size == 1 else _Sum.apply(partial, axis)


def scatter_from(whole: Tensor, axis: Axis, root: int, sizes: Sequence[int]) -> Tensor:
    """Rows `sizes` of what member `root` holds, one part to each; the others' `whole` counts for its shape only.

    Words n_r from another member, and backward on the root n − n_r.
    """
    return whole if axis.size == 1 else _ScatterFrom.apply(whole, axis, root, sizes)


def broadcast_from(block: Tensor, axis: Axis, root: int, shape: Sequence[int]) -> Tensor:
    """What member `root` holds, of `shape`, on all members, the others' blocks being empty; its gradient is summed onto the root.

    Words n on the others; backward (g−1)·n_r.
    """
    return block if axis.size == 1 else _BroadcastFrom.apply(block, axis, root, shape)
