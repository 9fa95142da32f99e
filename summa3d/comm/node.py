# Memory that the ranks of one node share, and how they wait for each other in it: asleep in the kernel, not polling.
# Imports arrays. Linux on x86-64; elsewhere `Ring.over` returns None and MPI is used.
# Next: staged.py, the collectives that are written with it; collectives.py, which chooses between them and MPI.
from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from mpi4py import MPI

from ..capability import FUTEX, available
from ..errors import GridError
from .arrays import Array, address, dtype_name, empty, is_on_device, is_torch
from .progress import IN_FLIGHT

SLOTS = 2
"""Communications of one axis that may be under way at a time."""
WAIT, WAKE, EVERYONE = 0, 1, 2**31 - 1
LINE = 8
"""64-bit words from one flag to the next: a cache line."""
GRAIN = 1 << 18
"""Slots grow in steps of this many bytes."""
SPINS = {True: 4, False: 2000}
"""Looks at a flag before sleeping, where ranks outnumber the cores, and where each has one of its own."""
SLEEP, NAP = 1.0, 0.0002
"""Seconds that a wait sleeps at a time: with nothing in flight in MPI, and with something that must be kept moving."""
LEFT, BROKEN = 1 << 61, (1 << 62) + 0xFFFFFFFF
"""Marks on a flag: the member has left the communication of this number out (added to it); the member goes on no more."""
POSTED, CLOSED, OFFERED, MAPPED = range(4)
"""What a member's flags of a slot tell: its part is written; it reads no more; larger memory is there; it has mapped that."""
FLAGS = 4
RECORD = 1024
"""Bytes of shared memory in which a member says why it goes on no more: a time, and a text."""
TOKEN, NOTE = 16, 128
"""Bytes of what tells offered memory from other, and of what says where it is: its token, and the path of its descriptor."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Flags:
    """Counters in shared memory that only grow, each written by one member. `wait` sleeps until one has grown enough.

    A member that cannot go on breaks its flags: whoever waits for one of them, now or later, gets GridError.
    """

    def __init__(self, memory: mmap.mmap, label: str, members: int, crowded: bool) -> None:
        self._memory, self._label, self._members = memory, label, members
        self._words = memoryview(memory).cast("q")
        self._first = address(np.frombuffer(memory, np.int64))
        self._spins = SPINS[crowded]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._number = FUTEX[platform.machine()]
        # A member that is gone wakes nobody: each sleep ends by itself, and its launcher ends the others meanwhile.
        self._times = {busy: _Time(int(seconds), round(seconds % 1 * 1e9)) for busy, seconds in ((False, SLEEP), (True, NAP))}
        self._timeouts = {busy: ctypes.addressof(time) for busy, time in self._times.items()}

    @staticmethod
    def nbytes(members: int) -> int:
        """The shared memory that they need: a line for the whole axis, one for each flag, and the members' records."""
        return (1 + FLAGS * members * SLOTS) * LINE * 8 + members * RECORD + SLOTS * NOTE

    @property
    def broken(self) -> bool:
        """Whether some member goes on no more."""
        return bool(self._words[0])

    def set(self, flag: int, value: int) -> None:
        """Raise `flag` to `value` and wake who waits for it. What this rank stored before is seen by who sees the flag."""
        place = (flag + 1) * LINE
        self._words[place] = value
        self._call(self._number, self._first + place * 8, WAKE, EVERYONE, None)

    def wait(self, flag: int, value: int) -> bool:
        """Return once `flag` is at least `value`; whether this rank had to sleep for it.

        Asleep it keeps MPI moving what this process has in flight. Raises GridError where the member that writes `flag` goes on
        no more, or has left out what this rank waits for.
        """
        words, place = self._words, (flag + 1) * LINE
        for _ in range(self._spins):
            if (seen := words[place]) >= value and (seen < LEFT or self._arrived(seen, value)):
                return False
        while (seen := words[place]) < value or (seen >= LEFT and not self._arrived(seen, value)):
            self.check()
            timeout = self._timeouts[IN_FLIGHT.advance()]
            self._call(self._number, self._first + place * 8, WAIT, seen & 0xFFFFFFFF, timeout)
        return True

    def _arrived(self, seen: int, value: int) -> bool:
        """False where a marked flag says that its member left out something before what is waited for, which may still come."""
        if seen >= BROKEN:
            self.check()
        if seen - LEFT == value:
            raise GridError("a member allocated a buffer for a reduce-scatter, as this one did, and began something else instead")
        return False

    def check(self) -> None:
        """Raise GridError where a member goes on no more, naming the first error."""
        if self._words[0]:
            raise GridError(
                f"axis {self._label} is broken: {self.first_error()}.\n"
                "  Its members are out of step, and it communicates no more. Free the grid and make another."
            )

    def report(self, member: int, text: str) -> None:
        """Write in shared memory why `member` goes on no more."""
        place = self._record(member)
        said = text.encode()[: RECORD - 8 - 1]
        self._memory[place + 8 : place + 8 + len(said)] = said
        self._words[place // 8] = time.monotonic_ns()
        self._words[0] = 1

    def first_error(self) -> str:
        """What the first member that failed has written; empty where none has."""
        records = [self._record(member) for member in range(self._members)]
        written = [(self._words[place // 8], place) for place in records if self._words[place // 8]]
        if not written:
            return ""
        place = min(written)[1]
        return self._memory[place + 8 : place + RECORD].rstrip(b"\0").decode(errors="ignore")

    def value(self, flag: int) -> int:
        """What `flag` is now."""
        return self._words[(flag + 1) * LINE]

    def note(self, slot: int) -> memoryview:
        """Where the one who offers larger memory for a slot says where it is."""
        place = self._record(self._members) + slot * NOTE
        return memoryview(self._memory)[place : place + NOTE]

    def _record(self, member: int) -> int:
        """Where a member's record begins, in bytes; behind the last one are the notes of the slots."""
        return (1 + FLAGS * self._members * SLOTS) * LINE * 8 + member * RECORD


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
        self.ring.flags.set(self.ring.flag(POSTED, self.ring.index, self.number), self.number)

    def wait(self, member: int) -> None:
        """Return once `member` has posted."""
        if member != self.ring.index:
            self.ring.flags.wait(self.ring.flag(POSTED, member, self.number), self.number)

    def wait_for_all(self) -> None:
        """Return once every member has posted. Waits first for who was last before, so as to be woken once."""
        ring, number = self.ring, self.number
        first = ring.flag(POSTED, 0, number)
        last = ring.last
        for member in (last, *range(ring.size)):
            if member != ring.index and ring.flags.wait(first + member * SLOTS, number):
                last = member
        ring.last = last

    def finish(self) -> None:
        """Read what the others laid here; a second call does nothing. It gives the slot back, unless a view is kept."""
        if self.read is not None:
            try:
                self._result, self.read = self.read(), None
                if not self.keeps:
                    self.close()
            except BaseException as error:
                self.ring.fail(error)
                raise

    def result(self) -> Array:
        """What was read, handed over: this turn, which its slot remembers until the next, holds nothing alive."""
        self.finish()
        result, self._result = self._result, None
        return result

    def leave(self) -> None:
        """Say that this member will not post."""
        self.ring.flags.set(self.ring.flag(POSTED, self.ring.index, self.number), LEFT + self.number)
        self.close()

    def close(self) -> None:
        """Say that this member reads the slot no more."""
        self.keeps = False
        self.ring.flags.set(self.ring.flag(CLOSED, self.ring.index, self.number), self.number)


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
    def over(cls, comm: MPI.Intracomm, label: str, crowded: bool) -> Ring | None:
        """A ring of the members of `comm`, who share a node (collective); None on all where the node cannot offer it."""
        memory = mapped(comm, Flags.nbytes(comm.size))
        return None if memory is None else cls(comm, Flags(memory, label, comm.size, crowded))

    @property
    def size_bytes(self) -> int:
        return sum(len(slot) for slot in self.slots if slot is not None) // self.size

    def flag(self, kind: int, member: int, number: int) -> int:
        """The flag of `member` of one kind for the slot of communication `number`."""
        return (kind * self.size + member) * SLOTS + number % SLOTS

    def turn(self, nbytes: int) -> Turn | None:
        """The next slot, with `nbytes` for all members together. None on all members where the node lacks the memory.

        Ends the view that the last turn may have given. Grows the slot, which is collective, where it is too small.
        """
        try:
            self.flags.check()
            return self._taken(nbytes)
        except BaseException as error:
            self.fail(error)
            raise

    def _taken(self, nbytes: int) -> Turn | None:
        if self.kept is not None:
            self.kept.close()
            self.kept = None
        if self.room is not None:
            self.room[0].leave()
            self.room = None
        self.number += 1
        slot = self.number % SLOTS
        before = self.turns[slot]
        if before is not None:
            before.finish()
        for member in range(self.size):
            if member != self.index:
                self.flags.wait(self.flag(CLOSED, member, self.number), self.number - SLOTS)
        memory = self.slots[slot]
        if nbytes > (0 if memory is None else len(memory)):
            self.slots[slot] = None
            memory = self.slots[slot] = self._larger(-(-nbytes // GRAIN) * GRAIN)
        if nbytes and memory is None:
            self.turns[slot] = None
            self.flags.set(self.flag(CLOSED, self.index, self.number), self.number)
            return None
        taken = self.turns[slot] = Turn(self, self.number, memory)
        return taken

    def _larger(self, nbytes: int) -> mmap.mmap | None:
        """Memory of `nbytes` for the slot that is being taken; None on all members where one cannot map it.

        The members speak by flags and not by MPI, in which nobody could be told that another has failed.
        """
        number, note = self.number, self.flags.note(self.number % SLOTS)
        descriptor = -1
        try:
            if self.index == 0:
                memory, descriptor = offered(nbytes, note)
                self.flags.set(self.flag(OFFERED, 0, number), number)
            else:
                self.flags.wait(self.flag(OFFERED, 0, number), number)
                memory = joined(nbytes, note)
            self.flags.set(self.flag(MAPPED, self.index, number), 2 * number + (memory is not None))
            for member in range(self.size):
                flag = self.flag(MAPPED, member, number)
                self.flags.wait(flag, 2 * number)
                if not self.flags.value(flag) % 2:
                    memory = None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return memory

    def refuse(self) -> None:
        """Raise the GridError of a broken ring; who waits for this member need not wait longer."""
        try:
            self.flags.check()
        except GridError as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Give up: tell the other members, who would wait for this one, of the first error."""
        if not self.flags.broken:
            text = str(error) or "without a message"
            self.flags.report(self.index, f"member {self.index} failed in a collective ({type(error).__name__}: {text})")
        for kind, number in itertools.product(range(FLAGS), range(SLOTS)):
            self.flags.set(self.flag(kind, self.index, number), BROKEN)

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
        try:
            array = turn.part(like, self.index * count, shape)
        except BaseException as error:
            self.fail(error)
            raise
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

    def ring(self, comm: MPI.Intracomm, label: str) -> Ring | None:
        if not self._made:
            self._made, self._ring = True, Ring.over(comm, label, self.crowded)
        return self._ring

    def check(self) -> None:
        """Raise GridError where the ring is broken."""
        if self._ring is not None and self._ring.flags.broken:
            self._ring.refuse()


def in_one_node(comm: MPI.Intracomm) -> bool:
    """Whether all ranks of `comm` share one node's memory in the way of this file (collective)."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = node.size == comm.size and available() is None
    node.Free()
    return bool(comm.allreduce(together, MPI.MIN))


def mapped(comm: MPI.Intracomm, nbytes: int) -> mmap.mmap | None:
    """Zeroed memory that the members of `comm` map together (collective); None on all of them where one cannot."""
    note = memoryview(bytearray(NOTE))
    memory, descriptor = offered(nbytes, note) if comm.rank == 0 else (None, -1)
    comm.Bcast(note)
    if comm.rank != 0:
        memory = joined(nbytes, note)
    everyone = comm.allreduce(memory is not None, MPI.MIN)
    if descriptor >= 0:
        os.close(descriptor)
    return memory if everyone else None


def offered(nbytes: int, note: memoryview) -> tuple[mmap.mmap | None, int]:
    """New zeroed memory, and the descriptor by which others find it as `note` tells; where there is none, an empty note."""
    note[:] = bytes(NOTE)
    descriptor = -1
    try:
        descriptor = os.memfd_create("summa3d")
        os.posix_fallocate(descriptor, 0, nbytes + mmap.PAGESIZE)  # an error now, not a signal at the first touch
        memory = mmap.mmap(descriptor, nbytes + mmap.PAGESIZE)
    except OSError:
        return None, descriptor
    token, path = os.urandom(TOKEN), f"/proc/{os.getpid()}/fd/{descriptor}".encode()
    memory[-TOKEN:] = token
    note[: TOKEN + len(path)] = token + path
    return memory, descriptor


def joined(nbytes: int, note: memoryview) -> mmap.mmap | None:
    """The memory that `note` tells of, if it is there and is the one meant."""
    token, path = bytes(note[:TOKEN]), bytes(note[TOKEN:]).rstrip(b"\0")
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, nbytes + mmap.PAGESIZE)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[-TOKEN:] == token else None


def staged_dtype(array: Array) -> bool:
    """Whether arrays like this one can be added up in place: on the host, and no booleans, which are left to MPI's operations."""
    return dtype_name(array) != "bool" and not is_on_device(array)
