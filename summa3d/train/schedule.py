"""The learning-rate schedule: linear warm-up, then half a cosine."""

from __future__ import annotations

from math import cos, pi
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of `step` (the first step is 1): linear warm-up, then half a cosine down to decay_to · peak.

    >>> from summa3d.train.config import TrainConfig
    >>> config = TrainConfig(steps=100, warmup=10, learning_rate=1.0, decay_to=0.1)
    >>> [round(learning_rate(step, config), 3) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    """
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    return config.learning_rate * (config.decay_to + (1 - config.decay_to) * (1 + cos(pi * done)) / 2)
