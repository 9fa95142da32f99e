"""Messages between members of a channel that share a node, through memory that both map: who waits for one sleeps."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from ..errors import AgreementError, GridError
from .communicators import comm_of
from .device.arrays import Array, contiguous, count, dtype_name, raw
from .transport.call import Carried, Members, Requests, Route, are_done, wait_for
from .transport.host import CODE_OF, DATATYPES, HostTransport
from .transport.node_memory import CLOSED, NOTE, POSTED, Flags, joined, mapped, offered
from .transport.progress import IN_FLIGHT, doze

PLACES = 16
"""Messages of a lane that may be under way at a time; further ones wait with their sender, and keep their arrays."""
LARGEST = 1 << 20
"""Bytes of a message up to which it is copied twice; larger ones go through MPI, which copies them once."""
WORDS, ELEMENTS, DTYPE, PLACE, MADE, NBYTES = 8, *range(5)
"""The words of a message's entry: its elements, its dtype's code, where it lies, how often that place was made, and its size."""
THROUGH_MPI = -1
"""In an entry's PLACE: the message goes through MPI."""
ENTRIES = PLACES * (WORDS * 8 + NOTE)
"""Bytes of a lane's entries, and of the notes that locate its places."""
DTYPES = tuple(DATATYPES)
HOST = HostTransport()
"""What carries messages that are large."""
Ends = tuple[int, int]
"""The members that send and receive along a lane."""


