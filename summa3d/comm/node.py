# Memory that the ranks of one node share, and how they wait for each other in it: asleep in the kernel, not polling.
# Imports arrays. Linux on x86-64; elsewhere `Ring.over` returns None and MPI is used.
# Next: staged.py, the collectives that are written with it; collectives.py, which chooses between them and MPI.
from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from mpi4py import MPI

from ..capability import FUTEX, available
from .arrays import Array, address, dtype_name, empty, is_on_device, is_torch

SLOTS = 2
"""Communications of one axis that may be under way at a time."""
WAIT, WAKE, EVERYONE = 0, 1, 2**31 - 1
LINE = 8
"""64-bit words from one flag to the next: a cache line."""
GRAIN = 1 << 18
"""Slots grow in steps of this many bytes."""
SPINS = {True: 4, False: 2000}
"""Looks at a flag before sleeping, where ranks outnumber the cores, and where each has one of its own."""


class _Second(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Flags:
    """Counters in shared memory that only grow, each written by one member. `wait` sleeps until one has grown enough."""

    def __init__(self, memory: mmap.mmap, crowded: bool) -> None:
        self._words = memoryview(memory).cast("q")
        self._first = address(np.frombuffer(memory, np.int64))
        self._spins = SPINS[crowded]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._number = FUTEX[platform.machine()]
        self._second = _Second(1, 0)  # a member that is gone wakes nobody; its launcher ends the others meanwhile
        self._timeout = ctypes.addressof(self._second)

    def set(self, flag: int, value: int) -> None:
        """Raise `flag` to `value` and wake who waits for it. What this rank stored before is seen by who sees the flag."""
        self._words[flag * LINE] = value
        self._call(self._number, self._first + flag * LINE * 8, WAKE, EVERYONE, None)

    def wait(self, flag: int, value: int) -> bool:
        """Return once `flag` is at least `value`; whether this rank had to sleep for it."""
        words, place = self._words, flag * LINE
        for _ in range(self._spins):
            if words[place] >= value:
                return False
        if words[place] >= value:
            return False
        while (seen := words[place]) < value:
            self._call(self._number, self._first + place * 8, WAIT, seen & 0xFFFFFFFF, self._timeout)
        return True


class Turn:
    """One communication in a slot of a ring: this member posts its part, and `finish` reads what the others laid there."""

    def __init__(self, ring: Ring, number: int, memory: mmap.mmap | None) -> None:
        self.ring, self.number, self.memory = ring, number, memory
        self.read: Callable[[], Array] | None = None
        self.keeps = False
        self._result: Array = None

    def part(self, like: Array, offset: int, shape: Sequence[int]) -> Array:
        """An array of `like`'s kind and dtype on the slot's memory, `offset` elements from its start."""
        count = prod(shape)
        if count == 0 or self.memory is None:
            return empty(shape, like)
        if is_torch(like):
            import torch

            flat = torch.frombuffer(self.memory, dtype=like.dtype, count=count, offset=offset * like.itemsize)
            return flat.view(tuple(shape))
        return np.frombuffer(self.memory, like.dtype, count, offset * like.itemsize).reshape(tuple(shape))

    def post(self) -> None:
        """Say that this member's part is written."""
        self.ring.flags.set(self.ring.posted(self.ring.index, self.number), self.number)

    def wait(self, member: int) -> None:
        """Return once `member` has posted."""
        if member != self.ring.index:
            self.ring.flags.wait(self.ring.posted(member, self.number), self.number)

    def wait_for_all(self) -> None:
        """Return once every member has posted. Waits first for who was last before, so as to be woken once."""
        ring, number = self.ring, self.number
        first = number % SLOTS
        last = ring.last
        for member in (last, *range(ring.size)):
            if ring.flags.wait(member * SLOTS + first, number) and member != ring.index:
                last = member
        ring.last = last

    def finish(self) -> None:
        """Read what the others laid here; a second call does nothing. It gives the slot back, unless a view is kept."""
        if self.read is not None:
            self._result, self.read = self.read(), None
            if not self.keeps:
                self.close()

    def result(self) -> Array:
        """What was read, handed over: this turn, which its slot remembers until the next, holds nothing alive."""
        self.finish()
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Say that this member reads the slot no more."""
        self.keeps = False
        self.ring.flags.set(self.ring.closed(self.ring.index, self.number), self.number)


class Ring:
    """The shared memory of one axis: slots that its communications use in turn, all members in the same order.

    Member j reuses a slot once every member has closed its last use. Nothing has a name, so nothing is left behind by a job
    that is killed, and each process unmaps by itself. `size_bytes` is this rank's share of the slots.
    """

    def __init__(self, comm: MPI.Intracomm, flags: Flags) -> None:
        self.comm, self.size, self.index, self.flags = comm, comm.size, comm.rank, flags
        self.number = 0
        self.last = self.size - 1
        self.slots: list[mmap.mmap | None] = [None] * SLOTS
        self.turns: list[Turn | None] = [None] * SLOTS
        self.kept: Turn | None = None
        self.room: tuple[Turn, Array] | None = None

    @classmethod
    def over(cls, comm: MPI.Intracomm, crowded: bool) -> Ring | None:
        """A ring of the members of `comm`, who share a node (collective); None on all where the node cannot offer it."""
        memory = mapped(comm, 2 * comm.size * SLOTS * LINE * 8)
        return None if memory is None else cls(comm, Flags(memory, crowded))

    @property
    def size_bytes(self) -> int:
        return sum(len(slot) for slot in self.slots if slot is not None) // self.size

    def posted(self, member: int, number: int) -> int:
        """The flag that says which communication of this slot `member` has posted."""
        return member * SLOTS + number % SLOTS

    def closed(self, member: int, number: int) -> int:
        """The flag that says which communication of this slot `member` reads no more."""
        return self.size * SLOTS + self.posted(member, number)

    def turn(self, nbytes: int) -> Turn | None:
        """The next slot, with `nbytes` for all members together. None on all members where the node lacks the memory.

        Ends the view that the last turn may have given. Grows the slot, which is collective, where it is too small.
        """
        if self.kept is not None:
            self.kept.close()
            self.kept = None
        if self.room is not None:
            self.room[0].close()
            self.room = None
        self.number += 1
        slot = self.number % SLOTS
        before = self.turns[slot]
        if before is not None:
            before.finish()
        for member in range(self.size):
            if member != self.index:
                self.flags.wait(self.closed(member, self.number), self.number - SLOTS)
        memory = self.slots[slot]
        if nbytes > (0 if memory is None else len(memory)):
            self.slots[slot] = None
            memory = self.slots[slot] = mapped(self.comm, -(-nbytes // GRAIN) * GRAIN)
        if nbytes and memory is None:
            self.turns[slot] = None
            self.flags.set(self.closed(self.index, self.number), self.number)
            return None
        taken = self.turns[slot] = Turn(self, self.number, memory)
        return taken

    def keep(self, turn: Turn) -> None:
        """The result of `turn` is a view that stays until the next turn."""
        turn.keeps = True
        self.kept = turn

    def open_room(self, shape: Sequence[int], like: Array) -> Array | None:
        """Memory of the next slot for this member to fill, and to reduce without a copy; None where there is none."""
        count = prod(shape)
        turn = self.turn(self.size * count * like.itemsize)
        if turn is None:
            return None
        array = turn.part(like, self.index * count, shape)
        self.room = turn, array
        return array

    def enter_room(self, array: Array) -> Turn | None:
        """The turn whose room `array` is, if it is one."""
        if self.room is None or self.room[1] is not array:
            return None
        turn, self.room = self.room[0], None
        return turn


class NodeRule:
    """Whether an axis, whose members share a node, communicates through the node's memory; and the ring once it does.

    Where ranks outnumber the cores (`crowded`) always: a rank that waits inside MPI polls, and takes the core from one that
    works. Elsewhere from SMALL bytes on, below which MPI is as quick, unless `always`. Above LARGEST bytes what must be copied
    anyway is left to MPI, which needs no memory for it.
    """

    SMALL, LARGEST = 1 << 15, 1 << 28

    def __init__(self, crowded: bool, always: bool) -> None:
        self.crowded, self.always = crowded, crowded or always
        self._made = False
        self._ring: Ring | None = None

    def takes(self, array: Array, elements: int) -> bool:
        nbytes = elements * array.itemsize
        return (self.always or nbytes >= self.SMALL) and nbytes <= self.LARGEST and staged_dtype(array)

    def ring(self, comm: MPI.Intracomm) -> Ring | None:
        if not self._made:
            self._made, self._ring = True, Ring.over(comm, self.crowded)
        return self._ring


def in_one_node(comm: MPI.Intracomm) -> bool:
    """Whether all ranks of `comm` share one node's memory in the way of this file (collective)."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = node.size == comm.size and available() is None
    node.Free()
    return bool(comm.allreduce(together, MPI.MIN))


def mapped(comm: MPI.Intracomm, nbytes: int) -> mmap.mmap | None:
    """Zeroed memory that the members of `comm` map together (collective); None on all of them where one cannot."""
    memory: mmap.mmap | None = None
    note: tuple[str, bytes] | None = None
    descriptor = -1
    if comm.rank == 0:
        try:
            descriptor = os.memfd_create("summa3d")
            os.posix_fallocate(descriptor, 0, nbytes + mmap.PAGESIZE)  # an error now, not a signal at the first touch
            memory = mmap.mmap(descriptor, nbytes + mmap.PAGESIZE)
            token = os.urandom(16)
            memory[-16:] = token
            note = f"/proc/{os.getpid()}/fd/{descriptor}", token
        except OSError:
            memory = None
    note = comm.bcast(note)
    if comm.rank != 0 and note is not None:
        path, token = note
        memory = _joined(path, token, nbytes + mmap.PAGESIZE)
    everyone = comm.allreduce(memory is not None, MPI.MIN)
    if descriptor >= 0:
        os.close(descriptor)
    return memory if everyone else None


def _joined(path: str, token: bytes, nbytes: int) -> mmap.mmap | None:
    """The memory behind another process's descriptor, if it is there and is the one meant."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[-16:] == token else None


def staged_dtype(array: Array) -> bool:
    """Whether arrays like this one can be added up in place: on the host, and no booleans, which are left to MPI's operations."""
    return dtype_name(array) != "bool" and not is_on_device(array)
