"""Transformer layers and models, each written once for every tensor-parallel scheme.

Names load on demand, so that the modules of plain data (config, schemes.registry) can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import ModelConfig
    from .context import Context, scheme
    from .copies import check_copies
    from .gradients import clip_grad_norm_, grad_norm
    from .layers.dropout import Batch, Dropout
    from .layers.embedding import Embedding, Positions
    from .layers.linear import Linear
    from .layers.loss import cross_entropy
    from .layers.mlp import MLP, GatedMLP
    from .layers.norm import LayerNorm, RMSNorm
    from .models.bert import BERT
    from .models.block import Block
    from .models.gpt import GPT
    from .models.llama import Llama
    from .models.registry import build
    from .models.vit import ViT
    from .parameter import ShardedParameter, initialise
    from .schemes.scheme import Scheme

MODULES = {
    "config": ("ModelConfig",),
    "context": ("Context", "scheme"),
    "copies": ("check_copies",),
    "gradients": ("clip_grad_norm_", "grad_norm"),
    "layers.dropout": ("Batch", "Dropout"),
    "layers.embedding": ("Embedding", "Positions"),
    "layers.linear": ("Linear",),
    "layers.loss": ("cross_entropy",),
    "layers.mlp": ("MLP", "GatedMLP"),
    "layers.norm": ("LayerNorm", "RMSNorm"),
    "models.bert": ("BERT",),
    "models.block": ("Block",),
    "models.gpt": ("GPT",),
    "models.llama": ("Llama",),
    "models.registry": ("build",),
    "models.vit": ("ViT",),
    "parameter": ("ShardedParameter", "initialise"),
    "schemes.scheme": ("Scheme",),
}
HOME = {name: module for module, names in MODULES.items() for name in names}
__all__ = [
    "BERT",
    "GPT",
    "MLP",
    "Batch",
    "Block",
    "Context",
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
    "check_copies",
    "clip_grad_norm_",
    "cross_entropy",
    "grad_norm",
    "initialise",
    "scheme",
]


def __getattr__(name: str) -> object:
    if name in HOME:
        return getattr(importlib.import_module(f".{HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
