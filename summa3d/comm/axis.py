"""One axis of a grid and its collectives. Each call is checked, carried by a transport, and counted in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mpi4py import MPI

from .arrays import Array, copy_into, count, into_problem, share
from .checks import Checks
from .pending import Begun, Completed, Pending
from .profile.ledger import Ledger
from .transport.call import Call
from .transport.node_buffer import NodeBuffer
from .transport.transports import Transports


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
        self._checks = Checks(members, transports, check)

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copied layer communicates over the same grid's axes

    def __repr__(self) -> str:
        return f"Axis({self.label}: {self.index} of {self.size})"

    # -- blocking: the started form, completed at once ------------------------------------------------------------------

    def all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None, view: bool = False
    ) -> Array:
        """Concatenate the members' blocks along `dim`. Words n − n_r, messages g−1.

        With `view`, the result may lie in memory that the members share, uncopied: it is to be read only, and holds until the
        next communication over this axis.
        """
        return self._all_gather(block, dim, sizes, into, True, view).wait()

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
        return self._reduce_scatter(array, dim, sizes, into, True, parts).wait()

    def all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Array:
        """Reduce the members' arrays by `op` (sum, max, min) on all of them. Words n + (g−2)·n_r, messages 2(g−1)."""
        return self._all_reduce(array, op, into, True, True).wait()

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        return self._broadcast(array, root, True).wait()

    def reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Array | None:
        """Reduce onto the root; None elsewhere. `into`, for the root, may be `array` itself. Words (g−1)·n_r, messages g−1."""
        return self._reduce(array, root, op, into, True).wait()

    def all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Array:
        """Send piece i along `dim` to member i and concatenate what arrives. Words received from others, messages g−1."""
        return self._all_to_all(array, dim, sizes, receive_sizes, True).wait()

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
            self.transports.barrier()

    # -- started: return a Pending ---------------------------------------------------------------------------------------

    def start_all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None, view: bool = False
    ) -> Pending:
        """`all_gather`, in flight."""
        return self._all_gather(block, dim, sizes, into, False, view)

    def start_reduce_scatter(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None
    ) -> Pending:
        """`reduce_scatter`, in flight."""
        return self._reduce_scatter(array, dim, sizes, into, False, None)

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None, in_order: bool = False) -> Pending:
        """`all_reduce`, in flight. `in_order`: all members complete it between the same two of their communications."""
        return self._all_reduce(array, op, into, False, in_order)

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        return self._broadcast(array, root, False)

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Pending:
        """`reduce`, in flight."""
        return self._reduce(array, root, op, into, False)

    def start_all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Pending:
        """`all_to_all`, in flight."""
        return self._all_to_all(array, dim, sizes, receive_sizes, False)

    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        self._checks.peer("send", to)
        return self._begin(Call("send", array, root=to, tag=tag, blocking=False), 0, 0)

    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        self._checks.target("receive", array)
        self._checks.peer("receive", source)
        return self._begin(Call("receive", array, root=source, tag=tag, blocking=False), count(array), 1)

    # -- memory ---------------------------------------------------------------------------------------------------------

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer of `like`'s dtype to fill, which `reduce_scatter` sums without a copy if it is this axis's next communication.

        None where the members share no memory. A collective, as far as all members must call it or none.
        """
        return None if self.size == 1 else self.transports.allocate(shape, like)

    def offers_views(self, array: Array) -> bool:
        """Whether an all-gather of arrays of this dtype can return a view of the node buffer (collective the first time)."""
        return self.transports.offers_views(array)

    @property
    def node_buffer(self) -> NodeBuffer | None:
        """The node buffer of this axis; None if it has none. The first use is collective, and makes it."""
        return None if self.transports.node is None else self.transports.node.buffer

    def open_device(self, array: Array) -> None:
        """Open the transport of arrays that lie where `array` does, for messages between two members (collective).

        A collective does so by itself; on the host there is nothing to open.
        """
        self.transports.of(array)

    # -- each collective: check, carry, account ------------------------------------------------------------------------

    def _all_gather(
        self, block: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool, view: bool
    ) -> Pending:
        if self.size == 1:
            return Completed(block if into is None else copy_into(into, block))
        dim, sizes = self._checks.settled("all_gather", block, dim, sizes, False, into)
        words = (sum(sizes) - sizes[self.index]) * prod(block.shape[:dim]) * prod(block.shape[dim + 1 :])
        return self._begin(Call("all_gather", block, dim, sizes, into, blocking, view), words, self.size - 1)

    def _reduce_scatter(
        self, array: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool, parts: Array | None
    ) -> Pending:
        if self.size == 1:
            return Completed(array if into is None else copy_into(into, array))
        dim, sizes = self._checks.settled("reduce_scatter", array, dim, sizes, True, into)
        words = (self.size - 1) * sizes[self.index] * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        return self._begin(Call("reduce_scatter", array, dim, sizes, into, blocking, parts=parts), words, self.size - 1)

    def _all_reduce(self, array: Array, op: str, into: Array | None, blocking: bool, in_order: bool) -> Pending:
        if self.size == 1:
            return Completed(array if into is None or into is array else copy_into(into, array))
        problem = into_problem(into, array, array.shape)
        self._checks.agreed("all_reduce", array, {"shape": tuple(array.shape), "op": op}, problem)
        n = count(array)
        words = n + (self.size - 2) * share(n, self.size, self.index)
        call = Call("all_reduce", array, into=into, blocking=blocking, in_order=in_order, op=op)
        return self._begin(call, words, 2 * (self.size - 1))

    def _broadcast(self, array: Array, root: int, blocking: bool) -> Pending:
        if self.size == 1:
            return Completed(array)
        received = self.index != root
        problem = self._checks.root_problem(root) or (self._checks.target_problem("broadcast", array) if received else None)
        self._checks.agreed("broadcast", array, {"shape": tuple(array.shape), "root": root}, problem)
        return self._begin(Call("broadcast", array, root=root, blocking=blocking), count(array) * received, int(received))

    def _reduce(self, array: Array, root: int, op: str, into: Array | None, blocking: bool) -> Pending:
        if self.size == 1:
            return Completed(array if into is None or into is array else copy_into(into, array))
        problem = self._checks.root_problem(root) or (into_problem(into, array, array.shape) if self.index == root else None)
        self._checks.agreed("reduce", array, {"shape": tuple(array.shape), "root": root, "op": op}, problem)
        words = (self.size - 1) * share(count(array), self.size, self.index)
        return self._begin(Call("reduce", array, into=into, blocking=blocking, op=op, root=root), words, self.size - 1)

    def _all_to_all(
        self, array: Array, dim: int, sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None, blocking: bool
    ) -> Pending:
        if self.size == 1:
            return Completed(array)
        dim, sizes, received = self._checks.pieces(array, dim, sizes, receive_sizes)
        arriving = sizes if received is None else received
        words = (sum(arriving) - arriving[self.index]) * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        return self._begin(Call("all_to_all", array, dim, sizes, None, blocking, receive_sizes=received), words, self.size - 1)

    def _begin(self, call: Call, words: int, messages: int) -> Pending:
        """Carry a checked call, inside an NVTX range if the ledger has ranges."""
        ranges = self.ledger.ranges
        if ranges is None or self.size == 1:
            return self._carry_and_account(call, words, messages)
        with ranges.around(f"{call.operation} {self.label}"):
            return self._carry_and_account(call, words, messages)

    def _carry_and_account(self, call: Call, words: int, messages: int) -> Pending:
        """Start a call and record it in the ledger; `wait` of the returned Pending records its completion."""
        begun = Begun(self.transports.carry, self.transports.of, call)
        return begun.recorded(self.ledger, self.label, words, messages)
