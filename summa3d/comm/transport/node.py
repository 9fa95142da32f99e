"""Collectives of members that share a node, through the slots of a node buffer: one copy in, one copy out, or none.

Each collective writes this member's part into a slot, and then reads the parts of the other members there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ..arrays import (
    Array,
    contiguous,
    copy_into,
    count,
    detached,
    dtype_name,
    empty,
    is_contiguous,
    is_half,
    is_torch,
    overlap,
    place_of,
    quiet,
    share,
    sum_wide,
)
from ..signatures import signed
from .call import ALL_REDUCE_LIMIT, MESSAGES, Call, Carried, Members, Route
from .host import HostTransport
from .node_buffer import NodeBuffer, Slot, lasting, row_major
from .node_memory import SLOTS
from .select import NodeRule, staged_dtype

IN_ONE_COPY = 1 << 16
"""Bytes in a slot below which one copy of a whole array costs less than to find the parts that others read."""
OPERATIONS = {"sum": "add", "max": "maximum", "min": "minimum"}
BARRIER, FREE = signed("barrier"), signed("grid.free()")


class NodeTransport:
    """Collectives through the node buffer of an axis. `carry` returns None, on all members alike, for calls it leaves to MPI.

    Every collective of the axis, those through MPI included, is compared over the members (signatures.py).
    Making one is collective over the members.
    """

    def __init__(self, members: Members, rule: NodeRule) -> None:
        self.members, self.rule, self.host = members, rule, HostTransport()
        self.buffer = self.opened()
        self._staged: dict[tuple[Any, Any], bool] = {}

    def opened(self) -> NodeBuffer | None:
        """The slots of this axis (collective); None where the node cannot offer them."""
        return NodeBuffer.over(self.members.comm, self.members.label, self.rule.crowded, self.members.grid)

    def check(self) -> None:
        """Raise GridError where a member has failed in the middle of a communication."""
        if self.buffer is not None and self.buffer.flags.broken:
            self.buffer.refuse()

    def fail(self, error: BaseException) -> None:
        """Break the axis, for all members."""
        if self.buffer is not None:
            self.buffer.fail(error)

    def end(self) -> None:
        """Say that this member makes no more calls, and frees the axis."""
        if self.buffer is not None and not self.buffer.flags.broken:
            self.buffer.signatures.call(FREE)

    def free(self) -> None:
        """Release the node's memory (collective). AgreementError if members differ in a call that was not compared yet."""
        buffer, self.buffer = self.buffer, None
        if buffer is None:
            return
        try:
            if buffer.flags.broken:
                buffer.signatures.disputed()
            else:
                buffer.signatures.compare(buffer.signatures.number)
        finally:
            buffer.release()

    def carry(self, call: Call) -> Carried | None:
        """Begin `call`; None, on all members alike, where it is left to another transport.

        Raises ShapeError for a dtype or a reduction that MPI does not support either, before a slot is taken; AgreementError
        where members differ in what they call. Any error but a ShapeError breaks the axis: the other members get one too, instead
        of waiting for this one.
        """
        route, buffer = call.route, self.buffer
        if buffer is None or route.operation in MESSAGES:
            return None
        bound = route.bound
        if bound is None:
            bound = route.bound = self._bind(buffer, route, call.array)
            route.signed = signed(route.described(call.array))
        try:
            number = buffer.signatures.post(route.signed)
            slot = buffer.slot_of(call.array) if buffer.allocated and route.operation == "reduce_scatter" else None
            if slot is None and not bound.here:
                self._compare_for_mpi(buffer, call, number)
                return None
            carried = bound.begin(call, slot)
            if carried is None:
                buffer.signatures.wake()
            else:
                carried.keep = call.array
        except BaseException as error:
            buffer.fail(error)
            raise
        return carried

    def _compare_for_mpi(self, buffer: NodeBuffer, call: Call, number: int) -> None:
        """Compare a call that MPI carries, before MPI would meet two that differ: it may abort, or overwrite memory.

        What is begun only does not wait here: of two members that differ, the later one sees it and begins nothing; the other one
        compares before it waits (`compared`).
        """
        buffer.signatures.wake()
        if call.blocking and not call.route.on_device:
            buffer.signatures.compare(number)
        else:
            buffer.signatures.review()

    def compared(self) -> Callable[[], None] | None:
        """What a member does before it waits for the call that MPI has just begun for it; None without a node buffer."""
        return None if self.buffer is None else partial(self._compare, self.buffer, self.buffer.signatures.number)

    def _compare(self, buffer: NodeBuffer, number: int) -> None:
        try:
            buffer.signatures.compare(number)
        except BaseException as error:
            buffer.fail(error)
            raise

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer that the next reduce-scatter sums in place; None where there is none."""
        buffer = self.buffer
        if buffer is None or not self.offers_views(like):
            return None
        try:
            buffer.signatures.call(signed(f"allocate of {dtype_name(like)} {tuple(shape)}"))
            return buffer.allocate(shape, like)
        except BaseException as error:
            buffer.fail(error)
            raise

    def offers_views(self, array: Array) -> bool:
        """Whether a gather of such arrays may be read in place."""
        kind = array.dtype, place_of(array)
        staged = self._staged.get(kind)
        if staged is None:
            staged = self._staged[kind] = staged_dtype(array)
        return staged and self.buffer is not None

    def barrier(self) -> bool:
        """Wait, asleep, for every member; returns False if the axis has no node buffer."""
        buffer = self.buffer
        if buffer is None:
            return False
        self._compare(buffer, buffer.signatures.call(BARRIER))
        return True

    def _bind(self, buffer: NodeBuffer, route: Route, array: Array) -> Bound | Elsewhere:
        """The collective of `route`, bound to the slots."""
        if not route.on_device:
            self.host.datatype(array)
            if "reduce" in route.operation:
                self.host.operation(array, route.op)
        here = self._takes(route, array)
        kind = BOUND.get(route.operation)
        if kind is None or not staged_dtype(array):
            return ELSEWHERE
        if route.operation == "all_reduce" and array.itemsize * count(array) > ALL_REDUCE_LIMIT:
            kind = AllReduceInParts
        return kind(buffer, route, array, here)

    def _takes(self, route: Route, array: Array) -> bool:
        """Whether calls go through the node buffer: decided by the operation, and the bytes that all members write there."""
        operation, size = route.operation, self.members.size
        if operation == "all_gather":
            if route.view and self.offers_views(array):
                return True
            line = prod(array.shape[: route.dim]) * prod(array.shape[route.dim + 1 :])
            return self.rule.takes(array, sum(route.sizes) * line)
        if operation == "all_reduce":
            large = array.itemsize * count(array) > ALL_REDUCE_LIMIT
            return self.rule.takes(array, size * count(array)) and (not large or (route.in_order and route.op == "sum"))
        if operation in ("reduce_scatter", "reduce"):
            return self.rule.takes(array, size * count(array))
        return operation == "broadcast" and self.rule.takes(array, count(array))


class Elsewhere:
    """A collective that is left to another transport."""

    here = False


ELSEWHERE = Elsewhere()


class Bound(ABC):
    """A collective of one route, bound to the slots of a node buffer: what is copied and summed there is found once.

    here : whether the route's calls go through the slots, or only those whose array was allocated there.
    """

    def __init__(self, buffer: NodeBuffer, route: Route, array: Array, here: bool = True) -> None:
        self.buffer, self.here = buffer, here
        self.like = empty((0,), detached(array))
        self.shape, self.is_torch = tuple(array.shape), is_torch(array)
        self.laid: list[Any] = [None] * SLOTS
        self.sums_wide = route.op == "sum" and is_half(array)
        self.copy, self.combine = _functions(array, route.op)
        self.prepare(route)
        self.nbytes = self.elements * array.itemsize
        buffer.grown.add(self)

    elements: int
    """The elements that all members write into a slot."""

    def forget(self, place: int) -> None:
        """The memory of a slot is replaced."""
        self.laid[place] = None

    def in_slot(self, slot: Slot) -> Any:
        """The arrays of this collective in the memory of `slot`, made once."""
        laid = self.laid[slot.place]
        if laid is None:
            with lasting(self.is_torch):
                laid = self.laid[slot.place] = self.lay(slot)
        return laid

    def taken(self, call: Call) -> tuple[Slot, Any, Array] | None:
        """The next slot, which `read` completes, its arrays, and the call's array without its history of gradients.

        None on all members where the node lacks the memory.
        """
        slot = self.buffer.take(self.nbytes)
        if slot is None:
            return None
        slot.into, slot.read = call.into, self.read
        laid, array = self.laid[slot.place], call.array
        if laid is None:
            laid = self.in_slot(slot)
        return slot, laid, array.detach() if self.is_torch and array.requires_grad else array

    def reduced(self, parts: Sequence[Array], out: Array | None) -> Array:
        """The members' parts reduced in their order: the same bits in every run. 16-bit floats are summed in float32."""
        first, second, *others = parts
        if self.sums_wide:
            return copy_into(empty(first.shape, first) if out is None else out, sum_wide(parts))
        if out is None:
            new = self.is_torch and first.is_contiguous()  # else torch's result would not lie in C order
            out = self.combine(first, second) if new else self.combine(first, second, out=empty(first.shape, first))
        else:
            self.combine(first, second, out=out)
        for part in others:
            self.combine(out, part, out=out)
        return out

    @abstractmethod
    def prepare(self, route: Route) -> None:
        """Compute `elements` and the offsets."""

    @abstractmethod
    def lay(self, slot: Slot) -> Any:
        """Make the arrays of a slot."""

    @abstractmethod
    def begin(self, call: Call, slot: Slot | None = None) -> Carried | None:
        """Write this member's part; what is returned completes the call. None on all members where the node lacks the memory."""

    @abstractmethod
    def read(self, slot: Slot) -> Any:
        """Wait for what others write, and return the result."""


