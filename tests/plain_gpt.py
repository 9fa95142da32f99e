"""The parity oracle: a GPT in plain torch on one process, written without any of the library's layers.

Only the masks' random numbers come from the library (their distribution has tests of its own).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from summa3d.layout.random import key
from summa3d.nn import ModelConfig
from summa3d.nn.random import keep_mask


class PlainGPT:
    """Loss of a GPT from a dict of global weights, by torch.nn.functional alone."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], seed: int = 1) -> None:
        self.config, self.seed = config, seed
        self.weights = {name: nn.Parameter(value.clone()) for name, value in weights.items()}

    def loss(self, tokens: Tensor, labels: Tensor, step: int = 0, first_row: int = 0, training: bool = True) -> Tensor:
        w, config = self.weights, self.config

        def drop(x: Tensor, name: str, probability: float) -> Tensor:
            if not training or probability == 0:
                return x
            shape = (first_row + len(x), *x.shape[1:])
            rows = (slice(first_row, first_row + len(x)), *(slice(0, n) for n in x.shape[1:]))
            return x * keep_mask(key(self.seed, f"dropout/{name}", step), shape, rows, probability) / (1 - probability)

        def norm(x: Tensor, name: str) -> Tensor:
            return functional.layer_norm(x, (config.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

        def linear(x: Tensor, name: str) -> Tensor:
            return functional.linear(x, w[f"{name}.weight"].T, w[f"{name}.bias"])

        x = w["embedding.weight"][tokens] + w["positions.weight"][: tokens.shape[1]]
        x = drop(x, "embedding", config.dropout)
        b, s, h = x.shape
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        for index in range(config.layers):
            name = f"blocks.{index}"
            normal, kv_heads = norm(x, f"{name}.attention_norm"), config.kv_heads or config.heads
            if kv_heads == config.heads:
                q, k, v = linear(normal, f"{name}.attention.qkv").view(b, s, config.heads, 3, -1).unbind(3)
            else:  # each head of k and v copied to the heads that share it
                q = linear(normal, f"{name}.attention.q").view(b, s, config.heads, -1)
                kv = linear(normal, f"{name}.attention.kv").view(b, s, kv_heads, 2, -1)
                k, v = kv.repeat_interleave(config.heads // kv_heads, 2).unbind(3)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
            context = drop(scores.softmax(-1), f"{name}.attention", config.attention_dropout) @ v
            x = x + drop(
                linear(context.transpose(1, 2).reshape(b, s, h), f"{name}.attention.out"),
                f"{name}.attention_branch",
                config.dropout,
            )
            inner = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up")
            relu2 = config.activation == "relu2"
            inner = inner.clamp(min=0) ** 2 if relu2 else functional.gelu(inner, approximate="tanh")
            x = x + drop(linear(inner, f"{name}.mlp.down"), f"{name}.mlp_branch", config.dropout)
        logits = norm(x, "norm") @ w["embedding.weight"].T
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
