"""Rotary positions: q and k rotated by angles that grow with the position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from summa3d.kernels import dispatch

from ...autograd.function import Function, once_differentiable
from ..config import ModelConfig
from ..context_parallel.positions import indices
from .product_cache import ProductCache


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return dispatch.kernels_for(x).rotate(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return dispatch.kernels_for(grad).rotate(grad, *ctx.saved_tensors, back=True), None, None


def angles_of(size: int, config: ModelConfig) -> Tensor:
    """The angle between consecutive positions for each pair of a head of `size` elements, [size/2], float64, on the host.

    The scaling "llama3" (Llama 3.1) depends on a pair's number of turns in the context that the model was first trained on.
    Source: Su et al. 2021.

    >>> angles_of(4, ModelConfig(family="llama", hidden=32, heads=8))
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    angles = config.theta ** (-torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
    if config.scaling == "default":
        return angles
    factor = config.rotary_factor or 1.0
    if config.scaling == "linear":
        return angles / factor
    low, high, context = config.rotary_low or 0.0, config.rotary_high or 0.0, config.rotary_context or 0
    unscaled = ((context * angles / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # 0: scaled, 1: unscaled, between: blended
    return angles * (unscaled + (1 - unscaled) / factor)


class Rotary:
    """Rotates the pair (i, i + d/2) of each head by position · θ^(−2i/d), the half-split order of Hugging Face's weights.

    The configuration may scale the angles (`angles_of`). q·k depends on differences of positions only, so the positions of
    packed documents need not restart: a token attends to its own document only. Angles are computed in float64 and their cosines
    and sines rounded once. Moves nothing: attention holds whole sequences, or whole parts of them. Source: Su et al. 2021.
    """

    def __init__(self, size: int, config: ModelConfig) -> None:
        self.angles = angles_of(size, config)
        self._table = ProductCache(self._new_table, 4)

    def _new_table(self, runs: tuple[range, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The cosines and sines of runs of positions, [positions, d/2] each; of a dry run, copies of nothing, not computed."""
        if device.type == "meta":
            nothing = torch.zeros((), dtype=torch.float64, device="cpu").expand(sum(map(len, runs)), len(self.angles))
            return nothing.to(device, dtype), nothing.to(device, dtype)
        angles = indices(runs, torch.device("cpu"))[:, None] * self.angles
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def __call__(self, q: Tensor, k: Tensor, runs: tuple[range, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Rotate q and k, [b, heads, s, d] with the positions of `runs`, in their order; default those of whole sequences."""
        table = self._table(runs or (range(q.shape[2]),), q.dtype, q.device)
        return _Rotate.apply(q, *table), _Rotate.apply(k, *table)
