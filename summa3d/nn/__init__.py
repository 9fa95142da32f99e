"""Transformer layers and models, each written once for every tensor-parallel scheme.

Names load on demand, so that the modules of plain data (config, scheme_kinds) can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bert import BERT
    from .block import Block
    from .config import ModelConfig
    from .dropout import Batch, Dropout
    from .embedding import Embedding, Positions
    from .gpt import GPT
    from .linear import Linear
    from .llama import Llama
    from .loss import cross_entropy
    from .mlp import MLP, GatedMLP
    from .model import build
    from .norm import LayerNorm, RMSNorm
    from .parameter import ShardedParameter, initialise
    from .schemes import Scheme, scheme
    from .vit import ViT

HOME = {
    "BERT": "bert",
    "GPT": "gpt",
    "MLP": "mlp",
    "Batch": "dropout",
    "Block": "block",
    "Dropout": "dropout",
    "Embedding": "embedding",
    "GatedMLP": "mlp",
    "LayerNorm": "norm",
    "Linear": "linear",
    "Llama": "llama",
    "ModelConfig": "config",
    "Positions": "embedding",
    "RMSNorm": "norm",
    "Scheme": "schemes",
    "ShardedParameter": "parameter",
    "ViT": "vit",
    "build": "model",
    "cross_entropy": "loss",
    "initialise": "parameter",
    "scheme": "schemes",
}
__all__ = [
    "BERT",
    "GPT",
    "MLP",
    "Batch",
    "Block",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "Llama",
    "ModelConfig",
    "Positions",
    "RMSNorm",
    "Scheme",
    "ShardedParameter",
    "ViT",
    "build",
    "cross_entropy",
    "initialise",
    "scheme",
]


def __getattr__(name: str) -> object:
    if name in HOME:
        return getattr(importlib.import_module(f".{HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
