"""The GPT-2 family: learned positions and a tied head, on any scheme."""

from __future__ import annotations

from .base import LanguageModel


class GPT(LanguageModel):
    """A decoder-only transformer with learned positions, layer norms, GELU and a tied head (the GPT-2 family)."""
