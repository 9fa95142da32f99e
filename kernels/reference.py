# The arithmetic between two communications, in plain torch: row statistics, normalisation, activations, rotary positions,
# cross entropy, dropout, AdamW. What dispatch.py gives tensors on the CPU, and the oracle of the fused kernels.
# Imports mask, torch. Each function is local; what must be summed over a grid axis is returned for the caller to sum.
# Next: summa3d/nn/norm.py and loss.py, which put the sums over the axis in between.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw as torch_adamw

from .mask import Mask


class Sum(Protocol):
    """A sum over ranks in flight."""

    def wait(self) -> Tensor: ...


StartSum = Callable[[Tensor], Sum]


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


def layer_norm(x: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """γ·x̂ + β: [rows, n] with mean and inverse [rows, 1], γ and β [n] → [rows, n]."""
    return torch.addcmul(beta, normalise(x, mean, inverse), gamma)


def layer_norm_gradient(
    gradient: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, inverse: Tensor, n: int, start_sum: StartSum
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and of γ and β in [2, columns], those summed over the rows that are here.

    With g = gradient·γ, dx = (g − Σg/n − x̂·Σ(g·x̂)/n)/σ: Σg and Σg·x̂, [rows, 2], are given to `start_sum`, which starts their
    sum over the ranks that hold the rest of the rows of n elements.
    """
    normal = normalise(x, mean, inverse)
    scaled = gradient * gamma
    sums = start_sum(torch.stack((scaled.sum(-1), (scaled * normal).sum(-1)), -1))
    lead = tuple(range(gradient.dim() - 1))
    vectors = torch.stack(((gradient * normal).sum(lead), gradient.sum(lead)))
    means = sums.wait() / n
    return torch.addcmul(scaled - means[..., :1], normal, means[..., 1:], value=-1).mul_(inverse), vectors


def rms_sums(x: Tensor) -> Tensor:
    """Σx² of each row: [rows, n] → [rows, 1], in `wide_dtype`."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_dtype(x.dtype)).square_()


def rms_inverse(sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> Tensor:
    """1/√(Σx²/n + eps) of each row of n elements: [rows, 1]."""
    return (sums / n + eps).rsqrt_().to(dtype)


def rms_norm(x: Tensor, inverse: Tensor, gamma: Tensor) -> Tensor:
    """γ·x/rms: [rows, n] with inverse [rows, 1] → [rows, n]."""
    return (x * inverse).mul_(gamma)


def rms_norm_gradient(
    gradient: Tensor, x: Tensor, gamma: Tensor, inverse: Tensor, n: int, start_sum: StartSum
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and of γ summed over the rows that are here, [columns].

    With x̂ = x/rms and g = gradient·γ, dx = (g − x̂·Σ(g·x̂)/n)/rms; `start_sum` gets Σg·x̂, [rows, 1], as in `layer_norm_gradient`.
    """
    normal = x * inverse
    scaled = gradient * gamma
    sums = start_sum((scaled * normal).sum(-1, keepdim=True))
    vector = (gradient * normal).sum(tuple(range(gradient.dim() - 1)))
    return torch.addcmul(scaled, normal, sums.wait() / n, value=-1).mul_(inverse), vector


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """GELU(x + bias), [rows, n] and [n]; approximate: "tanh" or "none", as torch's."""
    return functional.gelu(x if bias is None else x + bias, approximate=approximate)


def bias_gelu_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of bias, the latter summed over the rows that are here."""
    of_x = torch.ops.aten.gelu_backward(gradient, x if bias is None else x + bias, approximate=approximate)
    return of_x, None if bias is None else of_x.flatten(0, -2).sum(0)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    """x [b, heads, s, d] turned by angles [s, d/2], the element i of a head paired with i + d/2; `back`: by −angles."""
    first, second = x.chunk(2, -1)
    if back:
        return torch.cat((first * cosine + second * sine, second * cosine - first * sine), -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ∘ up."""
    return functional.silu(gate).mul_(up)


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, from gate and up alone: no SiLU is kept. Holds no more than three blocks at once."""
    gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
    return gate_gradient, functional.silu(gate).mul_(gradient)


def loss_input(logits: Tensor) -> Tensor:
    """Logits in the dtype that the loss and its sums are taken in: at least 32 bits."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def row_maximum(logits: Tensor) -> Tensor:
    """[rows, n] → [rows]; −∞ where there are no columns."""
    return logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)


def cross_entropy_sums(logits: Tensor, maximum: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """What a rank that holds columns first… of the logits adds to the loss of each row.

    logits [rows, n], maximum [rows] of whole rows, labels [rows] global (any negative label: none). Returns the values to go
    on with, here exp(logits − maximum) [rows, n], and in [rows, 2] the sum of these and the label's logit − maximum where it
    lies here.
    """
    shifted = logits - maximum[:, None]
    column = labels - first
    here = (column >= 0) & (column < logits.shape[1]) & (labels >= 0)
    picked = torch.zeros_like(maximum)
    if logits.shape[1]:
        picked = shifted.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].masked_fill_(~here, 0)
    exponentials = shifted.exp_()
    return exponentials, torch.stack((exponentials.sum(1), picked), 1)


def cross_entropy_kept(values: Tensor, maximum: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """What backward needs of `values` [rows, n] and of whole rows' maxima and sums [rows]: here the softmax, in their place."""
    return (values.div_(total[:, None]),)


def cross_entropy_gradient(kept: tuple[Tensor, ...], labels: Tensor, first: int, scale: Tensor) -> Tensor:
    """(softmax − onehot)·scale, scale [rows] (0 where a row has no label); `kept` stays as it is."""
    gradient = kept[0].clone()
    column = labels - first
    if gradient.shape[1]:  # -0 where the label is not here: adding it changes no bit, and nothing depends on values
        here = (column >= 0) & (column < gradient.shape[1]) & (labels >= 0)
        onehot = here.to(gradient.dtype).neg_()
        gradient.scatter_add_(1, column.clamp_(0, gradient.shape[1] - 1)[:, None], onehot[:, None])
    return gradient.mul_(scale[:, None])


def dropout_mask(x: Tensor, mask: Mask) -> Tensor:
    """What both passes over the block x take its mask from: here the mask itself, True where kept, drawn once."""
    return mask.draw()


def dropout_add(
    x: Tensor, keep: Tensor, probability: float, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """residual + dropout(x + bias): elements that are kept are scaled by 1/(1−p), the others 0."""
    x = x if bias is None else x + bias
    dropped = torch.where(keep, x * (1 / (1 - probability)), x.new_zeros(()))
    return dropped if residual is None else dropped.add_(residual)


def dropout_gradient(gradient: Tensor, keep: Tensor, probability: float, summed: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and where `summed` that of bias, summed over the rows that are here."""
    of_x = dropout_add(gradient, keep, probability)
    return of_x, of_x.flatten(0, -2).sum(0) if summed else None


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
    """A step of AdamW in place, for weight i its steps[i]-th (from 1), by its gradient·factor.

    It calls torch's functional form: building `torch.optim.AdamW` imports torch's compiler, 1.4 s of CPU and 73 MiB on every
    rank. The gradients may be left multiplied by the factor; those in 16 bits are widened.
    """
    widened = [gradient.to(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)]
    if factor != 1:
        torch._foreach_mul_(widened, factor)
    torch_adamw(
        list(weights),
        widened,
        list(first),
        list(second),
        [],
        [torch.full((), step - 1, dtype=torch.float32) for step in steps],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=rate,
        weight_decay=decay,
        eps=epsilon,
        maximize=False,
    )
