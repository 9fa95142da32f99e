"""Nothing runs when it is queued. What an event needs runs when somebody waits for it, in an order that the streams allow:

lazy : nothing else runs, so that what was not waited for has not happened.
eager : the transports' streams run ahead of the caller's as far as they can, so that what they do not wait for comes after them.
random : now and then all streams run ahead where they meet no other rank, so that what nobody holds is freed and overwritten.
concurrent : streams run beside each other, as a GPU's do: a message of NCCL holds up its own stream alone, until the other side
    is there. Deadlock is raised when nothing has moved for `patience` seconds: a busy machine may keep a rank waiting for long,
    so only who expects a deadlock should wait less than PATIENCE. Not one of MODES: collectives hold up the rank.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import fake_cublas
import numpy as np
from fake_nccl import Nccl
from mpi4py import MPI

POISON = 0xFF  # NaN in floats, −1 in whole numbers
MODES = ("lazy", "eager", "random")
PATIENCE = 250.0
ASLEEP = 1e-4
"""Seconds that a rank sleeps when none of its streams can go on, so that the others have the processor."""


class Deadlock(Exception):
    """No stream of this rank can go on."""


class Event:
    """`time` is the stream's, in milliseconds, when it passed."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream, self.done, self.time = device, stream, False, 0.0

    def passed(self) -> None:
        self.done, self.time = True, self.stream.time

    def synchronize(self) -> None:
        self.device.synchronize(self)


class Op:
    """What a stream does in its turn: `run` something, wait for an event, or pass one."""

    def __init__(
        self,
        number: int,
        run: Callable[[], Any] | None,
        waits: Event | None = None,
        meets_others: bool = False,
        milliseconds: float = 0.0,
    ) -> None:
        self.number, self.run, self.waits, self.meets_others, self.milliseconds = number, run, waits, meets_others, milliseconds
        self.requests: list[MPI.Request] | None = None


class Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr, self.time = ptr, 0.0
        self.queue: deque[Op] = deque()

    @property
    def blocked(self) -> Event | None:
        """The event that its next op waits for in vain."""
        event = self.queue[0].waits if self.queue else None
        return event if event is not None and not event.done else None


