"""The states of a parameter, each with a sharding of its own: weight as used and as stored, gradient, moments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..comm.topology import replica_axes
from ..layout.layout import Sharding
from ..nn.parameter import ShardedParameter

if TYPE_CHECKING:
    from ..comm.grid import BaseGrid


@dataclass(frozen=True)
class Shardings:
    """How the states of one parameter lie on the job's grid.

    Attributes
    ----------
    used : the weight as layers use it, equal on all replicas
    stored : the weight as the optimizer updates and a checkpoint keeps it
    gradient : the accumulated gradient
    moments : the optimizer's moments, and the part of weight and gradient that this rank updates
    """

    used: Sharding
    stored: Sharding
    gradient: Sharding
    moments: Sharding

    @classmethod
    def of(cls, used: Sharding, replicas: Sequence[str] = (), zero: int = 0, halves: bool = False) -> Shardings:
        """The shardings of a parameter of which `replicas` hold copies.

        Parameters
        ----------
        zero : 0, all states lie as the weight is used; 1 (ZeRO-1), the moments are sharded over the replicas; 2, the accumulated
            gradient as well; 3, the stored weight as well
        halves : whether layers use 16-bit copies of it: with zero 1 and 2 the wider weight is sharded as well

        >>> found = Shardings.of(Sharding(Layout("h:z n"), (8, 4)), ("dp",), zero=1)
        >>> str(found.gradient.layout), str(found.moments.layout)
        ('h:z n', 'h:(z,dp) n')
        """
        sharded = used.sharded_over(replicas) if zero and replicas else used
        return cls(used, sharded if halves or zero > 2 else used, sharded if zero > 1 else used, sharded)


def replicas_of(used: Sharding, grid: BaseGrid) -> tuple[str, ...]:
    """The axes along which replicas hold equal copies of a parameter, which take other rows or positions of the batch."""
    named = {*used.layout.axes, *used.layout.root_only}
    return tuple(axis for axis in replica_axes(grid.shape) if axis not in named)


@dataclass(frozen=True)
class LocalShardings(Shardings):
    """The shardings of a parameter on this rank of the job's grid, and which rows of its block each rank with copies owns."""

    grid: BaseGrid

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's block of the weight as layers use it."""
        return self.used.local_shape(self.grid)

    @property
    def numel(self) -> int:
        """The elements of that block."""
        return prod(self.shape)

    @cached_property
    def partition(self) -> Sharding:
        """The partition of the parameter over all ranks that hold copies: each sums, counts and writes its own rows."""
        finest = self.used.sharded_over(replicas_of(self.used, self.grid))
        return self.moments if self.moments == finest else finest

    @cached_property
    def share(self) -> Sharding:
        """The part that this rank counts and writes: its partition, divided among the stages that hold a tied table."""
        shared = [axis for axis, indices in self.partition.layout.at if len(indices) > 1]
        return self.partition.sharded_over(shared) if shared else self.partition

    @cached_property
    def counts(self) -> bool:
        """Return whether this rank counts what it holds of `share`: one of those that hold the same does."""
        return self.share.is_primary(self.grid)

    @cached_property
    def rows(self) -> list[slice]:
        """The rows of this rank's block that each of the ranks with copies owns, in the order of their plane."""
        used, grid = self.used, self.grid
        axes, start = replicas_of(used, grid), used.slices(grid)[0].start
        result = []
        for point in itertools.product(*(range(grid.shape[axis]) for axis in axes)):
            at = {**grid.coordinates, **dict(zip(axes, point, strict=True))}
            rows = self.partition.layout.slices(used.shape, grid.shape, at)[0]
            result.append(slice(rows.start - start, rows.stop - start))
        return result

    @cached_property
    def cut(self) -> bool:
        """Return whether `pieces` cuts: other ranks own rows of what this rank updates."""
        return self.moments is not self.partition

    def part(self, block: Tensor, sharding: Sharding, wanted: Sharding) -> Tensor:
        """Return the part of a block in `sharding` that a finer sharding has: a view."""
        if sharding is wanted or sharding == wanted:
            return block
        whole, part = sharding.slices(self.grid)[0], wanted.slices(self.grid)[0]
        return block[part.start - whole.start : part.stop - whole.start]


