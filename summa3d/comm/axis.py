"""One axis of a grid and its collectives. Each call is checked, carried by a transport, and counted in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from ..errors import ShapeError
from .axis_lock import AxisLock, OfThisProcess
from .calls import Calls
from .checks import Checks, Routes
from .collective import Collective, Copied, alone
from .device.arrays import Array
from .health import flight
from .health.agreement import world_ranks
from .pending import Completed, Pending
from .profile.ledger import Ledger
from .transport.call import Route
from .transport.transports import Freed, Transports

OPTIONS: dict[str, dict[str, Any]] = {
    "all_gather": {"dim": 0, "sizes": None, "view": False},
    "reduce_scatter": {"dim": 0, "sizes": None},
    "all_reduce": {"op": "sum", "in_order": False},
    "reduce": {"root": 0, "op": "sum"},
    "broadcast": {"root": 0},
    "all_to_all": {"dim": 0, "sizes": None, "receive_sizes": None},
}
"""What each collective may be prepared with, and what that is by default."""


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
        self.records = flight.AxisRecords(members.name, None if self.comm == MPI.COMM_NULL else partial(world_ranks, self.comm))
        self.calls = Calls(members, transports, self.lock, self.checks, self.records)

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
            return self.calls.complete(self.routes.gather(block, dim, sizes, into, view), block, into)

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
            return self.calls.complete(self.routes.scatter(array, dim, sizes, into, parts), array, into, parts)

    def all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Array:
        """Reduce the members' arrays by `op` (sum, max, min) on all of them. Words n + (g−2)·n_r, messages 2(g−1)."""
        if self.size == 1:
            return alone(array, into)
        with self.lock:
            return self.calls.complete(self.routes.reduction("all_reduce", array, op, into), array, into)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        if self.size == 1:
            return array
        with self.lock:
            return self.calls.complete(self.routes.from_root(array, root), array)

    def reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Array | None:
        """Reduce onto the root; None elsewhere. `into`, for the root, may be `array` itself. Words (g−1)·n_r, messages g−1."""
        if self.size == 1:
            return alone(array, into)
        with self.lock:
            return self.calls.complete(self.routes.reduction("reduce", array, op, into, root), array, into)

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
            return self.calls.complete(self.routes.exchange(array, dim, sizes, receive_sizes), array)

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
                self.calls.meet()

    # -- started: return a Pending ---------------------------------------------------------------------------------------

    def start_all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None, view: bool = False
    ) -> Pending:
        """`all_gather`, in flight."""
        if self.size == 1:
            return Completed(alone(block, into))
        with self.lock:
            return self.calls.begin(self.routes.gather(block, dim, sizes, into, view), block, into)

    def start_reduce_scatter(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None
    ) -> Pending:
        """`reduce_scatter`, in flight."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            return self.calls.begin(self.routes.scatter(array, dim, sizes, into), array, into)

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None, in_order: bool = False) -> Pending:
        """`all_reduce`, in flight. `in_order`: all members complete it between the same two of their communications."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            return self.calls.begin(self.routes.reduction("all_reduce", array, op, into, in_order=in_order), array, into)

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        if self.size == 1:
            return Completed(array)
        with self.lock:
            return self.calls.begin(self.routes.from_root(array, root), array)

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Pending:
        """`reduce`, in flight."""
        if self.size == 1:
            return Completed(alone(array, into))
        with self.lock:
            return self.calls.begin(self.routes.reduction("reduce", array, op, into, root), array, into)

    def start_all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Pending:
        """`all_to_all`, in flight."""
        if self.size == 1:
            return Completed(array)
        with self.lock:
            return self.calls.begin(self.routes.exchange(array, dim, sizes, receive_sizes), array)

    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        with self.lock:
            return self.calls.begin(self.routes.message("send", array, to, tag), array)

    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        with self.lock:
            route = self.routes.message("receive", array, source, tag)
            self.checks.target("receive", array)
            return self.calls.begin(route, array)

    # -- prepared ---------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        kind: str,
        like: Array,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
        op: str | None = None,
        root: int | None = None,
        view: bool | None = None,
        in_order: bool | None = None,
        receive_sizes: Sequence[int] | None = None,
    ) -> Collective:
        """Check a collective once, for arrays like one, and return what starts it.

        ``axis.prepare("all_gather", like=x).start(x).wait()`` is ``axis.all_gather(x)``, and cheaper when it is started again.

        Parameters
        ----------
        kind : all_gather, reduce_scatter, all_reduce, reduce, broadcast or all_to_all
        like : an array of the shape, dtype, library and memory of those that will be started
        dim, sizes, op, root, view, in_order, receive_sizes : as of the method of that name, and of `start_` with it

        Moves nothing, but for the agreement of an axis with check=True. All members prepare alike.
        Raises ShapeError for a kind that there is not, an option that the kind does not take, and what the method refuses.
        """
        given = {"dim": dim, "sizes": sizes, "op": op, "root": root, "view": view, "in_order": in_order}
        given["receive_sizes"] = receive_sizes
        given = {name: value for name, value in given.items() if value is not None}
        if kind not in OPTIONS:
            raise ShapeError(f"There is no collective {kind!r} to prepare. Those that there are: {', '.join(OPTIONS)}.")
        for name in given:
            if name not in OPTIONS[kind]:
                raise ShapeError(f"{kind} over {self.label} takes no {name}. It takes {', '.join(OPTIONS[kind])}.")
        if self.size == 1:
            return Copied(self.calls, kind)
        options = {**OPTIONS[kind], **given}

        def settle(array: Array, into: Array | None, parts: Array | None) -> Route:
            return self.routes.of(kind, array, into, parts, options)

        return Collective(self.calls, like, settle)

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
        return self.transports.offers_views(array)

    @property
    def node_bytes(self) -> int | None:
        """This rank's share of the memory that the axis's members share in their node; None where they share none."""
        return self.transports.node_bytes

    def open_device(self, array: Array) -> None:
        """Open the transport of arrays that lie where `array` does, for messages between two members (collective).

        A collective does so by itself; on the host there is nothing to open.
        """
        with self.lock:
            self.transports.of(array)


def free(axis: Axis) -> None:
    """Release the memory of an axis (collective). Whatever the axis is asked for later raises GridError."""
    before, axis.transports = axis.transports, Freed(axis.transports.members)
    axis.checks.transports = axis.lock.shared = axis.calls.transports = axis.transports
    axis.records.ranks = None  # the communicator, which would name them, is gone soon
    before.free()