class Device:
    """The backend of one rank. `calls` lists NCCL's calls and the copies, in the order in which they were queued.

    `words` counts what NCCL's calls bring this rank as a ledger would, from their own arguments.
    `takes` says how many milliseconds a call takes on its stream's clock, by its name and size: nothing takes any by default.
    """

    def __init__(
        self, world: MPI.Intracomm, mode: str = "lazy", shared: bool = False, seed: int = 0, patience: float = PATIENCE
    ) -> None:
        assert mode in (*MODES, "concurrent")
        self.world, self.mode, self.shared, self.patience = world, mode, shared, patience
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.compute = self.stream()
        self.allocated: list[np.ndarray] = []  # kept, so that who reads freed memory finds poison there
        self.calls: list[tuple[Any, ...]] = []
        self.words = 0
        self.pinned_bytes = 0
        self.bindings: Any = Nccl(self)
        self.takes: Callable[[str, int], float] = lambda name, size: 0.0
        self.host_waits = 0
        self._number = 0

    # -- Backend of comm/device/backend.py ---------------------------------------------------------------------------------

    @property
    def nccl(self) -> Any:
        return self.bindings

    def identity(self) -> str:
        return "device 0" if self.shared else f"device {self.world.rank}"

    def current(self, array: Any) -> Stream:
        assert isinstance(array, FakeArray)
        return self.compute

    def stream(self) -> Stream:
        self.streams.append(Stream(len(self.streams) + 1))
        return self.streams[-1]

    def record(self, stream: Stream, timing: bool = False) -> Event:
        event = Event(self, stream)
        self.queue(stream, event.passed)
        return event

    def mark(self, event: Event, stream: Stream) -> None:
        assert event.done, "a mark is recorded anew before it was passed"
        event.stream, event.done = stream, False
        self.queue(stream, event.passed)

    def milliseconds(self, start: Event, end: Event) -> float:
        assert start.done and end.done
        return end.time - start.time

    def wait(self, stream: Stream, event: Event) -> None:
        self.queue(stream, None, event)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self.calls.append(("copy", nbytes))
        self.queue(stream, lambda: ctypes.memmove(target, source, nbytes), milliseconds=self.takes("copy", nbytes))

    def pinned(self, nbytes: int) -> np.ndarray:
        self.pinned_bytes += nbytes
        return np.full(nbytes, POISON, np.uint8)

    def buffer(self, address: int, nbytes: int) -> Any:
        return (ctypes.c_char * nbytes).from_address(address) if nbytes else bytearray()

    # -- running -----------------------------------------------------------------------------------------------------------

    def queue(
        self, stream: Stream, run: Any, waits: Event | None = None, meets_others: bool = False, milliseconds: float = 0.0
    ) -> None:
        self._number += 1
        stream.queue.append(Op(self._number, run, waits, meets_others, milliseconds))

    def synchronize(self, event: Event) -> None:
        self.host_waits += 1
        if self.mode == "concurrent":
            self._run_beside(lambda: event.done)
        while not event.done:
            self._run_others()
            if not event.done:
                self._step(self._needed(event))

    def finish(self) -> None:
        """Run all that is queued, in the order of queueing as far as the streams allow."""
        if self.mode == "concurrent":
            self._run_beside(lambda: not any(stream.queue for stream in self.streams))
        while any(stream.queue for stream in self.streams):
            ready = [stream for stream in self.streams if stream.queue and stream.blocked is None]
            self._step(min(ready, key=lambda stream: stream.queue[0].number))

    def _needed(self, event: Event) -> Stream:
        """The stream that must take a step for `event` to come."""
        stream = event.stream
        while stream.blocked is not None:
            stream = stream.blocked.stream
        return stream

    def _run_others(self) -> None:
        """Let streams run ahead: alike on all ranks where they meet, else at random."""
        if self.mode == "eager":
            while ready := [one for one in self.streams if one is not self.compute and one.queue and one.blocked is None]:
                self._step(min(ready, key=lambda stream: stream.queue[0].number))
        if self.mode != "random" or self.random.random() < 0.5:
            return
        streams = self.streams[:]
        self.random.shuffle(streams)
        for stream in streams:
            while stream.queue and stream.blocked is None and not stream.queue[0].meets_others:
                self._step(stream)
                if self.random.random() < 0.1:
                    break

    def _run_beside(self, ended: Callable[[], bool]) -> None:
        """Let all streams run until `ended`, each as far as it can."""
        moved = time.monotonic()
        while not ended():
            idle = True
            for stream in self.streams:
                while stream.queue and stream.blocked is None and self._begin_or_end(stream):
                    idle = False
            now = time.monotonic()
            if not idle:
                moved = now
            elif now - moved > self.patience:
                raise Deadlock(f"{sum(bool(stream.queue) for stream in self.streams)} streams wait")
            else:
                time.sleep(ASLEEP)

    def _begin_or_end(self, stream: Stream) -> bool:
        """Run the next op of a stream, which ends when its requests have; whether it has ended."""
        op = stream.queue[0]
        if op.requests is None:
            op.requests = (op.run() if op.run is not None else None) or []
        if not MPI.Request.Testall(op.requests):
            return False
        stream.queue.popleft()
        return True

    def _step(self, stream: Stream) -> None:
        op = stream.queue.popleft()
        stream.time = max(stream.time, op.waits.time if op.waits is not None else 0.0) + op.milliseconds
        if op.run is not None:
            op.run()

    # -- memory ------------------------------------------------------------------------------------------------------------

    def put(self, values: np.ndarray) -> FakeArray:
        """`values` on the device, once the caller's stream has come so far."""
        array = self.empty(values.shape, values.dtype, "C" if values.flags.c_contiguous else "F")
        view, values = array._view, values.copy()
        self.queue(self.compute, lambda: np.copyto(view, values))
        return array

    def read(self, array: FakeArray) -> np.ndarray:
        """Return what `array` holds once the caller's stream has done what it was given."""
        self.record(self.compute).synchronize()
        return array._view.copy()

    def empty(self, shape: Sequence[int], dtype: Any, order: Any = "C") -> FakeArray:
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        data = np.full(max(size, 1), POISON, np.uint8)
        self.allocated.append(data)
        memory = Memory()
        # The allocator hands freed memory to whom the same stream serves next: poison comes in the order of that stream.
        weakref.finalize(memory, self.queue, self.compute, lambda: data.fill(POISON)).atexit = False
        return FakeArray(self, memory, np.ndarray(tuple(shape), dtype, data, order=order))


class Memory:
    """An allocation; all views hold it, and no op that is queued does."""


