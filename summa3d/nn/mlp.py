# The feed-forward half of a block. Imports linear. Next: block.py.
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .linear import Linear
from .scheme import Scheme


class MLP(nn.Module):
    """Y = GELU(X·W1 + b1)·W2 + b2: [b/(XY), s, h/Z] → [b/(XZ), s, f/Y] → back. GELU in its tanh form, as in GPT-2; local."""

    def __init__(
        self,
        hidden: int,
        width: int,
        scheme: Scheme,
        std: float = 0.02,
        out_std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.up = Linear(hidden, width, scheme, std=std, dtype=dtype)
        self.down = Linear(width, hidden, scheme, self.up.output_layout, std=out_std, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))
