"""What the plain oracles of the families share: dropout by the library's numbers, and weights by name.

Plain torch, one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from summa3d.layout.random import key
from summa3d.nn import ModelConfig
from summa3d.nn.random import keep_mask


class PlainTransformer:
    """Weights of a model by their global names, and the pieces that its loss is written with."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], seed: int = 1) -> None:
        self.config, self.seed = config, seed
        self.weights = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
        self.step, self.first_row, self.training = 0, 0, True

    def at(self, step: int, first_row: int, training: bool = True) -> None:
        """Set the keys of the masks of the next loss."""
        self.step, self.first_row, self.training = step, first_row, training

    def drop(self, x: Tensor, name: str, probability: float) -> Tensor:
        if not self.training or probability == 0:
            return x
        rows = slice(self.first_row, self.first_row + len(x))
        slices = (rows, *(slice(0, n) for n in x.shape[1:]))
        mask = keep_mask(key(self.seed, f"dropout/{name}", self.step), (rows.stop, *x.shape[1:]), slices, probability)
        return x * mask / (1 - probability)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"].T, self.weights.get(f"{name}.bias"))

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, name: str) -> Tensor:
        """q, k, v [b, a, s, d], allowed broadcast to [b, a, s, s] → [b, s, h]."""
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
        probabilities = self.drop(scores.softmax(-1), f"{name}.attention", self.config.attention_dropout)
        return (probabilities @ v).transpose(1, 2).flatten(2)
