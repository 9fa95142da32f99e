"""Transformer layers and models, each written once for every tensor-parallel scheme.

Names load on demand, so that the modules of plain data (config, schemes.registry) can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adopt.folder import from_folder as from_folder
    from .adopt.parallelise import parallelise as parallelise
    from .config import ModelConfig as ModelConfig
    from .context import Context as Context
    from .context import scheme as scheme
    from .copies import check_copies as check_copies
    from .gradients import clip_grad_norm_ as clip_grad_norm_
    from .gradients import grad_norm as grad_norm
    from .layers.dropout import Batch as Batch
    from .layers.dropout import Dropout as Dropout
    from .layers.embedding import Embedding as Embedding
    from .layers.embedding import Positions as Positions
    from .layers.linear import Linear as Linear
    from .layers.loss import cross_entropy as cross_entropy
    from .layers.mlp import MLP as MLP
    from .layers.mlp import GatedMLP as GatedMLP
    from .layers.norm import LayerNorm as LayerNorm
    from .layers.norm import RMSNorm as RMSNorm
    from .models.bert import BERT as BERT
    from .models.block import Block as Block
    from .models.gpt import GPT as GPT
    from .models.llama import Llama as Llama
    from .models.registry import build as build
    from .models.vit import ViT as ViT
    from .muon.optimizer import Muon as Muon
    from .parameter import ShardedParameter as ShardedParameter
    from .parameter import initialise as initialise
    from .schemes.scheme import Scheme as Scheme
    from .state import full_state_dict as full_state_dict
    from .state import load_full_state_dict as load_full_state_dict

MODULES = {
    "adopt.folder": ("from_folder",),
    "adopt.parallelise": ("parallelise",),
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
    "muon.optimizer": ("Muon",),
    "parameter": ("ShardedParameter", "initialise"),
    "schemes.scheme": ("Scheme",),
    "state": ("full_state_dict", "load_full_state_dict"),
}
HOME = {name: module for module, names in MODULES.items() for name in names}
__all__ = sorted(HOME)


def __getattr__(name: str) -> object:
    if name in HOME:
        return getattr(importlib.import_module(f".{HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
