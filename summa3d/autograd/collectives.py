"""Conjugate pairs of collectives as autograd functions: all-gather with reduce-scatter, all-reduce with identity.

`sum_gradient` is Megatron's f (identity forward, all-reduce backward), `all_reduce` is Megatron's g (all-reduce forward,
identity backward). Each backward applies the conjugate function, so gradients have gradients too (create_graph=True).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..comm.axis import Axis
from .function import Function

Map = Callable[[Tensor], Tensor]


class _Conjugate(Function):
    """`run` of a tensor; backward runs `back` of the gradient, whose own backward is `run` again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Map, back: Map) -> Tensor:
        ctx.pair = back, run
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return conjugate(grad, *ctx.pair), None, None


def conjugate(tensor: Tensor, run: Map, back: Map) -> Tensor:
    """Return `run(tensor)`; backward runs `back` on the gradient. Each is the other's adjoint; neither keeps a tensor."""
    result: Tensor = _Conjugate.apply(tensor, run, back)
    return result


def _gather_and_scatter(axis: Axis, dim: int, sizes: Sequence[int]) -> tuple[Map, Map]:
    return lambda block: axis.all_gather(block.detach(), dim, sizes), lambda part: axis.reduce_scatter(part.detach(), dim, sizes)


def _sum_over(axis: Axis) -> Map:
    return lambda partial: axis.all_reduce(partial.detach())


def _identity(value: Tensor) -> Tensor:
    return value.view_as(value)


def all_gather(block: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """All-gather the blocks along `axis`; backward is the reduce-scatter of the gradient.

    Parameters
    ----------
    block : this rank's block, of `sizes[axis.index]` along `dim`
    sizes : the extents of all members' blocks along `dim`

    Returns the whole tensor. Words on rank r of g: n − n_r forward, (g−1)·n_r backward (n elements, n_r of them its own).
    """
    return block if axis.size == 1 else conjugate(block, *_gather_and_scatter(axis, dim, sizes))


def reduce_scatter(partial: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Reduce-scatter `partial` along `axis`; backward is the all-gather of the gradient.

    Parameters
    ----------
    partial : this rank's summand of the whole tensor
    sizes : the extents of all members' blocks of the sum along `dim`

    Returns this rank's block of the sum. Words on rank r of g: (g−1)·n_r forward, n − n_r backward.
    """
    return partial if axis.size == 1 else conjugate(partial, *_gather_and_scatter(axis, dim, sizes)[::-1])


def sum_gradient(value: Tensor, axis: Axis) -> Tensor:
    """Return `value`; backward all-reduces its gradient over `axis` (Megatron's f).

    For a value that is equal on the members of `axis`, each of which applies it to other rows. Words: 0 forward; backward
    those of `all_reduce` forward.
    """
    return value if axis.size == 1 else conjugate(value, _identity, _sum_over(axis))


def all_reduce(partial: Tensor, axis: Axis) -> Tensor:
    """All-reduce `partial` along `axis`; backward is the identity (Megatron's g).

    Every member uses the sum alike, so every member already holds the gradient. Words on rank r of g: n + (g−2)·n_r forward,
    0 backward.
    """
    return partial if axis.size == 1 else conjugate(partial, _sum_over(axis), _identity)


def scatter_from(whole: Tensor, axis: Axis, root: int, sizes: Sequence[int]) -> Tensor:
    """Scatter the rows of member `root`, `sizes[r]` of them to member r; backward gathers the gradient on the root.

    `whole` is the tensor on the root; on the other members only its shape matters. Words: n_r on each other member forward,
    n − n_r on the root backward.
    """
    if axis.size == 1:
        return whole
    here, nothing = axis.index == root, [0] * axis.size
    own = [sizes[axis.index] if member == root else 0 for member in range(axis.size)]

    def scatter(whole: Tensor) -> Tensor:
        return axis.all_to_all(whole.detach() if here else whole.detach()[:0], 0, sizes if here else nothing, own)

    def gather(block: Tensor) -> Tensor:  # zeros of the joined shape elsewhere than on the root
        result: Tensor = axis.all_to_all(block.detach(), 0, own, sizes if here else nothing)
        return result if here else result.new_zeros(sum(sizes), *result.shape[1:])

    return conjugate(whole, scatter, gather)


def broadcast_from(block: Tensor, axis: Axis, root: int, shape: Sequence[int]) -> Tensor:
    """Broadcast the block of member `root`, of `shape`, along `axis`; backward reduces the gradient to the root.

    The other members pass an empty block. Words: n on each other member forward; (g−1)·n_r backward.
    """
    if axis.size == 1:
        return block
    here, own = axis.index == root, block.shape

    def broadcast(block: Tensor) -> Tensor:
        return axis.broadcast(block.clone() if here else block.new_empty(shape), root)

    def reduce(partial: Tensor) -> Tensor:  # an empty tensor elsewhere than on the root
        total: Tensor | None = axis.reduce(partial.detach().contiguous(), root)
        return partial.new_empty(own) if total is None else total

    return conjugate(block, broadcast, reduce)
