# Rotary positions: q and k turned by angles that grow with the position. Imports config, kernels.dispatch.
# Next: attention.py.
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from summa3d.kernels import dispatch

from .config import ModelConfig
from .layer_cache import LayerCache


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return dispatch.kernels_for(x).rotate(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return dispatch.kernels_for(grad).rotate(grad, *ctx.saved_tensors, back=True), None, None


def angles_of(size: int, config: ModelConfig) -> Tensor:
    """By how much each pair of a head of `size` elements turns from one position to the next, [d/2] in float64 on the host.

    Source: Su et al. 2021; "llama3" as Llama 3.1 stretches positions: by the number of turns in the context first trained on.
    """
    turns = config.theta ** (-torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
    if config.scaling == "default":
        return turns
    factor = config.rotary_factor or 1.0
    if config.scaling == "linear":
        return turns / factor
    low, high, context = config.rotary_low or 0.0, config.rotary_high or 0.0, config.rotary_context or 0
    kept = ((context * turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # 0 slowed, 1 as they were, between: blended
    return turns * (kept + (1 - kept) / factor)


class Rotary:
    """Turns the pair (i, i + d/2) of each head by position · θ^(−2i/d), the half-split order of Hugging Face's weights.

    The configuration may slow the angles (`angles_of`).
    Only differences of positions tell in q·k, so packed documents need not restart: a token sees none but its own.
    Angles are taken in float64 and rounded once. Moves nothing: attention holds whole sequences. Source: Su et al. 2021.
    """

    def __init__(self, size: int, config: ModelConfig) -> None:
        self.angles = angles_of(size, config)
        self._table = LayerCache(self._new_table, 4)

    def _new_table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, d/2]."""
        angles = torch.arange(length, device="cpu")[:, None] * self.angles
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [b, heads, s, d], s whole, turned."""
        table = self._table(q.shape[2], q.dtype, q.device)
        return _Rotate.apply(q, *table), _Rotate.apply(k, *table)
