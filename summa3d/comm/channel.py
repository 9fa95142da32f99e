"""Messages between the stages of a pipeline, over MPI or over NCCL's links between two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import AgreementError, GridError
from .axis import Axis
from .communicators import comm_of
from .device.arrays import Array, count, dtype_name, is_on_device, place_of
from .health import flight
from .lanes import Lanes
from .pending import Pending, Reported
from .transport.call import Route
from .transport.nccl import NcclLink, NcclTransport
from .transport.p2p import CODES, HEADER
from .transport.progress import IN_FLIGHT, doze

KINDS = ("F", "B")
"""Forward: the input of a stage; backward: the gradient of a stage's output."""
TEXT = 192
"""Bytes of what a message says of itself in debug mode."""


class Link(NamedTuple):
    """The messages of one kind from one member of the axis to one other."""

    kind: str
    source: int
    target: int

    @property
    def turn(self) -> tuple[int, ...]:
        """Turn to open it: even edges, odd edges, then the one that closes the circle; each edge's links one after another."""
        low, high = sorted(self[1:])
        return (low % 2 if high == low + 1 else 2, low, high, KINDS.index(self.kind), self.source)


def links_of(homes: Sequence[int]) -> dict[tuple[str, int], Link]:
    """(kind, stage that receives) → the link that the message takes; stages of one member need none.

    >>> sorted(links_of((0, 1, 0)))
    [('B', 0), ('B', 1), ('F', 1), ('F', 2)]
    """
    result = {}
    for stage, (lower, upper) in enumerate(pairwise(homes)):
        if lower != upper:
            result["F", stage + 1] = Link("F", lower, upper)
            result["B", stage] = Link("B", upper, lower)
    return result


