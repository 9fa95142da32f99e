"""Memory that the ranks of a node map together, and flags in it. A rank sleeps while it waits for a flag.

Only on Linux on x86-64 (node_support.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ...errors import GridError
from ...node_support import FUTEX, why_no_node_memory
from ..device.arrays import address
from .progress import IN_FLIGHT, Naps

SLOTS = 2
"""Communications of one axis that may be under way at a time."""
WAIT, WAKE, EVERYONE = 0, 1, 2**31 - 1
LINE = 8
"""64-bit words from one flag to the next: a cache line."""
SPINS = {True: 4, False: 2000}
"""Looks at a flag before sleeping, where ranks outnumber the cores, and where each has one of its own."""
SLEEP, NAP = 1.0, 0.0002
"""Seconds that a wait sleeps at a time: with nothing in flight in MPI, and with something that must be kept moving."""
LEFT, BROKEN = 1 << 61, (1 << 62) + 0xFFFFFFFF
"""Marks on a flag: the member skipped the communication whose number is added; the member has failed."""
POSTED, CLOSED, OFFERED, MAPPED = range(4)
"""A member's flags of a slot: its part is written; it has finished reading; larger memory is offered; it has mapped that."""
FLAGS = 4
FAILED, DISPUTED, INTERRUPTED = 1, 2, 3
"""The first word of a broken axis: a member failed in a collective; members differ in a call, whose number is the next word; a
member was interrupted in a collective."""
KEPT, TEXT = 8, 240
"""The last calls of a member that others can compare, a cache line of signatures; bytes of a call's text, which is cut there."""
RECORD = 1024
"""Bytes of shared memory for a member's error: a time, and a text."""
TOKEN, NOTE = 16, 128
"""Bytes of the token that identifies offered memory, and of the note that locates it: the token, and its descriptor's path."""


