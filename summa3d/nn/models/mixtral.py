"""The Mixtral family and its kin: decoders whose feed-forward layers are experts, of which each token takes some."""

from __future__ import annotations

from .base import LanguageModel


class Mixtral(LanguageModel):
    """A decoder-only transformer of the families mixtral, qwen2_moe, qwen3_moe and olmoe (`MoE`).

    Raises LayoutError where contexts exchange kv heads that ranks hold unevenly (`GroupedAttention`).
    """
