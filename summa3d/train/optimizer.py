# AdamW on the local blocks, the gradient norm of the whole model, and clipping by it.
# Imports kernels.dispatch, comm and layout for their types, torch. No arithmetic of its own but the norm.
# Next: schedule.py (the learning rate), checkpoint.py (how the moments are stored).
from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, sqrt
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from summa3d.kernels import dispatch

if TYPE_CHECKING:
    from ..comm.grid import Grid
    from ..nn.parameter import ShardedParameter
    from .config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's first and second moment."""


def named_parameters(model: torch.nn.Module) -> list[tuple[str, ShardedParameter]]:
    """The model's parameters by name, each with its `sharding` and `decay`, in an order that is the same on every rank."""
    return [(name, cast("ShardedParameter", p)) for name, p in model.named_parameters()]


class AdamW:
    """AdamW, with weight decay on the parameters that ask for it (`p.decay`: matrices, not vectors).

    `moments[moment][name]` is the moment of the parameter called `name`, laid out as that parameter.
    """

    def __init__(self, model: torch.nn.Module, config: TrainConfig) -> None:
        self.config = config
        self.parameters = dict(named_parameters(model))
        self.moments = {moment: {name: torch.zeros_like(p.data) for name, p in self.parameters.items()} for moment in MOMENTS}
        self._steps = dict.fromkeys(self.parameters, 0)

    def start_at(self, step: int) -> None:
        """Count from `step` on: the bias corrections depend on it."""
        self._steps = dict.fromkeys(self.parameters, step)

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update every parameter that has a gradient, with learning rate `rate`, by its gradient·factor.

        Gradients may be left multiplied by the factor.
        """
        for decay in (True, False):
            names = [name for name, p in self.parameters.items() if p.decay is decay and p.grad is not None]
            self._update(names, rate, self.config.weight_decay if decay else 0.0, factor)

    def _update(self, names: list[str], rate: float, weight_decay: float, factor: float) -> None:
        first, second = (self.moments[moment] for moment in MOMENTS)
        for name in names:
            self._steps[name] += 1
        weights = [self.parameters[name] for name in names]
        if not weights:
            return
        dispatch.kernels_for(weights[0]).adamw(
            weights,
            [grad for name in names if (grad := self.parameters[name].grad) is not None],
            [first[name] for name in names],
            [second[name] for name in names],
            [self._steps[name] for name in names],
            rate,
            self.config.betas,
            self.config.epsilon,
            weight_decay,
            factor,
        )


def global_gradient_norm(parameters: Iterable[ShardedParameter], grid: Grid) -> float:
    """The 2-norm of all gradients of the whole model, the same number on every rank.

    Every element is counted once, by the rank that owns it (`Sharding.owned`), in float64; one all-reduce of one word. It is
    finite only if every gradient is, copies included: what a rank decides by it, all decide. A device is waited for once.
    """
    found = [p for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(cast(torch.Tensor, p.grad), dtype=torch.float64) for p in found]
    squares = 0.0
    for p, norm in zip(found, _read(norms), strict=True):
        if p.sharding.owned(grid) or not isfinite(norm):
            squares += norm * norm
    return sqrt(float(grid.world.all_reduce(np.array([squares]))[0]))


def _read(norms: list[torch.Tensor]) -> list[float]:
    """Their values, read at once; 0 of tensors without memory."""
    if not norms or norms[0].is_meta:
        return [0.0] * len(norms)
    values: list[float] = torch.stack(norms).tolist()
    return values


def clip_factor(norm: float, limit: float, scale: float = 1.0) -> float:
    """What gradients `scale` times too large are multiplied by, so that their norm, then `norm`, is at most `limit` (0: any)."""
    return (limit / norm if limit and norm > limit else 1.0) / scale
