"""MPI on host memory: numpy arrays and torch CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import ShapeError
from ..device.arrays import Array, dtype_name, raw
from .call import Counts, Requests
from .flat import FlatTransport
from .p2p import CODES, Arriving, exchange, pieces
from .progress import IN_FLIGHT

DATATYPES = {
    "bool": MPI.C_BOOL,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "float16": MPI.UINT16_T,
    "bfloat16": MPI.UINT16_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
}
KINDS: dict[Any, MPI.Datatype] = {}
"""Those of the dtypes that have come, numpy's and torch's."""
CODE_OF = {name: code for code, name in enumerate(DATATYPES)}
OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
BOOL_OPERATIONS = {"max": MPI.LOR, "min": MPI.LAND}
COMPLEX_OPERATIONS = {"sum": MPI.SUM}
LARGE = 2**62  # more elements than any array has


class HostTransport(FlatTransport):
    """MPI on host memory: numpy arrays and torch CPU tensors, C-contiguous.

    `limit` is the largest element count of one MPI call. MPI 4 has 64-bit counts; on an older MPI, larger arrays travel in
    pieces, by point-to-point messages where a collective could not address them.

    Every call either completes (blocking) and returns no requests, or returns the requests to wait for; the caller keeps
    the arrays alive until then.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit or (LARGE if MPI.VERSION >= 4 else 2**31 - 1)

    def datatype(self, array: Array) -> MPI.Datatype:
        """The MPI datatype of an array's elements. Raises ShapeError for a dtype that cannot be communicated."""
        kind = KINDS.get(array.dtype)
        if kind is None:
            name = dtype_name(array)
            if name not in DATATYPES:
                raise ShapeError(f"dtype {name} cannot be communicated; supported: {', '.join(DATATYPES)}.")
            kind = KINDS[array.dtype] = DATATYPES[name]
        return kind

    def operation(self, array: Array, op: str) -> MPI.Op:
        """The MPI reduction `op` for an array's dtype."""
        name = dtype_name(array)
        table = BOOL_OPERATIONS if name == "bool" else COMPLEX_OPERATIONS if name.startswith("complex") else OPERATIONS
        if op not in table:
            raise ShapeError(f"Reduction {op!r} is not defined for dtype {name}. Defined: {', '.join(table)}.")
        return table[op]

    def memory(self, array: Array) -> Any:
        """The elements of an array, flat, in slices of which MPI is given them by `buffer`."""
        return raw(array)

    def buffer(self, memory: Any) -> Any:
        """`memory` as mpi4py takes it."""
        return memory

    def copy(self, target: Any, source: Any) -> None:
        """target = source, both memory; complete on return."""
        np.copyto(target, source)

    def close(self) -> None:
        """Release what the transport holds; nothing here."""

    def all_gather(self, comm: MPI.Comm, block: Array, out: Array, counts: Sequence[int], blocking: bool) -> Requests:
        """out = the blocks of all members, `counts` elements each, one after the other."""
        kind, send, receive = self.datatype(block), self.memory(block), self.memory(out)
        if sum(counts) > self.limit:
            parts = _parts(receive, counts)
            requests = exchange(comm, [send] * comm.size, parts, kind, self.limit, self.buffer)
            self.copy(parts[comm.rank], send)
            return _finish(requests, blocking)
        if len(set(counts)) == 1:
            call = comm.Allgather if blocking else comm.Iallgather
            return _started(call([self.buffer(send), counts[0], kind], [self.buffer(receive), counts[0], kind]))
        vcall = comm.Allgatherv if blocking else comm.Iallgatherv
        own = [self.buffer(send), counts[comm.rank], kind]
        return _started(vcall(own, [self.buffer(receive), counts, _offsets(counts), kind]))

    def all_to_all(self, comm: MPI.Comm, array: Array, out: Array, counts: Counts, blocking: bool) -> Requests:
        """Piece i of `array` goes to member i; out = the pieces received, one after the other."""
        kind, send, receive = self.datatype(array), self.memory(array), self.memory(out)
        largest = sum(counts.sent) if counts.equal else counts.largest
        if self.limit < LARGE and (largest is None or largest > self.limit):
            sends, receives = _parts(send, counts.sent), _parts(receive, counts.received)
            requests = exchange(comm, sends, receives, kind, self.limit, self.buffer)
            self.copy(receives[comm.rank], sends[comm.rank])
            return _finish(requests, blocking)
        if counts.equal:
            call, each = comm.Alltoall if blocking else comm.Ialltoall, counts.sent[0]
            return _started(call([self.buffer(send), each, kind], [self.buffer(receive), each, kind]))
        vcall = comm.Alltoallv if blocking else comm.Ialltoallv
        leaving = [self.buffer(send), counts.sent, _offsets(counts.sent), kind]
        return _started(vcall(leaving, [self.buffer(receive), counts.received, _offsets(counts.received), kind]))

    def all_reduce(self, comm: MPI.Comm, array: Array, out: Array, op: str, blocking: bool) -> Requests:
        """out = the reduction of all members' arrays; `out` may be `array` itself."""
        return self._reduced(comm.Allreduce if blocking else comm.Iallreduce, array, out, op)

    def broadcast(self, comm: MPI.Comm, array: Array, root: int, blocking: bool) -> Requests:
        """Every member's `array` becomes the root's, in place."""
        kind, flat = self.datatype(array), self.memory(array)
        call = comm.Bcast if blocking else comm.Ibcast
        if len(flat) <= self.limit:
            return _started(call([self.buffer(flat), kind], root))
        requests: Requests = []
        for part in pieces(len(flat), self.limit):
            requests += _started(call([self.buffer(flat[part]), kind], root))
        return requests

    def reduce(self, comm: MPI.Comm, array: Array, out: Array | None, op: str, root: int, blocking: bool) -> Requests:
        """At the root, out = the reduction of all members' arrays, `out` may be `array` itself; elsewhere `out` is None."""
        return self._reduced(comm.Reduce if blocking else comm.Ireduce, array, out, op, root)

    def _reduced(self, call: Callable[..., Any], array: Array, out: Array | None, op: str, *root: int) -> Requests:
        kind, operation, send = self.datatype(array), self.operation(array, op), self.memory(array)
        receive = None if out is None else self.memory(out)
        requests: Requests = []
        for part in pieces(len(send), self.limit):
            target = None if receive is None else [self.buffer(receive[part]), kind]
            source = MPI.IN_PLACE if array is out else [self.buffer(send[part]), kind]
            requests += _started(call(source, target, operation, *root))
        return requests

    def send(self, comm: MPI.Comm, array: Array, to: int, tag: int) -> Requests:
        """Start sending `array` to member `to`."""
        kind, flat, tag = self.datatype(array), self.memory(array), tag * CODES + CODE_OF[dtype_name(array)]
        return _begun([comm.Isend([self.buffer(flat[part]), kind], to, tag) for part in pieces(len(flat), self.limit)])

    def receive(self, comm: MPI.Comm, array: Array, source: int, tag: int) -> Requests:
        """Start receiving `array` from member `source`, in place."""
        kind, flat, name = self.datatype(array), self.memory(array), dtype_name(array)
        parts = [flat[part] for part in pieces(len(flat), self.limit)]
        posted = [comm.Irecv([self.buffer(part), kind], source, tag * CODES + CODE_OF[name]) for part in parts]
        return [Arriving(comm, _begun(posted), list(map(len, parts)), source, tag, DATATYPES, name)]


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _parts(flat: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return [flat[start : start + count] for start, count in zip(_offsets(counts), counts, strict=True)]


def _started(request: MPI.Request | None) -> Requests:
    return [] if request is None else _begun([request])


def _begun(requests: list[MPI.Request]) -> Requests:
    """`requests`, registered so that a rank which sleeps in node memory keeps them progressing."""
    IN_FLIGHT.add(requests)
    return requests


def _finish(requests: Requests, blocking: bool) -> Requests:
    if not blocking:
        return _begun(requests)
    MPI.Request.Waitall(requests)
    return []
