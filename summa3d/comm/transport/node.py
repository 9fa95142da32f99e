"""Collectives of members that share a node, through the slots of a node buffer: one copy in, one copy out, or none.

Each writes this member's part into a slot, and then combines the parts of all members there (slot_collective.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from ..device.arrays import Array, contiguous, copy_into, count, detached, dtype_name, empty, is_contiguous, place_of, share
from ..health.signatures import Signed, signed
from .call import ALL_REDUCE_LIMIT, NO_SIGNATURE, Carried, Members, Route
from .host import HostTransport
from .node_buffer import NodeBuffer, Slot, lasting
from .select import NodeRule, staged_dtype
from .slot_collective import PLANS, SlotCollective

BRIEF = 1 << 16
"""Bytes in a slot up to which a call takes less time than to read the clock of this thread's processor time four times."""
BARRIER, FREE = signed("barrier"), signed("grid.free()")
Begin = Callable[[SlotCollective, Array, "Array | None"], "Carried | None"]
"""Begins a collective in slots, of an array, into another one; None on all members where the node lacks the memory."""


class NodeTransport:
    """Collectives through the node buffer of an axis. `carry` returns None, on all members alike, for calls it leaves to MPI.

    Every collective of the axis, those through MPI included, is compared over the members (signatures.py).
    """

    def __init__(self, members: Members, rule: NodeRule, buffer: NodeBuffer) -> None:
        self.members, self.rule, self.buffer = members, rule, buffer
        self._staged: dict[tuple[Any, Any], bool] = {}
        self._allocations: dict[tuple[Any, ...], Signed | None] = {}

    @classmethod
    def over(cls, members: Members) -> NodeTransport | None:
        """The node transport of these members (collective); None on all of them where their node has no memory for it."""
        rule = members.node
        if rule is None or members.size == 1:
            return None
        buffer = NodeBuffer.over(members.comm, members.label, rule.crowded, members.grid)
        return None if buffer is None else cls(members, rule, buffer)

    def check(self) -> None:
        """Raise GridError where a member has failed in the middle of a communication."""
        if self.buffer.flags.broken:
            self._breaking(self.buffer.flags.check)  # its own flags too, so that no member waits for it

    def end(self) -> None:
        """Say that this member makes no more calls, and frees the axis."""
        if not self.buffer.flags.broken:
            self.buffer.signatures.call(FREE)

    def free(self) -> None:
        """Release the node's memory (collective). AgreementError if members differ in a call that was not compared yet."""
        buffer = self.buffer
        try:
            if buffer.flags.broken:
                buffer.signatures.disputed()
            else:
                buffer.signatures.compare(buffer.signatures.number)
        finally:
            buffer.release()

    def carry(self, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried | None:
        """Begin a call of `route`; None, on all members alike, where it is left to another transport.

        Raises ShapeError for a dtype or a reduction that MPI does not support either, before a slot is taken; AgreementError
        where members differ in what they call. Any error but a ShapeError breaks the axis: the other members get one too, instead
        of waiting for this one.
        """
        buffer, collective = self.buffer, route.bound
        if route.signed is NO_SIGNATURE:
            collective = route.bound = in_slots(route, array, self.members, self.rule)
            route.signed = signed(route.described(array))
            if isinstance(collective, SlotCollective) and collective.in_slots and collective.nbytes <= BRIEF:
                route.naps = buffer.flags.naps
        try:
            number = buffer.signatures.post(route.signed)
            slot = buffer.slot_of(array) if buffer.allocated is not None and route.operation == "reduce_scatter" else None
            if slot is None and (collective is None or not collective.in_slots):
                self._compare_for_mpi(route, number, blocking)
                return None
            if isinstance(collective, AllReduceInParts):
                carried = collective.begin(partial(self._begin, blocking=blocking), array, into, buffer.fail)
            else:
                carried = self._begin(collective, array, into, blocking, slot)
            if carried is None:
                buffer.signatures.wake()
        except BaseException as error:
            buffer.fail(error)
            raise
        return carried

    def _begin(
        self, collective: SlotCollective, array: Array, into: Array | None, blocking: bool = True, allocated: Slot | None = None
    ) -> Slot | None:
        """Write this member's part into the next slot, unless it lies in the `allocated` one; None where memory is lacking."""
        buffer = self.buffer
        slot = buffer.take(collective.nbytes) if allocated is None else allocated
        if slot is None:
            return None
        views = collective.views[slot.place]
        if views is None:
            with lasting(collective.is_torch):
                views = collective.views[slot.place] = collective.views_in(slot.part)
            buffer.seen.add(collective)
        slot.collective, slot.views, slot.keep = collective, views, array
        slot.into = array if collective.in_place else into
        if allocated is None:
            slot.own = collective.write(views, array, into, blocking)
        if views.mine is None:
            buffer.signatures.wake()
        else:
            slot.post()
            if collective.gives_view and into is None:
                slot.viewed, buffer.viewed = True, slot  # until the next slot is taken
        return slot

    def _compare_for_mpi(self, route: Route, number: int, blocking: bool) -> None:
        """Compare a call that MPI carries, before MPI would meet two that differ: it may abort, or overwrite memory.

        What is begun only does not wait here: of two members that differ, the later one sees it and begins nothing; the other one
        compares before it waits (`compared`).
        """
        signatures = self.buffer.signatures
        signatures.wake()
        if blocking and not route.on_device:
            signatures.compare(number)
        else:
            signatures.review()

    def compared(self) -> Callable[[], None]:
        """Compare calls before a member waits for the call that MPI has just begun for it."""
        return partial(self._breaking, self.buffer.signatures.compare, self.buffer.signatures.number)

    def _breaking(self, step: Callable[..., object], *arguments: object) -> None:
        """Take a step; an error in it breaks the axis, for all members."""
        try:
            step(*arguments)
        except BaseException as error:
            self.buffer.fail(error)
            raise

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer that the next reduce-scatter sums in place; None where there is none."""
        buffer, key = self.buffer, (like.dtype, place_of(like), *shape)
        if key not in self._allocations:
            text = f"allocate of {dtype_name(like)} {tuple(shape)}"
            self._allocations[key] = signed(text) if self.offers_views(like) else None
        signature = self._allocations[key]
        if signature is None:
            return None
        try:
            buffer.signatures.call(signature)
            return buffer.allocate(shape, like)
        except BaseException as error:
            buffer.fail(error)
            raise

    def offers_views(self, array: Array) -> bool:
        """Return whether a gather of such arrays may be read in place."""
        kind = array.dtype, place_of(array)
        staged = self._staged.get(kind)
        if staged is None:
            staged = self._staged[kind] = staged_dtype(array)
        return staged

    def barrier(self) -> None:
        """Wait, asleep, for every member."""
        self._breaking(self.buffer.signatures.compare, self.buffer.signatures.call(BARRIER))


class AllReduceInParts:
    """`Axis.all_reduce` by sum of a large array: each member sums its share, and the shares are gathered.

    What completes it takes a slot of its own: all members call it at the same place among their communications over this axis.
    MPI gathers where the node lacks the memory.
    """

    def __init__(self, like: Array, members: Members, in_slots: bool) -> None:
        self.in_slots, self.comm = in_slots, members.comm
        index, size, n = members.index, members.size, count(like)
        self.sizes = [share(n, size, member) for member in range(size)]
        scatter, gather = (Route(name, False, 0, 0, 0, self.sizes) for name in ("reduce_scatter", "all_gather"))
        self.scatter = SlotCollective(scatter, empty((n,), like), index, size)
        self.gather = SlotCollective(gather, empty((self.sizes[index],), like), index, size)

    def begin(self, begin: Begin, array: Array, into: Array | None, fail: Callable[[BaseException], None]) -> Carried | None:
        """Begin the reduce-scatter. begin : begins a step. fail : tells the other members of an error in what completes it."""
        array = detached(array)
        out = into if into is not None and is_contiguous(into) else empty(array.shape, array)
        summed = begin(self.scatter, contiguous(array).reshape(-1), None)
        if summed is None:
            return None

        def finish() -> Array:
            try:
                part, flat = summed.complete(), out.reshape(-1)
                gathered = begin(self.gather, part, flat)
                if gathered is None:
                    HostTransport().all_gather(self.comm, part, flat, self.sizes, True)
                else:
                    gathered.complete()
                return out if into is None or out is into else copy_into(into, out)
            except BaseException as error:
                fail(error)
                raise

        return Carried([], finish, array)


def in_slots(route: Route, array: Array, members: Members, rule: NodeRule) -> SlotCollective | AllReduceInParts | None:
    """The collective of `route` in the slots of an axis; None, it is left to another transport.

    Whether calls go through slots is decided by the operation, and by the elements that all members write there.

    Raises ShapeError for a dtype or a reduction that MPI does not support either.
    """
    if not route.on_device:
        host = HostTransport()
        host.datatype(array)
        if "reduce" in route.operation:
            host.operation(array, route.op)
    if route.operation not in PLANS or not staged_dtype(array):
        return None
    elements = PLANS[route.operation](route, tuple(array.shape), members.index, members.size).elements
    if route.operation == "all_reduce" and array.itemsize * prod(array.shape) > ALL_REDUCE_LIMIT:
        return AllReduceInParts(array, members, rule.takes(array, elements) and route.in_order and route.op == "sum")
    return SlotCollective(route, array, members.index, members.size, route.view or rule.takes(array, elements))
