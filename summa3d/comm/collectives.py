# Collectives along one axis of a grid, on blocks with a dim and uneven sizes, counted in the ledger.
# Imports arrays, transport, ledger, failure. Each exists blocking and started (`start_…` → Pending).
# Next: grid.py, which builds the axes; gemm/cuboid.py, which is written with them.
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from mpi4py import MPI

from ..errors import ShapeError
from .arrays import (
    Array,
    cast,
    contiguous,
    copy_into,
    count,
    delivered,
    dtype_name,
    empty,
    into_problem,
    is_contiguous,
    is_half,
    share,
    sum_parts,
    swap_front,
    widen,
)
from .failure import check_agreement
from .ledger import Amounts, Ledger
from .pending import Pending, completed
from .shared import SharedViews
from .transport import HostTransport, Requests


class Axis(SharedViews):
    """One axis of a grid, or a plane of several, seen from this rank: its size, this rank's index, and its collectives.

    Arrays are numpy arrays or torch CPU tensors. `sizes` are the members' extents along `dim`; without it they are equal.
    Results are new C-ordered arrays, or `into` where given. On an axis of size 1 every collective returns its input,
    uncopied, and costs nothing. Words are counted as DESIGN §1 defines them; n is the whole, n_r this rank's part.
    """

    def __init__(self, names: tuple[str, ...], size: int, index: int, comm: MPI.Intracomm, ledger: Ledger, check: bool = False):
        self.names, self.size, self.index, self.comm, self.ledger, self.check = names, size, index, comm, ledger, check
        self.label = "·".join(names)
        self.transport = HostTransport()
        self._shared = {}

    def __repr__(self) -> str:
        return f"Axis({self.label}: {self.index} of {self.size})"

    # -- blocking: the started form, completed at once ------------------------------------------------------------------

    def all_gather(self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None) -> Array:
        """Concatenate the members' blocks along `dim`. Words n − n_r, messages g−1."""
        return self._all_gather(block, dim, sizes, into, True).wait()

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
        """Send `array` to member `to`; returns when the buffer may be reused. Moves nothing *to* this rank."""
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

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Pending:
        """`all_reduce`, in flight."""
        return self._all_reduce(array, op, into, False)

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

    def start_send(self, array: Array, to: int, tag: int = 0) -> Pending:
        """`send`, in flight."""
        wall, cpu = time.perf_counter(), time.thread_time()
        requests = self.transport.send(self._peer_comm("send", to), contiguous(array), to, tag)
        return self._pending("send", 0, 0, array, requests, lambda: None, wall, cpu)

    def start_receive(self, array: Array, source: int, tag: int = 0) -> Pending:
        """`receive`, in flight."""
        if not is_contiguous(array):
            raise ShapeError("receive overwrites its array in place, so the array must be C-contiguous.")
        wall, cpu = time.perf_counter(), time.thread_time()
        requests = self.transport.receive(self._peer_comm("receive", source), array, source, tag)
        return self._pending("receive", count(array), 1, array, requests, lambda: array, wall, cpu)

    # -- the work ---------------------------------------------------------------------------------------------------------

    def _all_gather(self, block: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool) -> Pending:
        if self.size == 1:
            return completed(block if into is None else copy_into(into, block))
        dim, sizes = self._settled("all_gather", block, dim, sizes, False, into)
        wall, cpu = time.perf_counter(), time.thread_time()
        front = contiguous(swap_front(block, dim))
        shape = (sum(sizes), *front.shape[1:])
        rest = prod(front.shape[1:])
        direct = into is not None and dim == 0 and is_contiguous(into)
        out = into if direct else empty(shape, block)
        requests = self.transport.all_gather(self.comm, front, out, [size * rest for size in sizes], blocking)
        words = count(out) - count(front)

        def finish() -> Array:
            return out if direct else delivered(out, dim, into)

        return self._pending("all_gather", words, self.size - 1, block, requests, finish, wall, cpu, keep=(front, out))

    def _reduce_scatter(
        self, array: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool, parts: Array | None = None
    ) -> Pending:
        if self.size == 1:
            return completed(array if into is None else copy_into(into, array))
        dim, sizes = self._settled("reduce_scatter", array, dim, sizes, True, into)
        self.transport.operation(array, "sum")
        wall, cpu = time.perf_counter(), time.thread_time()
        front = contiguous(swap_front(array, dim))
        own = sizes[self.index]
        rest = prod(front.shape[1:])
        shape = (self.size, own, *front.shape[1:])
        room = self.ledger.track(empty(shape, array)) if parts is None else parts.reshape(shape)
        counts = [size * rest for size in sizes]
        largest = max(count(front), self.size * max(sizes) * rest)
        requests = self.transport.all_to_all(
            self.comm, front, counts, room, [own * rest] * self.size, blocking, equal=len(set(sizes)) == 1, largest=largest
        )
        direct = into is not None and dim == 0

        def finish() -> Array:
            out = sum_parts(room, into if direct else empty(shape[1:], room))
            return out if direct else delivered(out, dim, into)

        words = (self.size - 1) * own * rest
        return self._pending("reduce_scatter", words, self.size - 1, array, requests, finish, wall, cpu, keep=(front, room))

    def _all_reduce(self, array: Array, op: str, into: Array | None, blocking: bool) -> Pending:
        if self.size == 1:
            return completed(array if into is None or into is array else copy_into(into, array))
        self._check("all_reduce", array, {"shape": tuple(array.shape), "op": op}, into_problem(into, array, array.shape))
        wall, cpu = time.perf_counter(), time.thread_time()
        send = contiguous(array)
        n, own = count(array), share(count(array), self.size, self.index)
        words, messages = n + (self.size - 2) * own, 2 * (self.size - 1)
        if is_half(array):
            wide = widen(send)
            requests = self.transport.all_reduce(self.comm, wide, wide, op, blocking)

            def narrow() -> Array:
                return cast(wide, array) if into is None else copy_into(into, cast(wide, array))

            return self._pending("all_reduce", words, messages, wide, requests, narrow, wall, cpu, keep=wide)
        direct = into is not None and is_contiguous(into)
        out = send if into is array and direct else into if direct else empty(array.shape, array)
        requests = self.transport.all_reduce(self.comm, send, out, op, blocking)

        def finish() -> Array:
            return out if direct or into is None else copy_into(into, out)

        return self._pending("all_reduce", words, messages, array, requests, finish, wall, cpu, keep=(send, out))

    def _broadcast(self, array: Array, root: int, blocking: bool) -> Pending:
        if self.size == 1:
            return completed(array)
        self._check("broadcast", array, {"shape": tuple(array.shape), "root": root}, self._root_problem(root))
        wall, cpu = time.perf_counter(), time.thread_time()
        buffer = contiguous(array)
        requests = self.transport.broadcast(self.comm, buffer, root, blocking)
        received = self.index != root

        def finish() -> Array:
            return array if buffer is array else copy_into(array, buffer)

        words = count(array) if received else 0
        return self._pending("broadcast", words, int(received), array, requests, finish, wall, cpu, keep=buffer)

    def _reduce(self, array: Array, root: int, op: str, blocking: bool, into: Array | None = None) -> Pending:
        if self.size == 1:
            return completed(array if into is None or into is array else copy_into(into, array))
        problem = self._root_problem(root) or (into_problem(into, array, array.shape) if self.index == root else None)
        self._check("reduce", array, {"shape": tuple(array.shape), "root": root, "op": op}, problem)
        wall, cpu = time.perf_counter(), time.thread_time()
        send = widen(contiguous(array)) if is_half(array) else contiguous(array)
        direct = into is not None and not is_half(array) and is_contiguous(into)
        out = None if self.index != root else into if direct else empty(send.shape, send)
        requests = self.transport.reduce(self.comm, send, out, op, root, blocking)
        words = (self.size - 1) * share(count(array), self.size, self.index)

        def finish() -> Array | None:
            if out is None or out is into:
                return out
            return copy_into(into, out) if into is not None else cast(out, array) if is_half(array) else out

        return self._pending("reduce", words, self.size - 1, send, requests, finish, wall, cpu, keep=send)

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
        requests = self.transport.all_to_all(
            self.comm, front, [size * rest for size in sizes], out, [size * rest for size in receive_sizes], blocking, equal
        )
        words = (sum(receive_sizes) - receive_sizes[self.index]) * rest
        return self._pending(
            "all_to_all", words, self.size - 1, array, requests, lambda: delivered(out, dim, None), wall, cpu, keep=(front, out)
        )

    # -- checks and accounts ----------------------------------------------------------------------------------------------

    def _pending(
        self,
        name: str,
        words: int,
        messages: int,
        array: Array,
        requests: Requests,
        finish: Callable[[], Any],
        wall: float,
        cpu: float,
        keep: Any = None,
    ) -> Pending:
        amounts = Amounts(1, words, messages, words * array.itemsize, time.perf_counter() - wall, time.thread_time() - cpu)
        line = self.ledger.record(name, self.label, dtype_name(array), amounts)

        def account(wall_more: float, cpu_more: float) -> None:
            line.seconds += wall_more
            line.cpu_seconds += cpu_more

        return Pending(requests, finish, account, keep)

    def _settled(
        self, name: str, array: Array, dim: int, sizes: Sequence[int] | None, whole: bool, into: Array | None = None
    ) -> tuple[int, list[int]]:
        """`dim` counted from the front, and one size per member: `array` holds all of them along it (whole), or this member's."""
        shape, problem = list(array.shape), None
        if not -len(shape) <= dim < len(shape):
            self._check(
                name, array, {"dim": dim}, f"{name} over {self.label}: an array of shape {tuple(shape)} has no dim {dim}."
            )
        dim %= len(shape)
        extent = shape[dim]
        if sizes is None:
            problem = self._parts_problem(name, dim, extent) if whole else None
            sizes = [extent // self.size if whole else extent] * self.size
        elif len(sizes) != self.size or (sum(sizes) if whole else sizes[self.index]) != extent:
            problem = (
                f"{name} over {self.label} = {self.size} was given sizes {list(sizes)} for dim {dim} of size {extent}. "
                f"Pass one size per member that {'sum to it' if whole else 'equals its block'}."
            )
        if problem is None:
            result = [*shape[:dim], sizes[self.index] if whole else sum(sizes), *shape[dim + 1 :]]
            problem = into_problem(into, array, result)
        facts: dict[str, Any] = {"dim": dim, "other dims": (*shape[:dim], *shape[dim + 1 :])}
        if name != "all_to_all":  # whose members may each send other sizes
            facts |= {"sizes": list(sizes), "extent": extent if whole else sum(sizes)}
        self._check(name, array, facts, problem)
        return dim, list(sizes)

    def _awaited(self, array: Array, sizes: Sequence[int], receive_sizes: Sequence[int]) -> list[int]:
        """`receive_sizes`; in debug mode compared with what the others send."""
        if self.check:
            sent = self.comm.alltoall(list(sizes)) if len(receive_sizes) == self.size else None
            problem = (
                None
                if sent == list(receive_sizes)
                else f"Member {self.index} awaits pieces {list(receive_sizes)} but is sent {sent}."
            )
            self._check("all_to_all", array, {}, problem)
        return list(receive_sizes)

    def _parts_problem(self, name: str, dim: int, extent: int) -> str | None:
        below = extent - extent % self.size
        return (
            None
            if below == extent
            else (
                f"{name}: dim {dim} of size {extent} has no equal parts over {self.label} = {self.size}. "
                f"Pass sizes, or a multiple of {self.size}: {below}, {below + self.size}."
            )
        )

    def _root_problem(self, root: int) -> str | None:
        return (
            None
            if 0 <= root < self.size
            else f"There is no root {root} on axis {self.label}; its members are 0 to {self.size - 1}."
        )

    def _check(self, name: str, array: Array, facts: dict[str, Any], problem: str | None = None) -> None:
        """Raise ShapeError for a `problem` with this call; in debug mode an error on all members if they differ in anything."""
        if self.check:
            check_agreement(self.comm, f"{name} over {self.label}", {"dtype": dtype_name(array), **facts, "problem": problem})
        if problem is not None:
            raise ShapeError(problem)

    def _peer_comm(self, name: str, peer: int) -> MPI.Comm:
        if not 0 <= peer < self.size or peer == self.index:
            others = ", ".join(str(member) for member in range(self.size) if member != self.index) or "none"
            raise ShapeError(f"{name} on axis {self.label}: member {self.index} has no peer {peer}. Peers: {others}.")
        return self.comm