class Channel:
    """What the members of a pipeline's axis send each other: inputs of stages (F), and gradients of their outputs (B).

    A send starts at once and never blocks. A receive may be posted long before it is waited for; its words are counted in the
    phase in which it is waited for. Messages of one kind to one stage arrive in the order of their sends. With debug checks a
    message carries what it is, and its receiver compares. Those between members of a node go through its memory, but for debug
    checks; who waits for one sleeps.

    ``channel.send(y, 2, "F", micro)`` on the member that holds stage 1, ``channel.start_receive(x, 2, "F", micro).wait()`` on
    that of stage 2.

    Parameters
    ----------
    axis : the members. homes : the member that holds each stage.

    Making one is collective over the axis: messages have a communicator of their own. Device arrays need `open_device` first.
    """

    freed = False

    def __init__(self, axis: Axis, homes: Sequence[int]) -> None:
        axis.transports.check()
        wholes = isinstance(homes, Sequence) and all(isinstance(home, (int, np.integer)) for home in homes)
        if not wholes or not all(0 <= home < axis.size for home in homes):
            raise GridError(f"axis {axis.label} has the members 0 to {axis.size - 1}; the stages' are given as {homes!r}.")
        self.axis, self.links = axis, links_of(homes)
        self._own = {
            way: {key: link for key, link in self.links.items() if link[end] == axis.index}
            for way, end in (("send", 1), ("receive", 2))
        }
        self._members, self.ranks = axis.transports.members, tuple(range(axis.size))
        if axis.size > 1 and axis.comm != MPI.COMM_NULL:  # a dry run has no communicator
            self._members = replace(self._members, comm=axis.comm.Dup())
            self.ranks = tuple(axis.comm.group.Translate_ranks(list(self.ranks), MPI.COMM_WORLD.group))
        self.comm = self._members.comm
        ends = {self._tag(stage, kind): (link.source, link.target) for (kind, stage), link in self.links.items()}
        self._lanes = None if axis.check or self.comm == MPI.COMM_NULL else Lanes.over(self._members, ends)
        self._nccl: dict[Link, NcclLink] = {}
        self._sends: list[Reported] = []
        self._posted: set[Incoming] = set()  # MPI writes into their arrays, whether or not somebody waits
        self._headers: list[tuple[MPI.Request, bytes]] = []
        self._routes: dict[Any, Route] = {}

    def open_device(self, array: Array) -> None:
        """Open what carries messages that lie where `array` does (collective over the axis); nothing to open on the host.

        NCCL has no tags, and serves a communicator's messages one after the other: each kind, neighbour and direction has a
        link of its own.
        """
        transport = self.axis.transports.of(array)
        if not isinstance(transport, NcclTransport) or self._nccl:
            return
        for link in sorted(set(self.links.values()), key=lambda link: link.turn):
            if self.axis.index in (link.source, link.target):
                pair = comm_of(self.comm, (link.source, link.target))
                self._nccl[link] = NcclLink(transport.timeline, pair)
                pair.Free()

    def send(self, array: Array, stage: int, kind: str, micro: int = 0) -> None:
        """Begin to send `array` to `stage`; it must not be written until the send is done (`progress`, `finish`)."""
        link, tag = self._checked("send", array, stage, kind), self._tag(stage, kind)
        self.progress()
        if self.axis.check:
            header = _header(array, stage, kind, micro)
            request = self.comm.Isend(header, link.target, tag * CODES + HEADER)
            IN_FLIGHT.add([request])
            self._headers.append((request, header))
        route = self._message("send", array, 0, stage, kind, link.target)
        number = self.axis.records.begin(route, array, time.perf_counter(), flight.BEGUN)
        self._sends.append(self._begin(route, array, link, number).record(self.axis.ledger, self.axis.label))

    def start_receive(self, out: Array, stage: int, kind: str, micro: int = 0) -> Incoming:
        """Post the receive of what is sent to `stage`, into `out`; posted receives of one kind and stage are served in order.

        Words n, messages 1.
        """
        link, tag = self._checked("receive", out, stage, kind), self._tag(stage, kind)
        self.axis.checks.target("receive", out)
        route = self._message("receive", out, count(out), stage, kind, link.source)
        number = self.axis.records.begin(route, out, time.perf_counter(), flight.BEGUN)
        incoming = Incoming(self, number, partial(self._begin, route, out, link, number))
        if self.axis.check:
            incoming.expect(_header(out, stage, kind, micro), link.source, tag * CODES + HEADER)
        else:
            incoming.begin()
        self._posted.add(incoming)
        return incoming

    def progress(self) -> int:
        """Let MPI work on what is in flight, let go of what has been sent, and return how many sends are still out.

        Call it after each op: MPI moves most messages only while their sender is inside MPI.
        """
        IN_FLIGHT.advance()
        self._headers = [header for header in self._headers if not header[0].Test()]
        left = []
        for pending in self._sends:
            if pending.done:
                pending.wait()
            else:
                left.append(pending)
        self._sends = left
        return len(left)

    def finish(self) -> None:
        """Return once all that was sent has arrived."""
        for pending in self._sends:
            flight.mark(pending.number, flight.WAITED_FOR)
            if not pending.on_device:
                doze(partial(_is_done, pending))
            pending.wait()
        self._sends = []
        doze(lambda: all(request.Test() for request, _ in self._headers))
        self._headers = []

    def free(self) -> None:
        """Finish, and release the communicators (collective over the axis); a second call does nothing."""
        if self.freed:
            return
        self.freed = True
        self.finish()
        for link in self._nccl.values():
            link.close()
        self._nccl.clear()
        if self._lanes is not None:
            doze(self.comm.Ibarrier().Test)  # what was sent lies in its sender's memory until it is taken
            self._lanes.free()
            self._lanes = None
        if self.comm != self.axis.comm:
            self.comm.Free()

    def _begin(self, route: Route, array: Array, link: Link, number: int) -> Reported:
        transport: Any = self.axis.transports.host
        if self._lanes is not None and not route.on_device and self._lanes.take(route.tag):
            transport = self._lanes
        elif route.on_device:
            transport = self.axis.transports.between_two(array)
            if isinstance(transport, NcclTransport):
                if link not in self._nccl:
                    raise GridError(
                        "messages over NCCL need a link that all members have opened: call open_device(array) on them."
                    )
                transport = self._nccl[link]
                route.root = int(route.operation == "send")  # of two: the source, then the target
        carry = partial(transport.carry, self._members, route, array, None, False)
        return Reported(carry, lambda array: transport, route, array, number)

    def _message(self, way: str, array: Array, words: int, stage: int, kind: str, peer: int) -> Route:
        """The route of messages like this one, which is kept: the flight recorder writes its text once."""
        key = way, stage, kind, array.shape, array.dtype, place_of(array)
        if key not in self._routes:
            what = f"{kind} for stage {stage} {'to' if way == 'send' else 'from'} rank {self.ranks[peer]}"
            messages, tag = int(way == "receive"), self._tag(stage, kind)
            self._routes[key] = Route(way, is_on_device(array), words, messages, root=peer, tag=tag, what=what)
        return self._routes[key]

    def _tag(self, stage: int, kind: str) -> int:
        """Neither order nor peer tells messages apart: of two members, one sends both kinds to the other."""
        return 2 * stage + KINDS.index(kind)

    def _checked(self, way: str, array: Array, stage: int, kind: str) -> Link:
        """The link of a message that this member sends or receives.

        Raises GridError where there is none, or none any more, and ShapeError for what is no array.
        """
        if self.freed:
            raise GridError(f"the channel of {self.axis.label} was freed, and carries no more messages. Make another.")
        self.axis.transports.check()
        self.axis.checks.array(way, array)
        own = self._own[way]
        if not isinstance(kind, str) or not isinstance(stage, int) or (kind, stage) not in own:
            known = ", ".join(f"{kind} for stage {stage}" for kind, stage in sorted(own)) or "nothing"
            raise GridError(
                f"{self.axis.label} {self.axis.index} does not {way} {kind} for stage {stage}. What it {way}s: {known}. "
                "What goes from one stage of a member to the next is no message."
            )
        return own[kind, stage]


