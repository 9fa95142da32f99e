"""Newton–Schulz iteration and the rest of Muon's update, on whole matrices and on blocks, as in torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda inputs, outputs: sqrt(max(1.0, outputs / inputs)),
    "match_rms_adamw": lambda inputs, outputs: 0.2 * sqrt(max(inputs, outputs)),
}
"""What the learning rate of a weight [inputs, outputs] is multiplied by: that of torch's weights, which are [outputs, inputs]."""


class NewtonSchulz(NamedTuple):
    """How matrices are orthogonalised.

    coefficients : a, b, c of X ← aX + (bG + cG²)X with G = XXᵀ. steps : iterations. eps : least norm that a matrix is divided by.
    dtype : what is computed in; None, the matrices' own. torch.optim.Muon takes bfloat16 always
    """

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype | None = None

    def flops(self, rows: int, columns: int) -> int:
        """The flops of one matrix's products."""
        short, long = sorted((rows, columns))
        return self.steps * (4 * short * short * long + 2 * short**3)

    def orthogonalised(self, matrices: Tensor) -> Tensor:
        """About U·Vᵀ of each matrix U·S·Vᵀ of a batch [b, rows, columns]: singular values go to around 1. New tensors.

        A matrix of zeros stays one.
        """
        a, b, c = self.coefficients
        wide = matrices.shape[1] <= matrices.shape[2]
        x = (matrices if wide else matrices.mT).to(self.dtype or matrices.dtype)
        x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=self.eps)
        for _ in range(self.steps):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x if wide else x.mT


def averaged(gradient: Tensor, momentum: Tensor, rate: float, nesterov: bool) -> Tensor:
    """Matrix to orthogonalise: M ← μM + (1−μ)G, in place, and that, or with `nesterov` μM + (1−μ)G of the new M. A new tensor.

    rate : μ
    """
    momentum.lerp_(gradient, 1 - rate)
    return gradient.lerp(momentum, rate) if nesterov else momentum.clone()
