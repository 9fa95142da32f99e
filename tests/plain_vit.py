"""The parity oracle of ViT: plain torch on one process, its patches by a convolution, written without the library's layers."""

from __future__ import annotations

import torch
from plain_transformer import PlainTransformer
from torch import Tensor
from torch.nn import functional

from summa3d.nn import ModelConfig


class PlainViT(PlainTransformer):
    """Logits and loss of a ViT from a dict of global weights."""

    def logits(self, images: Tensor) -> Tensor:
        w, config, eps = self.weights, self.config, 1e-12
        kernel = w["patches.weight"].T.reshape(config.hidden, images.shape[1], config.patch, config.patch)
        patches = functional.conv2d(images, kernel, w["patches.bias"], stride=config.patch).flatten(2).transpose(1, 2)
        x = torch.cat((w["class_token"].expand(len(images), 1, -1), patches), 1) + w["positions.weight"]
        x = self.drop(x, "embedding", config.dropout)
        b, s, _ = x.shape
        for index in range(config.layers):
            name = f"blocks.{index}"
            normal = self.layer_norm(x, f"{name}.attention_norm", eps)
            qkv = self.linear(normal, f"{name}.attention.qkv").view(b, s, config.heads, 3, -1)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
            context = self.attend(q, k, v, torch.ones(s, s, dtype=torch.bool), name)
            x = x + self.drop(self.linear(context, f"{name}.attention.out"), f"{name}.attention_branch", config.dropout)
            normal = self.layer_norm(x, f"{name}.mlp_norm", eps)
            inner = self.linear(functional.gelu(self.linear(normal, f"{name}.mlp.up")), f"{name}.mlp.down")
            x = x + self.drop(inner, f"{name}.mlp_branch", config.dropout)
        return self.linear(self.layer_norm(x, "norm", eps)[:, 0], "head")

    def loss(self, images: Tensor, labels: Tensor, step: int = 0, first_row: int = 0) -> Tensor:
        self.at(step, first_row)
        return functional.cross_entropy(self.logits(images), labels, ignore_index=-100)


def pictures(config: ModelConfig, rows: int, sequence: int) -> dict[str, Tensor]:
    """Random images and labels; one row of several has no label."""
    side, _, channels, classes = config.image_sizes
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    labels[0] = -100 if rows > 1 else 0
    return {"images": torch.randn(rows, channels, side, side, generator=generator, dtype=torch.float64), "labels": labels}