class AllGather(Bound):
    """`Axis.all_gather`. With `view`, the result may lie in the slot; it does where the parts adjoin there."""

    def prepare(self, route: Route) -> None:
        """The parts lie one after the other."""
        dim, self.view = route.dim, route.view
        before, after = self.shape[:dim], self.shape[dim + 1 :]
        rest = prod(before) * prod(after)
        self.adjoin = prod(before) == 1
        self.starts = [0, *accumulate(size * rest for size in route.sizes)]
        self.elements = self.starts[-1]
        self.whole = (*before, sum(route.sizes), *after)
        self.strides = row_major(self.whole)
        columns = [0, *accumulate(route.sizes)]
        self.places = [(slice(None),) * dim + (slice(*ends),) for ends in pairwise(columns)]
        self.shapes = [(*before, size, *after) for size in route.sizes]

    def lay(self, slot: Slot) -> tuple[Array, list[tuple[Any, Array]]]:
        """This member's part, and from where to where the result is copied."""
        index = self.buffer.index
        mine = slot.part(self.like, self.starts[index], self.shapes[index])
        if self.adjoin:
            return mine, [(..., slot.part(self.like, 0, self.whole))]
        parts = [slot.part(self.like, start, shape) for start, shape in zip(self.starts, self.shapes, strict=False)]
        return mine, list(zip(self.places, parts, strict=True))

    def begin(self, call: Call, slot: Slot | None = None) -> Carried | None:
        """Copy this member's block."""
        taken = self.taken(call)
        if taken is None:
            return None
        slot, (mine, _), array = taken
        self.copy(mine, array)
        slot.post()
        if self.view and call.into is None and self.adjoin:
            self.buffer.view(slot)
            slot.read = self.look
        return slot

    def look(self, slot: Slot) -> Array:
        """The slot's memory as the result."""
        slot.wait_for_all()
        return slot.part(self.like, 0, self.whole, self.strides)

    def read(self, slot: Slot) -> Array:
        """Copy all members' blocks."""
        out = empty(self.whole, self.like) if slot.into is None else slot.into
        slot.wait_for_all()
        for place, part in self.laid[slot.place][1]:
            self.copy(out if place is ... else out[place], part)
        return out


