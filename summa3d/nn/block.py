# One transformer block of any family. Imports norm, attention, mlp, dropout. Next: body.py.
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .attention import new_attention
from .config import ModelConfig
from .dropout import Batch, Dropout
from .mask import Visible
from .mlp import new_mlp
from .norm import new_norm
from .schemes import Scheme


class Block(nn.Module):
    """Attention and feed-forward as two residual branches; the stream keeps its layout.

    Pre-normalised, as in GPT-2, Llama and ViT: x + dropout(branch(norm(x))), twice. Post-normalised, as in BERT:
    norm(x + dropout(branch(x))), twice. The two projections onto the stream start smaller by √(2l), as in GPT-2.
    """

    def __init__(self, config: ModelConfig, scheme: Scheme, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        out_std = 0.02 / math.sqrt(2 * config.layers)
        self.hidden, self.post_norm = config.hidden, config.traits.post_norm
        self.attention_norm = new_norm(config, scheme, dtype=dtype)
        self.attention = new_attention(config, scheme, name, out_std, dtype)
        self.mlp_norm = new_norm(config, scheme, dtype=dtype)
        self.mlp = new_mlp(config, scheme, out_std, dtype)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention_branch", scheme, scheme.stream)
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp_branch", scheme, scheme.stream)

    def forward(self, x: Tensor, batch: Batch, visible: Visible) -> Tensor:
        skip = True  # both branches return their last bias, and `_add` fuses it
        if self.post_norm:
            x = self.attention_norm(
                self._add(self.attention_dropout, self.attention(x, batch, visible, skip_bias_add=skip), batch, x)
            )
            return self.mlp_norm(self._add(self.mlp_dropout, self.mlp(x, skip_bias_add=skip), batch, x))
        # A branch gets no name: a name would hold it while the next one runs.
        x = self._add(
            self.attention_dropout, self.attention(self.attention_norm(x), batch, visible, skip_bias_add=skip), batch, x
        )
        return self._add(self.mlp_dropout, self.mlp(self.mlp_norm(x), skip_bias_add=skip), batch, x)

    def _add(self, dropout: Dropout, branch: tuple[Tensor, Tensor | None], batch: Batch, residual: Tensor) -> Tensor:
        """residual + dropout(branch + its last bias), in one kernel on a device."""
        return dropout(branch[0], (batch.sequence, self.hidden), batch, residual, branch[1])
