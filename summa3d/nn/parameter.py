"""Sharded parameters, and the initialisation that gives them the same values on every grid."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan, prod
from typing import Any

import torch
from torch import nn

from ..comm.grid import BaseGrid
from ..errors import ConfigError, ShapeError
from ..files import LARGEST_WHOLE
from ..layout.layout import Layout, Sharding
from ..layout.random import key
from .context import Context
from .random import normal_

MOST = torch.finfo(torch.float32).max
"""Of a first value's deviation, or the value: more is infinite in the dtypes of weights."""


class ShardedParameter(nn.Parameter):
    """This rank's block of a parameter.

    Attributes
    ----------
    sharding : the layout over the job's grid, and the global shape
    grid : the job's grid
    decay : whether weight decay applies (to matrices; not to biases and norms' γ and β)
    initial : the values that `initialise` writes: ("normal", std) or ("constant", value)
    joined : of a fused weight, numbers of groups and parts: its columns are ordered [group][part][the rest], and each part is a
        matrix of its own
    """

    sharding: Sharding
    grid: BaseGrid
    decay: bool
    initial: tuple[str, float]
    joined: tuple[int, int] = (1, 1)

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedParameter:
        """A copy with the same attributes, which torch's own copy would lack."""
        copied: ShardedParameter = super().__deepcopy__(memo)
        copied.sharding, copied.grid, copied.decay, copied.initial = self.sharding, self.grid, self.decay, self.initial
        copied.joined = self.joined
        return copied

    def __getstate__(self) -> dict[str, object]:
        """State that pickle keeps next to the values: no grid, whose communicators belong to this job."""
        return {name: value for name, value in self.__dict__.items() if name != "grid"}


class ShardedModule(nn.Module):
    """The base of modules with sharded parameters: `state_dict` says which part of the whole each block is.

    ``load_state_dict`` then refuses another rank's blocks, or those of another grid, of equal sizes too. The parts lie in the
    state's metadata, which ``torch.save`` keeps.

    transposed_in_torch : names of own parameters that torch's layer of the same kind has as transposes
    """

    transposed_in_torch: tuple[str, ...] = ()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][BLOCKS] = {name: part_of(p) for name, p in self._own().items()}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = local_metadata.get(BLOCKS, {})
        for name, p in self._own().items():
            if name in saved and prefix + name in state_dict and saved[name] != part_of(p):
                error_msgs.append(
                    f"{prefix}{name} is {_in_words(saved[name])}, the block of another rank or grid; this rank holds "
                    f"{_in_words(part_of(p))}. A state_dict fits the rank and the grid that made it: load_full_state_dict takes "
                    "what full_state_dict returned, on any grid."
                )
        super()._load_from_state_dict(state_dict, prefix, dict(local_metadata), strict, missing_keys, unexpected_keys, error_msgs)

    def _own(self) -> dict[str, ShardedParameter]:
        return {name: p for name, p in self._parameters.items() if isinstance(p, ShardedParameter)}


BLOCKS = "blocks"
"""The key of a module's metadata in a state_dict."""
BlockExtent = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""The shape of a whole parameter, and the start and stop of this rank's block along each dim."""


def part_of(parameter: ShardedParameter) -> BlockExtent:
    """Shape of a parameter's whole tensor, and the interval of each dim that is this rank's block."""
    slices = parameter.sharding.slices(parameter.grid)
    return tuple(parameter.sharding.shape), tuple((item.start, item.stop) for item in slices)


def _in_words(part: BlockExtent) -> str:
    shape, block = part
    return f"[{', '.join(f'{start}:{stop}' for start, stop in block)}] of {shape}"


def new_parameter(
    context: Context, layout: Layout, shape: tuple[int, ...], initial: tuple[str, float], dtype: torch.dtype, decay: bool
) -> ShardedParameter:
    """Create this rank's block of a parameter of global `shape`, filled with NaN until `initialise` or a checkpoint writes it.

    NaN makes a parameter that was never initialised visible in the first loss. `layout` is the one on the inner grid; ranks of
    the job that do not hold the parameter (`Context.on`) have an empty block. Raises ShapeError and ConfigError for what is no
    shape, deviation or floating-point dtype.
    """
    if not all(hasattr(size, "__index__") and not isinstance(size, bool) and size > 0 for size in shape):
        raise ShapeError(f"A parameter's sizes are whole numbers, 1 or more; they are given as {shape}.")
    if prod(shape) > LARGEST_WHOLE:
        raise ShapeError(f"A parameter has at most 2^63 − 1 elements; its sizes are given as {shape}.")
    try:
        value = float(initial[1])
    except (TypeError, ValueError, OverflowError):
        value = nan
    if not -MOST <= value <= MOST:
        raise ConfigError(f"A parameter's first values have a finite number as their deviation; it is given as {initial[1]!r}.")
    if not getattr(dtype, "is_floating_point", False):
        raise ConfigError(f"A parameter has one of torch's floating-point dtypes; it was given {dtype!r}.")
    sharding = Sharding(layout.held_at(dict(context.at)), shape)
    parameter = ShardedParameter(torch.full(sharding.local_shape(context.whole), torch.nan, dtype=dtype))
    parameter.sharding, parameter.grid, parameter.decay, parameter.initial = sharding, context.whole, decay, (initial[0], value)
    return parameter


def initialise(module: nn.Module, scheme: Context, seed: int) -> None:
    """Write the first values of every parameter of `module`: the same weights on every grid, without communication.

    Each value is a function of the seed, the parameter's name and the global element index.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedParameter):
            kind, value = parameter.initial
            if kind == "normal":
                slices = parameter.sharding.slices(scheme.whole)
                normal_(parameter.data, key(seed, name), parameter.sharding.shape, slices, value)
            else:
                parameter.data.fill_(value)
