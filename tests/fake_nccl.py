"""NCCL without a GPU: the names of `cupy.cuda.nccl` that are used, over MPI.

Every call is queued on a stream of the fake device that it is given, and counts the words that it moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from fake_device import Device

KINDS = {
    "NCCL_UINT8": "uint8",
    "NCCL_INT32": "int32",
    "NCCL_INT64": "int64",
    "NCCL_FLOAT16": "float16",
    "NCCL_BFLOAT16": "uint16",  # numpy has none: they travel as they are, and nobody adds them
    "NCCL_FLOAT32": "float32",
    "NCCL_FLOAT64": "float64",
}
OPERATIONS = {"NCCL_SUM": MPI.SUM, "NCCL_MAX": MPI.MAX, "NCCL_MIN": MPI.MIN}


class Nccl:
    """The names of `cupy.cuda.nccl` that are used, over MPI. A group is one op."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kinds = {}
        for number, (name, kind) in enumerate(KINDS.items()):
            setattr(self, name, number)
            self.kinds[number] = np.dtype(kind)
        self.operations = {}
        for number, (name, operation) in enumerate(OPERATIONS.items()):
            setattr(self, name, number)
            self.operations[number] = operation
        self.group: list[tuple[int, Callable[[], Any], float]] | None = None
        self.names = 0

    def get_unique_id(self) -> tuple[int, int]:
        self.names += 1
        return self.device.world.rank, self.names

    def NcclCommunicator(self, size: int, name: tuple[int, int], rank: int) -> Communicator:
        return Communicator(self, size, name, rank)

    def groupStart(self) -> None:
        assert self.group is None
        self.group = []

    def groupEnd(self) -> None:
        assert self.group is not None
        group, self.group = self.group, None
        if group:
            assert len({stream for stream, _, _ in group}) == 1
            self._queue(group[0][0], [run for _, run, _ in group], sum(taken for _, _, taken in group))

    def call(self, stream: int, run: Callable[[], Any], milliseconds: float) -> None:
        if self.group is None:
            self._queue(stream, [run], milliseconds)
        else:
            self.group.append((stream, run, milliseconds))

    def _queue(self, ptr: int, runs: list[Callable[[], Any]], milliseconds: float) -> None:
        def together() -> list[MPI.Request] | None:
            requests = [request for request in [run() for run in runs] if request is not None]
            if self.device.mode == "concurrent":
                return requests
            MPI.Request.Waitall(requests)
            return None

        self.device.queue(self.device.streams[ptr - 1], together, meets_others=True, milliseconds=milliseconds)


class Communicator:
    """`cupy.cuda.nccl.NcclCommunicator`, its arguments in the same order."""

    def __init__(self, nccl: Nccl, size: int, name: tuple[int, int], rank: int) -> None:
        world, (first, number) = nccl.device.world, name
        tag = 1000 + number
        ranks = np.empty(size, np.int64)  # not pickled: who receives an object of unknown size never sleeps
        if rank == 0:
            ranks[0], told = world.rank, np.empty(2, np.int64)
            for _ in range(size - 1):
                world.Recv(told, tag=tag)
                ranks[told[0]] = told[1]
            for other in ranks[1:]:
                world.Send(ranks, int(other), tag)
        else:
            world.Send(np.array([rank, world.rank]), first, tag)
            world.Recv(ranks, first, tag)
        self.nccl, self.comm = nccl, world.Create_group(world.group.Incl(ranks.tolist()), tag)
        self.destroyed = False
        self.streams: set[int] = set()

    def _view(self, address: int, count: int, kind: int) -> np.ndarray:
        dtype = self.nccl.kinds[kind]
        data = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(data, dtype)

    def _call(self, name: str, count: int, kind: int, stream: int, words: int, run: Callable[[], Any]) -> None:
        assert not self.destroyed and count > 0
        self.nccl.device.words += words
        self.nccl.device.calls.append((name, count, str(self.nccl.kinds[kind])))
        self.streams.add(stream)
        self.nccl.call(stream, run, self.nccl.device.takes(name, count))

    def allGather(self, send: int, receive: int, count: int, kind: int, stream: int) -> None:
        source, target = self._view(send, count, kind), self._view(receive, count * self.comm.size, kind)
        words = count * (self.comm.size - 1)
        self._call("allGather", count, kind, stream, words, lambda: self.comm.Allgather(_bytes(source), _bytes(target)))

    def allReduce(self, send: int, receive: int, count: int, kind: int, op: int, stream: int) -> None:
        source, target = self._view(send, count, kind), self._view(receive, count, kind)
        operation = self._operation(kind, op)
        words = count + (self.comm.size - 2) * self._share(count)
        self._call("allReduce", count, kind, stream, words, lambda: self.comm.Allreduce(source.copy(), target, operation))

    def reduceScatter(self, send: int, receive: int, count: int, kind: int, op: int, stream: int) -> None:
        source, target = self._view(send, count * self.comm.size, kind), self._view(receive, count, kind)
        operation = self._operation(kind, op)
        words = count * (self.comm.size - 1)

        def run() -> None:
            self.comm.Reduce_scatter_block(source.copy(), target, operation)

        self._call("reduceScatter", count, kind, stream, words, run)

    def broadcast(self, send: int, receive: int, count: int, kind: int, root: int, stream: int) -> None:
        source, target = self._view(send, count, kind), self._view(receive, count, kind)

        def run() -> None:
            if self.comm.rank == root:
                np.copyto(target, source)
            self.comm.Bcast(_bytes(target), root)

        self._call("broadcast", count, kind, stream, count if self.comm.rank != root else 0, run)

    def reduce(self, send: int, receive: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        source, target = self._view(send, count, kind), self._view(receive, count, kind)
        operation = self._operation(kind, op)
        own = count * (self.comm.rank == root) if self.nccl.group is not None else self._share(count)  # a part, or the whole

        def run() -> None:
            self.comm.Reduce(source.copy(), target if self.comm.rank == root else None, operation, root)

        self._call("reduce", count, kind, stream, own * (self.comm.size - 1), run)

    def send(self, send: int, count: int, kind: int, peer: int, stream: int) -> None:
        source = self._view(send, count, kind)
        begin = self.comm.Issend if self.nccl.device.mode == "concurrent" else self.comm.Isend
        self._call("send", count, kind, stream, 0, lambda: begin(_bytes(source), peer))

    def recv(self, receive: int, count: int, kind: int, peer: int, stream: int) -> None:
        target = self._view(receive, count, kind)
        words = count if peer != self.comm.rank else 0
        self._call("recv", count, kind, stream, words, lambda: self.comm.Irecv(_bytes(target), peer))

    def _operation(self, kind: int, op: int) -> MPI.Op:
        assert kind != self.nccl.NCCL_BFLOAT16, "16-bit floats are added in 32"
        return self.nccl.operations[op]

    def _share(self, count: int) -> int:
        return count // self.comm.size + (self.comm.rank < count % self.comm.size)

    def destroy(self) -> None:
        self.destroyed = True
        self.comm.Free()


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)
