"""Select this rank's device, and make it current in CuPy and torch with one memory pool for both."""

from __future__ import annotations

import os
import sys
from typing import Any

from mpi4py import MPI

from ...errors import ConfigError
from ..health.agreement import agree_on_error
from .arrays import DEVICES, Array, is_on_device
from .cupy import CupyBackend

VARIABLE = "SUMMA3D_DEVICE"
WIDE_SUMS, TF32 = 16, 3  # cublasMath_t: DISALLOW_REDUCED_PRECISION_REDUCTION, TF32_TENSOR_OP_MATH; CuPy names neither


def requested_device(name: str | None = None) -> str:
    """Device for arrays: `name`, else SUMMA3D_DEVICE, else cpu. Raises ConfigError for a device that does not exist."""
    wanted = name or os.environ.get(VARIABLE) or "cpu"
    if wanted not in DEVICES:
        raise ConfigError(f"device {wanted!r} does not exist. Devices: {', '.join(DEVICES)} ({VARIABLE} names one as well).")
    return wanted


def device_number(local_rank: int, visible: int) -> int:
    """The device number of the node's rank `local_rank` among its visible devices, round robin."""
    return local_rank % visible


def take_device(comm: MPI.Intracomm, tf32: bool = False) -> int:
    """Make this rank's device the current one of CuPy, and of torch where it is loaded; returns its number (collective).

    CuPy then takes its memory from torch's pool, so that what one frees the other can have. torch's backward threads take the
    device and the stream of the forward by themselves, and device/cupy.py reads torch's stream on the thread that calls.
    Products of float32 are taken in float32, or with `tf32` on operands rounded to 11 bits; 16-bit floats are summed in float32.
    CuPy has a cuBLAS handle for each thread: its products on other threads than the caller's take cuBLAS's own settings.
    Raises ConfigError on all ranks where one of them has no GPU, no CuPy, or a torch that is loaded and cannot use the GPU.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = node.rank
    node.Free()
    error: Exception | None = None
    number = 0
    try:
        number = device_number(local_rank, visible_devices())
        check_torch(sys.modules.get("torch"))
    except ConfigError as caught:
        error = caught
    agree_on_error(comm, error)
    import cupy

    cupy.cuda.Device(number).use()
    cupy.cuda.cublas.setMathMode(cupy.cuda.get_cublas_handle(), WIDE_SUMS | (TF32 if tf32 else 0))
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        set_precision(torch, tf32)
        torch.cuda.set_device(number)
        share_pool(cupy, torch)
    return number


def check_torch(torch: Any) -> None:
    """Raise ConfigError where torch is loaded, and cannot use the GPU that CuPy sees."""
    if torch is not None and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ConfigError(
            f"device cuda: torch {torch.__version__}, {built}, sees no GPU where CuPy does. "
            "Install a torch for this machine's CUDA, or use device cpu."
        )


def set_precision(torch: Any, tf32: bool) -> None:
    """Set what torch's products on devices may round: the operands of float32 only with `tf32`, sums of 16-bit floats never."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def placed(array: Array, device: str) -> Array:
    """A numpy array where `device` says: itself, or a copy on the current device."""
    if device == "cpu":
        return array
    import cupy

    return cupy.asarray(array)


def settle(array: Array) -> None:
    """Return once what was queued on the caller's stream is done; on the host it is."""
    if is_on_device(array):
        backend = CupyBackend()
        backend.record(backend.current(array)).synchronize()


def visible_devices() -> int:
    """Number of CUDA devices that this process sees, at least 1. Raises ConfigError where there is none, or no CuPy to use it."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"device cuda needs CuPy, which cannot be imported here ({error}). Install it, or use device cpu."
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"device cuda: there is no GPU here that CUDA can use ({error}). Use device cpu.") from error
    if count == 0:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(f"device cuda: CUDA sees no GPU (CUDA_VISIBLE_DEVICES={seen}). Let it see one, or use device cpu.")
    return count


def share_pool(cupy: Any, torch: Any) -> None:
    """Make CuPy allocate from torch's pool, on CuPy's current stream."""

    def malloc(nbytes: int, device: int) -> int:
        stream = cupy.cuda.get_current_stream().ptr
        return int(torch.cuda.caching_allocator_alloc(nbytes, device, stream)) if nbytes else 0

    def free(address: int, device: int) -> None:
        if address:
            torch.cuda.caching_allocator_delete(address)

    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
