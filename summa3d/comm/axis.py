"""One axis of a grid and its collectives. Each call is checked, carried by a transport, and counted in the ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
from mpi4py import MPI

from .arrays import Array, copy_into, dtype_name
from .axis_lock import AxisLock, OfThisProcess
from .checks import Checks, Routes
from .failure import check_comm
from .nodes import world_ranks
from .pending import Begun, Completed, Pending
from .profile import flight
from .profile.ledger import Amounts, Ledger
from .transport.call import Call, Route
from .transport.node_buffer import NodeBuffer
from .transport.transports import Freed, Transports

NOTHING = np.empty(0)


class Axis(OfThisProcess):
    """One axis of a grid, or a plane of several, seen from this rank: its size, this rank's index, and its collectives.

    Arrays are numpy arrays, CuPy arrays or torch tensors; those of a call lie all on the host or all on a device. `sizes` are
    the members' extents along `dim`; without it they are equal. Results are new C-ordered arrays, or `into` where given. On an
    axis of size 1 every collective returns its input, uncopied, and costs nothing. Words are elements received, as
    a bandwidth-optimal collective moves them; n is the whole, n_r this rank's part. `into` may lie in the memory of what is sent.

    A call with wrong arguments raises ShapeError before anything is sent, and leaves the axis as it was. After any other error
    in a communication, an interrupt included, the axis is broken: every later call of this member raises GridError, which names
    the first error. Through the node's memory every member raises it; through MPI the others cannot learn it, and wait.

    One thread at a time communicates over an axis: a second one that enters breaks it. Threads that take turns in another order
    on other ranks are found with `check` alone, by the names of the threads.
    """

    def __init__(self, names: tuple[str, ...], transports: Transports, check: bool = False) -> None:
        members = transports.members
        self.names, self.transports, self.check = names, transports, check
        self.size: int = members.size
        self.index: int = members.index
        self.comm: MPI.Intracomm = members.comm
        self.label: str = members.label
        self.ledger: Ledger = members.ledger
        self.lock = AxisLock(self.label, transports)
        self.checks = Checks(members, transports, check)
        self.routes = Routes(self.checks)
        self._barrier = Route("barrier", False, 0, 0)
        self.records = flight.AxisRecords(members.name, None if self.comm == MPI.COMM_NULL else partial(world_ranks, self.comm))

    def __repr__(self) -> str:
        return f"Axis({self.label}: {self.index} of {self.size})"

    # -- blocking ---------------------------------------------------------------------------------------------------------

    def all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None, view: bool = False
    ) -> Array:
        """Concatenate the members' blocks along `dim`. Words n − n_r, messages g−1.

        With `view`, the result may lie in memory that the members share, uncopied: it is to be read only, and holds until the
        next communication over this axis.
        """
        if self.size == 1:
            return alone(block, into)
        with self.lock:
            return self._complete(Call(self.routes.gather(block, dim, sizes, into, view), block, into))

    def reduce_scatter(
        self,
        array: Array,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        into: Array | None = None,
        parts: Array | None = None,
    ) -> Array:
        """Sum the members' arrays and keep this rank's part along `dim`. Words (g−1)·n_r, messages g−1.

        The parts are added in the members' order, so that the result never depends on the MPI library; needs g·n_r words
        of workspace, `parts`, allocated here unless it is given. 16-bit floats are accumulated in float32 and rounded once.
        """
        if self.size == 1:
            return alone(array, into)
        with self.lock:
            return self._complete(Call(self.routes.scatter(array, dim, sizes, into, parts), array, into, True, parts))

    def all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Array:
        """Reduce the members' arrays by `op` (sum, max, min) on all of them. Words n + (g−2)·n_r, messages 2(g−1)."""
        if self.size == 1:
            return alone(array, into)
        with self.lock:
            return self._complete(Call(self.routes.reduction("all_reduce", array, op, into), array, into))

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        if self.size == 1:
            return array
        with self.lock:
            return self._complete(Call(self.routes.from_root(array, root), array))

    def reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Array | None:
        """Reduce onto the root; None elsewhere. `into`, for the root, may be `array` itself. Words (g−1)·n_r, messages g−1."""
        if self.size == 1:
            return alone(array, into)
        with self.lock:
            return self._complete(Call(self.routes.reduction("reduce", array, op, into, root), array, into))

    def all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Array:
        """Send piece i along `dim` to member i and concatenate what arrives. Words received from others, messages g−1.

        `sizes` and `receive_sizes` differ from member to member: whether they fit those of the others is compared
        only with check=True.
        """
        if self.size == 1:
            return array
        with self.lock:
            return self._complete(Call(self.routes.exchange(array, dim, sizes, receive_sizes), array))

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send `array` to member `to`; returns when the buffer may be reused. Moves nothing *to* this rank.

        Raises GridError where it lies on a device and no collective, nor `open_device`, has come before along this axis.
        """
        self.start_send(array, to, tag).wait()

    def receive(self, array: Array, source: int, tag: int = 0) -> Array:
        """Overwrite `array` by what member `source` sends. Words n, messages 1."""
        return self.start_receive(array, source, tag).wait()

    def barrier(self) -> None:
        """Return once every member has called. Members that share a node wait asleep."""
        if self.size > 1:
            with self.lock:
                self._meet()

    # -- started: return a Pending ---------------------------------------------------------------------------------------

    def start_all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None, view: bool = False
    ) -> Pending:
        """`all_gather`, in flight."""
        if self.size == 1:
            return Completed(alone(block, into))
        with self.lock:
            return self._begin(Call(self.routes.gather(block, dim, sizes, into, view), block, into, False))

    def start_reduce_scatter(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None
    ) -> Pending:
        """`reduce_scatter`, in flight."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            return self._begin(Call(self.routes.scatter(array, dim, sizes, into), array, into, False))

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None, in_order: bool = False) -> Pending:
        """`all_reduce`, in flight. `in_order`: all members complete it between the same two of their communications."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            return self._begin(Call(self.routes.reduction("all_reduce", array, op, into, in_order=in_order), array, into, False))

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        if self.size == 1:
            return Completed(array)
        with self.lock:
            return self._begin(Call(self.routes.from_root(array, root), array, None, False))

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Pending:
        """`reduce`, in flight."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            return self._begin(Call(self.routes.reduction("reduce", array, op, into, root), array, into, False))

    def start_all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Pending:
        """`all_to_all`, in flight."""
        if self.size == 1:
            return Completed(array)
        with self.lock:
            return self._begin(Call(self.routes.exchange(array, dim, sizes, receive_sizes), array, None, False))

    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        with self.lock:
            return self._begin(Call(self.routes.message("send", array, to, tag), array, None, False))

    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        with self.lock:
            route = self.routes.message("receive", array, source, tag)
            self.checks.target("receive", array)
            return self._begin(Call(route, array, None, False))

    # -- memory ---------------------------------------------------------------------------------------------------------

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer of `like`'s dtype to fill, which `reduce_scatter` sums without a copy if it is this axis's next communication.

        None where the members share no memory. A collective, as far as all members must call it or none.
        """
        if self.size == 1:
            return None
        with self.lock:
            return self.transports.allocate(shape, like)

    def offers_views(self, array: Array) -> bool:
        """Whether an all-gather of arrays of this dtype can return a view of the node buffer."""
        node = self.transports.node
        return node is not None and node.offers_views(array)

    @property
    def node_buffer(self) -> NodeBuffer | None:
        """The node buffer of this axis; None if it has none."""
        return None if self.transports.node is None else self.transports.node.buffer

    def open_device(self, array: Array) -> None:
        """Open the transport of arrays that lie where `array` does, for messages between two members (collective).

        A collective does so by itself; on the host there is nothing to open.
        """
        with self.lock:
            self.transports.of(array)

    # -- carry and account -------------------------------------------------------------------------------------------------

    def _complete(self, call: Call) -> Array:
        """Carry a blocking call, and record it in the ledger once it is complete."""
        ledger, route = self.ledger, call.route
        if ledger.by_steps or route.on_device:
            pending = self._begin(call)
            pending.lock = Pending.lock  # this call has the axis's
            return pending.wait()
        wall, cpu = time.perf_counter(), time.thread_time()
        number = self.records.begin(route, call.array, wall, flight.WAITED_FOR)
        try:
            carried = self.transports.carry(call)
            result = carried.complete()
        except BaseException as error:
            self._failed(number, error)
            raise
        ended = time.perf_counter()
        flight.end(number, ended)
        moved = carried.moved
        self._record(route, call.array if moved is None else moved, ended - wall, time.thread_time() - cpu)
        return result

    def _begin(self, call: Call) -> Pending:
        """Carry a call; `wait` of the returned Pending records its completion. Inside an NVTX range if the ledger has ranges."""
        ledger, route, wall = self.ledger, call.route, time.perf_counter()
        number = self.records.begin(route, call.array, wall, flight.BEGUN)
        try:
            if ledger.by_steps or route.on_device:
                with nullcontext() if ledger.ranges is None else ledger.ranges.around(f"{route.operation} {self.label}"):
                    pending = Begun(self.transports.carry, self.transports.of, call).recorded(ledger, self.label)
            else:
                cpu = time.thread_time()
                carried = self.transports.carry(call)
                moved, carried.moved = carried.moved, None  # what is in flight keeps only the buffers that it needs
                moved = call.array if moved is None else moved
                line = self._record(route, moved, time.perf_counter() - wall, time.thread_time() - cpu)
                pending = Pending(carried, line.wait)
        except BaseException as error:
            self._failed(number, error)
            raise
        pending.number, pending.lock = number, self.lock
        return pending

    def _meet(self) -> None:
        """Carry a barrier, which the ledger does not count."""
        number = self.records.begin(self._barrier, NOTHING, time.perf_counter(), flight.WAITED_FOR)
        try:
            self.checks.barrier()
            self.transports.barrier()
        except BaseException as error:
            self._failed(number, error)
            raise
        flight.end(number, time.perf_counter())

    def _failed(self, number: int, error: BaseException) -> None:
        """Record that a call has failed. Raises GridError for MPI's error about a communicator that is gone."""
        flight.failed(number)
        if isinstance(error, MPI.Exception):
            check_comm(self.comm, f"axis {self.label}")

    def _record(self, route: Route, moved: Array, seconds: float, cpu_seconds: float) -> Amounts:
        """Add a call to its line of the ledger, which the route keeps by phase; returns the line."""
        key = self.ledger.current_phase, moved.dtype
        line = route.lines.get(key)
        if line is None:
            line = route.lines[key] = self.ledger.line(route.operation, self.label, dtype_name(moved))
        words = route.words
        line.calls += 1  # spelled out, because every collective passes here
        line.words += words
        line.messages += route.messages
        line.bytes += words * moved.itemsize
        line.seconds += seconds
        line.cpu_seconds += cpu_seconds
        return line


def alone(array: Array, into: Array | None) -> Array:
    """The result of a collective over an axis of one member."""
    return array if into is None or into is array else copy_into(into, array)


def free(axis: Axis) -> None:
    """Release the memory of an axis (collective). Whatever the axis is asked for later raises GridError."""
    before, axis.transports = axis.transports, Freed(axis.transports.members)
    axis.checks.in_step, axis.lock.shared = axis.transports.check, axis.transports
    axis.records.ranks = None  # the communicator, which would name them, is gone soon
    before.free()
