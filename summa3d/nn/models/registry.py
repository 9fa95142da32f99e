"""Builds the model of a configuration, whatever its family."""

from __future__ import annotations

import torch

from ..adopt.body import AdoptedDecoder
from ..config import FAMILIES, ModelConfig
from ..context import Context
from .bert import BERT
from .gpt import GPT
from .llama import Llama
from .mixtral import Mixtral
from .vit import ViT

Model = GPT | BERT | Llama | Mixtral | ViT | AdoptedDecoder
MODELS: dict[str, type[Model]] = {"gpt2": GPT, "bert": BERT, "llama": Llama, "vit": ViT, "hf": AdoptedDecoder}
MODELS |= {family: Mixtral for family, architecture in FAMILIES.items() if "experts" in architecture.options}


def build(config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> Model:
    """Build the model of the family that `config` names.

    ``model(inputs, labels, step=…, first_row=…, count=…)`` returns the global mean loss. Every rank of the scheme's grid calls
    this alike; no communication. Raises LayoutError where the scheme cannot split the model's sizes.
    """
    return MODELS[config.family](config, scheme, dtype, seed)
