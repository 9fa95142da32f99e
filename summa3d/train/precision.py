"""Mixed precision: 16-bit working copies of float32 master weights, and dynamic loss scaling for float16.

The layers compute in the dtype of their weights and need no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch

from ..autograd.recompute import places_of, weights_in
from ..errors import Summa3dError

if TYPE_CHECKING:
    from ..parallel.states import ParameterState
    from .config import Config, LossScaleConfig

SMALLEST_SCALE = 1.0
"""Smallest loss scale: a step that is not finite at this scale means that the run has diverged."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name.

    >>> torch_dtype("float32")
    torch.float32
    """
    return cast(torch.dtype, getattr(torch, name))


@contextmanager
def working_weights(model: torch.nn.Module, states: Iterable[ParameterState], dtype: torch.dtype) -> Iterator[None]:
    """A context in which every layer of a model computes with weights of `dtype`; the parameters themselves stay float32.

    The copies are part of the autograd graph of every loss that is computed with them: backward widens a 16-bit gradient and adds
    it to the float32 sum of the parameter's state, over micro-batches too. Each rank copies its local blocks before any
    all-gather, so that weights are communicated in 16 bits. Memory: 2 bytes per local weight until the context has ended and
    backward has used it; where replicas share the master weights (`ParameterState.copy`), the copies stay. A context inside
    another one uses its copies. The context does nothing where the parameters have that dtype.
    """
    wider = {id(state.parameter): state for state in states if state.parameter.dtype != dtype}
    result = {place: id(place[0]._parameters[place[1]]) for place in (places_of([model]) if wider else ())}
    places = [place for place in result if result[place] in wider]
    copies = {key: wider[key].weight_in(dtype) for key in dict.fromkeys(result[place] for place in places)}
    with weights_in(places, [copies[result[place]] for place in places]):
        yield


@dataclass
class LossScale:
    """The loss scale: 1, except in float16, where the scale is dynamic.

    Attributes
    ----------
    settings : the table `loss_scale` of the configuration
    dynamic : whether the scale changes: True in float16
    value : the loss is multiplied by this before backward
    good : steps since the scale last changed
    skipped : steps of the run whose update was skipped

    All ranks hold equal values, which follow from the loss and the global gradient norm.

    >>> from summa3d.train.config import LossScaleConfig
    >>> scale = LossScale(LossScaleConfig(), dynamic=True, value=65536.0)
    >>> scale.accepts(1, loss=2.5, norm=float("inf")), scale.value, scale.skipped
    (False, 32768.0, 1)
    """

    settings: LossScaleConfig
    dynamic: bool
    value: float = 1.0
    good: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, config: Config, saved: dict[str, Any] | None = None) -> LossScale:
        """The scale at the start of a run; `saved` is the state in the index of the checkpoint that is resumed."""
        scale = cls(config.loss_scale, dynamic=config.dtype == "float16", skipped=saved["skipped"] if saved else 0)
        if scale.dynamic:
            resumed = saved is not None and saved["dynamic"]
            scale.value, scale.good = (saved["value"], saved["good"]) if saved and resumed else (config.loss_scale.initial, 0)
        return scale

    def state(self) -> dict[str, Any]:
        """The state for the index of a checkpoint, as `of` reads it."""
        return {"dynamic": self.dynamic, "value": self.value, "good": self.good, "skipped": self.skipped}

    def accepts(self, number: int, loss: float, norm: float) -> bool:
        """Return whether step `number` may update the weights; adapts the scale for the next step.

        A step whose loss or gradient norm is not finite is skipped, and halves the scale. `growth_every` good steps in a row
        double the scale. Raises Summa3dError for a step that is not finite at the smallest scale.
        """
        finite = isfinite(loss) and isfinite(norm)
        if not finite and self.value <= SMALLEST_SCALE:
            raise Summa3dError(
                f"Training diverged at step {number}: loss {loss}, gradient norm {norm}.\n"
                "  Lower train.learning_rate or lengthen train.warmup; --resume continues from the newest checkpoint."
            )
        if not self.dynamic:
            return True
        if not finite:
            self.value, self.good, self.skipped = max(self.value / 2, SMALLEST_SCALE), 0, self.skipped + 1
            return False
        self.good += 1
        if self.good >= self.settings.growth_every:
            self.value, self.good = min(self.value * 2, self.settings.largest), 0
        return True
