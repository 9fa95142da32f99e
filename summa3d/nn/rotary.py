# Rotary positions: q and k turned by angles that grow with the position. Imports kernels.dispatch.
# Next: attention.py.
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from summa3d.kernels import dispatch as kernel


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return kernel.rotate(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return kernel.rotate(grad, *ctx.saved_tensors, back=True), None, None


class Rotary:
    """Turns the pair (i, i + d/2) of each head by position · base^(−2i/d), the half-split order of Hugging Face's weights.

    Only differences of positions tell in q·k, so packed documents need not restart: a token sees none but its own.
    Angles are taken in float64 and rounded once. Moves nothing: attention holds whole sequences. Source: Su et al. 2021.
    """

    def __init__(self, size: int, base: float) -> None:
        self.size, self.base = size, base
        self._table = lru_cache(maxsize=4)(self._new_table)

    def _new_table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, d/2]."""
        turns = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = torch.arange(length)[:, None] * turns
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [b, heads, s, d], s whole, turned."""
        table = self._table(q.shape[2], q.dtype, q.device)
        return _Rotate.apply(q, *table), _Rotate.apply(k, *table)
