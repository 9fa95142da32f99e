"""What a tensor says of itself (`device`, `is_cuda`), and what torch refuses, goes by the storage that it lies in.

Beside real numbers, that gives: a mix of host and device tensors raises; a device tensor handed to numpy raises; what has the
host wait for the device, and what is copied between them, is listed. Kernels are the .cu files compiled for the host, NCCL is
MPI, and everything runs when it is queued: the order of streams is tested on fake_device alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import fake_cublas
import fake_device
import host_kernels
import torch
from mpi4py import MPI
from summa3d.kernels import load
from summa3d.kernels.rows import Fused
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from summa3d.comm.device import cupy as cupy_backend
from summa3d.comm.device import select as places
from summa3d.gemm.local import cublas

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operations that have the host wait for what a device tensor holds."""
COPIES = {aten.copy_.default, aten._to_copy.default}
T = torch.Tensor
GETTERS = {getattr(T, name).__get__: name for name in ("device", "is_cuda", "is_cpu")}


class Storages:
    """The storages that lie on the device, or are pinned; a storage that is gone is not."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensor: T) -> None:
        if len(self._known) > 10_000:
            self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor: T) -> bool:
        ref = self._known.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()


class Pretended(TorchFunctionMode):
    """The device of this rank, for as long as it is entered.

    waits : what had the host wait for it, by name. copies : (direction, elements, whether the host's side was pinned). kernels :
    names, in the order of their start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.pinned = Storages(), Storages()
        self.waits: list[str] = []
        self.copies: list[tuple[str, int, bool]] = []
        self.kernels: list[str] = []
        self.place: str | None = None
        self._below = _Below(self)

    def __enter__(self) -> Pretended:
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in GETTERS:
            here = args[0] in self.storages
            return {"device": CUDA if here else torch.device("cpu"), "is_cuda": here, "is_cpu": not here}[GETTERS[func]]
        if func in (T.backward, torch.autograd.backward):
            given = args[1] if len(args) > 1 else kwargs.get("gradient" if func is T.backward else "grad_tensors")
            return self._differentiated(_several(args[0]), (), _several(given), keep=bool(kwargs.get("retain_graph")))
        if func is torch.autograd.grad:
            given, keep = kwargs.get("grad_outputs"), bool(kwargs.get("retain_graph"))
            return self._differentiated(
                _several(args[0]), _several(args[1]), _several(given), bool(kwargs.get("allow_unused")), keep
            )
        if func in (T.numpy, T.__array__) and args[0] in self.storages:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        if func is T.tolist and args[0] in self.storages:
            self.waits.append("tolist")
        if func is T.pin_memory:
            assert args[0] not in self.storages
            copy = args[0].clone()
            self.pinned.add(copy)
            return copy
        if func in (T.cpu, T.cuda, T.to):
            return self._moved(func, args, kwargs)
        pinned = kwargs.pop("pin_memory", False)
        result = self._made(func, args, kwargs) if kwargs.get("device") is not None else func(*args, **kwargs)
        if pinned:
            self.pinned.add(result)
        return result

    def _differentiated(
        self, outputs: tuple[T, ...], inputs: tuple[T, ...], given: tuple[T, ...], allow_unused: bool = True, keep: bool = False
    ) -> Any:
        """Both `backward` and torch.autograd.grad, within which this mode is on, as it is not in what it calls itself."""
        with torch._C.DisableTorchFunction():
            gradients = given or tuple(map(torch.ones_like, outputs))
        super().__enter__()
        try:
            return torch.autograd.graph._engine_run_backward(
                outputs, gradients, keep, False, inputs, allow_unused, accumulate_grad=not inputs
            )
        finally:
            super().__exit__(None, None, None)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function makes where its argument `device` says."""
        asked = torch.device(kwargs["device"])
        before, self.place = self.place, asked.type
        try:
            result = func(*args, **kwargs | {"device": "cpu" if asked.type == "cuda" else asked})
            if self.place == "cuda":
                self.storages.add(result)
            return result
        finally:
            self.place = before

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensor.to, cpu and cuda: a copy where the tensor goes to the other side."""
        source, *rest = args
        target = {T.cpu: "cpu", T.cuda: "cuda"}.get(func)
        dtypes: list[Any] = []
        for value in [*rest, kwargs.get("device")]:
            if isinstance(value, (str, torch.device)):
                target = torch.device(value).type
            elif isinstance(value, T):
                target, dtypes = "cuda" if value in self.storages else "cpu", [value.dtype]
            elif value is not None:
                dtypes.append(value)
        if target != "cuda" and source not in self.storages:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        kwargs.setdefault("dtype", dtypes[0] if dtypes else source.dtype)
        if target is None or (target == "cuda") is (source in self.storages):
            return T.to(source, **kwargs)
        before, self.place = self.place, target
        try:
            return T.to(source, **kwargs | {"copy": True})
        finally:
            self.place = before


class _Below(TorchDispatchMode):
    """Every operation, forward and backward: where its result lies, and whether its operands lie together."""

    def __init__(self, device: Pretended) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self.device, kwargs or {}
        with torch._C.DisableTorchFunction():
            tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
            there = [one for one in tensors if one in device.storages]
            if there and func not in COPIES:
                mixed = [one for one in tensors if one not in device.storages and one.dim() > 0]
                if mixed:
                    raise RuntimeError(f"{func}: operands on cuda:0 and cpu, {[tuple(one.shape) for one in tensors]}")
            if there and func in WAITS:
                device.waits.append(str(func))
            self._note_copy(func, args)
            result = func(*args, **kwargs)
            place = device.place or ("cuda" if there else "cpu")
            if func is not aten.copy_.default and place == "cuda":
                for one in _tensors((result,)):
                    device.storages.add(one)
            return result

    def _note_copy(self, func: Any, args: Any) -> None:
        device = self.device
        if func not in COPIES:
            return
        source = args[1] if func is aten.copy_.default else args[0]
        target = args[0] in device.storages if func is aten.copy_.default else (device.place or _place(source, device)) == "cuda"
        if target != (source in device.storages):
            host = source if target else args[0]
            device.copies.append(("to device" if target else "to host", source.numel(), host in device.pinned))


def _tensors(arguments: Any) -> Iterator[T]:
    """The tensors among an operation's arguments or results, lists of them included."""
    for one in arguments:
        if isinstance(one, T):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from _tensors(one)


def _several(tensors: Any) -> tuple[T, ...]:
    return () if tensors is None else (tensors,) if isinstance(tensors, T) else tuple(tensors)


def _place(tensor: T, device: Pretended) -> str:
    return "cuda" if tensor in device.storages else "cpu"


class Launcher(host_kernels.HostLauncher):
    """Starts the kernels compiled for the host on pretended device tensors, and on no others."""

    device = CUDA

    def __init__(self, libraries: Any, pretended: Pretended) -> None:
        super().__init__(libraries, 4, 1 << 20)
        self.pretended = pretended

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Any) -> None:
        for argument in arguments:
            assert not isinstance(argument, T) or argument.is_cuda, f"{kernel} was given a host tensor"
        self.pretended.kernels.append(kernel)
        with torch._C.DisableTorchFunction():
            super().__call__(kernel, blocks, threads, *arguments)


