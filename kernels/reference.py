# The arithmetic between two communications, in plain torch: row statistics, normalisation, rotary positions, SwiGLU,
# cross entropy, dropout.
# Imports torch only. Each function is local; what must be summed over a grid axis is returned for the caller to sum.
# Next: summa3d/nn/norm.py and loss.py, which put the sums over the axis in between.
from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row sums: float64 for float32 and float64, float32 for 16-bit floats.

    Sums of x and x² in twice the precision of x make E[x²] − E[x]² as accurate as a second pass over centred values, with
    one message instead of two.
    """
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def norm_sums(x: Tensor) -> Tensor:
    """Σx and Σx² of each row: [rows, n] → [rows, 2], in `wide_dtype`."""
    wide = wide_dtype(x.dtype)
    return torch.stack((x.sum(-1, dtype=wide), torch.linalg.vector_norm(x, dim=-1, dtype=wide).square_()), -1)


def norm_statistics(sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of each row of n elements from its summed Σx, Σx²: [rows, 2] → two [rows, 1]."""
    mean = sums[..., :1] / n
    variance = (sums[..., 1:] / n - mean * mean).clamp_(min=0)
    return mean.to(dtype), (variance + eps).rsqrt_().to(dtype)


def normalise(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """x̂ = (x − mean)/σ."""
    return (x - mean).mul_(inverse)


def norm_gradient_sums(gradient: Tensor, normal: Tensor) -> Tensor:
    """Σg and Σg·x̂ of each row, g the gradient of x̂: [rows, n] → [rows, 2]."""
    return torch.stack((gradient.sum(-1), (gradient * normal).sum(-1)), -1)


def norm_gradient(gradient: Tensor, normal: Tensor, inverse: Tensor, sums: Tensor, n: int) -> Tensor:
    """The gradient of x: (g − Σg/n − x̂·Σ(g·x̂)/n)/σ, sums over whole rows of n elements."""
    means = sums / n
    return torch.addcmul(gradient - means[..., :1], normal, means[..., 1:], value=-1).mul_(inverse)


def rms_sums(x: Tensor) -> Tensor:
    """Σx² of each row: [rows, n] → [rows, 1], in `wide_dtype`."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_dtype(x.dtype)).square_()


def rms_inverse(sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> Tensor:
    """1/√(Σx²/n + eps) of each row of n elements: [rows, 1]."""
    return (sums / n + eps).rsqrt_().to(dtype)


def rms_gradient(gradient: Tensor, normal: Tensor, inverse: Tensor, sums: Tensor, n: int) -> Tensor:
    """The gradient of x: (g − x̂·Σ(g·x̂)/n)/rms, g the gradient of x̂ = x/rms, the sum over whole rows of n elements."""
    return torch.addcmul(gradient, normal, sums / n, value=-1).mul_(inverse)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [b, heads, s, d] turned by angles [s, d/2], the element i of a head paired with i + d/2."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ∘ up."""
    return torch.nn.functional.silu(gate).mul_(up)


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, from gate and up alone: no SiLU is kept. Holds no more than three blocks at once."""
    gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
    return gate_gradient, torch.nn.functional.silu(gate).mul_(gradient)


def cross_entropy_sums(logits: Tensor, maximum: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """What a rank that holds columns first… of the logits adds to the loss of each row.

    logits [rows, n], maximum [rows] of whole rows, labels [rows] global (any negative label: none). Returns
    exp(logits − maximum) [rows, n] and, stacked in [rows, 2], their sum and the label's logit − maximum where it lies here.
    """
    shifted = logits - maximum[:, None]
    column = labels - first
    here = (column >= 0) & (column < logits.shape[1]) & (labels >= 0)
    picked = torch.zeros_like(maximum)
    if logits.shape[1]:
        picked = shifted.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].masked_fill_(~here, 0)
    exponentials = shifted.exp_()
    return exponentials, torch.stack((exponentials.sum(1), picked), 1)


def cross_entropy_gradient(probabilities: Tensor, labels: Tensor, first: int, scale: Tensor) -> Tensor:
    """(softmax − onehot)·scale in place, scale [rows] (0 where a row has no label)."""
    column = labels - first
    rows = ((column >= 0) & (column < probabilities.shape[1]) & (labels >= 0)).nonzero()[:, 0]
    probabilities[rows, column[rows]] -= 1
    return probabilities.mul_(scale[:, None])


def dropout(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """x/(1−p) where `keep`, else 0."""
    return torch.where(keep, x * (1 / (1 - probability)), x.new_zeros(()))
