"""One axis of a grid and its collectives. Each call is checked, carried by a transport, and counted in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from inspect import signature

from mpi4py import MPI

from ..errors import ShapeError
from .axis_lock import AxisLock, OfThisProcess
from .calls import Calls
from .checks import COLLECTIVES, Checks, Routes, Sizes
from .collective import Collective, Copied
from .device.arrays import Array
from .health import flight
from .health.agreement import world_ranks
from .pending import Pending
from .transport.transports import Transports


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
        self.size, self.index, self.comm = members.size, members.index, members.comm
        self.label, self.ledger = members.label, members.ledger
        self.lock = AxisLock(self.label, transports)
        self.checks = Checks(members, transports, check)
        self.routes = Routes(self.checks)
        self.records = flight.AxisRecords(members.name, None if self.comm == MPI.COMM_NULL else partial(world_ranks, self.comm))
        self.calls = Calls(members, transports, self.lock, self.checks, self.records)

    def __repr__(self) -> str:
        return f"Axis({self.label}: {self.index} of {self.size})"

    # -- blocking ---------------------------------------------------------------------------------------------------------

    def all_gather(self, block: Array, dim: int = 0, sizes: Sizes = None, into: Array | None = None, view: bool = False) -> Array:
        """Concatenate the members' blocks along `dim`. Words n − n_r, messages g−1.

        With `view`, the result may lie in memory that the members share, uncopied: it is to be read only, and holds until the
        next communication over this axis.
        """
        return self.calls.complete(self.routes.all_gather, block, into, None, dim, sizes, view)

    def reduce_scatter(
        self, array: Array, dim: int = 0, sizes: Sizes = None, into: Array | None = None, parts: Array | None = None
    ) -> Array:
        """Sum the members' arrays and keep this rank's part along `dim`. Words (g−1)·n_r, messages g−1.

        The parts are added in the members' order, so that the result never depends on the MPI library; needs g·n_r words
        of workspace, `parts`, allocated here unless it is given. 16-bit floats are accumulated in float32 and rounded once.
        """
        return self.calls.complete(self.routes.reduce_scatter, array, into, parts, dim, sizes)

    def all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Array:
        """Reduce the members' arrays by `op` (sum, max, min) on all of them. Words n + (g−2)·n_r, messages 2(g−1)."""
        return self.calls.complete(self.routes.all_reduce, array, into, None, op, True)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        return self.calls.complete(self.routes.broadcast, array, None, None, root)

    def reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Array | None:
        """Reduce onto the root; None elsewhere. `into`, for the root, may be `array` itself. Words (g−1)·n_r, messages g−1."""
        return self.calls.complete(self.routes.reduce, array, into, None, root, op)

    def all_to_all(self, array: Array, dim: int = 0, sizes: Sizes = None, receive_sizes: Sizes = None) -> Array:
        """Send piece i along `dim` to member i and concatenate what arrives. Words received from others, messages g−1.

        `sizes` and `receive_sizes` differ from member to member: whether they fit those of the others is compared
        only with check=True.
        """
        return self.calls.complete(self.routes.all_to_all, array, None, None, dim, sizes, receive_sizes)

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
        self, block: Array, dim: int = 0, sizes: Sizes = None, into: Array | None = None, view: bool = False
    ) -> Pending:
        """`all_gather`, in flight."""
        return self.calls.begin(self.routes.all_gather, block, into, None, dim, sizes, view)

    def start_reduce_scatter(self, array: Array, dim: int = 0, sizes: Sizes = None, into: Array | None = None) -> Pending:
        """`reduce_scatter`, in flight."""
        return self.calls.begin(self.routes.reduce_scatter, array, into, None, dim, sizes)

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None, in_order: bool = False) -> Pending:
        """`all_reduce`, in flight. `in_order`: all members complete it between the same two of their communications."""
        return self.calls.begin(self.routes.all_reduce, array, into, None, op, in_order)

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        return self.calls.begin(self.routes.broadcast, array, None, None, root)

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Pending:
        """`reduce`, in flight."""
        return self.calls.begin(self.routes.reduce, array, into, None, root, op)

    def start_all_to_all(self, array: Array, dim: int = 0, sizes: Sizes = None, receive_sizes: Sizes = None) -> Pending:
        """`all_to_all`, in flight."""
        return self.calls.begin(self.routes.all_to_all, array, None, None, dim, sizes, receive_sizes)

    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        if self.size == 1:
            self.routes.send(array, None, None, to, tag)  # which refuses it: there is no other member
        return self.calls.begin(self.routes.send, array, None, None, to, tag)

    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        if self.size == 1:
            self.routes.receive(array, None, None, source, tag)
        return self.calls.begin(self.routes.receive, array, None, None, source, tag)

    # -- prepared ---------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        kind: str,
        like: Array,
        *,
        dim: int | None = None,
        sizes: Sizes = None,
        op: str | None = None,
        root: int | None = None,
        view: bool | None = None,
        in_order: bool | None = None,
        receive_sizes: Sizes = None,
    ) -> Collective:
        """Check a collective once, for arrays like one, and return what starts it.

        ``axis.prepare("all_gather", like=x).start(x).wait()`` is ``axis.all_gather(x)``, and cheaper when it is started again.

        Parameters
        ----------
        kind : all_gather, reduce_scatter, all_reduce, reduce, broadcast or all_to_all
        like : an array of the shape, dtype, library and memory of those that will be started
        dim, sizes, op, root, view, in_order, receive_sizes : as of the method of that name, and of `start_` with it; one that is
            None is left to its default

        Moves nothing, but for the agreement of an axis with check=True. All members prepare alike.
        Raises ShapeError for a kind that there is not, an option that the kind does not take, and what the method refuses.
        """
        if kind not in COLLECTIVES:
            raise ShapeError(f"There is no collective {kind!r} to prepare. Those that there are: {', '.join(COLLECTIVES)}.")
        settle = getattr(self.routes, kind)
        options = {"dim": dim, "sizes": sizes, "op": op, "root": root, "view": view}
        options |= {"in_order": in_order, "receive_sizes": receive_sizes}
        given = {name: value for name, value in options.items() if value is not None}
        taken = _options(kind)
        for name in given:
            if name not in taken:
                raise ShapeError(f"{kind} over {self.label} takes no {name}. It takes {', '.join(taken)}.")
        return Copied(self.calls, kind) if self.size == 1 else Collective(self.calls, like, partial(settle, **given))

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
        """Return whether an all-gather of arrays of this dtype can return a view of the node buffer."""
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


@cache
def _options(kind: str) -> tuple[str, ...]:
    """The options that a collective takes behind the arrays."""
    return tuple(signature(getattr(Routes, kind)).parameters)[4:]
