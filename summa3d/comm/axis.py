"""One axis of a grid and its collectives. Each call is checked, carried by a transport, and counted in the ledger."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod

import numpy as np
from mpi4py import MPI

from ..errors import ShapeError
from .arrays import Array, copy_into, count, dtype_name, into_problem, is_on_device, is_writable, place_of, share
from .checks import Checks
from .nodes import world_ranks
from .pending import Begun, Completed, Pending
from .profile import flight
from .profile.ledger import Amounts, Ledger
from .transport.call import Call, Route
from .transport.node_buffer import NodeBuffer
from .transport.transports import Freed, Transports

NOTHING = np.empty(0)
ROUTES = 1024
"""Routes that an axis keeps; a step of training takes the same few again and again."""


class Axis:
    """One axis of a grid, or a plane of several, seen from this rank: its size, this rank's index, and its collectives.

    Arrays are numpy arrays, CuPy arrays or torch tensors; those of a call lie all on the host or all on a device. `sizes` are
    the members' extents along `dim`; without it they are equal. Results are new C-ordered arrays, or `into` where given. On an
    axis of size 1 every collective returns its input, uncopied, and costs nothing. Words are elements received, as
    a bandwidth-optimal collective moves them; n is the whole, n_r this rank's part. `into` may lie in the memory of what is sent.

    A call with wrong arguments raises ShapeError before anything is sent, and leaves the axis as it was. After any other error
    in a communication through the node's memory the axis is broken: every later call of every member raises GridError, which
    names the first error.
    """

    def __init__(self, names: tuple[str, ...], transports: Transports, check: bool = False) -> None:
        members = transports.members
        self.names, self.transports, self.check = names, transports, check
        self.size: int = members.size
        self.index: int = members.index
        self.comm: MPI.Intracomm = members.comm
        self.label: str = members.label
        self.ledger: Ledger = members.ledger
        self.checks = Checks(members, transports, check)
        self._routes: dict[Hashable, Route] = {}
        self._barrier = Route("barrier", False, 0, 0)
        self.records = flight.AxisRecords(self.label, None if self.comm == MPI.COMM_NULL else partial(world_ranks, self.comm))

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copied layer communicates over the same grid's axes

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
        return self._complete(Call(self._gather(block, dim, sizes, into, view), block, into))

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
        route = self._scatter(array, dim, sizes, into)
        if parts is not None:
            self.checks.workspace(array, parts, route.words // (self.size - 1) * self.size)
        return self._complete(Call(route, array, into, True, parts))

    def all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Array:
        """Reduce the members' arrays by `op` (sum, max, min) on all of them. Words n + (g−2)·n_r, messages 2(g−1)."""
        if self.size == 1:
            return alone(array, into)
        return self._complete(Call(self._reduction("all_reduce", array, op, into), array, into))

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        return array if self.size == 1 else self._complete(Call(self._from_root(array, root), array))

    def reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Array | None:
        """Reduce onto the root; None elsewhere. `into`, for the root, may be `array` itself. Words (g−1)·n_r, messages g−1."""
        if self.size == 1:
            return alone(array, into)
        return self._complete(Call(self._reduction("reduce", array, op, into, root), array, into))

    def all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Array:
        """Send piece i along `dim` to member i and concatenate what arrives. Words received from others, messages g−1."""
        return array if self.size == 1 else self._complete(Call(self._exchange(array, dim, sizes, receive_sizes), array))

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
            self._meet()

    # -- started: return a Pending ---------------------------------------------------------------------------------------

    def start_all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None, view: bool = False
    ) -> Pending:
        """`all_gather`, in flight."""
        if self.size == 1:
            return Completed(alone(block, into))
        return self._begin(Call(self._gather(block, dim, sizes, into, view), block, into, False))

    def start_reduce_scatter(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None
    ) -> Pending:
        """`reduce_scatter`, in flight."""
        if self.size == 1:
            return Completed(alone(array, into))
        return self._begin(Call(self._scatter(array, dim, sizes, into), array, into, False))

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None, in_order: bool = False) -> Pending:
        """`all_reduce`, in flight. `in_order`: all members complete it between the same two of their communications."""
        if self.size == 1:
            return Completed(alone(array, into))
        return self._begin(Call(self._reduction("all_reduce", array, op, into, in_order=in_order), array, into, False))

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        return Completed(array) if self.size == 1 else self._begin(Call(self._from_root(array, root), array, None, False))

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Pending:
        """`reduce`, in flight."""
        if self.size == 1:
            return Completed(alone(array, into))
        return self._begin(Call(self._reduction("reduce", array, op, into, root), array, into, False))

    def start_all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Pending:
        """`all_to_all`, in flight."""
        if self.size == 1:
            return Completed(array)
        return self._begin(Call(self._exchange(array, dim, sizes, receive_sizes), array, None, False))

    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        self.checks.peer("send", to, tag)
        return self._begin(Call(self._message("send", array, to, tag), array, None, False))

    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        self.checks.array("receive", array)
        self.checks.target("receive", array)
        self.checks.peer("receive", source, tag)
        return self._begin(Call(self._message("receive", array, source, tag), array, None, False))

    # -- memory ---------------------------------------------------------------------------------------------------------

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer of `like`'s dtype to fill, which `reduce_scatter` sums without a copy if it is this axis's next communication.

        None where the members share no memory. A collective, as far as all members must call it or none.
        """
        return None if self.size == 1 else self.transports.allocate(shape, like)

    def offers_views(self, array: Array) -> bool:
        """Whether an all-gather of arrays of this dtype can return a view of the node buffer."""
        return self.transports.offers_views(array)

    @property
    def node_buffer(self) -> NodeBuffer | None:
        """The node buffer of this axis; None if it has none."""
        return None if self.transports.node is None else self.transports.node.buffer

    def open_device(self, array: Array) -> None:
        """Open the transport of arrays that lie where `array` does, for messages between two members (collective).

        A collective does so by itself; on the host there is nothing to open.
        """
        self.transports.of(array)

    # -- each collective: checked and counted once for all calls that are alike -------------------------------------------

    def _gather(self, block: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, view: bool) -> Route:
        sizes = None if sizes is None else listed("all_gather", sizes)
        key, route = self._known("all_gather", block, into, dim, sizes, view)
        if route is not None:
            return route
        dim, extents = self.checks.settled("all_gather", block, dim, sizes, False, into)
        words = (sum(extents) - extents[self.index]) * prod(block.shape[:dim]) * prod(block.shape[dim + 1 :])
        return self._kept(key, Route("all_gather", is_on_device(block), words, self.size - 1, dim, extents, view=view))

    def _scatter(self, array: Array, dim: int, sizes: Sequence[int] | None, into: Array | None) -> Route:
        sizes = None if sizes is None else listed("reduce_scatter", sizes)
        key, route = self._known("reduce_scatter", array, into, dim, sizes)
        if route is not None:
            return route
        dim, extents = self.checks.settled("reduce_scatter", array, dim, sizes, True, into)
        words = (self.size - 1) * extents[self.index] * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        return self._kept(key, Route("reduce_scatter", is_on_device(array), words, self.size - 1, dim, extents))

    def _reduction(
        self, name: str, array: Array, op: str, into: Array | None, root: int | None = None, in_order: bool = True
    ) -> Route:
        """The route of an all-reduce, or of a reduce onto `root`."""
        key, route = self._known(name, array, into, op, root, in_order)
        if route is not None:
            return route
        facts = {"shape": tuple(array.shape), "op": op, "root": root}
        problem = self.checks.root_problem(0 if root is None else root) or self.checks.op_problem(op)
        if problem is None and root in (None, self.index):
            problem = into_problem(into, array, array.shape)
        self.checks.agreed(name, array, facts, problem)
        own = share(count(array), self.size, self.index)
        words, messages = (self.size - 1) * own, self.size - 1
        if root is None:
            words, messages = count(array) - own + words, 2 * messages
        route = Route(name, is_on_device(array), words, messages, op=op, root=-1 if root is None else root, in_order=in_order)
        return self._kept(key, route)

    def _from_root(self, array: Array, root: int) -> Route:
        key, route = self._known("broadcast", array, None, root)
        if route is not None and (not route.words or is_writable(array)):
            return route
        received = self.index != root
        problem = self.checks.root_problem(root) or (self.checks.target_problem("broadcast", array) if received else None)
        self.checks.agreed("broadcast", array, {"shape": tuple(array.shape), "root": root}, problem)
        return self._kept(key, Route("broadcast", is_on_device(array), count(array) * received, int(received), root=root))

    def _exchange(self, array: Array, dim: int, sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None) -> Route:
        sizes = None if sizes is None else listed("all_to_all", sizes)
        receive_sizes = None if receive_sizes is None else listed("all_to_all", receive_sizes)
        key, route = self._known("all_to_all", array, None, dim, sizes, receive_sizes)
        if route is not None:
            return route
        dim, extents, received = self.checks.pieces(array, dim, sizes, receive_sizes)
        arriving = extents if received is None else received
        words = (sum(arriving) - arriving[self.index]) * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        return self._kept(
            key, Route("all_to_all", is_on_device(array), words, self.size - 1, dim, extents, receive_sizes=received)
        )

    def _message(self, name: str, array: Array, peer: int, tag: int) -> Route:
        """The route of a message to or from member `peer`."""
        key, route = self._known(name, array, None, peer, tag)
        arriving = name == "receive"
        return route or self._kept(
            key, Route(name, is_on_device(array), count(array) * arriving, int(arriving), root=peer, tag=tag)
        )

    def _known(self, name: str, array: Array, into: Array | None, *rest: Hashable) -> tuple[Hashable, Route | None]:
        """What calls like this one have in common, and their route; None where this one must be checked itself.

        Raises ShapeError for what is no array, and for arguments of types that no call takes.
        """
        key: Hashable = None
        try:
            key = (name, array.shape, array.dtype, place_of(array), rest)
            route = self._routes.get(key)
            if route is not None and into is None and not self.check:
                return key, route
        except (AttributeError, TypeError) as error:
            self.checks.array(name, array)
            said = ", ".join(map(repr, rest))
            raise ShapeError(f"{name} over {self.label} does not take arguments of these types: {said}.") from error
        self.checks.array(name, array)
        return key, None

    def _kept(self, key: Hashable, route: Route) -> Route:
        if len(self._routes) >= ROUTES:
            self._routes.clear()
        return self._routes.setdefault(key, route)

    # -- carry and account -------------------------------------------------------------------------------------------------

    def _complete(self, call: Call) -> Array:
        """Carry a blocking call, and record it in the ledger once it is complete."""
        ledger, route = self.ledger, call.route
        if ledger.by_steps or route.on_device:
            return self._begin(call).wait()
        wall, cpu = time.perf_counter(), time.thread_time()
        number = self.records.begin(route, call.array, wall, flight.WAITED_FOR)
        try:
            carried = self.transports.carry(call)
            result = carried.complete()
        except BaseException:
            flight.failed(number)
            raise
        ended = time.perf_counter()
        flight.end(number, ended)
        self._record(route, carried.moved, ended - wall, time.thread_time() - cpu)
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
                line = self._record(route, moved, time.perf_counter() - wall, time.thread_time() - cpu)
                pending = Pending(carried, line.wait)
        except BaseException:
            flight.failed(number)
            raise
        pending.number = number
        return pending

    def _meet(self) -> None:
        """Carry a barrier, which the ledger does not count."""
        number = self.records.begin(self._barrier, NOTHING, time.perf_counter(), flight.WAITED_FOR)
        try:
            self.checks.barrier()
            self.transports.barrier()
        except BaseException:
            flight.failed(number)
            raise
        flight.end(number, time.perf_counter())

    def _record(self, route: Route, moved: Array, seconds: float, cpu_seconds: float) -> Amounts:
        """Add a call to its line of the ledger, which the route keeps by phase; returns the line."""
        key = self.ledger.current_phase, moved.dtype
        line = route.lines.get(key)
        if line is None:
            line = route.lines[key] = self.ledger.line(route.operation, self.label, dtype_name(moved))
        line.count(route.words, route.messages, moved.itemsize, seconds, cpu_seconds)
        return line


def listed(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes as a tuple. Raises ShapeError for what is no sequence."""
    try:
        return tuple(sizes)
    except TypeError as error:
        raise ShapeError(f"{name}: sizes are whole numbers, one per member; they are given as {sizes!r}.") from error


def alone(array: Array, into: Array | None) -> Array:
    """The result of a collective over an axis of one member."""
    return array if into is None or into is array else copy_into(into, array)


def free(axis: Axis) -> None:
    """Release the memory of an axis (collective). Whatever the axis is asked for later raises GridError."""
    before, axis.transports = axis.transports, Freed(axis.transports.members)
    axis.checks.in_step = axis.transports.check
    before.free()
