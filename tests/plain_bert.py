"""The parity oracle of BERT: plain torch on one process, written without any of the library's layers."""

from __future__ import annotations

import torch
from plain_transformer import PlainTransformer
from torch import Tensor
from torch.nn import functional

from summa3d.nn import ModelConfig


class PlainBERT(PlainTransformer):
    """Logits and loss of a BERT from a dict of global weights."""

    def logits(self, tokens: Tensor, types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """mask [b, s]: True at tokens. Returns [b, s, v] and [b, 2]."""
        w, config, eps = self.weights, self.config, 1e-12
        b, s = tokens.shape
        x = w["embedding.weight"][tokens] + w["positions.weight"][:s] + w["token_types.weight"][types]
        x = self.drop(self.layer_norm(x, "embedding_norm", eps), "embedding", config.dropout)
        for index in range(config.layers):
            name = f"blocks.{index}"
            qkv = self.linear(x, f"{name}.attention.qkv").view(b, s, config.heads, 3, -1)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
            context = self.linear(self.attend(q, k, v, mask[:, None, None, :], name), f"{name}.attention.out")
            x = self.layer_norm(x + self.drop(context, f"{name}.attention_branch", config.dropout), f"{name}.attention_norm", eps)
            inner = self.linear(functional.gelu(self.linear(x, f"{name}.mlp.up")), f"{name}.mlp.down")
            x = self.layer_norm(x + self.drop(inner, f"{name}.mlp_branch", config.dropout), f"{name}.mlp_norm", eps)
        inner = self.layer_norm(functional.gelu(self.linear(x, "transform")), "transform_norm", eps)
        relation = self.linear(torch.tanh(self.linear(x[:, 0], "pooler")), "relation")
        return inner @ w["embedding.weight"].T + w["head_bias"], relation

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        types: Tensor,
        attention_mask: Tensor,
        relation: Tensor,
        step: int = 0,
        first_row: int = 0,
    ) -> Tensor:
        self.at(step, first_row)
        words, sentences = self.logits(tokens, types, attention_mask != 0)
        masked = functional.cross_entropy(words.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return masked + functional.cross_entropy(sentences, relation, ignore_index=-100)


def sentence_pairs(config: ModelConfig, rows: int, sequence: int) -> dict[str, Tensor]:
    """Two sentences a row, of different lengths, padded; labels on a few tokens; one row of several without a relation."""
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = torch.randint(0, config.vocabulary, (2, rows, sequence), generator=generator)
    lengths = torch.randint(3, sequence + 1, (rows, 1), generator=generator)
    mask = torch.arange(sequence) < lengths
    labels[(torch.rand(rows, sequence, generator=generator) < 0.6) | ~mask] = -100
    labels[0, 1] = 5
    relation = torch.randint(0, 2, (rows,), generator=generator)
    relation[-1] = -100 if rows > 1 else 1
    types = (torch.arange(sequence) >= lengths // 2).long()
    return {"tokens": tokens, "labels": labels, "types": types, "attention_mask": mask.long(), "relation": relation}
