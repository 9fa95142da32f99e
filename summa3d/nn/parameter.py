# Parameters that know their sharding, and their first values. Imports layout, random.
# Next: linear.py.
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layout.layout import Layout, Sharding
from .random import key, normal_
from .schemes import Scheme


class ShardedParameter(nn.Parameter):
    """This rank's block of a parameter.

    sharding : layout and global shape.
    decay : whether weight decay applies (matrices yes; biases, norms' γ and β no).
    initial : what `initialise` fills it with: ("normal", std), or ("constant", value).
    """

    sharding: Sharding
    decay: bool
    initial: tuple[str, float]

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedParameter:
        copied: ShardedParameter = super().__deepcopy__(memo)
        copied.sharding, copied.decay, copied.initial = self.sharding, self.decay, self.initial  # which torch leaves behind
        return copied


def new_parameter(
    scheme: Scheme, layout: Layout, shape: tuple[int, ...], initial: tuple[str, float], dtype: torch.dtype, decay: bool
) -> ShardedParameter:
    """An unfilled parameter: NaN, until `initialise` or a checkpoint fills it, so that a forgotten one cannot pass unseen."""
    sharding = Sharding(layout, shape)
    parameter = ShardedParameter(torch.full(sharding.local_shape(scheme.grid), torch.nan, dtype=dtype))
    parameter.sharding, parameter.decay, parameter.initial = sharding, decay, initial
    return parameter


def initialise(module: nn.Module, scheme: Scheme, seed: int) -> None:
    """Fill every parameter of `module` from (seed, its name, its global element indices): the same weights on every grid."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedParameter):
            _fill(parameter.data, parameter, scheme, key(seed, name))


def _fill(data: Tensor, parameter: ShardedParameter, scheme: Scheme, stream: int) -> None:
    kind, value = parameter.initial
    if kind == "normal":
        normal_(data, stream, parameter.sharding.shape, parameter.sharding.slices(scheme.grid), value)
    else:
        data.fill_(value)
