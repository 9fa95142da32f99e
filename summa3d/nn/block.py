# One transformer block, pre-normalised. Imports norm, attention, mlp, dropout. Next: gpt.py.
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .attention import SelfAttention
from .config import ModelConfig
from .dropout import Batch, Dropout
from .mlp import MLP
from .norm import LayerNorm
from .scheme import Scheme


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))); the stream keeps its layout.

    The two projections onto the stream start smaller by √(2l), as in GPT-2.
    """

    def __init__(self, config: ModelConfig, scheme: Scheme, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        out_std = 0.02 / math.sqrt(2 * config.layers)
        self.hidden = config.hidden
        self.attention_norm = LayerNorm(config.hidden, scheme, dtype=dtype)
        self.attention = SelfAttention(
            config.hidden, config.heads, scheme, name, config.attention_dropout, out_std=out_std, dtype=dtype
        )
        self.mlp_norm = LayerNorm(config.hidden, scheme, dtype=dtype)
        self.mlp = MLP(config.hidden, config.width, scheme, out_std=out_std, dtype=dtype)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention_branch", scheme, scheme.stream)
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp_branch", scheme, scheme.stream)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        shape = (batch.sequence, self.hidden)
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), batch), shape, batch)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), shape, batch)
