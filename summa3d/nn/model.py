# The model of a configuration, whatever its family. Imports gpt, bert, llama, vit.
# Next: train/prepare.py, which builds what a run's configuration names.
from __future__ import annotations

import torch

from .bert import BERT
from .config import ModelConfig
from .gpt import GPT
from .llama import Llama
from .schemes import Scheme
from .vit import ViT

Model = GPT | BERT | Llama | ViT
MODELS: dict[str, type[Model]] = {"gpt2": GPT, "bert": BERT, "llama": Llama, "vit": ViT}


def build(config: ModelConfig, scheme: Scheme, dtype: torch.dtype = torch.float32, seed: int = 1) -> Model:
    """The model of the family that `config` names; ``model(inputs, labels, step=…, first_row=…, count=…)`` is its loss."""
    return MODELS[config.family](config, scheme, dtype, seed)
