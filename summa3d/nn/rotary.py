# Rotary positions: q and k turned by angles that grow with the position. Imports kernels.reference.
# Next: attention.py.
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from summa3d.kernels import reference as kernel


class Rotary:
    """Turns the pair (i, i + d/2) of each head by position · base^(−2i/d), the half-split order of Hugging Face's weights.

    Angles are taken in float64 and rounded once. Moves nothing: attention holds whole sequences. Source: Su et al. 2021.
    """

    def __init__(self, size: int, base: float) -> None:
        self.size, self.base = size, base
        self._from_zero = lru_cache(maxsize=4)(self._new_table)

    def _new_table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.table(torch.arange(length), dtype)

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., d/2] of positions [...]."""
        turns = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = positions[..., None] * turns
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k [b, heads, s, d] at positions [b, s]; without them at 0 … s−1."""
        if positions is None:
            cosine, sine = self._from_zero(q.shape[2], q.dtype)
        else:
            cosine, sine = (part[:, None] for part in self.table(positions, q.dtype))
        return kernel.rotate(q, cosine, sine), kernel.rotate(k, cosine, sine)
