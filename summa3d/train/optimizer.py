"""AdamW on the local blocks of a sharded model, the learning rate, and the factor that clips gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import TYPE_CHECKING

import torch

from summa3d.kernels import dispatch

if TYPE_CHECKING:
    from ..parallel.states import ParameterState
    from .config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's first and second moments."""


class AdamW:
    """AdamW with decoupled weight decay on matrices (parameters with `p.decay`), and none on vectors.

    `moments[moment][name]` is a moment of the parameter `name`, in its state's sharding of moments. Memory: two words per
    element of it. Nothing is communicated.
    """

    def __init__(self, states: Sequence[ParameterState], config: TrainConfig) -> None:
        self.config = config
        self.states = {state.name: state for state in states}
        self.moments = {moment: {state.name: torch.zeros_like(state.weight) for state in states} for moment in MOMENTS}
        self._steps = dict.fromkeys(self.states, 0)

    def start_at(self, step: int) -> None:
        """Set the number of steps already taken, on which the bias corrections depend."""
        self._steps = dict.fromkeys(self.states, step)

    def counted_gradients(self) -> list[tuple[torch.Tensor, bool]]:
        """The gradients of this rank, each with whether this rank is the one that counts it: what `norm_and_votes` takes.

        They are the same with moments that are copied over the replicas and with sharded ones, and so is the norm.
        """
        found = [(state.counted_gradient, state.shardings.counts) for state in self.states.values()]
        return [(gradient, counts) for gradient, counts in found if gradient is not None]

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update this rank's part of every weight that has a gradient, from gradient · factor, with learning rate `rate`.

        The call may leave gradients multiplied by `factor`.
        """
        for decay in (True, False):
            found = [(state, state.gradient) for state in self.states.values() if state.parameter.decay is decay]
            given = [(state, gradient) for state, gradient in found if gradient is not None]
            self._update(given, rate, self.config.weight_decay if decay else 0.0, factor)

    def _update(self, given: list[tuple[ParameterState, torch.Tensor]], rate: float, weight_decay: float, factor: float) -> None:
        first, second = (self.moments[moment] for moment in MOMENTS)
        rows: list[tuple[torch.Tensor, ...]] = []
        steps: list[int] = []
        for state, gradient in given:
            name = state.name
            self._steps[name] += 1
            blocks = state.weight, gradient, first[name], second[name]
            pieces = list(zip(*map(state.pieces, blocks), strict=True)) if state.shardings.cut else [blocks]
            rows += pieces
            steps += [self._steps[name]] * len(pieces)
        if rows:
            weights, *others = map(list, zip(*rows, strict=True))
            settings = self.config.betas, self.config.epsilon, weight_decay, factor
            dispatch.kernels_for(weights[0]).adamw(weights, *others, steps, rate, *settings)


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


def clip_factor(norm: float, limit: float, scale: float = 1.0) -> float:
    """The factor that unscales gradients and clips them.

    Parameters
    ----------
    norm : global norm of the unscaled gradients
    limit : largest norm after clipping; 0 turns clipping off
    scale : loss scale that the gradients are still multiplied by

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, 1.0, scale=2.0)
    (0.25, 1.0, 0.125)
    """
    return (limit / norm if limit and norm > limit else 1.0) / scale
