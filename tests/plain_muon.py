"""The oracle of Muon: torch's own on whole matrices, one process, its cast to bfloat16 taken out; AdamW for all else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def without_bfloat16() -> Iterator[None]:
    """Within the block torch.optim.Muon computes in its gradients' dtype: the cast is a copy."""
    with mock.patch.object(torch.Tensor, "bfloat16", lambda self: self.clone()):
        yield


def parts_of(name: str, weight: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """The logical matrices of a weight, as torch's layers hold them, [outputs, inputs]: columns are [head][part][d]."""
    groups, parts = (heads, 3) if name.endswith("qkv.weight") else (kv_heads, 2) if name.endswith("kv.weight") else (1, 1)
    cut = weight.unflatten(1, (groups, parts, -1)).unbind(2)
    return [one.flatten(1).T for one in cut]


def joined_of(name: str, matrices: list[Tensor], heads: int, kv_heads: int) -> Tensor:
    """The weight of such matrices: the inverse of `parts_of`."""
    groups = heads if name.endswith("qkv.weight") else kv_heads if name.endswith("kv.weight") else 1
    return torch.stack([one.T.unflatten(1, (groups, -1)) for one in matrices], 2).flatten(1)


class PlainMuon:
    """torch.optim.Muon on the matrices of blocks, torch.optim.AdamW on the rest, of global weights that it updates in place."""

    def __init__(
        self, weights: Mapping[str, Tensor], heads: int, kv_heads: int, decay: float, muon: Mapping[str, object]
    ) -> None:
        self.weights, self.heads = weights, (heads, kv_heads)
        self.hidden = [name for name, one in weights.items() if name.startswith("blocks.") and one.dim() == 2]
        self.matrices = {
            name: [torch.nn.Parameter(one.clone()) for one in parts_of(name, weights[name].data, *self.heads)]
            for name in self.hidden
        }
        every = [one for name in self.hidden for one in self.matrices[name]]
        rest = [one for name, one in weights.items() if name not in self.hidden]
        groups = [
            {"params": [one for one in rest if one.dim() == 2], "weight_decay": decay},
            {"params": [one for one in rest if one.dim() != 2], "weight_decay": 0.0},
        ]
        self.muon = torch.optim.Muon(every, weight_decay=decay, **muon)
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)

    def step(self, rate: float, limit: float) -> None:
        """Clip the gradients of all weights by their norm, and update."""
        norm = torch.nn.utils.get_total_norm([one.grad for one in self.weights.values()])
        for one in self.weights.values() if norm > limit else ():
            one.grad *= limit / norm
        for name in self.hidden:
            gradients = parts_of(name, self.weights[name].grad, *self.heads)
            for one, gradient in zip(self.matrices[name], gradients, strict=True):
                one.grad = gradient.clone()
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
        with without_bfloat16():
            self.muon.step()
        self.adamw.step()
        for name in self.hidden:
            self.weights[name].data.copy_(joined_of(name, [one.data for one in self.matrices[name]], *self.heads))
