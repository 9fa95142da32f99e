# One entry per function: tensors on a CUDA device go to the fused kernel, all others to plain torch. Nothing else chooses.
# Imports reference; load when a tensor is on a device. What a function does, with its shapes, is said in reference.py.
# Next: reference.py, rows.py, elements.py.
from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference
from .mask import Mask

if TYPE_CHECKING:
    from .rows import StartSum


of_meta: ContextVar[Any] = ContextVar("of_meta", default=reference)
"""What has the functions below for tensors without memory: a dry run of a device sets kernels that compute nothing."""


def kernels_for(x: Tensor) -> Any:
    """What has the functions below for x: the module reference, or the fused kernels of x's device."""
    if not x.is_cuda:
        return of_meta.get() if x.is_meta else reference
    from .load import fused

    return fused(x.device)


def norm_sums(x: Tensor) -> Tensor:
    return kernels_for(x).norm_sums(x)


def norm_statistics(sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return kernels_for(sums).norm_statistics(sums, n, eps, dtype)


def layer_norm(x: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return kernels_for(x).layer_norm(x, mean, inverse, gamma, beta)


def layer_norm_gradient(
    gradient: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, inverse: Tensor, n: int, start_sum: StartSum
) -> tuple[Tensor, Tensor]:
    return kernels_for(x).layer_norm_gradient(gradient, x, gamma, mean, inverse, n, start_sum)


def rms_sums(x: Tensor) -> Tensor:
    return kernels_for(x).rms_sums(x)


def rms_inverse(sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> Tensor:
    return kernels_for(sums).rms_inverse(sums, n, eps, dtype)


def rms_norm(x: Tensor, inverse: Tensor, gamma: Tensor) -> Tensor:
    return kernels_for(x).rms_norm(x, inverse, gamma)


def rms_norm_gradient(
    gradient: Tensor, x: Tensor, gamma: Tensor, inverse: Tensor, n: int, start_sum: StartSum
) -> tuple[Tensor, Tensor]:
    return kernels_for(x).rms_norm_gradient(gradient, x, gamma, inverse, n, start_sum)


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return kernels_for(x).bias_gelu(x, bias, approximate)


def bias_gelu_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor | None]:
    return kernels_for(x).bias_gelu_gradient(gradient, x, bias, approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return kernels_for(gate).swiglu(gate, up)


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return kernels_for(gate).swiglu_gradient(gradient, gate, up)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    return kernels_for(x).rotate(x, cosine, sine, back)


def dropout_mask(x: Tensor, mask: Mask) -> Tensor | Mask:
    return kernels_for(x).dropout_mask(x, mask)


def dropout_add(
    x: Tensor, mask: Tensor | Mask, probability: float, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return kernels_for(x).dropout_add(x, mask, probability, residual, bias)


def dropout_gradient(
    gradient: Tensor, mask: Tensor | Mask, probability: float, summed: bool = False
) -> tuple[Tensor, Tensor | None]:
    return kernels_for(gradient).dropout_gradient(gradient, mask, probability, summed)


def loss_input(logits: Tensor) -> Tensor:
    return kernels_for(logits).loss_input(logits)


def row_maximum(logits: Tensor) -> Tensor:
    return kernels_for(logits).row_maximum(logits)


def cross_entropy_sums(logits: Tensor, maximum: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return kernels_for(logits).cross_entropy_sums(logits, maximum, labels, first)


def cross_entropy_kept(values: Tensor, maximum: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    return kernels_for(values).cross_entropy_kept(values, maximum, total)


def cross_entropy_gradient(kept: tuple[Tensor, ...], labels: Tensor, first: int, scale: Tensor) -> Tensor:
    return kernels_for(scale).cross_entropy_gradient(kept, labels, first, scale)


def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[int],
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
    factor: float = 1.0,
) -> None:
    if weights:
        kernels = kernels_for(weights[0])
        kernels.adamw(weights, gradients, first, second, steps, rate, betas, epsilon, decay, factor)