class Flags:
    """Counters in shared memory that only grow, each written by one member. `wait` sleeps until one has grown enough.

    A flag is named by the place of its 64-bit word (`place`).

    A member that fails breaks its flags: a member that waits for one of them, now or later, gets GridError.

    review : what a member does each time that it has slept. awake : what it does once it sleeps no more. disputed : raises the
    error of members that differ in a call, the first time.
    """

    def __init__(self, memory: mmap.mmap, label: str, members: int, crowded: bool) -> None:
        self._memory, self.label, self.members = memory, label, members
        self.words = memoryview(memory).cast("q")
        self._texts = self._record(members) + SLOTS * NOTE  # of members' calls, behind the notes of the slots
        self._first = address(np.frombuffer(memory, np.int64))
        self._spins, self.naps = SPINS[crowded], Naps()
        self._fence = threading.Lock()
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._number = FUTEX[platform.machine()]
        # A killed member wakes no other: each sleep has a timeout, and the launcher ends the other members meanwhile.
        self._times = {busy: np.array([seconds, seconds % 1 * 1e9], np.int64) for busy, seconds in ((False, SLEEP), (True, NAP))}
        self._timeouts = {busy: address(time) for busy, time in self._times.items()}  # the kernel's timespec
        self.review: Callable[[], None] = _nothing
        self.awake: Callable[[], None] = _nothing
        self.disputed: Callable[[], None] = _nothing

    @staticmethod
    def nbytes(members: int) -> int:
        """The shared memory that they need: a line for the whole axis, one for each flag, and the members' records and calls."""
        return _lines(members) * LINE * 8 + members * (RECORD + KEPT * TEXT) + SLOTS * NOTE

    def place(self, kind: int, member: int, slot: int) -> int:
        """The flag of one kind that `member` writes for a slot."""
        return ((kind * self.members + member) * SLOTS + slot + 1) * LINE

    def called(self, member: int) -> int:
        """The flag that counts a member's calls. In the line behind it are the signatures of its last calls.

        Two words behind the flag is the number of the call in which the member waits, if nothing else can go on in its process.
        """
        return (1 + FLAGS * self.members * SLOTS + 2 * member) * LINE

    @property
    def broken(self) -> bool:
        """Return whether some member has failed."""
        return bool(self.words[0])

    def set(self, flag: int, value: int) -> None:
        """Raise `flag` to `value` and wake its waiters. A rank that sees the flag also sees what this rank stored before.

        The next word is 1 if a rank may sleep: else no system call is needed. The processor must not read it before others see
        the flag; the lock is there for its locked instruction, which orders the two.
        """
        words = self.words
        words[flag] = value
        with self._fence:
            sleeps = words[flag + 1]
        if sleeps:
            words[flag + 1] = 0
            self._call(self._number, self._first + flag * 8, WAKE, EVERYONE, None)

    def wait(self, flag: int, value: int) -> bool:
        """Return once `flag` is at least `value`; whether this rank had to sleep for it. Not called where it is, and not marked.

        While asleep it lets MPI progress the requests in flight of this process. Raises GridError if the member that writes
        `flag` has failed, or skipped the communication that this rank waits for.
        """
        words = self.words
        for _ in range(self._spins):
            if (seen := words[flag]) >= value and (seen < LEFT or self._arrived(seen, value)):
                return False
        slept = False
        while (seen := words[flag]) < value or (seen >= LEFT and not self._arrived(seen, value)):
            self.check()
            if slept:  # for as long as a member that has come would have taken: it may have called something else
                self.review()
            slept = True
            timeout, began = self._timeouts[IN_FLIGHT.advance()], time.perf_counter()
            words[flag + 1] = 1  # before the kernel compares the flag with what was seen, each time
            self._call(self._number, self._first + flag * 8, WAIT, seen & 0xFFFFFFFF, timeout)
            self.naps.seconds += time.perf_counter() - began
        self.awake()
        return True

    def _arrived(self, seen: int, value: int) -> bool:
        """False if the marked flag's member skipped an earlier communication: the awaited one may still come."""
        if seen >= BROKEN:
            self.check()
        if seen - LEFT == value:
            self.review()  # raises what each member called, where they are compared
            raise GridError("a member allocated a buffer for a reduce-scatter, as this one did, and began something else instead")
        return False

    def check(self) -> None:
        """Raise GridError with the first error if a member has failed; AgreementError, once, if the members differ in a call.

        Its cause is a KeyboardInterrupt where that is what ended the member.
        """
        if self.words[0]:
            self.disputed()
            cause = KeyboardInterrupt() if self.words[0] == INTERRUPTED else None
            raise GridError(
                f"axis {self.label} is broken: {self.first_error()}.\n"
                "  Its members are out of step, and it communicates no more. Free the grid and make another."
            ) from cause

    def report(self, member: int, text: str, state: int = FAILED) -> None:
        """Write the error of `member` to shared memory; the axis is broken from now on, in a state other than 0."""
        place = self._record(member)
        said = text.encode()[: RECORD - 8 - 1]
        self._memory[place + 8 : place + 8 + len(said)] = said
        self.words[place // 8] = time.monotonic_ns()
        self.words[0] = state

    def release(self) -> None:
        """Unmap the memory; nothing may be asked of the flags afterwards."""
        self.review = self.awake = self.disputed = _nothing
        self.words.release()
        with contextlib.suppress(BufferError):  # who waits in another thread still looks at it
            self._memory.close()

    def text_of(self, member: int, place: int) -> memoryview:
        """Memory in which a member writes the name of its call, as bytes that are cut or end in 0, at one of its KEPT places."""
        start = self._texts + (member * KEPT + place) * TEXT
        return memoryview(self._memory)[start : start + TEXT]

    def text(self, member: int, place: int) -> str:
        """Text of a member's call, at one of its KEPT places."""
        return bytes(self.text_of(member, place)).partition(b"\0")[0].decode(errors="ignore")

    def first_error(self) -> str:
        """The error of the first member that failed; empty if none has."""
        records = [self._record(member) for member in range(self.members)]
        written = [(self.words[place // 8], place) for place in records if self.words[place // 8]]
        if not written:
            return ""
        place = min(written)[1]
        return self._memory[place + 8 : place + RECORD].rstrip(b"\0").decode(errors="ignore")

    def note(self, slot: int) -> memoryview:
        """The note in which the member that offers larger memory for a slot says where to find it."""
        place = self._record(self.members) + slot * NOTE
        return memoryview(self._memory)[place : place + NOTE]

    def _record(self, member: int) -> int:
        """Offset of a member's record, in bytes; behind the last one are the notes of the slots."""
        return _lines(self.members) * LINE * 8 + member * RECORD


def _nothing() -> None:
    """Do nothing."""


def _lines(members: int) -> int:
    """The lines of flags: one for the axis, one for each flag of each slot, two for each member's calls."""
    return 1 + (FLAGS * SLOTS + 2) * members


def in_one_node(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks of `comm` share one node, and can map memory together (collective)."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = node.size == comm.size and why_no_node_memory() is None
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
    """New zeroed memory, and the descriptor by which others find it through `note`; without memory an empty note."""
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
    """The memory that `note` locates; None if it cannot be mapped or has another token."""
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