@dataclass(eq=False)
class ParameterState:
    """The states of one parameter on this rank of the job's grid; its moments belong to the optimizer.

    Attributes
    ----------
    parameter : its data are the stored weight
    copy : of zero 1 and 2, what layers use where the stored weight is sharded: in 16 bits, in the sharding `used`, a leaf
    total : the accumulated gradient, where it is not `parameter.grad`
    taken : called with the gradients of the weight that layers use, whole, where they are not accumulated as they are
    given : whether backward has left a gradient on this rank since `clear`; known once the replicas' sums have begun
    """

    name: str
    parameter: ShardedParameter
    shardings: LocalShardings
    copy: Tensor | None = None
    total: Tensor | None = None
    taken: Callable[[ParameterState, Tensor], None] | None = None
    given: bool = False

    def shard(self, dtype: torch.dtype, copied: bool) -> None:
        """Store this rank's part alone of a weight that is stored in shards, and give layers, if `copied`, a copy of `dtype`.

        Moves nothing.
        """
        used, stored = self.shardings.used, self.shardings.stored
        if stored != used and copied:
            self.copy = self.parameter.data.to(dtype).requires_grad_(self.parameter.requires_grad)
        if stored != used:
            self.parameter.data = self.shardings.part(self.parameter.data, used, stored).clone()
        if self._apart and self.parameter.requires_grad:
            self.leaf.register_post_accumulate_grad_hook(self._take)

    @property
    def leaf(self) -> Tensor:
        """Tensor in which backward leaves the gradient of the weight that layers use."""
        return self.parameter if self.copy is None else self.copy

    @cached_property
    def _apart(self) -> bool:
        """Return whether gradients are accumulated in `total`: they have another sharding or dtype than what layers use."""
        return self.copy is not None or self.shardings.gradient != self.shardings.stored

    def _take(self, leaf: Tensor) -> None:
        """Accumulate what backward has left in a leaf, widened, and leave nothing there.

        Blocks that are computed again leave nothing of a weight whose gradient is deferred.
        """
        if leaf.grad is None:
            return
        gradient, leaf.grad = leaf.grad.to(self.parameter.dtype), None
        if self.taken is None:
            self.add(gradient)
        else:
            self.taken(self, gradient)

    @property
    def used(self) -> Tensor:
        """The weight that layers use, which all replicas hold."""
        return self.parameter.data if self.copy is None else self.copy.detach()

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight for layers that compute in `dtype`: backward widens its gradient and adds it to `accumulated`."""
        return self.parameter.to(dtype) if self.copy is None else self.copy

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        self.parameter.grad = self.total = None
        self.given = False

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, in the sharding of `gradient` and the parameter's dtype, to the accumulated one."""
        if self._apart:
            self.total = gradient if self.total is None else self.total.add_(gradient)
        else:
            self.parameter.grad = gradient if self.parameter.grad is None else self.parameter.grad + gradient

    def pieces(self, block: Tensor) -> list[Tensor]:
        """A block in the moments' sharding, cut where another rank begins to own: views.

        An update by pieces has the same bits where all replicas update everything as where each updates its own: a kernel may
        round the last elements of a tensor otherwise than those before them.
        """
        return [block[rows] for rows in self.shardings.rows] if self.shardings.cut else [block]

    @property
    def weight(self) -> Tensor:
        """The part of the stored weight that this rank updates, in place."""
        stored, moments = self.shardings.stored, self.shardings.moments
        return self.parameter.data if stored is moments else self.shardings.part(self.parameter.data, stored, moments)

    def own_part(self, block: Tensor) -> Tensor:
        """The part of `share` of a block in the moments' sharding: a view."""
        return self.shardings.part(block, self.shardings.moments, self.shardings.share)

    @property
    def accumulated(self) -> Tensor | None:
        """The gradient that backward accumulates; None where there is none."""
        return self.total if self._apart else self.parameter.grad

    @property
    def gradient(self) -> Tensor | None:
        """The part of the accumulated gradient that this rank updates with; None where there is none."""
        return self.parameter.grad if self._plain else self._part_of_gradient(self.shardings.moments)

    @property
    def own_gradient(self) -> Tensor | None:
        """The part of the accumulated gradient that this rank owns; None where there is none."""
        return self._part_of_gradient(self.shardings.partition)

    @property
    def counted_gradient(self) -> Tensor | None:
        """The part of `share` of the accumulated gradient; None where there is none."""
        return self.parameter.grad if self._plain else self._part_of_gradient(self.shardings.share)

    @cached_property
    def _plain(self) -> bool:
        """True if this rank accumulates in the parameter what it updates with and counts, whole: no replica has a part of it."""
        return not self._apart and self.shardings.gradient == self.shardings.moments == self.shardings.share

    def _part_of_gradient(self, wanted: Sharding) -> Tensor | None:
        whole, sharding = self.total if self._apart else self.parameter.grad, self.shardings.gradient
        return whole if whole is None or sharding is wanted else self.shardings.part(whole, sharding, wanted)


def named_parameters(model: torch.nn.Module) -> list[tuple[str, ShardedParameter]]:
    """Names and parameters of a model, each with its `sharding` and `decay`, in the same order on every rank."""
    return [(name, cast(ShardedParameter, p)) for name, p in model.named_parameters()]


def states_of(model: torch.nn.Module, grid: BaseGrid, zero: int = 0, dtype: torch.dtype | None = None) -> list[ParameterState]:
    """The states of a model's parameters on the job's grid, in the same order on every rank. Moves nothing.

    zero : as of `Shardings.of`. dtype : that layers compute in; default the parameters' own
    """
    result = []
    for name, p in named_parameters(model):
        wanted = p.dtype if dtype is None else dtype
        of = Shardings.of(p.sharding, replicas_of(p.sharding, grid), zero, wanted != p.dtype)
        state = ParameterState(name, p, LocalShardings(of.used, of.stored, of.gradient, of.moments, grid))
        state.shard(wanted, copied=zero < 3)
        result.append(state)
    return result
