"""The base of the autograd functions: what torch's own does, a transform's refusal and the missing second derivative included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from summa3d.autograd.function import Function, once_differentiable


class Squared(Function):
    """x², whose backward has no backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert not torch.is_grad_enabled()
        return 2 * ctx.saved_tensors[0] * grad, None


def test_a_function_has_a_gradient():
    x = torch.arange(5.0, requires_grad=True)
    Squared.apply(x, 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_marked_backward_says_that_it_has_no_second_derivative():
    x = torch.arange(5.0, requires_grad=True)
    (first,) = torch.autograd.grad(Squared.apply(x, 2).square().sum(), x, create_graph=True)
    assert torch.equal(first.detach(), 4 * x.detach() ** 3)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_a_transform_is_refused_with_its_reason():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: Squared.apply(x, 2).sum())(torch.ones(3))
