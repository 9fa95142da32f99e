"""NCCL on device arrays through CuPy's bindings: one communicator per axis, on its own stream.

The host never waits: events order NCCL's work after the caller's stream, and the caller's stream after NCCL's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from mpi4py import MPI

from ...errors import GridError
from ..device.arrays import Array, address, count, dtype_name, is_half
from ..device.arrival import Arrival, Held
from ..profile.timeline import Span, Timed, Timeline
from .call import Counts, Requests
from .host import DATATYPES as MPI_DATATYPES
from .host import LARGE, HostTransport

DATATYPES = {name: (f"NCCL_{name.upper()}", 1) for name in MPI_DATATYPES} | {
    "bool": ("NCCL_UINT8", 1),
    "complex64": ("NCCL_FLOAT32", 2),
    "complex128": ("NCCL_FLOAT64", 2),
}
"""dtype → what NCCL calls it, and how many of those an element is: complex numbers travel and are added as pairs."""
OPERATIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX", "min": "NCCL_MIN"}


class NcclMessage(Timed):
    """A posted send or receive. It is queued with the next call on the communicator, or by its `wait`."""

    def __init__(self, transport: NcclTransport, array: Array, peer: int, sends: bool) -> None:
        self.transport, self.array, self.peer, self.sends = transport, array, peer, sends
        self.spans = (Span("nccl"),) if count(array) else ()
        self.arrival: Arrival | None = None

    @property
    def done(self) -> bool:
        """Return whether the device has passed it; a message that has not been queued, it has not, unless it has no elements."""
        return not self.spans if self.arrival is None else self.arrival.done

    def wait(self) -> None:
        """Queue all posted messages, then make the caller's stream wait for this one."""
        self.transport.launch_messages()
        if self.arrival is not None:
            self.arrival.wait()


