"""The Llama family: rotary positions, RMSNorm, SwiGLU, grouped-query attention and an untied head, on any scheme."""

from __future__ import annotations

import torch

from ..config import ModelConfig
from ..context import Context
from ..layers.embedding import Embedding
from ..parameter import initialise
from .base import LanguageModel


class Llama(LanguageModel):
    """A decoder-only transformer of the Llama family.

    Its head is a table of its own, or the embedding's with `tied_head`.
    Raises LayoutError where kv_heads or ffn cannot be split (`GroupedAttention`, `GatedMLP`).
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__(config, scheme, dtype, seed)
        last = scheme.on_ends(last=True)
        self.head = None if config.tied else Embedding(config.vocabulary, config.hidden, last, dtype=dtype)
        initialise(self, scheme, seed)

    def output(self) -> Embedding:
        """The head's own table, or the embedding's where the head is tied."""
        return self.embedding if self.head is None else self.head
