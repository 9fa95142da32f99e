# Working copies in 16 bits of float32 weights, and the scale that keeps float16 gradients from vanishing.
# Imports autograd, config, errors, torch. The layers know nothing of it: they compute in the dtype of their weights.
# Next: loop.py, which takes a step with it; optimizer.py, which sees float32 only.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch

from ..autograd.recompute import places_of, weights_in
from ..errors import Summa3dError
from .config import master_dtype

if TYPE_CHECKING:
    from .config import Config, LossScaleConfig

SMALLEST_SCALE = 1.0
"""A step that fails with losses scaled by no more than this fails by itself: the run has diverged."""


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for "float32"."""
    return cast(torch.dtype, getattr(torch, name))


@contextmanager
def working_weights(model: torch.nn.Module, config: Config) -> Iterator[None]:
    """Within the block, every layer finds its weights in `config.dtype`; the model's own parameters stay float32.

    The copy is part of the graph: a gradient that arrives in 16 bits is widened and added to the parameter's float32 `grad`,
    over micro-batches too. Each rank copies its own blocks, before they are gathered, so weights travel in 16 bits. Memory: 2
    bytes for each weight of the rank until backward has used it. Nothing is done where `dtype` needs no copy.
    """
    if config.dtype == master_dtype(config.dtype):
        yield
        return
    dtype = torch_dtype(config.dtype)
    places = places_of([model])
    copies = {id(p): p.to(dtype) for p in model.parameters()}
    with weights_in(places, [copies[id(module._parameters[name])] for module, name in places]):
        yield


@dataclass
class LossScale:
    """What losses are multiplied by before backward: 1, except in float16, where it grows and shrinks as gradients allow.

    `good` counts the steps since the last change, `skipped` the bad steps of the run. Every rank holds the same numbers: they
    follow from the global gradient norm, which is one number for all ranks.
    """

    settings: LossScaleConfig
    dynamic: bool
    value: float = 1.0
    good: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, config: Config, saved: dict[str, Any] | None = None) -> LossScale:
        """The scale a run begins with, or goes on with from what a checkpoint's index holds."""
        scale = cls(config.loss_scale, dynamic=config.dtype == "float16", skipped=saved["skipped"] if saved else 0)
        if scale.dynamic:
            resumed = saved is not None and saved["dynamic"]
            scale.value, scale.good = (saved["value"], saved["good"]) if saved and resumed else (config.loss_scale.initial, 0)
        return scale

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"dynamic": self.dynamic, "value": self.value, "good": self.good, "skipped": self.skipped}

    def accepts(self, number: int, loss: float, norm: float) -> bool:
        """Whether step `number` may update the weights; adapts the scale for the next one.

        A bad step (a loss or a gradient that is not finite) is skipped and halves the scale; `growth_every` good ones double it.
        Raises Summa3dError where no smaller scale can help.
        """
        finite = isfinite(loss) and isfinite(norm)
        if not finite and self.value <= SMALLEST_SCALE:
            raise Summa3dError(
                f"Training diverged at step {number}: loss {loss}, gradient norm {norm}.\n"
                "  A lower train.learning_rate or a longer train.warmup helps; --resume goes on from the newest checkpoint."
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
