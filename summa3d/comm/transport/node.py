"""Collectives of members that share a node, through the slots of a node buffer: one copy in, one copy out, or none.

Each collective writes this member's part into a slot, and then reads the parts of the other members there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, contiguous, copy_into, count, detached, empty, is_contiguous, is_half, is_torch, overlap, share, widen
from .call import Call, Carried, Members
from .host import HostTransport
from .node_buffer import NodeBuffer, NodeRule, Slot, staged_dtype

OPERATIONS = {"sum": "add", "max": "maximum", "min": "minimum"}
ALL_REDUCE_LIMIT = 1 << 20
"""Bytes up to which every member reads every array to reduce it; of larger ones each sums its share, and shares are gathered."""


class NodeTransport:
    """Collectives through the node buffer of an axis. `carry` returns None, on all members alike, for calls it leaves to MPI."""

    def __init__(self, members: Members, rule: NodeRule) -> None:
        self.members, self.rule, self.host = members, rule, HostTransport()
        self._buffer: NodeBuffer | None = None
        self._made = False
        self._supported: set[tuple[Any, str]] = set()  # dtypes and reductions that have been checked

    @property
    def buffer(self) -> NodeBuffer | None:
        """The slots (made at the first use, which is collective); None where the node cannot offer them."""
        if not self._made:
            members = self.members
            self._made, self._buffer = True, NodeBuffer.over(members.comm, members.label, self.rule.crowded)
        return self._buffer

    def check(self) -> None:
        """Raise GridError where a member has failed in the middle of a communication."""
        if self._buffer is not None and self._buffer.flags.broken:
            self._buffer.refuse()

    def carry(self, call: Call) -> Carried | None:
        """Begin `call`; None, on all members alike, where it is left to another transport.

        Raises ShapeError for a dtype or a reduction that MPI does not support either, before a slot is taken. Any later error
        breaks the axis: the other members get GridError instead of waiting for this one.
        """
        slot = self._buffer.slot_of(call.array) if self._buffer is not None and call.operation == "reduce_scatter" else None
        if slot is None and not self._takes(call):
            return None
        kind = call.array.dtype, call.op
        if kind not in self._supported:
            self.host.datatype(call.array)
            self.host.operation(call.array, call.op)
            self._supported.add(kind)
        buffer = self._buffer if self._made else self.buffer
        if buffer is None:
            return None
        try:
            finish = _begun(buffer, call, slot, self.host)
        except BaseException as error:
            buffer.fail(error)
            raise
        return None if finish is None else Carried([], finish, call.array, call.array)

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer that the next reduce-scatter sums in place; None where there is none."""
        buffer = self.buffer if staged_dtype(like) else None
        return None if buffer is None else buffer.allocate(shape, like)

    def offers_views(self, array: Array) -> bool:
        """Whether a gather of such arrays may be read in place; the first call is collective."""
        return staged_dtype(array) and self.buffer is not None

    def barrier(self) -> bool:
        """Wait, asleep, for every member; returns False if the axis has no node buffer."""
        buffer = self.buffer
        if buffer is None:
            return False
        slot = buffer.take(0)
        assert slot is not None  # no memory is needed

        def meet() -> None:
            slot.post()
            slot.wait_for_all()

        slot.read = meet
        slot.finish()
        return True

    def _takes(self, call: Call) -> bool:
        """Whether a call goes through the node buffer: decided by the operation, and the bytes that all members write there."""
        array, operation, size = call.array, call.operation, self.members.size
        if operation == "all_gather":
            if call.view and self.offers_views(array):
                return True
            line = prod(array.shape[: call.dim]) * prod(array.shape[call.dim + 1 :])
            return self.rule.takes(array, sum(call.sizes) * line)
        if operation == "all_reduce":
            large = array.itemsize * count(array) > ALL_REDUCE_LIMIT
            return self.rule.takes(array, size * count(array)) and (not large or (call.in_order and call.op == "sum"))
        if operation in ("reduce_scatter", "reduce"):
            return self.rule.takes(array, size * count(array))
        return operation == "broadcast" and self.rule.takes(array, count(array))


def _begun(buffer: NodeBuffer, call: Call, slot: Slot | None, host: HostTransport) -> Callable[[], Array] | None:
    """What completes `call`, begun in a slot; None on all members where the node lacks the memory."""
    array = detached(call.array)
    if call.operation == "all_gather":
        taken = all_gather(buffer, array, call.dim, call.sizes, call.into, call.view)
    elif call.operation == "reduce_scatter":
        taken = reduce_scatter(buffer, array, call.dim, call.sizes, call.into, call.blocking, slot)
    elif call.operation == "broadcast":
        taken = broadcast(buffer, call.array, call.root)
    elif call.operation == "reduce":
        taken = reduce(buffer, array, call.op, call.into, call.root)
    elif array.itemsize * count(array) > ALL_REDUCE_LIMIT:
        return all_reduce_in_parts(buffer, array, call.into, call.blocking, host)
    else:
        taken = reduce(buffer, array, call.op, call.into)
    return None if taken is None else taken.result


