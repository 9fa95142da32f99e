"""Parameters that stay in a module of another library: copies on all ranks, whose gradients are summed where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...autograd.collectives import sum_gradient
from ...layout.layout import Layout
from ..context import Context
from ..parameter import ShardedParameter, new_parameter


def keep(owner: nn.Module, leaf: str, scheme: Context, plane: Sequence[str]) -> ShardedParameter:
    """Make a module's parameter a copy on all ranks, each of whose uses has its gradient summed over `plane`.

    Any code that reads the attribute gets what is summed: the parameter, a 16-bit copy of it, or what replicas hold shards of.
    Words: in backward one all-reduce of it a use.
    """
    old = owner._parameters[leaf]
    assert old is not None
    layout, shape, axis = Layout(*((),) * old.dim()), tuple(old.shape), scheme.grid[tuple(plane)]
    kept = new_parameter(scheme, layout, shape, ("constant", 0.0), old.dtype, decay=old.dim() > 1)
    if not old.is_meta:
        kept.data.copy_(old.detach()[kept.sharding.slices(kept.grid)])
    kept.requires_grad_(old.requires_grad)
    owner._parameters[leaf] = kept

    def used(self: nn.Module) -> Tensor:
        stored: Any = self._parameters[leaf]
        return sum_gradient(scheme.gathered(stored, layout, shape), axis)

    own = type(owner)
    owner.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, leaf: property(used)})
    return kept