class NcclTransport(HostTransport):
    """NCCL between ranks that have a device each. Making one is collective over `comm`; raises GridError on all members alike.

    NCCL promises no order of a sum, so its sums may differ in the last bits from run to run; those of 16-bit floats are taken
    by the caller, in float32: in the members' order after an all-to-all that carries 16 bits each, or on arrays it widened.
    Sends and receives are queued together, as one group, with the next call on this communicator or when one is waited for:
    two members that send to each other before they receive do not wait for each other. NCCL knows no tags: between two
    members messages arrive in the order in which they were sent, and must be received in that order.
    """

    def __init__(self, timeline: Timeline, comm: MPI.Comm) -> None:
        super().__init__(LARGE)
        self.timeline, self.backend = timeline, timeline.backend
        self.nccl = self.backend.nccl
        self.communicator = _joined(self.nccl, comm)
        self.stream = self.backend.stream()
        self.held = Held()
        self.messages: list[NcclMessage] = []

    def all_gather(self, comm: MPI.Comm, block: Array, out: Array, counts: Sequence[int], blocking: bool) -> Requests:
        """As HostTransport's; unequal blocks travel as one group of broadcasts."""
        kind, width = self._kind(block)

        def queue(stream: int) -> None:
            if len(set(counts)) == 1:
                self.communicator.allGather(address(block), address(out), counts[0] * width, kind, stream)
                return
            with _Group(self.nccl):  # one broadcast from each member, straight to where its block belongs
                for member, part in self._parts(out, counts):
                    source = address(block) if member == comm.rank else part
                    if counts[member]:
                        self.communicator.broadcast(source, part, counts[member] * width, kind, member, stream)

        return self._launched(queue if sum(counts) else None, (block, out))

    def all_to_all(self, comm: MPI.Comm, array: Array, out: Array, counts: Counts, blocking: bool) -> Requests:
        """As HostTransport's, by one group of sends and receives; `equal` and `largest` have no effect."""
        kind, width = self._kind(array)

        def queue(stream: int) -> None:
            with _Group(self.nccl):
                for member, part in self._parts(array, counts.sent):
                    if counts.sent[member]:
                        self.communicator.send(part, counts.sent[member] * width, kind, member, stream)
                for member, part in self._parts(out, counts.received):
                    if counts.received[member]:
                        self.communicator.recv(part, counts.received[member] * width, kind, member, stream)

        return self._launched(queue if sum(counts.sent) or sum(counts.received) else None, (array, out))

    def sums_parts(self, array: Array) -> bool:
        """NCCL sums all but 16-bit floats, which the caller sums in float32."""
        return not is_half(array)

    def reduce_scatter(self, comm: MPI.Comm, array: Array, counts: Sequence[int], out: Array) -> Requests:
        """out = this member's part, of `counts` elements each, of the sum of all arrays."""
        operation = self._operation(array, "sum")
        kind, width = self._kind(array)

        def queue(stream: int) -> None:
            if len(set(counts)) == 1:
                self.communicator.reduceScatter(address(array), address(out), counts[0] * width, kind, operation, stream)
                return
            with _Group(self.nccl):  # one reduction onto each member, of its part
                for member, part in self._parts(array, counts):
                    target = address(out) if member == comm.rank else part  # which is written at its root only
                    if counts[member]:
                        self.communicator.reduce(part, target, counts[member] * width, kind, operation, member, stream)

        return self._launched(queue if sum(counts) else None, (array, out))

    def all_reduce(self, comm: MPI.Comm, array: Array, out: Array, op: str, blocking: bool) -> Requests:
        """As HostTransport's, queued on this transport's stream."""
        return self._whole(self.communicator.allReduce, array, out, self._operation(array, op))

    def broadcast(self, comm: MPI.Comm, array: Array, root: int, blocking: bool) -> Requests:
        """As HostTransport's, queued on this transport's stream."""
        return self._whole(self.communicator.broadcast, array, array, root)

    def reduce(self, comm: MPI.Comm, array: Array, out: Array | None, op: str, root: int, blocking: bool) -> Requests:
        """As HostTransport's, queued on this transport's stream."""
        return self._whole(self.communicator.reduce, array, array if out is None else out, self._operation(array, op), root)

    def _whole(self, call: Callable[..., None], array: Array, out: Array, *rest: int) -> Requests:
        """Queue what takes every member's whole array."""
        kind, width = self._kind(array)
        queue = partial(call, address(array), address(out), count(array) * width, kind, *rest)
        return self._launched(queue if count(array) else None, (array, out))

    def send(self, comm: MPI.Comm, array: Array, to: int, tag: int) -> Requests:
        """Post a send; NCCL knows no tags, so `tag` has no effect."""
        return self._posted(array, to, True)

    def receive(self, comm: MPI.Comm, array: Array, source: int, tag: int) -> Requests:
        """Post a receive; messages arrive in the order of their sends, whatever `tag` is."""
        return self._posted(array, source, False)

    def on_host(self, seconds: float) -> float:
        """0: the host only queues work; the device's seconds are in the spans."""
        return 0.0

    def close(self) -> None:
        """Queue what was posted, wait for the stream, and destroy the communicator."""
        self.launch_messages()
        self.backend.record(self.stream).synchronize()
        self.communicator.destroy()

    def launch_messages(self) -> None:
        """Queue the sends and receives posted so far, as one group."""
        messages, self.messages = [message for message in self.messages if count(message.array)], []
        if not messages:
            return

        def queue(stream: int) -> None:
            with _Group(self.nccl):
                for message in messages:
                    kind, width = self._kind(message.array)
                    call = self.communicator.send if message.sends else self.communicator.recv
                    call(address(message.array), count(message.array) * width, kind, message.peer, stream)

        spans = [span for message in messages for span in message.spans]
        for span in spans:
            span.share = 1 / len(spans)
        event = self._queued(queue, [message.array for message in messages], *spans)
        for message in messages:
            message.arrival = Arrival(self.backend, event, message.array, None)

    def _posted(self, array: Array, peer: int, sends: bool) -> Requests:
        self._kind(array)
        message = NcclMessage(self, array, peer, sends)
        self.messages.append(message)
        return [message]

    def _launched(self, queue: Callable[[int], None] | None, arrays: Sequence[Array]) -> Requests:
        """Queue a collective, or nothing if it has no elements. Posted messages are queued first, on every member."""
        self.launch_messages()
        if queue is None:
            return []
        span = Span("nccl")
        return [Arrival(self.backend, self._queued(queue, arrays, span), arrays[0], self.held, span)]

    def _queued(self, queue: Callable[[int], None], arrays: Sequence[Array], *spans: Span) -> Any:
        """Queue NCCL's work behind what the caller's stream holds; returns the mark behind it, until which arrays are held.

        The span starts when the caller's stream gets there, and includes the wait for the other members, as on the host.
        """
        self.backend.wait(self.stream, self.backend.record(self.backend.current(arrays[0])))
        start = self.timeline.start(self.stream)
        queue(self.stream.ptr)
        self.timeline.stop(start, self.stream, *spans)
        event = self.backend.record(self.stream)
        self.held.hold(event, tuple(arrays))
        return event

    def _kind(self, array: Array) -> tuple[int, int]:
        self.datatype(array)  # the same dtypes as through MPI
        name, width = DATATYPES[dtype_name(array)]
        return getattr(self.nccl, name), width

    def _operation(self, array: Array, op: str) -> int:
        self.operation(array, op)  # the same reductions as through MPI
        return int(getattr(self.nccl, OPERATIONS[op]))

    def _parts(self, array: Array, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Each member, and where its part of `array` begins."""
        starts = [0, *accumulate(counts)][:-1]
        return [(member, address(array) + start * array.itemsize) for member, start in enumerate(starts)]


class NcclLink(NcclTransport):
    """NCCL for the messages of one kind from one rank to one other: a communicator of these two, on a stream of its own.

    Each message is queued at once. A group that waits for all of its messages, or a stream that carries others between them,
    would let a message wait for one that is not sent before it has arrived.
    """

    def _posted(self, array: Array, peer: int, sends: bool) -> Requests:
        requests = super()._posted(array, peer, sends)
        self.launch_messages()
        return requests


class _Group:
    """NCCL calls that are launched as one, so that none waits for another."""

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl

    def __enter__(self) -> None:
        self._nccl.groupStart()

    def __exit__(self, *error: object) -> None:
        self._nccl.groupEnd()


def _joined(nccl: Any, comm: MPI.Comm) -> Any:
    """The NCCL communicator of the members of `comm` (collective): rank 0 draws its name, MPI carries it to the others."""
    name: Any = None
    problem: str | None = None
    if comm.rank == 0:
        try:
            name = nccl.get_unique_id()
        except RuntimeError as error:  # NcclError is one
            problem = str(error)
    name, problem = comm.bcast((name, problem))
    if problem is not None:
        raise GridError(f"NCCL cannot start on rank 0 of {comm.size}: {problem}. Use transport pinned, or cuda-aware.")
    try:
        return nccl.NcclCommunicator(comm.size, name, comm.rank)
    except RuntimeError as error:
        raise GridError(f"NCCL cannot join {comm.size} ranks: {error}. Use transport pinned, or cuda-aware.") from error