class Backend(fake_device.Device):
    """The device's streams and NCCL, for torch tensors: what is queued runs at once.

    Each thread has a current stream of its own. waited : the pairs (who waits, whom for) of streams, in order.
    """

    def __init__(self, world: Any = None) -> None:
        super().__init__(MPI.COMM_WORLD if world is None else world)
        self.streams_of: dict[int, fake_device.Stream] = {}
        self.waited: list[tuple[fake_device.Stream, fake_device.Stream]] = []

    def current(self, array: Any) -> fake_device.Stream:
        assert array.is_cuda, "the host's array on a device"
        thread = threading.get_ident()
        if thread not in self.streams_of:
            self.streams_of[thread] = self.stream()
        return self.streams_of[thread]

    def wait(self, stream: Any, event: Any) -> None:
        self.waited.append((stream, event.stream))
        super().wait(stream, event)

    def queue(self, stream: Any, run: Any, waits: Any = None, meets_others: bool = False, milliseconds: float = 0.0) -> None:
        if run is not None:
            run()


@contextmanager
def pretended(monkeypatch: Any, libraries: Any) -> Iterator[tuple[Pretended, list[Backend]]]:
    """The device, and the backends that are made on it: NCCL, kernels and `take_device` are those of the pretended one."""
    device, backends = Pretended(), []
    of_cupy, at_once = cublas.bindings, fake_cublas.cuda(lambda call, run: run())

    def bindings(array: Any) -> Any:
        return (at_once, nullcontext()) if isinstance(array, T) else of_cupy(array)

    def backend() -> Backend:
        backends.append(Backend())
        return backends[-1]

    with monkeypatch.context() as patch:
        kernels = Fused(Launcher(libraries, device))
        patch.setattr(load, "fused", lambda wanted: kernels)
        patch.setattr(cupy_backend, "CupyBackend", backend)
        patch.setattr(places, "take_device", lambda comm, tf32=False: 0)
        patch.setattr("summa3d.train.device.take_device", lambda comm, tf32=False: 0)
        patch.setattr(places, "CupyBackend", backend)
        patch.setattr(cublas, "bindings", bindings)
        for account in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, account, lambda device: 0)
        with device:
            yield device, backends
