"""The node buffer: an axis's slots of memory that the ranks of a node share, used in turn by its collectives.

`NodeBuffer.over` returns None where the node cannot offer the memory; the axis then uses MPI.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

from mpi4py import MPI

from ...preemption import is_interrupt
from ..device.arrays import Array, empty, is_torch, library_of
from ..health.agreement import world_ranks
from ..health.failure import said
from ..health.signatures import Signatures
from .call import Carried, refuse_freed
from .node_memory import (
    BROKEN,
    CLOSED,
    FAILED,
    FLAGS,
    INTERRUPTED,
    LEFT,
    MAPPED,
    OFFERED,
    POSTED,
    SLOTS,
    Flags,
    joined,
    mapped,
    offered,
)
from .slot_collective import ALL, SlotCollective, Views, row_major

GRAIN = 1 << 18
"""Slots grow in steps of this many bytes."""


class Slot(Carried):
    """One communication in a slot of a node buffer: this member posts its part, and `complete` combines all members' parts.

    collective : which one it is, until it is complete. views : its arrays in this slot. into, own : what `combine` is given.
    """

    collective: SlotCollective | None = None
    views: Views
    viewed = False
    into: Array = None
    own: Array | None = None
    _result: Array = None

    def __init__(self, buffer: NodeBuffer, number: int, memory: mmap.mmap | None) -> None:
        self.buffer, self.number, self.memory = buffer, number, memory
        self.place, self.call = number % SLOTS, buffer.signatures.number

    def part(self, like: Array, offset: int, shape: tuple[int, ...], strides: Sequence[int] | None = None) -> Array:
        """An array of `like`'s kind and dtype on the slot's memory, `offset` elements from its start, in C order.

        strides : those of C order, where the caller has them
        """
        count = prod(shape)
        if count == 0 or self.memory is None:
            return empty(shape, like)
        flat = self.buffer.flat(self.place, self.memory, like)
        if is_torch(like):
            return flat.as_strided(shape, strides or row_major(shape), offset)
        return flat[offset : offset + count].reshape(shape)

    def post(self) -> None:
        """Signal that this member's part is written; wake, too, who waits for its call itself."""
        buffer = self.buffer
        buffer.flags.set(buffer.own[POSTED][self.place], self.number)
        signatures = buffer.signatures
        if signatures.words[signatures.own + 1]:  # `set` has ordered this behind the call
            signatures.wake()

    def wait(self, member: int) -> None:
        """Return once `member` has posted."""
        if member != self.buffer.index:
            self.buffer.flags.wait(self.buffer.posted[member][self.place], self.number)
            self.buffer.signatures.compare_with(member, self.call)

    def wait_for_all(self) -> None:
        """Return once every member has posted. Waits first for the member that was last before, so that this rank wakes once."""
        buffer, last, number = self.buffer, -1, self.number
        others, words = buffer.others[POSTED][self.place], buffer.flags.words
        for flag in others:
            if not number <= words[flag] < LEFT and buffer.flags.wait(flag, number):
                last = flag
        if last >= 0 and last != others[0]:
            others.remove(last)
            others.insert(0, last)
        buffer.signatures.compare(self.call)

    def complete(self) -> Array:
        """Combine the parts of all members, unless `finish` did, and close the slot, unless the result is a view of it; once.

        The slot keeps no reference to the result, since the buffer keeps the slot until its next use.
        """
        collective = self.collective
        if collective is None:
            result, self._result, self.keep = self._result, None, None
            return result
        if self.buffer.released:
            refuse_freed(self.buffer.flags.label)
        try:
            plan = collective.plan
            if plan.waits_for == ALL:
                self.wait_for_all()
            elif plan.waits_for >= 0:
                self.wait(plan.waits_for)
            if self.viewed:
                result = self.part(collective.like, 0, collective.whole, collective.strides)
            else:
                result = collective.combine(self.views, self.into, self.own)
            self.collective = self.keep = self.into = self.own = None
            if not self.viewed:
                buffer = self.buffer
                buffer.flags.set(buffer.own[CLOSED][self.place], self.number)
        except BaseException as error:
            self.buffer.fail(error)
            raise
        return result

    def finish(self) -> None:
        """Have the result ready before it is asked for: the slot is needed."""
        kept = self.keep
        self._result, self.keep = self.complete(), kept

    def leave(self) -> None:
        """Signal that this member will not post."""
        self.buffer.flags.set(self.buffer.own[POSTED][self.place], LEFT + self.number)
        self.close()

    def close(self) -> None:
        """Signal that this member no longer reads the slot."""
        self.buffer.flags.set(self.buffer.own[CLOSED][self.place], self.number)


