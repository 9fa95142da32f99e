"""The CUDA device through CuPy, for arrays of CuPy and of torch.

Every method is one call or two, so that code which only a GPU can run stays easy to review.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...errors import ConfigError
from .arrays import Array, is_torch

DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses say which way


class CupyBackend:
    """Streams, events and copies of the current CUDA device. Raises ConfigError where CuPy is not installed."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(f"Device arrays are communicated by CuPy, which cannot be imported here: {error}.") from error
        self._cuda = cupy.cuda
        self._nccl: Any = None
        with suppress(ImportError):
            from cupy.cuda import nccl

            self._nccl = nccl if nccl.available else None

    @property
    def nccl(self) -> Any:
        """CuPy's NCCL bindings; None where they are missing or cannot be used."""
        return self._nccl

    def identity(self) -> str:
        """Host name and PCI bus id of the current device."""
        device = self._cuda.runtime.getDevice()
        return f"{socket.gethostname()}/{self._cuda.runtime.deviceGetPCIBusId(device)}"

    def current(self, array: Array) -> Any:
        """torch's current stream of the tensor's device, or CuPy's: both belong to the calling thread, autograd's among them."""
        if not is_torch(array):
            return self._cuda.get_current_stream()
        import torch

        from summa3d.kernels.streams import taken_over

        return taken_over(self._cuda, torch.cuda.current_stream(array.device).cuda_stream)

    def stream(self) -> Any:
        """A new non-blocking stream: the default stream does not order it."""
        return self._cuda.Stream(non_blocking=True)

    def record(self, stream: Any, timing: bool = False) -> Any:
        """A new CUDA event, recorded on `stream`."""
        event = self._cuda.Event(disable_timing=not timing)
        event.record(stream)
        return event

    def mark(self, event: Any, stream: Any) -> None:
        """Record an existing CUDA event anew on `stream`."""
        event.record(stream)

    def milliseconds(self, start: Any, end: Any) -> float:
        """Elapsed time between two timing events, as CUDA measures it."""
        return float(self._cuda.get_elapsed_time(start, end))

    def wait(self, stream: Any, event: Any) -> None:
        """Make `stream` wait for `event`; the host does not wait."""
        stream.wait_event(event)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue an asynchronous D2H or H2D copy on `stream`; no bytes queue nothing."""
        if nbytes:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, DEFAULT_KIND, stream.ptr)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked memory of CuPy's pinned pool, as bytes."""
        return np.frombuffer(self._cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def buffer(self, address: int, nbytes: int) -> SimpleNamespace:
        """Device memory behind the CUDA array interface, which mpi4py reads."""
        data = (address if nbytes else 0, False)
        return SimpleNamespace(__cuda_array_interface__={"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 3})