class Incoming:
    """A receive that has been posted. `wait` completes it, counts its words in the current phase, and returns the array.

    In debug mode only its header is posted: what is not the awaited message may be larger than the array.
    """

    def __init__(self, channel: Channel, number: int, start: Callable[[], Reported]) -> None:
        self._channel, self._number, self._start = channel, number, start
        self._begun: Reported | None = None
        self._header: tuple[MPI.Request, bytearray, bytes] | None = None

    def begin(self) -> Reported:
        """Post the receive of the array, once."""
        self._begun = self._begun or self._start()
        return self._begun

    def expect(self, header: bytes, source: int, tag: int) -> None:
        """Post the receive of what the message says of itself, which must be `header`."""
        arrived = bytearray(TEXT)
        self._header = self._channel.comm.Irecv(arrived, source, tag), arrived, header
        IN_FLIGHT.add([self._header[0]])

    def wait(self) -> Array:
        """Return the array that has arrived; a second call returns the same.

        Raises AgreementError, in debug mode, where something else was sent.
        """
        channel = self._channel
        if self._begun is None and self._header is not None:
            self._compare(*self._header)
        result = self.begin().record(channel.axis.ledger, channel.axis.label).wait()
        channel._posted.discard(self)
        return result

    def _compare(self, request: MPI.Request, arrived: bytearray, expected: bytes) -> None:
        flight.mark(self._number, flight.WAITED_FOR)
        request.Wait()
        if arrived != expected:
            flight.mark(self._number, flight.FAILED)
            sent, wanted = (bytes(text).rstrip(b"\0").decode() for text in (arrived, expected))
            axis = self._channel.axis
            raise AgreementError(f"{axis.label} {axis.index} waits for {wanted}, and was sent {sent}.")


def _is_done(pending: Pending) -> bool:
    return pending.done


def _header(array: Array, stage: int, kind: str, micro: int) -> bytes:
    """Description of a message: the same text on both sides."""
    shape = "×".join(map(str, array.shape))
    text = f"{kind} of micro-batch {micro} for stage {stage}, {shape} {dtype_name(array)}".encode()
    return text[:TEXT].ljust(TEXT, b"\0")
