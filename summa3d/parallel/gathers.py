"""All-gathers of the weights that replicas have updated in parts: at once in a node's memory, else during the next forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from ..comm.device.arrays import is_on_device
from ..comm.transport.progress import PROGRESS
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
    """The all-gathers of weights of which each replica has updated a part (ZeRO 1 and 2), a bucket at a time.

    After `overlap`, `start` defers those of replicas on several nodes. Layers of the next forward wait for the weights that they
    use (`PassState.pending_gathers`), which keeps the next buckets in flight. The order is that of first use, the same on every
    rank. Whatever else reads weights between steps calls `finish` first.

    Parameters
    ----------
    states : of the parameters, in the order in which forward uses their weights
    grid : of the whole job
    buckets : which weights travel together

    Words: (D−1)/D per element of a parameter with D replicas (mean over them). Memory: the gathered buckets in flight, two or as
    many as the last layer waited for.
    """

    def __init__(self, states: Mapping[str, ParameterState], grid: BaseGrid, buckets: Sequence[Bucket]) -> None:
        self.states, self.grid = states, grid
        place = {name: number for number, name in enumerate(states)}
        self.buckets = sorted(buckets, key=lambda bucket: (bucket.chunk, min(place[name] for name in bucket.names)))
        self._bucket_of = {id(states[name].leaf): number for number, bucket in enumerate(self.buckets) for name in bucket.names}
        self._left: deque[int] = deque()
        self._in_flight: deque[Pending] = deque()
        self._state: PassState | None = None

    @property
    def left(self) -> tuple[int, int]:
        """The number of buckets whose all-gather has not started, and of those in flight."""
        return len(self._left) - len(self._in_flight), len(self._in_flight)

    def overlap(self, state: PassState) -> None:
        """Defer the all-gathers of later calls of `start` to the next forward of the layers that share this state.

        Not those in a node's memory, where ranks copy the words themselves and nothing could hide them.
        """
        self._state = state

    def start(self) -> None:
        """All-gather the weights that layers use, or defer that; collective over the replicas."""
        self.finish()
        for number, bucket in enumerate(self.buckets):
            in_node = self.grid[bucket.axes].offers_views(self.states[bucket.names[0]].used)
            if self._state is None or in_node:
                self._unpack(bucket, self._begin(bucket))
            else:
                self._left.append(number)
        if self._state is not None and self._left:
            assert self._state.pending_gathers is None, "a context has one model in training"
            self._state.pending_gathers = self._wait_for

    def finish(self) -> None:
        """Wait for all deferred all-gathers; collective over the replicas."""
        while self._left:
            with self.grid.ledger.phase("optimizer"):
                self._wait()

    def _wait_for(self, weights: Iterable[Tensor]) -> None:
        """Wait for the buckets up to the last one that has any of these weights, and keep as many of the next ones in flight."""
        last, many = max((self._bucket_of.get(id(weight), -1) for weight in weights), default=-1), 0
        with self.grid.ledger.phase("optimizer"):
            while self._left and self._left[0] <= last:
                self._wait()
                many += 1
            self._start_until(max(BUCKETS_IN_FLIGHT, many))

    def _wait(self) -> None:
        """Wait for the next bucket, with others in flight."""
        self._start_until(BUCKETS_IN_FLIGHT)
        PROGRESS.end()
        self._unpack(self.buckets[self._left[0]], self._in_flight.popleft())
        self._left.popleft()
        if self._state is not None and not self._left:
            self._state.pending_gathers = None

    def _start_until(self, many: int) -> None:
        """Start all-gathers until so many are in flight."""
        while len(self._in_flight) < min(many, len(self._left)):
            bucket = self.buckets[self._left[len(self._in_flight)]]
            self._in_flight.append(self._begin(bucket))
            PROGRESS.begin(progressed_by_mpi(self.grid[bucket.axes], self.states[bucket.names[0]].used))

    @torch.no_grad()
    def _begin(self, bucket: Bucket) -> Pending:
        """Start the all-gather of a bucket, in the dtype of layers."""
        states = [self.states[name] for name in bucket.names]
        dtype = states[0].used.dtype
        return start_gather(bucket, self.grid[bucket.axes], (state.weight.to(dtype) for state in states))

    @torch.no_grad()
    def _unpack(self, bucket: Bucket, pending: Pending) -> None:
        """Overwrite the weights that layers use."""
        copied = self.states[bucket.names[0]].copy is not None  # into which the own part was not yet rounded
        here = None if copied else self.grid[bucket.axes].index
        bucket.unpack(pending.wait(), {name: self.states[name].used for name in bucket.names}, here)


def start_gather(bucket: Bucket, axis: Axis, own: Iterable[Tensor]) -> Pending:
    """Start the all-gather of a bucket from the parts that this rank owns, in the order of its names; `unpack` takes it."""
    return axis.start_all_gather(torch.cat([part.reshape(-1) for part in own]), sizes=bucket.sizes, view=True)


def progressed_by_mpi(axis: Axis, array: Tensor) -> bool:
    """Return whether MPI moves arrays like this one along an axis: those of hosts that share no node's memory; no dry run's."""
    return axis.comm != MPI.COMM_NULL and not is_on_device(array) and not axis.offers_views(array)