def all_gather(buffer: NodeBuffer, block: Array, dim: int, sizes: Sequence[int], into: Array | None, view: bool) -> Slot | None:
    """`Axis.all_gather`. With `view`, the result may lie in the slot; it does where the parts adjoin there."""
    rest = prod(block.shape[:dim]) * prod(block.shape[dim + 1 :])
    starts = [0, *accumulate(size * rest for size in sizes)]
    slot = buffer.take(starts[-1] * block.itemsize)
    if slot is None:
        return None
    before, after = tuple(block.shape[:dim]), tuple(block.shape[dim + 1 :])
    copy_into(slot.held(block, starts[buffer.index], tuple(block.shape)), block)
    slot.post()
    shape = (*before, sum(sizes), *after)
    like = slot.sample(block)
    if view and into is None and prod(before) == 1:
        buffer.view(slot)

        def look() -> Array:
            slot.wait_for_all()
            return slot.part(like, 0, shape)

        slot.read = look
        return slot

    def read() -> Array:
        out = empty(shape, like) if into is None else into
        columns = [0, *accumulate(sizes)]
        slot.wait_for_all()
        if dim == 0:
            return copy_into(out, slot.held(like, 0, shape))
        for member in range(buffer.size):
            part = slot.held(like, starts[member], (*before, sizes[member], *after))
            copy_into(out[(slice(None),) * dim + (slice(columns[member], columns[member + 1]),)], part)
        return out

    slot.read = read
    return slot


def reduce_scatter(
    buffer: NodeBuffer, array: Array, dim: int, sizes: Sequence[int], into: Array | None, blocking: bool, slot: Slot | None = None
) -> Slot | None:
    """`Axis.reduce_scatter`: every member reads its part of every array, and adds them in the members' order.

    With `slot`, `array` was allocated there, and lies already where it is read.
    """
    whole = count(array)
    begin = sum(sizes[: buffer.index])
    if slot is None:
        slot = buffer.take(buffer.size * whole * array.itemsize)
        if slot is None:
            return None
        mine = slot.held(array, buffer.index * whole, tuple(array.shape))
        end = begin + sizes[buffer.index]
        for part in (slice(0, begin), slice(end, array.shape[dim])):  # no other member reads this member's own part ...
            at = (slice(None),) * dim + (part,)
            copy_into(mine[at], array[at])
        own = array[(slice(None),) * dim + (slice(begin, end),)]
        if not blocking or (into is not None and overlap(into, own)):
            own = copy_into(empty(own.shape, array), own)  # ... but the caller may overwrite it meanwhile, or the sum
    else:
        own = None
    slot.post()
    shape, at = tuple(array.shape), (slice(None),) * dim + (slice(begin, begin + sizes[buffer.index]),)
    like = slot.sample(array)

    def part_of(member: int) -> Array:
        if member == buffer.index and own is not None:
            return own
        return slot.held(like, member * whole, shape)[at]

    def read() -> Array:
        out = into if into is not None else empty(part_of(buffer.index).shape, like)
        slot.wait_for_all()
        return _reduced(buffer, part_of, out, "sum")

    slot.read = read
    return slot


def all_reduce_in_parts(
    buffer: NodeBuffer, array: Array, into: Array | None, blocking: bool, host: HostTransport
) -> Callable[[], Array] | None:
    """`Axis.all_reduce` by sum of a large array: each member sums its share, and the shares are gathered.

    What is returned completes it, and takes a slot of its own: all members call it at the same place among their
    communications over this axis. `host` gathers where the node lacks the memory.
    """
    out = into if into is not None and is_contiguous(into) else empty(array.shape, array)
    sizes = [share(count(array), buffer.size, member) for member in range(buffer.size)]
    summing = reduce_scatter(buffer, contiguous(array).reshape(-1), 0, sizes, None, blocking)
    if summing is None:
        return None

    def gather() -> Array:
        try:
            part, flat = summing.result(), out.reshape(-1)
            gathering = all_gather(buffer, part, 0, sizes, flat, False)
            if gathering is None:
                host.all_gather(buffer.comm, part, flat, sizes, True)
            else:
                gathering.finish()
            return out if into is None or out is into else copy_into(into, out)
        except BaseException as error:
            buffer.fail(error)
            raise

    return gather


def broadcast(buffer: NodeBuffer, array: Array, root: int) -> Slot | None:
    """`Axis.broadcast`: the root copies its array into the slot, the others read it."""
    slot = buffer.take(count(array) * array.itemsize)
    if slot is None:
        return None
    if buffer.index == root:
        copy_into(slot.held(array, 0, tuple(array.shape)), detached(array))
        slot.post()

    def read() -> Array:
        if buffer.index != root:
            slot.wait(root)
            copy_into(detached(array), slot.held(array, 0, tuple(array.shape)))
        return array

    slot.read = read
    return slot


def reduce(buffer: NodeBuffer, array: Array, op: str, into: Array | None, root: int | None = None) -> Slot | None:
    """`Axis.reduce`, or without a root `Axis.all_reduce`: every array is read in the members' order, for the same bits on all."""
    whole, shape = count(array), tuple(array.shape)
    slot = buffer.take(buffer.size * whole * array.itemsize)
    if slot is None:
        return None
    like = slot.sample(array)
    copy_into(slot.held(like, buffer.index * whole, shape), array)
    slot.post()

    def part_of(member: int) -> Array:
        return slot.held(like, member * whole, shape)

    def read() -> Array | None:
        if root not in (None, buffer.index):
            return None
        slot.wait_for_all()
        first = part_of(0)
        return _reduced(buffer, part_of, empty(first.shape, first) if into is None else into, op)

    slot.read = read
    return slot


def _reduced(buffer: NodeBuffer, part_of: Callable[[int], Array], out: Array, op: str) -> Array:
    """The members' parts reduced in their order: the same bits in every run. 16-bit floats are summed in float32."""
    first, second = part_of(0), part_of(1)
    if op == "sum" and is_half(first):
        total = widen(first)
        for member in range(1, buffer.size):
            total += widen(part_of(member))
        return copy_into(out, total)
    combine = _operation(first, op)
    combine(first, second, out=out)
    for member in range(2, buffer.size):
        combine(out, part_of(member), out=out)
    return out


def _operation(array: Array, op: str) -> Any:
    if is_torch(array):
        import torch

        return getattr(torch, OPERATIONS[op])
    return getattr(np, OPERATIONS[op])
