"""Data-parallel replicas: the rows that each takes, the sums of their gradients in buckets, and what is gathered afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch
from mpi4py import MPI

from ..comm.health.agreement import check_agreement
from ..comm.topology import SAME_ROWS, replica_axes
from ..comm.transport.progress import IN_FLIGHT, PROGRESS
from ..comm.transport.select import NodeRule
from ..layout.layout import split_sizes
from ..nn.overlap import BUCKETS_IN_FLIGHT
from .buckets import Bucket, buckets_of
from .gathers import WeightGathers, progressed_by_mpi, start_gather
from .states import ParameterState

if TYPE_CHECKING:
    from torch import Tensor

    from ..comm.axis import Axis
    from ..comm.grid import BaseGrid
    from ..comm.pending import Pending
    from ..nn.parameter import ShardedParameter


def plane_of(grid: BaseGrid) -> Axis:
    """The plane of all replicas of a grid, which take other rows or positions; without replicas, an axis of this rank alone."""
    return grid[replica_axes(grid.shape)]


def replica_rows(grid: BaseGrid, batch: int) -> slice:
    """The rows of a global batch that this rank's replica takes: the same on all ranks of its inner grid, and of its contexts.

    Moves nothing. batch : rows of all replicas; those of each differ by at most one, larger first

    >>> from summa3d.comm.grid import Place
    >>> replica_rows(Place({"dp": 2, "x": 2}, rank=3), 7)
    slice(4, 7, None)
    """
    index, many = 0, 1
    for axis in replica_axes(grid.shape):
        if axis not in SAME_ROWS:
            index, many = index * grid.shape[axis] + grid.coordinates[axis], many * grid.shape[axis]
    sizes = split_sizes(batch, many)
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])


@dataclass
class Replicas:
    """The replicas of a model, seen from this rank: each computes with its own rows, and all take the same optimizer step.

    A step sums the gradients once, whatever the number of micro-batches: in the chunk's last backward (`expect`), a bucket as
    soon as its last gradient is there, and all others of the chunk behind it (`start_chunk`, an op R of the schedule);
    `finish` comes before the gradient norm, then `update`. With zero 2 it sums those of each micro-batch, a bucket as soon as
    backward has left all of its gradients (`take`), and adds the sums to this rank's part. Of a backward in two parts, W sums
    a bucket as soon as it has taken its own gradients, with those that X have left meanwhile, of whatever micro-batches.

    Attributes
    ----------
    states : the states of the model's parameters
    grid : the grid of the whole job
    buckets : which gradients travel together
    gathers : the all-gathers of the weights that `update` has updated in parts, with zero 1 and 2
    zero : 0, moments are copied, and `update` gathers the summed gradients; 1 (ZeRO-1), moments are sharded, and it gathers the
        weights. Both move 2(D−1)/D words per element of a parameter with D replicas (mean over them), and give the same bits. 2,
        accumulated gradients are sharded as well: (m+1)(D−1)/D words with m micro-batches. 3, weights as well: layers gather them
        and sum their gradients themselves, and nothing is left to do here
    """

    states: dict[str, ParameterState]
    grid: BaseGrid
    buckets: list[Bucket]
    zero: int = 1
    _in_flight: deque[tuple[Bucket, Pending]] = field(default_factory=deque)
    _taken: dict[str, Tensor] = field(default_factory=dict)
    _leaves: dict[int, str] = field(default_factory=dict)
    _announced: set[str] = field(default_factory=set)
    _without: list[str] = field(default_factory=list)
    _awaited: dict[int, deque[tuple[Bucket, set[str]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gathers = WeightGathers(self.states, self.grid, self.buckets)

    @classmethod
    def of(
        cls,
        states: Sequence[ParameterState],
        grid: BaseGrid,
        zero: int,
        bucket: int,
        chunk_of: Callable[[str], int] = lambda name: 0,
    ) -> Replicas:
        """The replicas of these states; collective over them. bucket : bytes of a bucket; chunk_of : as of `buckets_of`."""
        buckets = buckets_of(states, chunk_of, bucket) if zero < 3 else []
        result = cls({state.name: state for state in states}, grid, buckets, zero)
        for axes in (*result.planes, replica_axes(grid.shape)):
            grid[axes]  # makes its communicator
        for item in buckets:
            for name in item.names:
                state = result.states[name]
                if zero == 2:
                    state.taken = partial(result.take, item)
                    result._leaves[id(state.leaf)] = name
                elif state.parameter.requires_grad:
                    state.leaf.register_post_accumulate_grad_hook(partial(result._arrived, name))
        return result

    @property
    def planes(self) -> list[tuple[str, ...]]:
        """The planes over which gradients are summed."""
        return list(dict.fromkeys(bucket.axes for bucket in self.buckets))

    def check(self) -> None:
        """Raise AgreementError unless all replicas have the same buckets, naming those that differ; collective."""
        for axes in self.planes:
            mine = [bucket for bucket in self.buckets if bucket.axes == axes]
            facts = {f"bucket {place}": (item.chunk, item.names, item.sizes) for place, item in enumerate(mine)}
            check_agreement(self.grid[axes].comm, f"the buckets of {'·'.join(axes)}", facts)

    @property
    def plane(self) -> Axis:
        """The plane of all replicas."""
        return plane_of(self.grid)

    def accumulated(self, parameter: ShardedParameter) -> Tensor | None:
        """The accumulated gradient of a parameter, behind all backwards.

        With zero 2, which sums it over the replicas before, this rank's part: what backward has left is summed now.
        """
        state = next(state for state in self.states.values() if state.parameter is parameter)
        if self.zero == 2:
            for chunk in {bucket.chunk for bucket in self.buckets if state.name in bucket.names}:
                self.start_chunk(chunk)
            self.finish()
        return state.accumulated

    def total(self, number: float) -> float:
        """The sum of a number over the replicas, the same on all; collective. Moves an all-reduce of one word."""
        return float(self.plane.all_reduce(np.array([number]))[0])

    def settle(self, loss: float) -> float:
        """The sum of a step's loss over the replicas, and which parameters no replica has a gradient of; collective.

        Behind `finish`; `update` then leaves those parameters alone. Moves an all-reduce of one complex word; where replicas
        differ in which parameters have gradients, another of one word a parameter: of these one replica's gradient is enough.
        """
        plane, states = self.plane, [self.states[name] for bucket in self.buckets for name in bucket.names]
        self._without = [state.name for state in states if not state.given]
        mark = 1 + crc32(" ".join(self._without).encode()) if self._without else 0
        summand = mark * (plane.size - 1) if plane.index == 0 else -mark  # the sum is 0 where all marks are equal
        whole = plane.all_reduce(np.array([complex(loss, summand)]))[0]
        if whole.imag and plane.comm != MPI.COMM_NULL:  # the other replicas of a dry run have what this one has
            given = plane.all_reduce(np.array([float(state.given) for state in states]), "max")
            self._without = [state.name for state, result in zip(states, given, strict=True) if not result]
        return float(whole.real)

    def reduce(self) -> None:
        """Sum all gradients over the replicas; collective. Each rank then holds the sums of the rows that it owns."""
        for chunk in dict.fromkeys(bucket.chunk for bucket in self.buckets):
            self.start_chunk(chunk)
        self.finish()

    def expect(self, chunk: int) -> None:
        """Know that the backward to come completes the gradients of a chunk.

        From now on a bucket's sums begin as soon as backward has left the last of its gradients, and those of the buckets before:
        in the same order on every replica.
        """
        if self.zero < 2:
            trained = {name for name, state in self.states.items() if state.parameter.requires_grad}
            self._awaited[chunk] = deque(
                (bucket, trained & set(bucket.names)) for bucket in self.buckets if bucket.chunk == chunk
            )

    def _arrived(self, name: str, leaf: Tensor) -> None:
        """Begin the sums that wait for a gradient that backward has left, and let MPI move what is in flight."""
        for awaited in self._awaited.values():
            for _, names in awaited:
                names.discard(name)
            with self.grid.ledger.phase("optimizer"):
                while awaited and not awaited[0][1]:
                    self.start(awaited.popleft()[0])
            IN_FLIGHT.advance()

    def start_chunk(self, chunk: int) -> None:
        """Begin the sums of a chunk's buckets: on every replica at the same place between the other chunks' ops.

        Those that began in the backward before (`expect`) are left out.
        """
        awaited = self._awaited.pop(chunk, None)
        buckets = self.buckets if awaited is None else [bucket for bucket, _ in awaited]
        for bucket in buckets:
            if bucket.chunk == chunk and (self.zero < 2 or self._taken.keys() & bucket.names):
                self.start(bucket)

    def announce(self, leaves: frozenset[int]) -> None:
        """Know the weights that layers use, by identity, whose gradients a W takes next."""
        self._announced = {self._leaves[leaf] for leaf in leaves if leaf in self._leaves}

    def take(self, bucket: Bucket, state: ParameterState, gradient: Tensor) -> None:
        """Take a micro-batch's gradient of a parameter of a bucket, and begin the bucket's sums if it is the last.

        MPI moves what is in flight meanwhile.
        """
        before = self._taken.get(state.name)
        self._taken[state.name] = gradient if before is None else before + gradient
        if state.name in self._announced:
            self._announced.remove(state.name)
            complete = self._announced.isdisjoint(bucket.names)
        else:
            complete = self._taken.keys() >= {name for name in bucket.names if self.states[name].parameter.requires_grad}
        if complete:
            self.start(bucket)
        IN_FLIGHT.advance()

    def start(self, bucket: Bucket) -> None:
        """Begin the sums of a bucket: every replica, in the same order of buckets. A gradient that there is not is 0."""
        while len(self._in_flight) >= BUCKETS_IN_FLIGHT:
            self._end_oldest()
        axis, blocks = self.grid[bucket.axes], {name: self._summand(self.states[name]) for name in bucket.names}
        like, words = blocks[bucket.names[0]], sum(bucket.sizes)
        fits = axis.size * words * like.itemsize <= NodeRule.LARGEST
        summands = axis.allocate((words,), like) if fits else None  # where a node's ranks sum them, without another copy
        pending = axis.start_reduce_scatter(bucket.pack(blocks, summands), sizes=bucket.sizes)
        self._in_flight.append((bucket, pending))
        PROGRESS.begin(progressed_by_mpi(axis, like))

    def finish(self) -> None:
        """Wait for the sums of all buckets that were started."""
        while self._in_flight:
            self._end_oldest()
        for name in [name for bucket in self.buckets for name in bucket.names] if self.zero == 2 else ():
            state = self.states[name]
            if state.accumulated is None:
                state.add(torch.zeros_like(state.weight))

    def update(self, step: Callable[[], None]) -> None:
        """Run an optimizer's step between what it needs and what its weights need, so that all replicas end with the same.

        What `settle` found without a gradient has none in the step, as on one rank: nothing decays it.
        """
        if self.zero == 0:
            self._gather_gradients()
        for name in self._without:
            self.states[name].clear()
        step()
        if self.zero > 0:
            self.gathers.start()

    def _end_oldest(self) -> None:
        bucket, pending = self._in_flight.popleft()
        shapes, index = {name: self.states[name].shardings.shape for name in bucket.names}, self.grid[bucket.axes].index
        PROGRESS.end()
        for name, part in bucket.parts_in(pending.wait(), index, shapes).items():
            if self.zero < 2:
                _given(self.states[name].own_gradient).copy_(part)
            else:
                self.states[name].add(part)

    def _summand(self, state: ParameterState) -> Tensor:
        """This rank's summand of the sum of a parameter's gradients, whole."""
        if self.zero == 2:
            taken = self._taken.pop(state.name, None)
            state.given |= taken is not None
            return state.parameter.new_zeros(state.shardings.shape) if taken is None else taken
        state.given = state.accumulated is not None
        if not state.given:
            state.add(state.parameter.new_zeros(state.shardings.shape))
        return _given(state.accumulated)

    @torch.no_grad()
    def _gather_gradients(self) -> None:
        """Overwrite the gradients of all buckets by the sums that each replica owns."""
        for bucket in self.buckets:
            states, axis = [self.states[name] for name in bucket.names], self.grid[bucket.axes]
            pending = start_gather(bucket, axis, (_given(state.own_gradient) for state in states))
            bucket.unpack(pending.wait(), {state.name: _given(state.accumulated) for state in states}, axis.index)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "`start` gave every parameter of a bucket a gradient"
    return tensor
