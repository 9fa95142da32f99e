# Collectives along one axis of a grid, on blocks with a dim and uneven sizes, counted in the ledger.
# Imports arrays, transport, ledger, failure. Each exists blocking and started (`start_…` → Pending).
# Next: grid.py, which builds the axes; gemm/cuboid.py, which is written with them.
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from ..errors import ShapeError
from .arrays import Array, cast, contiguous, copy_into, dtype_name, empty, is_contiguous, is_half, restore_front, sum_parts, swap_front, widen
from .failure import check_agreement
from .ledger import Amounts, Ledger
from .transport import HostTransport, Requests


class Pending:
    """A communication in flight. `wait()` completes it and returns its result; a second call returns the same result.

    It keeps every buffer alive until then.
    """

    def __init__(self, requests: Requests, finish: Callable[[], Array], account: Callable[[float, float], None], keep: Any = None):
        self._requests, self._finish, self._account, self._keep = requests, finish, account, keep
        self._done = False
        self._result: Array = None

    def wait(self) -> Array:
        if not self._done:
            wall, cpu = time.perf_counter(), time.thread_time()
            if self._requests:
                MPI.Request.Waitall(self._requests)
            self._result = self._finish()
            self._done = True
            self._account(time.perf_counter() - wall, time.thread_time() - cpu)
            del self._requests, self._finish, self._account, self._keep
        return self._result


def _ready(result: Array) -> Pending:
    return Pending([], lambda: result, lambda wall, cpu: None)


