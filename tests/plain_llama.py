"""The parity oracle of the Llama family: plain torch on one process, written without any of the library's layers.

Rotary positions are complex multiplications here, and k and v are copied to every head that shares them.
"""

from __future__ import annotations

import math

import torch
from plain_transformer import PlainTransformer
from torch import Tensor
from torch.nn import functional


class PlainLlama(PlainTransformer):
    """Loss of a Llama from a dict of global weights."""

    def logits(self, tokens: Tensor) -> Tensor:
        w, config = self.weights, self.config
        x = self.drop(w["embedding.weight"][tokens], "embedding", config.dropout)
        b, s = tokens.shape
        kv_heads = config.kv_heads or config.heads
        causal = torch.ones(s, s, dtype=torch.bool).tril()
        for index in range(config.layers):
            name = f"blocks.{index}"
            normal = self.rms_norm(x, f"{name}.attention_norm")
            q = self.linear(normal, f"{name}.attention.q").view(b, s, config.heads, -1).transpose(1, 2)
            kv = self.linear(normal, f"{name}.attention.kv").view(b, s, kv_heads, 2, -1).transpose(1, 2)
            k, v = (part.repeat_interleave(config.heads // kv_heads, 1) for part in kv.unbind(3))
            context = self.attend(self.turned(q), self.turned(k), v, causal, name)
            x = x + self.drop(self.linear(context, f"{name}.attention.out"), f"{name}.attention_branch", config.dropout)
            normal = self.rms_norm(x, f"{name}.mlp_norm")
            x = x + self.drop(self.feed(normal, name), f"{name}.mlp_branch", config.dropout)
        return self.rms_norm(x, "norm") @ w["embedding.weight" if config.tied_head else "head.weight"].T

    def feed(self, normal: Tensor, name: str) -> Tensor:
        inner = functional.silu(self.linear(normal, f"{name}.mlp.gate")) * self.linear(normal, f"{name}.mlp.up")
        return self.linear(inner, f"{name}.mlp.down")

    def loss(self, tokens: Tensor, labels: Tensor, step: int = 0, first_row: int = 0, training: bool = True) -> Tensor:
        self.at(step, first_row, training)
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        eps = 1e-5 if self.config.norm_eps is None else self.config.norm_eps
        return self.weights[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def turned(self, x: Tensor) -> Tensor:
        """x [b, a, s, d] with the pair (i, i + d/2) of position p turned by p · base^(−2i/d)."""
        s, d = x.shape[2:]
        base = 10000.0 if self.config.rotary_base is None else self.config.rotary_base
        turns = [self.stretched(base ** (-pair / d)) for pair in range(0, d, 2)]
        angles = torch.arange(s, dtype=torch.float64)[:, None] * torch.tensor(turns, dtype=torch.float64)
        turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def stretched(self, turn: float) -> float:
        """The angle of one pair, slowed by its wavelength as the configuration says."""
        config = self.config
        if config.rotary_scaling == "linear":
            return turn / config.rotary_factor
        if config.rotary_scaling != "llama3":
            return turn
        wavelength = 2 * math.pi / turn
        if wavelength < config.rotary_context / config.rotary_high:
            return turn
        if wavelength > config.rotary_context / config.rotary_low:
            return turn / config.rotary_factor
        smooth = (config.rotary_context / wavelength - config.rotary_low) / (config.rotary_high - config.rotary_low)
        return (1 - smooth) * turn / config.rotary_factor + smooth * turn
