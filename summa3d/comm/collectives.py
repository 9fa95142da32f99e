# Collectives along one axis of a grid, on blocks with a dim and uneven sizes, counted in the ledger.
# Imports arrays, transport, account, ledger. Each exists blocking and started (`start_…` → Pending).
# Next: grid.py, which builds the axes; gemm/algorithms/cuboid.py, which is written with them.
from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from math import prod

from mpi4py import MPI

from ..errors import ShapeError
from . import staged
from .account import Accounted, shown
from .arrays import (
    Array,
    cast,
    contiguous,
    copy_into,
    count,
    delivered,
    detached,
    empty,
    into_problem,
    is_contiguous,
    is_half,
    is_writable,
    overlap,
    share,
    sum_parts,
    swap_front,
    widen,
)
from .checks import Checks
from .ledger import Ledger
from .node import NodeRule, Ring, staged_dtype
from .pending import Pending, completed
from .transport import Carriers


class Axis(Accounted, Checks):
    """One axis of a grid, or a plane of several, seen from this rank: its size, this rank's index, and its collectives.

    Arrays are numpy arrays, CuPy arrays or torch tensors; those of a call lie all on the host or all on a device. `sizes` are
    the members' extents along `dim`; without it they are equal. Results are new C-ordered arrays, or `into` where given. On an
    axis of size 1 every collective returns its input, uncopied, and costs nothing. Words are counted as DESIGN §1 defines
    them; n is the whole, n_r this rank's part. `into` may lie in the memory of what is sent. `carriers` are the transports, of
    the host and of a device.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        size: int,
        index: int,
        comm: MPI.Intracomm,
        ledger: Ledger,
        check: bool = False,
        node: NodeRule | None = None,
        carriers: Carriers | None = None,
    ):
        self.names, self.size, self.index, self.comm, self.ledger, self.check = names, size, index, comm, ledger, check
        self.label = "·".join(names)
        self.carriers = Carriers() if carriers is None else carriers
        self._node = node if size > 1 else None

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copied layer communicates over the same grid's axes

    def __repr__(self) -> str:
        return f"Axis({self.label}: {self.index} of {self.size})"

    def open_device(self, array: Array) -> None:
        """Open the transport of arrays that lie where `array` does, for messages between two members (collective).

        A collective does so by itself; on the host there is nothing to open.
        """
        self.carriers.of(array, self.comm)

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
        return self._all_reduce(array, op, into, True).wait()

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        return self._broadcast(array, root, True).wait()

    def reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Array | None:
        """Reduce onto the root; None elsewhere. `into`, for the root, may be `array` itself. Words (g−1)·n_r, messages g−1."""
        return self._reduce(array, root, op, True, into).wait()

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

    # -- started: return a Pending ---------------------------------------------------------------------------------------

    def start_all_gather(
        self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None
    ) -> Pending:
        """`all_gather`, in flight."""
        return self._all_gather(block, dim, sizes, into, False)

    def start_reduce_scatter(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None
    ) -> Pending:
        """`reduce_scatter`, in flight."""
        return self._reduce_scatter(array, dim, sizes, into, False)

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None, in_order: bool = False) -> Pending:
        """`all_reduce`, in flight. `in_order`: all members complete it between the same two of their communications."""
        return self._all_reduce(array, op, into, False, in_order)

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        return self._broadcast(array, root, False)

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum", into: Array | None = None) -> Pending:
        """`reduce`, in flight."""
        return self._reduce(array, root, op, False, into)

    def start_all_to_all(
        self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
    ) -> Pending:
        """`all_to_all`, in flight."""
        return self._all_to_all(array, dim, sizes, receive_sizes, False)

    @shown
    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        wall, cpu = time.perf_counter(), time.thread_time()
        comm, buffer = self._peer_comm("send", to), contiguous(array)
        requests = self.carriers.between_two(array).send(comm, buffer, to, tag)
        return self._pending("send", 0, 0, array, requests, lambda: None, wall, cpu, keep=buffer)

    @shown
    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        if not is_contiguous(array):
            raise ShapeError("receive overwrites its array in place, so the array must be C-contiguous.")
        if not is_writable(array):
            raise ShapeError("receive overwrites its array in place, and this one is read-only.")
        wall, cpu = time.perf_counter(), time.thread_time()
        comm = self._peer_comm("receive", source)
        requests = self.carriers.between_two(array).receive(comm, array, source, tag)
        return self._pending("receive", count(array), 1, array, requests, lambda: array, wall, cpu)

    # -- the work ---------------------------------------------------------------------------------------------------------

    @shown
    def _all_gather(
        self, block: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool, view: bool = False
    ) -> Pending:
        if self.size == 1:
            return completed(block if into is None else copy_into(into, block))
        dim, sizes = self._settled("all_gather", block, dim, sizes, False, into)
        wall, cpu = time.perf_counter(), time.thread_time()
        line = prod(block.shape[:dim]) * prod(block.shape[dim + 1 :])
        words = (sum(sizes) - sizes[self.index]) * line
        ring = self.ring if view and self.offers_views(block) else self._ring(block, sum(sizes) * line)
        turn = ring and staged.all_gather(ring, detached(block), dim, sizes, into, view)
        if turn:
            return self._pending("all_gather", words, self.size - 1, block, [], turn.result, wall, cpu)
        front = contiguous(swap_front(block, dim))
        shape = (sum(sizes), *front.shape[1:])
        rest = prod(front.shape[1:])
        direct = into is not None and dim == 0 and is_contiguous(into) and not overlap(into, front)
        out = into if direct else empty(shape, block)
        requests = self.carriers.of(block, self.comm).all_gather(self.comm, front, out, [size * rest for size in sizes], blocking)

        def finish() -> Array:
            return out if direct else delivered(out, dim, into)

        return self._pending("all_gather", words, self.size - 1, block, requests, finish, wall, cpu, keep=(front, out))

    @shown
    def _reduce_scatter(
        self, array: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool, parts: Array | None = None
    ) -> Pending:
        if self.size == 1:
            return completed(array if into is None else copy_into(into, array))
        dim, sizes = self._settled("reduce_scatter", array, dim, sizes, True, into)
        carrier = self.carriers.of(array, self.comm)
        carrier.operation(array, "sum")
        wall, cpu = time.perf_counter(), time.thread_time()
        own = sizes[self.index]
        words = (self.size - 1) * own * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        ring = self.ring
        room = None if ring is None else ring.enter_room(array)
        if room is None:
            ring = self._ring(array, self.size * count(array))
        turn = ring and staged.reduce_scatter(ring, detached(array), dim, sizes, into, blocking, room)
        if turn:
            return self._pending("reduce_scatter", words, self.size - 1, array, [], turn.result, wall, cpu, keep=array)
        front = contiguous(swap_front(array, dim))
        rest = prod(front.shape[1:])
        shape = (self.size, own, *front.shape[1:])
        direct = into is not None and dim == 0
        if carrier.sums_parts(array):
            part = into if direct and is_contiguous(into) else empty(shape[1:], array)
            requests = carrier.reduce_scatter(self.comm, front, [size * rest for size in sizes], part)

            def deliver() -> Array:
                return part if part is into else delivered(part, dim, into)

            return self._pending("reduce_scatter", words, self.size - 1, array, requests, deliver, wall, cpu, keep=(front, part))
        room = self.ledger.track(empty(shape, array)) if parts is None else parts.reshape(shape)
        counts = [size * rest for size in sizes]
        largest = max(count(front), self.size * max(sizes) * rest)
        requests = carrier.all_to_all(
            self.comm, front, counts, room, [own * rest] * self.size, blocking, equal=len(set(sizes)) == 1, largest=largest
        )

        def finish() -> Array:
            out = sum_parts(room, into if direct else empty(shape[1:], room))
            return out if direct else delivered(out, dim, into)

        return self._pending("reduce_scatter", words, self.size - 1, array, requests, finish, wall, cpu, keep=(front, room))

    @shown
    def _all_reduce(self, array: Array, op: str, into: Array | None, blocking: bool, in_order: bool = True) -> Pending:
        if self.size == 1:
            return completed(array if into is None or into is array else copy_into(into, array))
        self._check("all_reduce", array, {"shape": tuple(array.shape), "op": op}, into_problem(into, array, array.shape))
        carrier = self.carriers.of(array, self.comm)
        wall, cpu = time.perf_counter(), time.thread_time()
        send = contiguous(array)
        n, own = count(array), share(count(array), self.size, self.index)
        words, messages = n + (self.size - 2) * own, 2 * (self.size - 1)
        large = n * array.itemsize > staged.ALL_REDUCE_LIMIT
        ring = self._ring(array, self.size * n) if not large or (in_order and op == "sum") else None
        if ring and large:
            by_mpi = partial(carrier.all_gather, self.comm, blocking=True)
            gather = staged.all_reduce_in_parts(ring, detached(array), into, blocking, by_mpi)
            if gather is not None:
                return self._pending("all_reduce", words, messages, array, [], gather, wall, cpu)
        elif ring:
            carrier.operation(array, op)
            turn = staged.all_reduce(ring, detached(array), op, into)
            if turn:
                return self._pending("all_reduce", words, messages, array, [], turn.result, wall, cpu)
        if is_half(array):
            wide = widen(send)
            requests = carrier.all_reduce(self.comm, wide, wide, op, blocking)

            def narrow() -> Array:
                return cast(wide, array) if into is None else copy_into(into, cast(wide, array))

            return self._pending("all_reduce", words, messages, wide, requests, narrow, wall, cpu, keep=wide)
        direct = into is not None and is_contiguous(into) and (into is array or not overlap(into, send))
        out = send if into is array and direct else into if direct else empty(array.shape, array)
        requests = carrier.all_reduce(self.comm, send, out, op, blocking)

        def finish() -> Array:
            return out if direct or into is None else copy_into(into, out)

        return self._pending("all_reduce", words, messages, array, requests, finish, wall, cpu, keep=(send, out))

    @shown
    def _broadcast(self, array: Array, root: int, blocking: bool) -> Pending:
        if self.size == 1:
            return completed(array)
        problem = self._root_problem(root)
        if problem is None and self.index != root and not is_writable(array):
            problem = "broadcast overwrites its array in place, and this one is read-only."
        self._check("broadcast", array, {"shape": tuple(array.shape), "root": root}, problem)
        wall, cpu = time.perf_counter(), time.thread_time()
        received = self.index != root
        words = count(array) if received else 0
        ring = self._ring(array, count(array))
        turn = ring and staged.broadcast(ring, array, root)
        if turn:
            return self._pending("broadcast", words, int(received), array, [], turn.result, wall, cpu)
        buffer = contiguous(array)
        requests = self.carriers.of(array, self.comm).broadcast(self.comm, buffer, root, blocking)

        def finish() -> Array:
            return array if buffer is array else copy_into(array, buffer)

        return self._pending("broadcast", words, int(received), array, requests, finish, wall, cpu, keep=buffer)

    @shown
    def _reduce(self, array: Array, root: int, op: str, blocking: bool, into: Array | None = None) -> Pending:
        if self.size == 1:
            return completed(array if into is None or into is array else copy_into(into, array))
        problem = self._root_problem(root) or (into_problem(into, array, array.shape) if self.index == root else None)
        self._check("reduce", array, {"shape": tuple(array.shape), "root": root, "op": op}, problem)
        wall, cpu = time.perf_counter(), time.thread_time()
        words = (self.size - 1) * share(count(array), self.size, self.index)
        ring = self._ring(array, self.size * count(array))
        carrier = self.carriers.of(array, self.comm)
        if ring:
            carrier.operation(array, op)
            turn = staged.reduce(ring, detached(array), root, op, into)
            if turn:
                return self._pending("reduce", words, self.size - 1, array, [], turn.result, wall, cpu)
        send = widen(contiguous(array)) if is_half(array) else contiguous(array)
        direct = into is not None and not is_half(array) and is_contiguous(into)
        out = None if self.index != root else into if direct else empty(send.shape, send)
        requests = carrier.reduce(self.comm, send, out, op, root, blocking)

        def finish() -> Array | None:
            if out is None or out is into:
                return out
            return copy_into(into, out) if into is not None else cast(out, array) if is_half(array) else out

        return self._pending("reduce", words, self.size - 1, send, requests, finish, wall, cpu, keep=send)

    @shown
    def _all_to_all(
        self, array: Array, dim: int, sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None, blocking: bool
    ) -> Pending:
        if self.size == 1:
            return completed(array)
        equal = sizes is None and receive_sizes is None
        if (sizes is None) != (receive_sizes is None):
            raise ShapeError(f"all_to_all over {self.label} takes sizes and receive_sizes together, or neither for equal pieces.")
        dim, sizes = self._settled("all_to_all", array, dim, sizes, True)
        receive_sizes = self._awaited(array, sizes, sizes if receive_sizes is None else receive_sizes)
        wall, cpu = time.perf_counter(), time.thread_time()
        front = contiguous(swap_front(array, dim))
        rest = prod(front.shape[1:])
        out = empty((sum(receive_sizes), *front.shape[1:]), array)
        requests = self.carriers.of(array, self.comm).all_to_all(
            self.comm, front, [size * rest for size in sizes], out, [size * rest for size in receive_sizes], blocking, equal
        )
        words = (sum(receive_sizes) - receive_sizes[self.index]) * rest
        return self._pending(
            "all_to_all", words, self.size - 1, array, requests, lambda: delivered(out, dim, None), wall, cpu, keep=(front, out)
        )

    # -- the node's memory ----------------------------------------------------------------------------------------------

    @property
    def ring(self) -> Ring | None:
        """The slots of node-shared memory of this axis (made at the first use, which is collective); None where it has none."""
        return None if self._node is None else self._node.ring(self.comm, self.label)

    def room(self, shape: Sequence[int], like: Array) -> Array | None:
        """Shared memory to fill, which `reduce_scatter` sums without a copy if it comes next; None where there is none."""
        ring = self.ring if staged_dtype(like) else None
        return None if ring is None else ring.open_room(shape, like)

    def offers_views(self, array: Array) -> bool:
        """Whether gathers and sums of arrays of this dtype can be read where the members laid them."""
        return staged_dtype(array) and self.ring is not None

    def barrier(self) -> None:
        """Return once every member has called. Members that share a node wait asleep."""
        if self.ring is not None:
            staged.meet(self.ring)
        elif self.size > 1:
            self.comm.Barrier()

    def _ring(self, array: Array, elements: int) -> Ring | None:
        """The ring, if a communication of so many elements shall go through it."""
        if self._node is None or not self._node.takes(array, elements):
            return None
        self.carriers.host.datatype(array)  # the same dtypes as through MPI
        return self.ring
