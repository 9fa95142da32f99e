"""Bias fusion: the bias that a linear layer skipped (`skip_bias_add`) is added by the kernel that follows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from summa3d.kernels import dispatch, reference
from summa3d.kernels.mask import Mask

from ...autograd.function import Function, once_differentiable


class _BiasActivation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, form: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.form = form
        return dispatch.kernels_for(x).bias_activation(x, bias, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *dispatch.kernels_for(grad).bias_activation_gradient(grad, *ctx.saved_tensors, ctx.form), None


def bias_activation(x: Tensor, bias: Tensor | None, *, form: str) -> Tensor:
    """f(x + bias), with bias fusion where the linear layer skipped the addition; x is kept for backward.

    form : "gelu_tanh", "gelu" or "relu2" (`nn.config.ACTIVATIONS`)
    """
    if bias is None and form in reference.APPROXIMATE and not x.is_meta and dispatch.kernels_for(x) is reference:
        return reference.bias_activation(x, None, form)  # torch's own function, whose graph calls no Python
    return _BiasActivation.apply(x, bias, form)


class _BiasDropoutAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None, mask: Mask, probability: float) -> Tensor:
        kept = dispatch.kernels_for(x).dropout_mask(x, mask)
        ctx.save_for_backward(*([kept] if isinstance(kept, Tensor) else []))
        ctx.mask, ctx.probability = kept if isinstance(kept, Mask) else None, probability
        return dispatch.kernels_for(x).dropout_add(x, kept, probability, residual, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors[0] if ctx.mask is None else ctx.mask
        of_x, of_residual, of_bias, *_ = ctx.needs_input_grad
        grads = (
            dispatch.kernels_for(grad).dropout_gradient(grad, kept, ctx.probability, of_bias) if of_x or of_bias else (None, None)
        )
        return grads[0], grad if of_residual else None, grads[1], None, None


def bias_dropout_add(x: Tensor, residual: Tensor | None, bias: Tensor | None, mask: Mask, probability: float) -> Tensor:
    """residual + dropout(x + bias), with bias fusion on a device; the mask is kept for backward, or drawn again on a device.

    residual, bias : None where there is none
    """
    return _BiasDropoutAdd.apply(x, residual, bias, mask, probability)