class FakeArray:
    """An array of a fake device, as CuPy's are: what it holds is only read by what is queued."""

    __array_ufunc__ = None

    def __init__(self, device: Device, memory: Memory, view: np.ndarray) -> None:
        self._device, self._memory, self._view = device, memory, view
        self.shape, self.dtype, self.itemsize, self.nbytes = view.shape, view.dtype, view.dtype.itemsize, view.nbytes
        self.flags, self.ndim, self.size, self.strides = view.flags, view.ndim, view.size, view.strides

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        raise TypeError("the host reads device memory")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self._view.__array_interface__["data"][0]
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (address, False), "version": 3}

    def __len__(self) -> int:
        return self.shape[0]

    def _on(self, view: np.ndarray) -> FakeArray:
        return FakeArray(self._device, self._memory, view)

    def __getitem__(self, key: Any) -> FakeArray:
        view = self._view[key]
        if not isinstance(view, np.ndarray) or not (view.base is not None or view.size == 0):
            raise TypeError("the host reads device memory")
        return self._on(view)

    def __setitem__(self, key: Any, value: Any) -> None:
        copyto(self[key], value)

    def reshape(self, *shape: Any) -> FakeArray:
        if not self.flags.c_contiguous and not np.shares_memory(self._view.reshape(*shape), self._view):
            return asarray(self, "C").reshape(*shape)
        return self._on(self._view.reshape(*shape))

    def view(self, dtype: Any) -> FakeArray:
        return self._on(self._view.view(dtype))

    def astype(self, dtype: Any) -> FakeArray:
        return copyto(self._device.empty(self.shape, dtype), self)

    @property
    def T(self) -> FakeArray:
        return self._on(self._view.T)

    def conj(self) -> FakeArray:
        return conjugate(self, out=empty(self.shape, self.dtype, device=self._device))

    def _binary(self, function: Any, other: Any, out: FakeArray | None = None) -> FakeArray:
        if out is None:
            kind = function(np.ones((), self.dtype), other if np.isscalar(other) else np.ones((), other.dtype)).dtype
            out = self._device.empty(
                np.broadcast_shapes(self.shape, np.shape(other) if np.isscalar(other) else other.shape), kind
            )
        left, right, target = self._view, other if np.isscalar(other) else other._view, out._view
        self._device.queue(self._device.compute, lambda: function(left, right, out=target))
        return out

    def __iadd__(self, other: Any) -> FakeArray:
        return self._binary(np.add, other, self)

    def __imul__(self, other: Any) -> FakeArray:
        return self._binary(np.multiply, other, self)

    def __add__(self, other: Any) -> FakeArray:
        return self._binary(np.add, other)

    def __sub__(self, other: Any) -> FakeArray:
        return self._binary(np.subtract, other)

    def __mul__(self, other: Any) -> FakeArray:
        return self._binary(np.multiply, other)

    __rmul__ = __mul__

    def get(self) -> np.ndarray:
        return self._device.read(self)

    def __matmul__(self, other: FakeArray) -> FakeArray:
        return matmul(self, other)


DEFAULT: list[Device] = []
"""The device on which `empty` makes arrays, as CuPy's current one; the last that a test has taken."""


def use(device: Device) -> Device:
    DEFAULT[:] = [device]
    return device


def empty(shape: Sequence[int], dtype: Any, order: Any = "C", device: Device | None = None) -> FakeArray:
    return (device or DEFAULT[0]).empty(shape, dtype, order)


def copyto(out: FakeArray, source: Any) -> FakeArray:
    target = out._view
    values = source._view if isinstance(source, FakeArray) else source
    assert isinstance(source, FakeArray) or np.isscalar(source), "the host's array on a device"
    out._device.queue(out._device.compute, lambda: np.copyto(target, values, casting="unsafe"))
    return out


def asarray(array: FakeArray, order: Any = None) -> FakeArray:
    if order is None or array.flags.c_contiguous:
        return array
    return copyto(array._device.empty(array.shape, array.dtype), array)


def moveaxis(array: FakeArray, source: int, target: int) -> FakeArray:
    return array._on(np.moveaxis(array._view, source, target))


def add(left: FakeArray, right: FakeArray, out: FakeArray) -> FakeArray:
    return left._binary(np.add, right, out)


def conjugate(array: FakeArray, out: FakeArray) -> FakeArray:
    source, target = array._view, out._view
    array._device.queue(array._device.compute, lambda: np.conjugate(source, out=target))
    return out


def matmul(left: FakeArray, right: FakeArray, out: FakeArray | None = None) -> FakeArray:
    out = left._device.empty((left.shape[0], right.shape[1]), left.dtype) if out is None else out
    return left._binary(np.matmul, right, out)


def array(source: FakeArray, order: Any = "C") -> FakeArray:
    return copyto(source._device.empty(source.shape, source.dtype, order), source)


def _called(device: Device, call: tuple[Any, ...], run: Callable[[], None], size: int = 0) -> None:
    """Queue a product on the caller's stream, and list it."""
    device.calls.append(call)
    device.queue(device.compute, run, milliseconds=device.takes("gemm", size))


sys.modules[f"{__name__}.cublas"] = fake_cublas.plain(_called)
sys.modules[f"{__name__}.cuda"] = fake_cublas.cuda(lambda call, run: _called(DEFAULT[0], call, run))
