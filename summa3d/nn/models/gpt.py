"""The GPT-2 family: learned positions and a tied head, on any scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..context import Context
from ..layers.embedding import Positions
from ..parameter import initialise
from .base import LanguageModel


class GPT(LanguageModel):
    """A decoder-only transformer with learned positions, layer norms, GELU and a tied head (the GPT-2 family)."""

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__(config, scheme, dtype, seed)
        self.positions = Positions(config.sequence, config.hidden, scheme.on_ends(first=True), dtype=dtype)
        initialise(self, scheme, seed)

    def positioned(self, x: Tensor, sequence: int, positions: Tensor | None) -> Tensor:
        """Add the learned positions to the embedded tokens."""
        return self.positions(x, sequence, positions)
