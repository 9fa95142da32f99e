"""Our transformer blocks as plain torch modules with our serial weights, for block_vs_dtensor.py and block_vs_compile.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from summa3d.cli.blocks import Case, Stack
from summa3d.nn import ModelConfig, scheme


class Attention(nn.Module):
    """Causal self-attention whose heads are split into `num_shards` shards."""

    def __init__(self, config: ModelConfig, num_shards: int) -> None:
        super().__init__()
        self.heads, self.size = config.heads // num_shards, config.hidden // config.heads
        self.qkv, self.out = nn.Linear(config.hidden, 3 * config.hidden), nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of x [b, s, h]."""
        parts = self.qkv(x).unflatten(-1, (self.heads, 3, self.size)).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU (tanh) between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.hidden, config.width), nn.Linear(config.width, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP of x [b, s, h]."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class PlainBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: ModelConfig, num_shards: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention, self.mlp = Attention(config, num_shards), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """The block on the residual stream x [b, s, h]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def plain_stack(case: Case, num_shards: int = 1) -> nn.Sequential:
    """The blocks of `case` with our whole weights; `num_shards` is the number of ranks over which heads will be split."""
    dtype = getattr(torch, case.dtype)
    with torch.device(case.device):
        stack = nn.Sequential(*(PlainBlock(case.config, num_shards) for _ in range(case.config.layers))).to(dtype)
    weights = Stack(case.config, scheme("serial"), dtype).state_dict()
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            value = weights[f"blocks.{name}"]
            parameter.copy_(value.T if parameter.dim() == 2 else value)
    return stack
