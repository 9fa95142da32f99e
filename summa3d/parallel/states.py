"""The states of a parameter, each with a sharding of its own: weight as used and as stored, gradient, moments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..comm.topology import replica_axes
from ..layout.layout import Sharding
from ..nn.parameter import ShardedParameter

if TYPE_CHECKING:
    from ..comm.grid import Grid


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
        zero : 0, all states lie as the weight is used; 1 (ZeRO-1), the moments are sharded over the replicas
        halves : whether layers use 16-bit copies of it: with zero 1 the wider weight is sharded as well

        >>> found = Shardings.of(Sharding(Layout("h:z n"), (8, 4)), ("dp",), zero=1)
        >>> str(found.gradient.layout), str(found.moments.layout)
        ('h:z n', 'h:(z,dp) n')
        """
        sharded = used.sharded_over(replicas) if zero and replicas else used
        return cls(used, sharded if halves else used, used, sharded)


def replicas_of(used: Sharding, grid: Grid) -> tuple[str, ...]:
    """The axes along which replicas hold equal copies of a parameter, which take other rows or positions of the batch."""
    named = {*used.layout.axes, *used.layout.root_only}
    return tuple(axis for axis in replica_axes(grid.shape) if axis not in named)


@dataclass(frozen=True)
class State:
    """The states of one parameter on this rank of the job's grid; its moments belong to the optimizer."""

    name: str
    parameter: ShardedParameter
    shardings: Shardings
    grid: Grid

    @cached_property
    def partition(self) -> Sharding:
        """The partition of the parameter over all ranks that hold copies: each sums, counts and writes its own rows."""
        used, moments = self.shardings.used, self.shardings.moments
        finest = used.sharded_over(replicas_of(used, self.grid))
        return moments if moments == finest else finest

    @cached_property
    def share(self) -> Sharding:
        """The part that this rank counts and writes: its partition, divided among the stages that hold a tied table."""
        shared = [axis for axis, indices in self.partition.layout.at if len(indices) > 1]
        return self.partition.sharded_over(shared) if shared else self.partition

    @cached_property
    def rows(self) -> list[slice]:
        """The rows of this rank's block that each of the ranks with copies owns, in the order of their plane."""
        used, grid = self.shardings.used, self.grid
        axes, start = replicas_of(used, grid), used.slices(grid)[0].start
        found = []
        for point in itertools.product(*(range(grid.shape[axis]) for axis in axes)):
            at = {**grid.coordinates, **dict(zip(axes, point, strict=True))}
            rows = self.partition.layout.slices(used.shape, grid.shape, at)[0]
            found.append(slice(rows.start - start, rows.stop - start))
        return found

    def pieces(self, block: Tensor) -> list[Tensor]:
        """A block in the moments' sharding, cut where another rank begins to own: views.

        An update by pieces has the same bits where all replicas update everything as where each updates its own: a kernel may
        round the last elements of a tensor otherwise than those before them.
        """
        return [block] if self.shardings.moments is self.partition else [block[rows] for rows in self.rows]

    @property
    def weight(self) -> Tensor:
        """The part of the stored weight that this rank updates, in place."""
        return self._part(self.parameter.data, self.shardings.stored, self.shardings.moments)

    def own_part(self, block: Tensor) -> Tensor:
        """The part of `share` of a block in the moments' sharding: a view."""
        return self._part(block, self.shardings.moments, self.share)

    @property
    def accumulated(self) -> Tensor | None:
        """The gradient that backward accumulates; None where there is none."""
        return self.parameter.grad

    @property
    def gradient(self) -> Tensor | None:
        """The part of the accumulated gradient that this rank updates with; None where there is none."""
        return self._part_of_gradient(self.shardings.moments)

    @property
    def own_gradient(self) -> Tensor | None:
        """The part of the accumulated gradient that this rank owns; None where there is none."""
        return self._part_of_gradient(self.partition)

    @property
    def counted_gradient(self) -> Tensor | None:
        """The part of `share` of the accumulated gradient; None where there is none."""
        return self._part_of_gradient(self.share)

    def _part_of_gradient(self, wanted: Sharding) -> Tensor | None:
        whole = self.accumulated
        return None if whole is None else self._part(whole, self.shardings.gradient, wanted)

    def _part(self, block: Tensor, sharding: Sharding, wanted: Sharding) -> Tensor:
        """The part of a block in `sharding` that a finer sharding has: a view."""
        if sharding is wanted or sharding == wanted:
            return block
        whole, part = sharding.slices(self.grid)[0], wanted.slices(self.grid)[0]
        return block[part.start - whole.start : part.stop - whole.start]


def named_parameters(model: torch.nn.Module) -> list[tuple[str, ShardedParameter]]:
    """Names and parameters of a model, each with its `sharding` and `decay`, in the same order on every rank."""
    return [(name, cast(ShardedParameter, p)) for name, p in model.named_parameters()]


def states_of(model: torch.nn.Module, grid: Grid, zero: int = 0) -> list[State]:
    """The states of a model's parameters on the job's grid, in the same order on every rank. Moves nothing."""
    return [
        State(name, p, Shardings.of(p.sharding, replicas_of(p.sharding, grid), zero), grid) for name, p in named_parameters(model)
    ]
