"""Gathers of the weights that replicas have updated in parts: at once in a node's memory, else behind the next forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from ..comm.device.arrays import is_on_device
from ..comm.transport.progress import MOVER
from ..nn.overlap import BUCKETS_IN_FLIGHT
from .buckets import Bucket
from .states import ParameterState

if TYPE_CHECKING:
    from torch import Tensor

    from ..autograd.deferred import PassState
    from ..comm.axis import Axis
    from ..comm.grid import BaseGrid
    from ..comm.pending import Pending


class WeightGathers:
    """The gathers of weights of which each replica has updated a part: the weights that layers use are overwritten by all parts.

    Behind `behind`, `start` leaves those of replicas on several nodes owed. The next forward says which weights it uses next
    (`PassState.awaited`): before a layer uses its own they are waited for, and as many behind them are on their way. The order is
    that of the first use, the same on every rank. Who reads weights between steps calls `finish` before.

    Parameters
    ----------
    states : of the parameters, in the order in which forward uses their weights
    grid : of the whole job
    buckets : which weights travel together

    Memory: a layer's weights, or two buckets, gathered.
    """

    def __init__(self, states: Mapping[str, ParameterState], grid: BaseGrid, buckets: Sequence[Bucket]) -> None:
        self.states, self.grid = states, grid
        place = {name: number for number, name in enumerate(states)}
        self.buckets = sorted(buckets, key=lambda bucket: (bucket.chunk, min(place[name] for name in bucket.names)))
        self._owed: deque[Bucket] = deque()
        self._coming: deque[tuple[Bucket, Pending]] = deque()
        self._user: PassState | None = None

    @property
    def left(self) -> tuple[int, int]:
        """Number of buckets that are owed, and of those on their way."""
        return len(self._owed), len(self._coming)

    def behind(self, user: PassState) -> None:
        """From now on gather behind the next forward of the layers whose pass `user` is the state of.

        In a node's memory weights are gathered at once: there the ranks themselves copy what moves, behind nothing.
        """
        self._user = user

    def start(self) -> None:
        """Gather all weights, or leave them owed; collective over the replicas."""
        self.finish()
        for bucket in self.buckets:
            if self._user is None or self.grid[bucket.axes].offers_views(self.states[bucket.names[0]].used):
                self._begin(bucket)
                self._end()
            else:
                self._owed.append(bucket)
                assert self._user.awaited in (None, self._await), "one model of a context is trained at a time"
                self._user.awaited = self._await

    def finish(self) -> None:
        """Gather what is owed; collective over the replicas."""
        while self._owed or self._coming:
            with self.grid.ledger.phase("optimizer"):
                self._next()

    def _await(self, weights: Iterable[Tensor]) -> None:
        """Return once weights that a layer is about to use are whole."""
        wanted = set(map(id, weights))
        left = [bucket for bucket, _ in self._coming] + [*self._owed]
        used = [place for place, bucket in enumerate(left) if any(id(self.states[name].leaf) in wanted for name in bucket.names)]
        many = max(used, default=-1) + 1
        with self.grid.ledger.phase("optimizer"):
            for _ in range(many):
                self._next()
            self._ahead(max(BUCKETS_IN_FLIGHT, many))

    def _next(self) -> None:
        """End the gather of the next bucket; by then others are on their way."""
        self._ahead(BUCKETS_IN_FLIGHT)
        self._end()
        if self._user is not None and self.left == (0, 0):
            self._user.awaited = None

    def _ahead(self, many: int) -> None:
        """Have so many gathers on their way."""
        while self._owed and len(self._coming) < many:
            self._begin(self._owed.popleft())

    @torch.no_grad()
    def _begin(self, bucket: Bucket) -> None:
        """Begin the gather of what each replica owns of a bucket's weights, in the dtype of layers."""
        states, axis = [self.states[name] for name in bucket.names], self.grid[bucket.axes]
        dtype = states[0].used.dtype
        message = torch.cat([state.weight.to(dtype).reshape(-1) for state in states])
        self._coming.append((bucket, axis.start_all_gather(message, sizes=bucket.sizes, view=True)))
        MOVER.begin(moved_by_mpi(axis, message))

    @torch.no_grad()
    def _end(self) -> None:
        """End the gather that was begun first."""
        bucket, pending = self._coming.popleft()
        blocks = {name: self.states[name].used for name in bucket.names}
        copied = self.states[bucket.names[0]].copy is not None  # a copy in 16 bits has nothing yet of what is new
        MOVER.end()
        bucket.unpack(pending.wait(), blocks, None if copied else self.grid[bucket.axes].index)


def moved_by_mpi(axis: Axis, array: Tensor) -> bool:
    """Return whether MPI moves arrays like this one along an axis: the host's, of ranks that share no node's memory."""
    return axis.comm != MPI.COMM_NULL and not is_on_device(array) and not axis.offers_views(array)
