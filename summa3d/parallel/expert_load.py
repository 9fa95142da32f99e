"""The load of a model's experts over a step, and the biases of the choice that it moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..comm.topology import OUTER
from ..nn.experts.moe import MoE

if TYPE_CHECKING:
    from ..comm.axis import Axis
    from ..nn.models.base import Body
    from .states import ParameterState


@dataclass(frozen=True)
class ExpertLoads:
    """The layers of experts of a model, and how many tokens each expert took in a step.

    Attributes
    ----------
    layers : the number of each layer of experts → the layer
    axis : the plane of ranks that count other tokens, or other layers: along contexts, replicas and stages
    biases : the states of the biases by layer, where the model has some
    rate : by how much a step moves a bias
    """

    layers: dict[int, MoE]
    axis: Axis
    biases: dict[int, ParameterState]
    rate: float

    @classmethod
    def of(cls, model: Body, states: Iterable[ParameterState]) -> ExpertLoads | None:
        """Those of a model, None where it has no experts. The first call is collective: it makes a communicator."""
        result = ((layer, getattr(block, "moe", None)) for layer, block in enumerate(model.blocks))
        layers = {layer: moe for layer, moe in result if isinstance(moe, MoE)}
        if not layers:
            return None
        whole = model.context.whole
        axes = tuple(axis for axis in OUTER if axis != "ep" and whole.shape.get(axis, 1) > 1)
        of_parameter = {id(state.parameter): state for state in states}
        biases = {layer: of_parameter[id(moe.router.bias)] for layer, moe in layers.items() if moe.router.bias is not None}
        return cls(layers, whole[axes], biases, model.config.moe.bias_rate or 0.0)

    def take(self) -> np.ndarray:
        """The tokens of each expert since they were last taken, [layers of experts, E], the same on every rank; collective.

        Moves an all-reduce of so many whole numbers.
        """
        width = next(iter(self.layers.values())).plane.experts
        own = np.zeros((len(self.layers), width), np.int64)
        for row, moe in zip(own, self.layers.values(), strict=True):
            row += sum(moe.trained.values())
            moe.trained.clear()
        return self.axis.all_reduce(own) if self.axis.size > 1 else own

    @torch.no_grad()
    def move(self, counts: np.ndarray) -> None:
        """Move this rank's part of every bias, by the counts of a step: by rate · sign(mean − count)."""
        for layer, row in zip(self.layers, counts, strict=True):
            if layer in self.biases:
                state = self.biases[layer]
                signs = np.sign(row.sum() - len(row) * row)[state.shardings.moments.slices(state.shardings.grid)[0]]
                state.weight.add_(torch.from_numpy(signs).to(state.weight), alpha=self.rate)
