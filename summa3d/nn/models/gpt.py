"""The GPT-2 family: learned positions and a tied head, on any scheme."""

from __future__ import annotations

from .base import LanguageModel


class GPT(LanguageModel):
    """A decoder-only transformer with learned positions, layer norms and a tied head (the GPT-2 family).

    Its activation is GELU, or `activation`; heads of k and v may be fewer than those of q (`GroupedAttention`).
    """