class Axis:
    """One axis of a grid, or a plane of several, seen from this rank: its size, this rank's index, and its collectives.

    Arrays are numpy arrays or torch CPU tensors. `sizes` are the members' extents along `dim`; without it they are equal.
    Results are new C-ordered arrays, or `into` where given. On an axis of size 1 every collective returns its input,
    uncopied, and costs nothing. Words are counted as DESIGN §1 defines them; n is the whole, n_r this rank's part.
    """

    def __init__(self, names: tuple[str, ...], size: int, index: int, comm: MPI.Comm | None, ledger: Ledger, check: bool = False):
        self.names, self.size, self.index, self.comm, self.ledger, self.check = names, size, index, comm, ledger, check
        self.label = "·".join(names)
        self.transport = HostTransport()

    def __repr__(self) -> str:
        return f"Axis({self.label}: {self.index} of {self.size})"

    # -- blocking: the started form, completed at once ------------------------------------------------------------------

    def all_gather(self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None) -> Array:
        """Concatenate the members' blocks along `dim`. Words n − n_r, messages g−1."""
        return self._all_gather(block, dim, sizes, into, True).wait()

    def reduce_scatter(self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None) -> Array:
        """Sum the members' arrays and keep this rank's part along `dim`. Words (g−1)·n_r, messages g−1.

        The parts are added in the members' order, so that the result never depends on the MPI library; needs g·n_r words
        of workspace. 16-bit floats are accumulated in float32 and rounded once.
        """
        return self._reduce_scatter(array, dim, sizes, into, True).wait()

    def all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Array:
        """Reduce the members' arrays by `op` (sum, max, min) on all of them. Words n + (g−2)·n_r, messages 2(g−1)."""
        return self._all_reduce(array, op, into, True).wait()

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Overwrite every member's `array` by the root's. Words n (root 0), messages 1 (root 0)."""
        return self._broadcast(array, root, True).wait()

    def reduce(self, array: Array, root: int = 0, op: str = "sum") -> Array | None:
        """Reduce onto the root; None elsewhere. Words (g−1)·n_r, messages g−1."""
        return self._reduce(array, root, op, True).wait()

    def all_to_all(self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None) -> Array:
        """Send piece i along `dim` to member i and concatenate what arrives. Words received from others, messages g−1."""
        return self._all_to_all(array, dim, sizes, receive_sizes, True).wait()

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send `array` to member `to`; returns when the buffer may be reused. Moves nothing *to* this rank."""
        self.start_send(array, to, tag).wait()

    def receive(self, array: Array, source: int, tag: int = 0) -> Array:
        """Overwrite `array` by what member `source` sends. Words n, messages 1."""
        return self.start_receive(array, source, tag).wait()

    # -- started: return a Pending ---------------------------------------------------------------------------------------

    def start_all_gather(self, block: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None) -> Pending:
        """`all_gather`, in flight."""
        return self._all_gather(block, dim, sizes, into, False)

    def start_reduce_scatter(self, array: Array, dim: int = 0, sizes: Sequence[int] | None = None, into: Array | None = None) -> Pending:
        """`reduce_scatter`, in flight."""
        return self._reduce_scatter(array, dim, sizes, into, False)

    def start_all_reduce(self, array: Array, op: str = "sum", into: Array | None = None) -> Pending:
        """`all_reduce`, in flight."""
        return self._all_reduce(array, op, into, False)

    def start_broadcast(self, array: Array, root: int = 0) -> Pending:
        """`broadcast`, in flight."""
        return self._broadcast(array, root, False)

    def start_reduce(self, array: Array, root: int = 0, op: str = "sum") -> Pending:
        """`reduce`, in flight."""
        return self._reduce(array, root, op, False)

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
        return self._pending("receive", _count(array), 1, array, requests, lambda: array, wall, cpu)

    # -- the work ---------------------------------------------------------------------------------------------------------

    def _all_gather(self, block: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool) -> Pending:
        if self.size == 1:
            return _ready(block if into is None else copy_into(into, block))
        sizes = self._agreed("all_gather", block, dim, sizes or [block.shape[dim]] * self.size, block.shape[dim])
        wall, cpu = time.perf_counter(), time.thread_time()
        front = contiguous(swap_front(block, dim))
        shape = (sum(sizes), *front.shape[1:])
        rest = _count(front) // sizes[self.index] if sizes[self.index] else _product(front.shape[1:])
        direct = into is not None and dim == 0 and is_contiguous(into)
        out = into if direct else empty(shape, block)
        requests = self.transport.all_gather(self.comm, front, out, [size * rest for size in sizes], blocking)
        words = _count(out) - _count(front)

        def finish() -> Array:
            return out if direct else _delivered(out, dim, into)

        return self._pending("all_gather", words, self.size - 1, block, requests, finish, wall, cpu, keep=(front, out))

    def _reduce_scatter(self, array: Array, dim: int, sizes: Sequence[int] | None, into: Array | None, blocking: bool) -> Pending:
        if self.size == 1:
            return _ready(array if into is None else copy_into(into, array))
        sizes = self._agreed("reduce_scatter", array, dim, sizes or self._equal_parts("reduce_scatter", array, dim), None)
        wall, cpu = time.perf_counter(), time.thread_time()
        front = contiguous(swap_front(array, dim))
        own = sizes[self.index]
        rest = _product(front.shape[1:])
        parts = self.ledger.track(empty((self.size, own, *front.shape[1:]), array))
        counts = [size * rest for size in sizes]
        requests = self.transport.all_to_all(self.comm, front, counts, parts, [own * rest] * self.size, blocking)
        direct = into is not None and dim == 0

        def finish() -> Array:
            out = sum_parts(parts, into if direct else empty(parts.shape[1:], parts))
            return out if direct else _delivered(out, dim, into)

        words = (self.size - 1) * own * rest
        return self._pending("reduce_scatter", words, self.size - 1, array, requests, finish, wall, cpu, keep=(front, parts))

    def _all_reduce(self, array: Array, op: str, into: Array | None, blocking: bool) -> Pending:
        if self.size == 1:
            return _ready(array if into is None or into is array else copy_into(into, array))
        self._check("all_reduce", array, {"shape": tuple(array.shape), "op": op})
        wall, cpu = time.perf_counter(), time.thread_time()
        send = contiguous(array)
        n, own = _count(array), _share(_count(array), self.size, self.index)
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
            return _ready(array)
        self._check("broadcast", array, {"shape": tuple(array.shape), "root": root})
        wall, cpu = time.perf_counter(), time.thread_time()
        buffer = contiguous(array)
        requests = self.transport.broadcast(self.comm, buffer, root, blocking)
        received = self.index != root

        def finish() -> Array:
            return array if buffer is array else copy_into(array, buffer)

        words = _count(array) if received else 0
        return self._pending("broadcast", words, int(received), array, requests, finish, wall, cpu, keep=buffer)

    def _reduce(self, array: Array, root: int, op: str, blocking: bool) -> Pending:
        if self.size == 1:
            return _ready(array)
        self._check("reduce", array, {"shape": tuple(array.shape), "root": root, "op": op})
        wall, cpu = time.perf_counter(), time.thread_time()
        send = widen(array) if is_half(array) else contiguous(array)
        out = empty(send.shape, send) if self.index == root else None
        requests = self.transport.reduce(self.comm, send, out, op, root, blocking)
        words = (self.size - 1) * _share(_count(array), self.size, self.index)

        def finish() -> Array | None:
            return cast(out, array) if out is not None and is_half(array) else out

        return self._pending("reduce", words, self.size - 1, send, requests, finish, wall, cpu, keep=send)

    def _all_to_all(
        self, array: Array, dim: int, sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None, blocking: bool
    ) -> Pending:
        if self.size == 1:
            return _ready(array)
        sizes = sizes or self._equal_parts("all_to_all", array, dim)
        receive_sizes = receive_sizes or sizes
        self._check("all_to_all", array, {"dim": dim, "other dims": _other_dims(array, dim)})
        if sum(sizes) != array.shape[dim]:
            raise ShapeError(f"all_to_all over {self.label} was given sizes {list(sizes)} for dim {dim} of size {array.shape[dim]}.")
        wall, cpu = time.perf_counter(), time.thread_time()
        front = contiguous(swap_front(array, dim))
        rest = _product(front.shape[1:])
        out = empty((sum(receive_sizes), *front.shape[1:]), array)
        requests = self.transport.all_to_all(
            self.comm, front, [size * rest for size in sizes], out, [size * rest for size in receive_sizes], blocking
        )
        words = (sum(receive_sizes) - receive_sizes[self.index]) * rest
        return self._pending(
            "all_to_all", words, self.size - 1, array, requests, lambda: _delivered(out, dim, None), wall, cpu, keep=(front, out)
        )

    # -- checks and accounts ----------------------------------------------------------------------------------------------

    def _pending(
        self, name: str, words: int, messages: int, array: Array, requests: Requests, finish: Callable[[], Any], wall: float, cpu: float, keep: Any = None
    ) -> Pending:
        amounts = Amounts(1, words, messages, words * array.itemsize, time.perf_counter() - wall, time.thread_time() - cpu)
        self.ledger.record(name, self.label, amounts)
        phase = self.ledger.current_phase

        def account(wall_more: float, cpu_more: float) -> None:
            with self.ledger.phase(phase):
                self.ledger.record(name, self.label, Amounts(seconds=wall_more, cpu_seconds=cpu_more))

        return Pending(requests, finish, account, keep)

    def _agreed(self, name: str, array: Array, dim: int, sizes: Sequence[int], own: int | None) -> list[int]:
        """Check `sizes` against the array: their number, and their sum, or this rank's own entry where only that is held."""
        self._check(name, array, {"dim": dim, "other dims": _other_dims(array, dim), "sizes": list(sizes)})
        extent = array.shape[dim]
        held = sum(sizes) if own is None else sizes[self.index] if len(sizes) == self.size else None
        if len(sizes) != self.size or held != extent:
            raise ShapeError(
                f"{name} over {self.label} = {self.size} was given sizes {list(sizes)} for dim {dim} of size {extent} "
                f"on member {self.index}. Pass one size per member that {'sum to it' if own is None else 'equals its block'}."
            )
        return list(sizes)

    def _equal_parts(self, name: str, array: Array, dim: int) -> list[int]:
        extent = array.shape[dim]
        if extent % self.size:
            raise ShapeError(
                f"{name}: dim {dim} of size {extent} has no equal parts over {self.label} = {self.size}. "
                f"Pass sizes, or a multiple of {self.size}: {extent - extent % self.size}, {extent + self.size - extent % self.size}."
            )
        return [extent // self.size] * self.size

    def _check(self, name: str, array: Array, facts: dict[str, Any]) -> None:
        if self.check and self.comm is not None:
            check_agreement(self.comm, f"{name} over {self.label}", {"dtype": dtype_name(array), **facts})

    def _peer_comm(self, name: str, peer: int) -> MPI.Comm:
        if self.comm is None or not 0 <= peer < self.size or peer == self.index:
            others = ", ".join(str(member) for member in range(self.size) if member != self.index) or "none"
            raise ShapeError(f"{name} on axis {self.label}: member {self.index} has no peer {peer}. Peers: {others}.")
        return self.comm


def _delivered(out: Array, dim: int, into: Array | None) -> Array:
    """`out`, gathered with its dim in front, in the caller's order of dims."""
    result = restore_front(out, dim)
    return contiguous(result) if into is None else copy_into(into, result)


def _product(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _count(array: Array) -> int:
    return _product(array.shape)


def _share(n: int, parts: int, index: int) -> int:
    """This rank's part of the balanced split of n."""
    return n // parts + (index < n % parts)


def _other_dims(array: Array, dim: int) -> tuple[int, ...]:
    return tuple(extent for position, extent in enumerate(array.shape) if position != dim)