class ReduceScatter(Bound):
    """`Axis.reduce_scatter`: every member reads its part of every array, and adds them in the members' order.

    With a slot, the call's array was allocated there, and lies already where it is read.
    """

    def prepare(self, route: Route) -> None:
        """The arrays lie one after the other."""
        self.each = prod(self.shape)
        self.elements = self.buffer.size * self.each
        ends = [0, *accumulate(route.sizes)]
        before = (slice(None),) * route.dim
        begin, end = ends[self.buffer.index], ends[self.buffer.index + 1]
        self.own = (*before, slice(begin, end))
        others = [part for part in (slice(0, begin), slice(end, ends[-1])) if part.start < part.stop]
        self.others = [(*before, part) for part in others]

    def lay(self, slot: Slot) -> tuple[Array, list[Array], list[Array]]:
        """This member's array, of it the parts of the other members, and all summands of this member's part."""
        arrays = [slot.part(self.like, member * self.each, self.shape) for member in range(self.buffer.size)]
        mine = arrays[self.buffer.index]
        return mine, [mine[at] for at in self.others], [array[self.own] for array in arrays]

    def begin(self, call: Call, slot: Slot | None = None) -> Carried | None:
        """Copy what the others sum, unless it lies there."""
        if slot is None:
            taken = self.taken(call)
            if taken is None:
                return None
            slot, (mine, others, _), array = taken
            if self.nbytes < IN_ONE_COPY or not call.blocking or (call.into is not None and overlap(call.into, array)):
                self.copy(mine, array)
            else:  # no other member reads this member's own part, nor is it overwritten before it is read
                for part, at in zip(others, self.others, strict=True):
                    self.copy(part, array[at])
                slot.own = array[self.own]
        else:
            slot.into, slot.read = call.into, self.read
        slot.post()
        return slot

    def read(self, slot: Slot) -> Array:
        """Sum this member's part."""
        parts = self.in_slot(slot)[2]
        if slot.own is not None:
            parts = [*parts]
            parts[self.buffer.index] = slot.own
        slot.wait_for_all()
        return self.reduced(parts, slot.into)


