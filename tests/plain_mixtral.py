"""The parity oracle of the Mixtral family: plain torch on one process, every token multiplied by each of its experts alone."""

from __future__ import annotations

from collections import Counter
from math import ceil

import torch
from plain_llama import PlainLlama
from torch import Tensor
from torch.nn import functional


class PlainMixtral(PlainLlama):
    """Loss of a Mixtral from a dict of global weights. `chosen` has the experts of each layer's tokens, [b, s, k]."""

    def feed(self, normal: Tensor, name: str) -> Tensor:
        config, name = self.config, f"{name}.moe"
        experts, k, (b, s, _) = config.experts or 8, config.experts_per_token or 2, normal.shape
        logits = normal @ self.weights[f"{name}.router.weight"]
        scores = logits.sigmoid() if config.moe.scores == "sigmoid" else logits.softmax(-1)
        bias = self.weights.get(f"{name}.router.bias")
        ranked = scores if bias is None else scores + bias
        chosen = torch.tensor([[self.best(row, k) for row in of] for of in ranked.tolist()])  # [b, s, k]
        taken = torch.tensor([self.within_capacity(of, experts) for of in chosen.tolist()])
        self.chosen.append(chosen)
        self.taken.append(taken)
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * taken
        scores = scores / scores.sum(-1, keepdim=True)
        out = torch.zeros_like(normal)
        for e in range(experts):
            share = (weights * (chosen == e)).sum(-1, keepdim=True)
            inner = functional.silu(self.linear(normal, f"{name}.experts.{e}.gate")) * self.linear(
                normal, f"{name}.experts.{e}.up"
            )
            out = out + share * self.linear(inner, f"{name}.experts.{e}.down")
        frequency = functional.one_hot(chosen, experts).sum((1, 2)).double() / s  # [b, e]
        balance = experts * (frequency * scores.mean(1)).sum(-1)
        rows = self.step_rows or b
        self.terms += (config.balance or 0) * balance.sum() / rows / config.layers
        self.terms += (config.moe.z_loss or 0) * logits.exp().sum(-1).log().square().sum() / (s * rows * config.layers)
        return out

    def best(self, row: list[float], k: int) -> list[int]:
        """The k best experts of a token, of its best groups."""
        groups = self.config.moe.groups or 1
        size = len(row) // groups
        together = [sum(sorted(row[at * size : (at + 1) * size])[-2:]) for at in range(groups)]
        kept = sorted(range(groups), key=lambda at: (-together[at], at))[: self.config.moe.groups_per_token]
        return sorted((e for e in range(len(row)) if e // size in kept), key=lambda e: (-row[e], e))[:k]

    def within_capacity(self, of: list[list[int]], experts: int) -> list[list[bool]]:
        """Return which choices of a sequence its experts take: the first ones."""
        factor = self.config.moe.capacity
        most = len(of) if factor is None else ceil(factor * len(of) * len(of[0]) / experts)
        seen, taken = Counter[int](), []
        for picks in of:
            taken.append([seen[expert] < most for expert in picks])
            seen.update(picks)
        return taken

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        step: int = 0,
        first_row: int = 0,
        training: bool = True,
        step_rows: int | None = None,
    ) -> Tensor:
        self.chosen, self.taken = [], []
        self.terms, self.step_rows = torch.zeros((), dtype=torch.float64), step_rows
        loss = super().loss(tokens, labels, step, first_row, training)
        return loss + self.terms if training else loss

    def counts(self) -> list[list[int]]:
        """Tokens by layer and expert that takes them, of the last loss."""
        every = zip(self.chosen, self.taken, strict=True)
        return [torch.bincount(chosen[taken], minlength=self.config.experts or 8).tolist() for chosen, taken in every]
