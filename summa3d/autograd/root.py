"""The root of a graph without the tensor that it was built for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Root(torch.autograd.Function):
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
