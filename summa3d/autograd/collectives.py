"""Conjugate pairs of collectives as autograd functions: all-gather with reduce-scatter, all-reduce with identity.

`sum_gradient` is Megatron's f (identity forward, all-reduce backward), `all_reduce` is Megatron's g (all-reduce forward,
identity backward). Each backward applies the conjugate function, so gradients have gradients too (create_graph=True).
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
    """Gather the members' rows on `root`; the other members get zeros of the joined shape."""

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
    """Sum the members' tensors on `root`; the other members get an empty tensor of the shape `block`."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, root: int, block: Sequence[int]) -> Tensor:
        ctx.axis, ctx.root, ctx.shape = axis, root, partial.shape
        total: Tensor | None = axis.reduce(partial.detach().contiguous(), root)
        return partial.new_empty(block) if total is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _BroadcastFrom.apply(grad, ctx.axis, ctx.root, ctx.shape), None, None, None


def _only(member: int, count: int, size: int) -> list[int]:
    """Counts for `size` members: `count` for `member`, 0 for the others."""
    return [count if index == member else 0 for index in range(size)]


def all_gather(block: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """All-gather the blocks along `axis`; backward is the reduce-scatter of the gradient.

    Parameters
    ----------
    block : this rank's block, of `sizes[axis.index]` along `dim`
    sizes : the extents of all members' blocks along `dim`

    Returns the whole tensor. Words on rank r of g: n − n_r forward, (g−1)·n_r backward (n elements, n_r of them its own).
    """
    return block if axis.size == 1 else _Gather.apply(block, axis, dim, sizes)


def reduce_scatter(partial: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Reduce-scatter `partial` along `axis`; backward is the all-gather of the gradient.

    Parameters
    ----------
    partial : this rank's summand of the whole tensor
    sizes : the extents of all members' blocks of the sum along `dim`

    Returns this rank's block of the sum. Words on rank r of g: (g−1)·n_r forward, n − n_r backward.
    """
    return partial if axis.size == 1 else _Scatter.apply(partial, axis, dim, sizes)


def sum_gradient(value: Tensor, axis: Axis) -> Tensor:
    """Return `value`; backward all-reduces its gradient over `axis` (Megatron's f).

    For a value that is equal on the members of `axis`, each of which applies it to other rows. Words: 0 forward; backward
    those of `all_reduce` forward.
    """
    return value if axis.size == 1 else _SumGradient.apply(value, axis)


def all_reduce(partial: Tensor, axis: Axis) -> Tensor:
    """All-reduce `partial` along `axis`; backward is the identity (Megatron's g).

    Every member uses the sum alike, so every member already holds the gradient. Words on rank r of g: n + (g−2)·n_r forward,
    0 backward.
    """
    return partial if axis.size == 1 else _Sum.apply(partial, axis)


def scatter_from(whole: Tensor, axis: Axis, root: int, sizes: Sequence[int]) -> Tensor:
    """Scatter the rows of member `root`, `sizes[r]` of them to member r; backward gathers the gradient on the root.

    `whole` is the tensor on the root; on the other members only its shape matters. Words: n_r on each other member forward,
    n − n_r on the root backward.
    """
    return whole if axis.size == 1 else _ScatterFrom.apply(whole, axis, root, sizes)


def broadcast_from(block: Tensor, axis: Axis, root: int, shape: Sequence[int]) -> Tensor:
    """Broadcast the block of member `root`, of `shape`, along `axis`; backward reduces the gradient to the root.

    The other members pass an empty block. Words: n on each other member forward; (g−1)·n_r backward.
    """
    return block if axis.size == 1 else _BroadcastFrom.apply(block, axis, root, shape)