class Lanes:
    """The lanes of one member of a channel, by tag: one for each kind of message and stage, to and from members of its node.

    A lane has PLACES entries, which its messages use in turn, and places for what they carry, made when they are needed and as
    large as that is. Memory has no name, so that a killed job leaves none behind. Two flags of a lane count the messages that
    were sent and those that were taken.
    """

    def __init__(self, flags: Flags, memory: mmap.mmap, ends: Mapping[int, Ends], index: int) -> None:
        self.flags, self.senders, self.receivers = flags, dict[int, Sender](), dict[int, Receiver]()
        start = Flags.nbytes(flags.members)
        for number, (tag, (source, target)) in enumerate(ends.items()):
            if index in (source, target):
                entries = Entries(flags, memory, number, start + number * ENTRIES)
                if index == source:
                    self.senders[tag] = Sender(entries)
                else:
                    self.receivers[tag] = Receiver(entries)

    @classmethod
    def over(cls, members: Members, ends: Mapping[int, Ends]) -> Lanes | None:
        """The lanes of this member (collective over the members); None on all of a node where there are none, or no memory.

        ends : tag → the members between which its messages go
        """
        if members.rule is None or members.size == 1:
            return None
        here = [member for member, node in enumerate(members.nodes) if node == members.nodes[members.index]]
        inside = {tag: pair for tag, pair in ends.items() if set(pair) <= set(here)}
        if not inside:
            return None
        comm = members.comm if len(here) == members.size else comm_of(members.comm, here)
        size = max(len(inside), len(here))
        memory = mapped(comm, Flags.nbytes(size) + len(inside) * ENTRIES)
        if comm not in (members.comm, MPI.COMM_SELF):
            comm.Free()
        if memory is None:
            return None
        return cls(Flags(memory, members.label, size, members.rule.crowded), memory, inside, members.index)

    def take(self, tag: int) -> bool:
        """Return whether messages of this tag go along a lane of this member."""
        return tag in self.senders or tag in self.receivers

    def carry(self, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin a message of `route`, whose tag has a lane, as `HostTransport.carry` does."""
        HOST.datatype(array)  # raises the same error
        if route.operation == "send":
            return Carried([self.senders[route.tag].send(members, route, contiguous(array))], lambda: None, None, array)
        return Carried([self.receivers[route.tag].expect(members, route, array)], lambda: array, None, array)

    def free(self) -> None:
        """Unmap the memory, of which nothing may be asked afterwards."""
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        self.flags.release()


class Entries:
    """What both ends of a lane see: its flags, the entries of its messages, and the notes that locate its places."""

    closed = False

    def __init__(self, flags: Flags, memory: mmap.mmap, number: int, start: int) -> None:
        self.flags, self.label = flags, flags.label
        self.sent, self.taken = flags.place(POSTED, number, 0), flags.place(CLOSED, number, 0)
        self.words = memoryview(memory)[start : start + PLACES * WORDS * 8].cast("q")
        self.notes = memoryview(memory)[start + PLACES * WORDS * 8 : start + ENTRIES]

    def note(self, place: int) -> memoryview:
        """The note that locates a place."""
        return self.notes[place * NOTE : (place + 1) * NOTE]

    def close(self) -> None:
        """Release what keeps the memory mapped."""
        self.closed = True
        self.words.release()
        self.notes.release()

    @property
    def count_sent(self) -> int:
        """The messages that were sent."""
        return self.flags.words[self.sent]

    @property
    def count_taken(self) -> int:
        """The messages that were taken, all of them up to this number."""
        return self.flags.words[self.taken]


class Sender:
    """A lane's sending end. A message that finds no entry free waits here, and is sent when this member next looks."""

    def __init__(self, entries: Entries) -> None:
        self.entries, self.number, self.waiting = entries, 0, deque[Leaving]()
        self._memories: list[mmap.mmap | None] = [None] * PLACES
        self._descriptors, self._sizes = [-1] * PLACES, [0] * PLACES
        self._made, self._last = [0] * PLACES, [0] * PLACES

    def send(self, members: Members, route: Route, array: Array) -> Leaving:
        """Begin to send an array."""
        leaving = Leaving(self, members, route, array)
        self.waiting.append(leaving)
        if not leaving.done:
            IN_FLIGHT.add([leaving])
        return leaving

    def advance(self) -> None:
        """Send those that wait, in their order, as far as entries are free."""
        while self.waiting and self.number < self.entries.count_taken + PLACES:
            self._send(self.waiting.popleft())

    def wait_for_entry(self) -> None:
        """Sleep until the next message has an entry."""
        awaited = self.number + 1 - PLACES
        if self.entries.count_taken < awaited:
            self.entries.flags.wait(self.entries.taken, awaited)

    def _send(self, leaving: Leaving) -> None:
        self.number = number = self.number + 1
        array, elements = leaving.array, count(leaving.array)
        place = self._place_for(elements * array.itemsize)
        memory = None if place == THROUGH_MPI else self._memories[place]
        if memory is None:
            place, leaving.requests = THROUGH_MPI, leaving.through_mpi()
        else:
            put(memory, array)
            self._last[place], leaving.array = number, None
        entry, words = (number - 1) % PLACES * WORDS, self.entries.words
        words[entry + ELEMENTS], words[entry + DTYPE], words[entry + PLACE] = elements, CODE_OF[dtype_name(array)], place
        words[entry + MADE], words[entry + NBYTES] = self._made[place], self._sizes[place]
        leaving.sent = True
        self.entries.flags.set(self.entries.sent, number)

    def _place_for(self, nbytes: int) -> int:
        """A place that no message lies in, the last used of those that are large enough; THROUGH_MPI for a large message."""
        if nbytes > LARGEST:
            return THROUGH_MPI
        taken = self.entries.count_taken
        free = [place for place, last in enumerate(self._last) if last <= taken]
        fitting = [place for place in free if self._memories[place] is not None and self._sizes[place] >= nbytes]
        if fitting:
            return max(fitting, key=self._last.__getitem__)
        place = free[0]
        self._let_go(place)
        self._made[place] += 1
        self._sizes[place] = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memories[place], self._descriptors[place] = offered(self._sizes[place], self.entries.note(place))
        return place

    def _let_go(self, place: int) -> None:
        self._memories[place] = None
        if self._descriptors[place] >= 0:
            os.close(self._descriptors[place])
            self._descriptors[place] = -1

    def close(self) -> None:
        """Let go of all memory."""
        for place in range(PLACES):
            self._let_go(place)
        self.entries.close()


class Leaving:
    """A message that is being sent: what `Carried` takes as a request, and `IN_FLIGHT` looks after.

    requests : MPI's, where it goes through MPI. sent : whether it has had an entry.
    """

    sent = False

    def __init__(self, lane: Sender, members: Members, route: Route, array: Array) -> None:
        self.lane, self.members, self.route, self.array = lane, members, route, array
        self.requests: Requests = []

    def through_mpi(self) -> Requests:
        """Begin to send it through MPI."""
        return HOST.send(self.members.comm, self.array, self.route.root, self.route.tag)

    @property
    def done(self) -> bool:
        """Return whether the array may be overwritten; never waits."""
        if not self.sent:
            self.lane.advance()
        return self.sent and are_done(self.requests)

    def Get_status(self) -> bool:
        """`done`, as MPI's requests call it."""
        return self.done

    def wait(self) -> None:
        """Return once the array may be overwritten."""
        while not self.done:
            if self.sent:
                doze(lambda: self.done)
            else:
                self.lane.wait_for_entry()
        wait_for(self.requests)  # which lets go of the memory that they were given
        self.array, self.requests = None, []


class Receiver:
    """A lane's receiving end."""

    def __init__(self, entries: Entries) -> None:
        self.entries, self.number = entries, 0
        self.expected = deque[Coming]()
        """Messages that may come through MPI, whose receives have not begun; MPI hands them out in the order of these."""
        self._taken, self._count = set[int](), 0
        self._memories: dict[int, tuple[int, mmap.mmap]] = {}

    def expect(self, members: Members, route: Route, array: Array) -> Coming:
        """Expect the next message."""
        self.number += 1
        coming = Coming(self, self.number, members, route, array)
        self.expected.append(coming)
        return coming

    def memory(self, place: int, made: int, nbytes: int) -> mmap.mmap:
        """The memory of a place, which was made so often, of this size. Raises GridError where it cannot be mapped."""
        known = self._memories.pop(place, None)
        if known is not None and known[0] == made:
            self._memories[place] = known
            return known[1]
        result = joined(nbytes, self.entries.note(place))
        if result is None:
            raise GridError(f"the memory of a message over {self.entries.label} cannot be mapped.")
        self._memories[place] = made, result
        return result

    def taken(self, number: int) -> None:
        """Say that a message was taken: its entry is free once all before it were."""
        self._taken.add(number)
        while self._count + 1 in self._taken:
            self._count += 1
            self._taken.remove(self._count)
        self.entries.flags.set(self.entries.taken, self._count)

    def close(self) -> None:
        """Let go of all memory."""
        self._memories.clear()
        self.entries.close()


class Coming:
    """A message that is expected: what `Carried` takes as a request. `wait` takes it, asleep until it was sent.

    Raises AgreementError for another message than the awaited one, which is taken all the same.
    """

    def __init__(self, lane: Receiver, number: int, members: Members, route: Route, array: Array) -> None:
        self.lane, self.number, self.members, self.route, self.array = lane, number, members, route, array
        self._requests: Requests = []

    @property
    def done(self) -> bool:
        """Return whether it was sent, or comes no more; never waits."""
        return self.lane.entries.closed or self.lane.entries.count_sent >= self.number

    def begin(self) -> None:
        """Begin to receive it, if it comes through MPI; it was sent."""
        at = (self.number - 1) % PLACES * WORDS
        if self.lane.entries.words[at + PLACE] == THROUGH_MPI:
            self._requests = HOST.receive(self.members.comm, self.array, self.route.root, self.route.tag)

    def wait(self) -> None:
        """Return once the array is overwritten by the message."""
        lane, entries, array = self.lane, self.lane.entries, self.array
        if entries.closed:
            raise GridError(f"the channel of {entries.label} was freed before this message was waited for.")
        if not self.done:
            entries.flags.wait(entries.sent, self.number)
        while lane.expected and lane.expected[0].number <= self.number:
            lane.expected.popleft().begin()
        if self._requests:
            lane.taken(self.number)
            for request in self._requests:
                request.wait()
            return
        at, words = (self.number - 1) % PLACES * WORDS, entries.words
        elements, code, place, made, nbytes = words[at : at + NBYTES + 1]
        fits = elements == count(array) and code == CODE_OF[dtype_name(array)]
        if fits:
            get(array, lane.memory(place, made, nbytes))
        lane.taken(self.number)
        if not fits:
            sent = f"{elements} elements" + ("" if code == CODE_OF[dtype_name(array)] else f" of {DTYPES[code]}")
            raise AgreementError(
                f"member {self.route.root} has sent {sent} with tag {self.route.tag}; "
                f"this member awaits {count(array)} of {dtype_name(array)}."
            )


def put(memory: mmap.mmap, array: Array) -> None:
    """Copy an array to the start of a place."""
    flat = raw(array).view(np.uint8)
    np.copyto(np.frombuffer(memory, np.uint8, flat.size), flat)


def get(array: Array, memory: mmap.mmap) -> None:
    """Overwrite an array by the start of a place."""
    flat = raw(array).view(np.uint8)
    np.copyto(flat, np.frombuffer(memory, np.uint8, flat.size))
