# The learning rate of each step: a pure function. Imports config for its type only.
# Next: optimizer.py, which sets it.
from __future__ import annotations

from math import cos, pi
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of `step` (the first is 1): linear warm-up, then half a cosine down to `decay_to` of the peak."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    return config.learning_rate * (config.decay_to + (1 - config.decay_to) * (1 + cos(pi * done)) / 2)