class Reduce(Bound):
    """`Axis.reduce` and `Axis.all_reduce`: every array is read in the members' order, for the same bits on all."""

    def prepare(self, route: Route) -> None:
        """The arrays lie one after the other."""
        self.reads = route.root in (-1, self.buffer.index)
        self.each = prod(self.shape)
        self.elements = self.buffer.size * self.each

    def lay(self, slot: Slot) -> list[Array]:
        """All members' arrays."""
        return [slot.part(self.like, member * self.each, self.shape) for member in range(self.buffer.size)]

    def begin(self, call: Call, slot: Slot | None = None) -> Carried | None:
        """Copy this member's array."""
        taken = self.taken(call)
        if taken is None:
            return None
        slot, parts, array = taken
        self.copy(parts[self.buffer.index], array)
        slot.post()
        return slot

    def read(self, slot: Slot) -> Array | None:
        """Reduce all members' arrays, where this member is to have the result."""
        if not self.reads:
            return None
        slot.wait_for_all()
        return self.reduced(self.laid[slot.place], slot.into)


class Broadcast(Bound):
    """`Axis.broadcast`: the root copies its array into the slot, the others read it."""

    def prepare(self, route: Route) -> None:
        """One array."""
        self.root, self.elements = route.root, prod(self.shape)

    def lay(self, slot: Slot) -> Array:
        """The root's array."""
        return slot.part(self.like, 0, self.shape)

    def begin(self, call: Call, slot: Slot | None = None) -> Carried | None:
        """On the root, copy its array."""
        taken = self.taken(call)
        if taken is None:
            return None
        slot, part, array = taken
        slot.into = call.array
        if self.buffer.index == self.root:
            self.copy(part, array)
            slot.post()
        else:
            self.buffer.signatures.wake()
        return slot

    def read(self, slot: Slot) -> Array:
        """Elsewhere, copy what the root has posted."""
        array = slot.into
        if self.buffer.index != self.root:
            slot.wait(self.root)
            self.copy(detached(array), self.in_slot(slot))
        return array


class AllReduceInParts(Bound):
    """`Axis.all_reduce` by sum of a large array: each member sums its share, and the shares are gathered.

    What completes it takes a slot of its own: all members call it at the same place among their communications over this axis.
    MPI gathers where the node lacks the memory.
    """

    def prepare(self, route: Route) -> None:
        """A reduce-scatter of the flat array, and a gather of its parts."""
        buffer, n = self.buffer, prod(self.shape)
        self.sizes = [share(n, buffer.size, member) for member in range(buffer.size)]
        self.elements = 0
        scatter = Route("reduce_scatter", False, 0, 0, 0, self.sizes)
        self.scatter = ReduceScatter(buffer, scatter, empty((n,), self.like))
        gather = Route("all_gather", False, 0, 0, 0, self.sizes)
        self.gather = AllGather(buffer, gather, empty((self.sizes[buffer.index],), self.like))

    def lay(self, slot: Slot) -> None:
        """Make none: the two collectives have theirs."""

    def begin(self, call: Call, slot: Slot | None = None) -> Carried | None:
        """Begin the reduce-scatter."""
        array, into = detached(call.array), call.into
        out = into if into is not None and is_contiguous(into) else empty(array.shape, array)
        summed = self.scatter.begin(Call(call.route, contiguous(array).reshape(-1), None, call.blocking))
        if summed is None:
            return None

        def finish() -> Array:
            try:
                part, flat = summed.complete(), out.reshape(-1)
                gathered = self.gather.begin(Call(call.route, part, flat))
                if gathered is None:
                    HostTransport().all_gather(self.buffer.comm, part, flat, self.sizes, True)
                else:
                    gathered.complete()
                return out if into is None or out is into else copy_into(into, out)
            except BaseException as error:
                self.buffer.fail(error)
                raise

        return Carried([], finish, array)

    def read(self, slot: Slot) -> Any:
        """Do nothing: `begin` says what completes the call."""


BOUND: dict[str, type[Bound]] = {
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_reduce": Reduce,
    "reduce": Reduce,
    "broadcast": Broadcast,
}


def _functions(array: Array, op: str) -> tuple[Any, Any]:
    """What copies one array into another, and what reduces two of them by `op`."""
    if is_torch(array):
        import torch

        return torch.Tensor.copy_, getattr(torch, OPERATIONS[op])
    return np.copyto, quiet(getattr(np, OPERATIONS[op]))
