# The shape of a model, as plain data. Imports no torch, so that a configuration can be checked without it.
# Next: scheme.py (which grid axes split which dim), then gpt.py.
from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a transformer, in the symbols of DESIGN §1: l layers, h hidden, a heads, f ffn, s sequence, v vocabulary.

    `kv_heads` and `ffn` default to `heads` and `4 · hidden`. `dropout` acts on the embedding and the two residual branches;
    `attention_dropout` on the attention probabilities, and takes attention off its fused path.
    """

    family: str = "gpt2"
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int | None = None
    ffn: int | None = None
    sequence: int = 128
    vocabulary: int = 256
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.family != "gpt2":
            raise ConfigError(f"model.family {self.family!r} is not available. Families: gpt2.")
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.hidden % self.heads:
            fits = [a for a in range(1, self.hidden + 1) if self.hidden % a == 0]
            raise ConfigError(
                f"model.hidden {self.hidden} cannot be divided into model.heads {self.heads}. "
                f"Head counts that fit hidden {self.hidden}: {', '.join(map(str, fits))}."
            )
        if self.kv_heads not in (None, self.heads):
            raise ConfigError(
                f"model.kv_heads {self.kv_heads} differs from model.heads {self.heads}; gpt2 has one k and v per head."
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must lie in [0, 1).")

    @property
    def width(self) -> int:
        """Feed-forward width f."""
        return 4 * self.hidden if self.ffn is None else self.ffn
