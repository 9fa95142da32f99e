"""The layers' local arithmetic in plain torch: what the host runs, and the oracle of the fused kernels.

Row statistics, normalisation, activations, rotary positions, cross entropy, dropout and AdamW. No function communicates: a
partial sum over a split dim is returned, or passed to `start_sum`, for the caller to all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw as torch_adamw

from .mask import Mask

APPROXIMATE = {"gelu_tanh": "tanh", "gelu": "none"}
"""Forms of GELU → what torch calls them."""


class Sum(Protocol):
    """An all-reduce in flight."""

    def wait(self) -> Tensor:
        """Wait for the all-reduce and return the sum."""


StartSum = Callable[[Tensor], Sum]
"""Starts the all-reduce of row sums over the ranks that hold the other columns of the same rows."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row sums: float64 for float32 and float64, float32 for 16-bit floats.

    With Σx and Σx² in twice the precision of x, E[x²] − E[x]² is as accurate as a second pass over centred values, and takes
    one all-reduce instead of two.

    >>> wide_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def norm_sums(x: Tensor, centred: bool = True) -> Tensor:
    """Σx and Σx² of each row, or (not `centred`) Σx² alone: [rows, n] → [rows, 2 or 1], in `wide_dtype`.

    >>> norm_sums(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[ 6., 14.]], dtype=torch.float64)
    """
    wide = wide_dtype(x.dtype)
    sums = [x.sum(-1, dtype=wide)] if centred else []
    squares = torch.linalg.vector_norm(x, dim=-1, dtype=wide).square_()
    return torch.stack((*sums, squares), -1) if centred else squares[..., None]


