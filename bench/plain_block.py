"""Our transformer blocks as plain torch modules with our serial weights.

The peer of block_vs_dtensor.py and block_vs_compile.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from summa3d.cli.blocks import Case, Stack
from summa3d.nn import ModelConfig, scheme


class Attention(nn.Module):
    """Causal self-attention; of its heads one in `ways` is here."""

    def __init__(self, config: ModelConfig, ways: int) -> None:
        super().__init__()
        self.heads, self.size = config.heads // ways, config.hidden // config.heads
        self.qkv, self.out = nn.Linear(config.hidden, 3 * config.hidden), nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (self.heads, 3, self.size)).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.hidden, config.width), nn.Linear(config.width, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig, ways: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention, self.mlp = Attention(config, ways), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def plain_stack(case: Case, ways: int = 1) -> nn.Sequential:
    """The blocks of `case` with our weights, whole; `ways` is by how many ranks the heads will be split."""
    dtype = getattr(torch, case.dtype)
    with torch.device(case.device):
        stack = nn.Sequential(*(PlainBlock(case.config, ways) for _ in range(case.config.layers))).to(dtype)
    weights = Stack(case.config, scheme("serial"), dtype).state_dict()
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            value = weights[f"blocks.{name}"]
            parameter.copy_(value.T if parameter.dim() == 2 else value)
    return stack
