"""The root and the leaf of a graph without the tensors that it was built for and on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .function import Function


class _Root(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: list[Tensor]) -> Tensor:
        ctx.slot = slot
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.slot.pop(), None


def root_of(y: Tensor, slot: list[Tensor]) -> Tensor:
    """A scalar whose backward continues with the gradient of y that was put into `slot`: it keeps the graph of y, and not y."""
    root: Tensor = _Root.apply(y, slot)
    return root


class _Leaf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, slot: list[Tensor]) -> Tensor:
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.slot.append(gradients[0])
        return None, None, None


def leaf_of(x: Tensor, slot: list[Tensor]) -> Tensor:
    """A view of x whose gradient is put into `slot`: what needs a gradient of x, without keeping x or the gradient."""
    leaf: Tensor = _Leaf.apply(x, x.new_zeros((), requires_grad=True), slot)
    return leaf