def norm_statistics(sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """The mean and 1/σ of each row, from its sums Σx and Σx² over all n elements: [rows, 2] → two [rows, 1] in `dtype`.

    From Σx² alone, [rows, 1], None and 1/rms. eps is added to the variance, or to the mean square.
    """
    if sums.shape[-1] == 1:
        return None, (sums / n + eps).rsqrt_().to(dtype)
    mean = sums[..., :1] / n
    variance = (sums[..., 1:] / n - mean * mean).clamp_(min=0)
    return mean.to(dtype), (variance + eps).rsqrt_().to(dtype)


def normalise(x: Tensor, mean: Tensor | None, inverse: Tensor) -> Tensor:
    """x̂ = (x − mean)/σ, or without a mean x/rms."""
    return x * inverse if mean is None else (x - mean).mul_(inverse)


def norm(x: Tensor, mean: Tensor | None, inverse: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """γ·x̂ + β, or without β γ·x̂: [rows, n] with mean and inverse [rows, 1], γ and β [n] → [rows, n]."""
    normal = normalise(x, mean, inverse)
    return normal.mul_(gamma) if beta is None else torch.addcmul(beta, normal, gamma)


def norm_gradient(
    gradient: Tensor, x: Tensor, gamma: Tensor, mean: Tensor | None, inverse: Tensor, n: int, start_sum: StartSum
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and the gradients of γ and β, [2, columns], or without a mean of γ, [1, columns], over the local rows.

    With g = gradient·γ, dx = (g − Σg/n − x̂·Σ(g·x̂)/n)/σ, without a mean dx = (g − x̂·Σ(g·x̂)/n)/rms. The local sums, Σg where
    there is a mean and Σg·x̂, [rows, 2 or 1], go to `start_sum`, which all-reduces them over the ranks that hold the other
    columns. n is the global row length.
    """
    normal = normalise(x, mean, inverse)
    scaled, lead = gradient * gamma, tuple(range(gradient.dim() - 1))
    if mean is None:
        sums = start_sum((scaled * normal).sum(-1, keepdim=True))
        vectors = (gradient * normal).sum(lead)[None]
        return torch.addcmul(scaled, normal, sums.wait() / n, value=-1).mul_(inverse), vectors
    sums = start_sum(torch.stack((scaled.sum(-1), (scaled * normal).sum(-1)), -1))
    vectors = torch.stack(((gradient * normal).sum(lead), gradient.sum(lead)))
    means = sums.wait() / n
    return torch.addcmul(scaled - means[..., :1], normal, means[..., 1:], value=-1).mul_(inverse), vectors


def bias_activation(x: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """f(x + bias) for x [rows, n] and bias [n]; `form` is "gelu_tanh", "gelu" (exact), or "relu2", max(0, x)².

    >>> bias_activation(torch.ones(1, 2), torch.tensor([1.0, -2.0]), "relu2")
    tensor([[4., 0.]])
    """
    x = x if bias is None else x + bias
    if form == "relu2":
        y = torch.relu(x)
        return y.mul_(y)
    return functional.gelu(x, approximate=APPROXIMATE[form])


def bias_activation_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None, form: str) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of bias; the gradient of bias is summed over the local rows, and None without a bias."""
    x = x if bias is None else x + bias
    if form == "relu2":
        of_x = torch.relu(x).mul_(gradient).mul_(2)
    else:
        of_x = torch.ops.aten.gelu_backward(gradient, x, approximate=APPROXIMATE[form])
    return of_x, None if bias is None else of_x.flatten(0, -2).sum(0)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    """Rotate x [b, heads, s, d] by angles whose cosine and sine are [s, d/2]; element i of a head is paired with i + d/2.

    back : rotate by the negative angles, which is the gradient

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), *quarter)
    tensor([[[[0., 1.]]]])
    """
    first, second = x.chunk(2, -1)
    if back:
        return torch.cat((first * cosine + second * sine, second * cosine - first * sine), -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ∘ up, elementwise."""
    return functional.silu(gate).mul_(up)


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, from gate and up alone, so that forward saves no SiLU. Workspace: at most three blocks."""
    gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
    return gate_gradient, functional.silu(gate).mul_(gradient)


def loss_input(logits: Tensor) -> Tensor:
    """Return the logits in the dtype of the loss: 16-bit logits are widened to float32.

    >>> loss_input(torch.zeros(1, dtype=torch.float16)).dtype
    torch.float32
    """
    return logits.float() if logits.dtype.itemsize < 4 else logits


def row_maximum(logits: Tensor) -> Tensor:
    """The maximum of each row: [rows, n] → [rows]; −∞ where this rank holds no columns."""
    return logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)


def cross_entropy_sums(logits: Tensor, maximum: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The summands of each row's cross entropy on a rank that holds a block of the vocabulary.

    Parameters
    ----------
    logits : [rows, n], the columns first … first + n of the global logits; overwritten
    maximum : [rows], of whole rows
    labels : [rows], global; a negative label is not counted
    first : the global index of the first column

    Returns the values for `cross_entropy_kept`, here exp(logits − maximum) [rows, n], and [rows, 2]: their sum over the local
    columns, and the label's logit − maximum (0 where another rank holds the label).
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
    """The tensors to keep for backward: here the softmax, computed in place of `values` [rows, n].

    maximum and total : [rows], over whole rows
    """
    return (values.div_(total[:, None]),)


def cross_entropy_gradient(kept: tuple[Tensor, ...], labels: Tensor, first: int, scale: Tensor) -> Tensor:
    """The gradient of the logits: (softmax − onehot)·scale, with scale [rows], 0 where a row has no label.

    `kept` is not changed. `first` is the global index of the first local column.
    """
    gradient = kept[0].clone()
    column = labels - first
    if gradient.shape[1]:  # adds −0 where another rank holds the label: no bit changes, and no shape depends on values
        here = (column >= 0) & (column < gradient.shape[1]) & (labels >= 0)
        onehot = here.to(gradient.dtype).neg_()
        gradient.scatter_add_(1, column.clamp_(0, gradient.shape[1] - 1)[:, None], onehot[:, None])
    return gradient.mul_(scale[:, None])


def dropout_mask(x: Tensor, mask: Mask) -> Tensor:
    """The mask of the block x, for forward and backward: here a bool tensor, True where an element is kept, drawn once."""
    return mask.draw()


def dropout_add(
    x: Tensor, keep: Tensor, probability: float, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """residual + dropout(x + bias): kept elements are scaled by 1/(1−p), the others are 0.

    >>> dropout_add(torch.ones(2), torch.tensor([True, False]), 0.5, residual=torch.ones(2))
    tensor([3., 1.])
    """
    x = x if bias is None else x + bias
    dropped = torch.where(keep, x * (1 / (1 - probability)), x.new_zeros(()))
    return dropped if residual is None else dropped.add_(residual)


def dropout_gradient(gradient: Tensor, keep: Tensor, probability: float, summed: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradient of x and, where `summed`, the gradient of bias, summed over the local rows (else None)."""
    of_x = dropout_add(gradient, keep, probability)
    return of_x, of_x.flatten(0, -2).sum(0) if summed else None


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """out = Σ parts over their first dim, 16-bit floats, added in float32 in the order 0, 1, … and rounded once.

    >>> out = torch.empty(1, dtype=torch.bfloat16)
    >>> sum_parts(torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16), out)
    >>> out.item()
    3.0
    """
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()  # torch would make this copy itself, unseen by a dry run
    out.copy_(total)


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
    """Take one AdamW step in place, with the gradients multiplied by `factor`.

    Parameters
    ----------
    weights, gradients : one gradient per weight; 16-bit gradients are widened, others may be left multiplied by `factor`
    first, second : the moments of each weight
    steps : the number of this step for each weight, from 1
    rate, betas, epsilon, decay : of AdamW, as in `torch.optim.AdamW`
    factor : unscales (loss scaling) and clips the gradients

    It calls torch's functional form, because building `torch.optim.AdamW` imports torch's compiler: 1.4 s of CPU and 73 MiB
    on every rank.
    """
    widened = [gradient.to(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)]
    if factor != 1:
        torch._foreach_mul_(widened, factor)
    counts = list(torch.tensor([step - 1 for step in steps], dtype=torch.float32).unbind())
    numbers: dict[str, Any] = {"lr": rate, "beta1": betas[0], "beta2": betas[1], "eps": epsilon, "weight_decay": decay}
    moments = list(first), list(second)
    torch_adamw(list(weights), widened, *moments, [], counts, fused=True, amsgrad=False, maximize=False, **numbers)
