"""The Llama family: rotary positions, RMSNorm, SwiGLU, grouped-query attention and an untied head, on any scheme."""

from __future__ import annotations

from .base import LanguageModel


class Llama(LanguageModel):
    """A decoder-only transformer of the Llama family.

    Its head is a table of its own, or the embedding's with `tied_head`.
    Raises LayoutError where contexts exchange kv heads that ranks hold unevenly (`GroupedAttention`).
    """
