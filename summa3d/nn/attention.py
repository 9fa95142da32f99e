# Causal self-attention on whole sequences and whole heads, both local after the first linear. Imports linear, dropout.
# Next: mlp.py, block.py.
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..layout.layout import Layout
from .dropout import Batch, Dropout
from .linear import Linear
from .scheme import Scheme


class SelfAttention(nn.Module):
    """Y = softmax(QKᵀ/√d, causal)·V·W_o for the stream X [b, s, h]; a heads of d = h/a.

    The columns of the QKV weight are ordered [head][q, k, v][d], so that a block of columns is a block of whole heads.
    Attention itself moves nothing: each rank holds b/(XZ) whole sequences of a/Y heads. torch's fused attention is used,
    except with attention dropout, whose masks are counter-based.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        scheme: Scheme,
        name: str,
        dropout: float = 0.0,
        std: float = 0.02,
        out_std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.qkv = Linear(hidden, 3 * hidden, scheme, std=std, dtype=dtype)
        inner = self.qkv.output_layout
        self.out = Linear(hidden, hidden, scheme, inner, std=out_std, dtype=dtype)
        self.dropout = Dropout(dropout, f"{name}.attention", scheme, Layout(inner.dims[0], inner.dims[-1], (), ()))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.size))  # [b/(XZ), s, a/Y, 3, d]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))  # [b/(XZ), a/Y, s, d]
        if self.training and self.dropout.probability:
            context = self._unfused(q, k, v, batch)
        else:
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(2))  # [b/(XY), s, h/Z]

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        s = q.shape[2]
        future = torch.ones(s, s, dtype=torch.bool).triu_(1)
        scores = (q @ k.transpose(2, 3) / math.sqrt(self.size)).masked_fill(future, -math.inf)  # [b/(XZ), a/Y, s, s]
        return self.dropout(scores.softmax(-1), (self.heads, s, s), batch) @ v
