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
        if self.post_norm:
            x = self.attention_norm(self._joined(self.attention_dropout, self.attention.handed_on(x, batch, visible), batch, x))
            return self.mlp_norm(self._joined(self.mlp_dropout, self.mlp.handed_on(x), batch, x))
        # No name for a branch: it would be held while the next one runs.
        x = self._joined(self.attention_dropout, self.attention.handed_on(self.attention_norm(x), batch, visible), batch, x)
        return self._joined(self.mlp_dropout, self.mlp.handed_on(self.mlp_norm(x)), batch, x)

    def _joined(self, dropout: Dropout, branch: tuple[Tensor, Tensor | None], batch: Batch, stream: Tensor) -> Tensor:
        """The stream with a branch, which hands its last bias on, dropped and added."""
        return dropout(branch[0], (batch.sequence, self.hidden), batch, stream, branch[1])