class NodeBuffer:
    """The shared memory of one axis: slots that its communications use in turn, all members in the same order.

    Member j reuses a slot once every member has closed its last use. The memory has no name in the file system, so a killed job
    leaves nothing behind; each process unmaps it by itself.
    """

    released = False

    def __init__(self, comm: MPI.Intracomm, flags: Flags, grid: int = 1) -> None:
        self.size, self.index, self.flags = comm.size, comm.rank, flags
        self.signatures = Signatures(flags, comm.rank, partial(world_ranks, comm), f"{flags.label} of grid {grid}")
        self.begin()

    def begin(self) -> None:
        """Nothing has been communicated yet."""
        self.number = 0
        self.memories: list[mmap.mmap | None] = [None] * SLOTS
        self.slots: list[Slot | None] = [None] * SLOTS
        self._flats: list[dict[Any, Array]] = [{} for _ in range(SLOTS)]
        self.seen: WeakSet[SlotCollective] = WeakSet()
        self.viewed: Slot | None = None
        self.allocated: tuple[Slot, Array] | None = None
        flags, members = self.flags, [member for member in range(self.size) if member != self.index]
        self.own = [[flags.place(kind, self.index, place) for place in range(SLOTS)] for kind in range(FLAGS)]
        self.posted = [[flags.place(POSTED, member, place) for place in range(SLOTS)] for member in range(self.size)]
        self.others = [
            [[flags.place(kind, member, place) for member in members[::-1]] for place in range(SLOTS)] for kind in range(FLAGS)
        ]

    @classmethod
    def over(cls, comm: MPI.Intracomm, label: str, crowded: bool, grid: int = 1) -> NodeBuffer | None:
        """The buffer of the members of `comm`, which share a node (collective); None on all if the node lacks the memory."""
        memory = mapped(comm, Flags.nbytes(comm.size))
        return None if memory is None else cls(comm, Flags(memory, label, comm.size, crowded), grid)

    @property
    def size_bytes(self) -> int:
        """This rank's share of the slots: their bytes, divided by the number of members."""
        return sum(len(memory) for memory in self.memories if memory is not None) // self.size

    def take(self, nbytes: int) -> Slot | None:
        """The next slot, with `nbytes` for all members together. None on all members where the node lacks the memory.

        Invalidates the view of the last slot, and abandons an allocated slot that was not used. A slot that is too small grows;
        all members wait for each other then. The caller has posted its call, which raises on a broken axis; it breaks
        the axis on an error.
        """
        if self.viewed is not None:
            self.viewed.close()
            self.viewed = None
        if self.allocated is not None:
            self.allocated[0].leave()
            self.allocated = None
        self.number = number = self.number + 1
        place = number % SLOTS
        before = self.slots[place]
        if before is not None and before.collective is not None:
            before.finish()
        words, closed = self.flags.words, number - SLOTS
        for flag in self.others[CLOSED][place]:
            if not closed <= words[flag] < LEFT:
                self.flags.wait(flag, closed)
        memory = self.memories[place]
        if nbytes > (0 if memory is None else len(memory)):
            self.signatures.wake()
            self.signatures.compare(self.signatures.number)  # members that differ in their call would not all grow
            self.memories[place] = None
            self._flats[place].clear()
            for collective in self.seen:
                collective.views[place] = None
            memory = self.memories[place] = self._larger(-(-nbytes // GRAIN) * GRAIN)
        if nbytes and memory is None:
            self.slots[place] = None
            self.flags.set(self.own[CLOSED][place], number)
            return None
        slot = self.slots[place] = Slot(self, number, memory)
        return slot

    def flat(self, place: int, memory: mmap.mmap, like: Array) -> Array:
        """All of a slot's memory as one array of `like`'s kind and dtype, made once."""
        array = self._flats[place].get(like.dtype)
        if array is None:
            with lasting(is_torch(like)):
                array = library_of(like).frombuffer(memory, dtype=like.dtype, count=len(memory) // like.itemsize)
            self._flats[place][like.dtype] = array
        return array

    def _larger(self, nbytes: int) -> mmap.mmap | None:
        """Memory of `nbytes` for the slot that is being taken; None on all members where one cannot map it.

        The members agree by flags instead of MPI: a member that waits in MPI could not learn that another one has failed.
        """
        number, place, flags = self.number, self.number % SLOTS, self.flags
        note = flags.note(place)
        descriptor = -1
        try:
            if self.index == 0:
                memory, descriptor = offered(nbytes, note)
                flags.set(flags.place(OFFERED, 0, place), number)
            else:
                flags.wait(flags.place(OFFERED, 0, place), number)
                memory = joined(nbytes, note)
            flags.set(self.own[MAPPED][place], 2 * number + (memory is not None))
            for member in range(self.size):
                flag = flags.place(MAPPED, member, place)
                flags.wait(flag, 2 * number)
                if not flags.words[flag] % 2:
                    memory = None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return memory

    def fail(self, error: BaseException) -> None:
        """Break the axis: report `error`, if it is the first, to the members that would wait for this one."""
        if not self.flags.broken:
            who = f"member {self.index} (rank {MPI.COMM_WORLD.rank})"
            self.flags.report(
                self.index, f"{who} failed in a collective ({said(error)})", INTERRUPTED if is_interrupt(error) else FAILED
            )
        for flag in itertools.chain(*self.own):
            self.flags.set(flag, BROKEN)
        self.signatures.wake()

    def release(self) -> None:
        """Let go of the memory, at once and not by the collector of circles; views that a caller still holds keep theirs."""
        self.released = True
        self.signatures.close()
        self.begin()
        self.flags.release()

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """Memory of the next slot for this member to fill, and to reduce without a copy; None where there is none."""
        shape, count = tuple(shape), prod(shape)
        slot = self.take(self.size * count * like.itemsize)
        if slot is None:
            return None
        array = slot.part(like, self.index * count, shape)
        self.allocated = slot, array
        return array

    def slot_of(self, array: Array) -> Slot | None:
        """The slot in which `array` was allocated; None if there is none, or if a communication came in between."""
        if self.allocated is None or self.allocated[1] is not array:
            return None
        slot, self.allocated = self.allocated[0], None
        return slot


@contextmanager
def lasting(is_torch: bool) -> Iterator[None]:
    """Inside it, tensors are made that are used again outside the modes, such as inference, that the caller may be in."""
    if not is_torch:
        yield
        return
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.inference_mode(False), _disable_current_modes():
        yield
