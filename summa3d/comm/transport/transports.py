"""The transports of one axis: node memory, host MPI, and, from the first device array on, a device transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...errors import GridError
from ..device.arrays import Array, is_on_device
from ..health.signatures import signed
from . import probe
from .call import MESSAGES, Carried, Members, Route, refuse_freed
from .cuda_aware import CudaAwareTransport
from .flat import FlatTransport
from .host import HostTransport
from .nccl import NcclTransport
from .node import NodeTransport
from .pinned import PinnedTransport
from .select import Facts, TransportChoice, choose


class Transports:
    """The transports of one axis. The first one that does not decline a call carries it.

    All members decide alike: by the call, and by facts that the members have exchanged.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.node = NodeTransport.over(members)
        self.host: FlatTransport = HostTransport()
        self.choice: TransportChoice | None = None
        self._device: Any = None

    def check(self) -> None:
        """Raise GridError where a member has failed in the middle of a communication of this axis, naming its error."""
        if self.node is not None:
            self.node.check()

    def fail(self, error: BaseException) -> None:
        """Have the other members raise this error, too, where they share a node's memory; through MPI they cannot learn it."""
        if self.node is not None:
            self.node.buffer.fail(error)

    def carry(
        self, route: Route, array: Array, into: Array | None = None, blocking: bool = True, parts: Array | None = None
    ) -> Carried:
        """Begin a call of `route`. Raises ShapeError for a dtype or a reduction that is not supported, before anything is sent.

        array : what is sent, or overwritten. into : where the result goes; None, a new array. blocking : whether it completes
        before the call of the axis returns. parts : workspace of a reduce-scatter.
        """
        node, message = self.node, route.operation in MESSAGES
        if node is not None:
            carried = None if message else node.carry(route, array, into, blocking)
            if carried is not None:
                return carried
            node.check()
        if not route.on_device:
            carried = self.host.carry(self.members, route, array, into, blocking, parts)
            if node is not None and carried.requests and not message:
                carried.before = node.compared()
            return carried
        transport = self.between_two(array) if message else self.of(array)
        return transport.carry(self.members, route, array, into, blocking, parts)

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer that the next reduce-scatter sums in place; None where none of the transports has such memory (collective)."""
        return None if self.node is None else self.node.allocate(shape, like)

    def offers_views(self, array: Array) -> bool:
        """Return whether an all-gather of arrays of this dtype can return a view of memory that the members share."""
        return self.node is not None and self.node.offers_views(array)

    @property
    def node_bytes(self) -> int | None:
        """This rank's share of the memory that the members share in their node; None where they share none."""
        return None if self.node is None else self.node.buffer.size_bytes

    def refuse(self, text: str) -> None:
        """Let members that share a node's memory compare a call that this one refuses: those that make another one raise, too."""
        if self.node is not None:
            self.node.buffer.signatures.call(signed(text))

    def barrier(self) -> None:
        """Return once every member has called; members that share a node wait asleep."""
        if self.node is None:
            self.members.comm.Barrier()
        else:
            self.node.barrier()

    def of(self, array: Array) -> Any:
        """The transport for collectives on `array`; the first one on a device is collective.

        Raises ConfigError or GridError on all members alike where the device transport that was asked for cannot be had.
        """
        if not is_on_device(array):
            return self.host
        if self._device is None:
            self._device = self._opened()
        return self._device

    def between_two(self, array: Array) -> Any:
        """The transport for a point-to-point message of a device array. Raises GridError if none has been opened."""
        if self._device is None:
            raise GridError(
                "the first communication of device arrays along an axis opens its transport, and must be a collective: members "
                "that take no part in a message would not open it. Call open_device(array) on all of them first."
            )
        return self._device

    def _opened(self) -> Any:
        timeline, comm = self.members.ledger.timeline, self.members.comm
        backend = timeline.backend
        known = comm.allgather((backend.identity(), backend.nccl is not None))
        facts = Facts([identity for identity, _ in known], all(nccl for _, nccl in known), self._reads_devices())
        self.choice = choose(facts, self.members.wanted)
        if self.choice.name == "nccl":
            return NcclTransport(timeline, comm)
        if self.choice.name == "cuda-aware":
            return CudaAwareTransport(backend)
        return PinnedTransport(timeline)

    def _reads_devices(self) -> bool:
        """Return whether MPI reads device pointers, as rank 0 finds out, where it matters."""
        if self.members.wanted in ("pinned", "nccl", "mpi"):
            return False
        comm = self.members.comm
        return bool(comm.bcast(probe.cuda_aware().works if comm.rank == 0 else None))

    def end(self) -> None:
        """Say that this member frees the axis: one that calls something else learns it."""
        if self.node is not None:
            self.node.end()

    def free(self) -> None:
        """Release the node's memory and what the device transport holds (collective, after `end` of all axes of the grid).

        Whatever the axis is asked for afterwards raises GridError; who holds these transports need not be told.
        """
        node, device, self.node, self._device = self.node, self._device, None, None
        asked = ("carry", "check", "allocate", "barrier", "of", "between_two")
        vars(self).update(dict.fromkeys(asked, partial(refuse_freed, self.members.label)))
        if device is not None:
            device.close()
        if node is not None:
            node.free()


TransportFactory = Callable[[Members], Transports]
"""Makes the transports of each axis of a grid: `Transports`, or a subclass that moves nothing."""
