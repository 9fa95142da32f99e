# Rotary positions: q and k turned by angles that grow with the position. Imports kernels.reference.
# Next: attention.py.
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from summa3d.kernels import reference as kernel


class Rotary:
    """Turns the pair (i, i + d/2) of each head by position · base^(−2i/d), the half-split order of Hugging Face's weights.

    Only differences of positions tell in q·k, so packed documents need not restart: a token sees none but its own.
    Angles are taken in float64 and rounded once. Moves nothing: attention holds whole sequences. Source: Su et al. 2021.
    """

    def __init__(self, size: int, base: float) -> None:
        self.size, self.base = size, base
        self._table = lru_cache(maxsize=4)(self._new_table)

    def _new_table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, d/2]."""
        turns = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = torch.arange(length)[:, None] * turns
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [b, heads, s, d], s whole, turned."""
        table = self._table(q.shape[2], q.dtype)
        return kernel.rotate(q, *table), kernel.rotate(k, *table)
