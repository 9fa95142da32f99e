"""Array operations that communication needs, for numpy, CuPy and torch alike.

A torch tensor is recognised by a method, a CuPy array by its CUDA array interface: neither library need be installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from math import prod
from typing import Any, Literal

import numpy as np

from ...dtypes import HALVES
from ...errors import ConfigError

Array = Any
"""A numpy array, a CuPy array or a torch tensor, C-contiguous where it is communicated."""
DEVICES = ("cpu", "cuda")
QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
quiet = np.errstate(**QUIET)
"""Decorates numpy's arithmetic on blocks: inf and nan say what happened, and each rank would print warnings of its own.

One that a user has made an error would leave the other ranks waiting. It costs 0.6 µs, which torch's arrays do not pay.
"""

_meta_is_device = ContextVar("_meta_is_device", default=False)


@contextlib.contextmanager
def meta_on_device() -> Iterator[None]:
    """Within the block, torch tensors without memory (device meta) count as a CUDA device's: what a device's dry run needs."""
    token = _meta_is_device.set(True)
    try:
        yield
    finally:
        _meta_is_device.reset(token)


def is_torch(array: Array) -> bool:
    """Return whether `array` is a torch tensor."""
    kind: Any = type(array)
    return _is_torch_type(kind)


@cache
def _is_torch_type(kind: Any) -> bool:
    return hasattr(kind, "data_ptr")


def is_on_device(array: Array) -> bool:
    """Return whether the memory is a CUDA device's: a CuPy array, or a torch tensor that says so."""
    if is_torch(array):
        return bool(array.is_cuda) or (array.is_meta and _meta_is_device.get())
    return not isinstance(array, np.ndarray) and hasattr(type(array), "__cuda_array_interface__")


def place_of(array: Array) -> Any:
    """Kind of an array and place of its memory, as something to compare; of numpy's own arrays, a constant."""
    kind = type(array)
    if kind is np.ndarray:
        return None
    try:
        return kind, array.device, array.layout
    except AttributeError:  # not torch's
        return kind, getattr(array, "device", None)


def array_problem(array: Any, has_memory: bool = True) -> str | None:
    """Reason why this is no array that can be communicated; None if it is one. A dry run's tensors need not have memory."""
    if isinstance(array, np.ndarray):
        odd = isinstance(array, (np.matrix, np.ma.MaskedArray))
        return f"a {type(array).__name__} is no plain array; pass numpy.asarray of it" if odd else None
    if is_torch(array):
        import torch

        if array.layout is not torch.strided:
            return f"a tensor of layout {array.layout} has no elements in order; pass tensor.to_dense()"
        return "the tensor is on device meta, and has no elements" if has_memory and array.is_meta else None
    if hasattr(type(array), "__cuda_array_interface__"):
        return None
    return f"a {type(array).__name__} is no array; pass one of numpy, CuPy or torch"


def library_of(array: Array) -> Any:
    """The library that made an array: numpy, CuPy or torch, many of whose functions have the same names."""
    if isinstance(array, np.ndarray):
        return np
    return sys.modules["torch" if is_torch(array) else type(array).__module__.partition(".")[0]]


def kind_of(array: Array) -> str:
    """Facts that must be equal where arrays are combined: the library, and where the memory lies."""
    if isinstance(array, np.ndarray):
        return "numpy"
    library = library_of(array).__name__
    return f"{library} on a device" if is_on_device(array) else library


def address(array: Array) -> int:
    """Memory address of the first element."""
    if is_torch(array):
        return int(array.data_ptr())
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return int(interface["data"][0])


def overlap(array: Array, other: Array) -> bool:
    """Return whether two arrays of one kind have elements in common; columns side by side in one memory have not."""
    if isinstance(array, np.ndarray):
        return bool(np.may_share_memory(array, other) and np.shares_memory(array, other))
    if is_torch(array) and array.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if is_torch(array) and array.is_meta and array.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False  # without memory, all storages have the address 0
    return bool(np.shares_memory(_Outline(array), _Outline(other)))


class _Outline:
    """Where an array's elements lie, in a form that numpy compares without reading them: they may be a device's."""

    def __init__(self, array: Array) -> None:
        size = int(array.itemsize)
        steps = [step * size for step in array.stride()] if is_torch(array) else array.strides
        start = address(array) or (64 + array.storage_offset() * size if is_torch(array) else 0)  # without memory, from 64 on
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(array.shape),
            "strides": tuple(steps),
            "typestr": f"|V{size}",
            "data": (start, True),
        }


def empty(shape: Sequence[int], like: Array, order: Literal["C", "F"] = "C") -> Array:
    """An uninitialised array of `like`'s kind, dtype and device; in C order, or with order F in that of its transpose."""
    if is_torch(like):
        if order == "C":
            return like.new_empty(tuple(shape))
        return like.new_empty(tuple(shape)[::-1]).permute(*reversed(range(len(shape))))
    return library_of(like).empty(tuple(shape), like.dtype, order=order)


def contiguous(array: Array) -> Array:
    """`array` itself if it is C-contiguous, else a C-ordered copy."""
    if is_contiguous(array):
        return array
    if not is_torch(array):
        return library_of(array).asarray(array, order="C")
    return array.detach().resolve_conj().resolve_neg().contiguous()


def detached(array: Array) -> Array:
    """`array` without its history of gradients."""
    return array.detach() if is_torch(array) else array


def is_contiguous(array: Array) -> bool:
    """True if the memory holds the elements in C order, as they are (torch may leave a conjugation or a sign to its readers)."""
    if not is_torch(array):
        return bool(array.flags.c_contiguous)
    return array.is_contiguous() and not array.is_conj() and not array.is_neg()


def is_writable(array: Array) -> bool:
    """True if the elements may be overwritten: not of a read-only array of numpy's, nor where a tensor repeats its memory."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable)
    if not is_torch(array) or array.is_contiguous():
        return True
    return all(step or extent < 2 for step, extent in zip(array.stride(), array.shape, strict=True))


def move_dim(array: Array, dim: int, to: int) -> Array:
    """A view with `dim` moved to the place `to`; the array itself where it is there."""
    if dim == to:
        return array
    return array.movedim(dim, to) if is_torch(array) else library_of(array).moveaxis(array, dim, to)


def permuted(array: Array, dims: Sequence[int]) -> Array:
    """A view with the dims in another order."""
    return array.permute(*dims) if is_torch(array) else array.transpose(*dims)


def copy_into(out: Array, source: Array) -> Array:
    """Copy `source` into `out`, in place; returns `out`."""
    if is_torch(out):
        out.copy_(source)
    elif out.dtype == source.dtype:
        library_of(out).copyto(out, source)
    else:
        with np.errstate(**QUIET):
            library_of(out).copyto(out, source)
    return out


def cast(array: Array, like: Array) -> Array:
    """`array` in the dtype of `like`."""
    if is_torch(array):
        return array.to(like.dtype)
    with np.errstate(**QUIET):
        return array.astype(like.dtype)


def widen(array: Array) -> Array:
    """A 16-bit float array in float32."""
    return array.detach().float() if is_torch(array) else array.astype(np.float32)


def numpy_dtype(dtype: np.typing.DTypeLike) -> np.dtype:
    """numpy's dtype, or of the name bfloat16, which numpy has not, that of ml_dtypes. Raises ConfigError where it is missing."""
    if not isinstance(dtype, str) or dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ConfigError(
            "numpy has no bfloat16; the package ml_dtypes gives it one, and cannot be imported here. Install it, or take float16."
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def dtype_name(array: Array) -> str:
    """``float32``, ``bfloat16``, ``int64``, … for numpy and torch alike."""
    return _name_of(array.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_half(array: Array) -> bool:
    """True for the 16-bit floats, whose sums are accumulated in float32."""
    return dtype_name(array) in HALVES


def sum_parts(parts: Array, out: Array) -> Array:
    """out = Σ parts over their first dim, always in the order 0, 1, …, so that a sum is the same in every run.

    16-bit floats are accumulated in float32 and rounded once; torch's tensors on a device in one kernel.
    """
    if is_half(parts) and is_torch(parts):
        from summa3d.kernels import dispatch

        dispatch.kernels_for(parts).sum_parts(parts.detach(), out)
        return out
    if is_half(parts):
        return copy_into(out, sum_wide(parts))
    if len(parts) == 1:
        return copy_into(out, parts[0])
    with contextlib.nullcontext() if is_torch(parts) else np.errstate(**QUIET):
        library_of(parts).add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
    return out


@quiet
def sum_wide(parts: Sequence[Array]) -> Array:
    """The sum of 16-bit floats, in float32."""
    total = widen(parts[0])
    for part in parts[1:]:
        total += widen(part)
    return total


def raw(array: Array) -> np.ndarray:
    """The memory of a C-contiguous array as a flat numpy array; 16-bit floats as uint16, which MPI can carry."""
    if is_torch(array):
        import torch

        flat = array.detach().reshape(-1)
        return flat.view(torch.uint16).numpy() if is_half(array) else flat.numpy()
    flat = array.reshape(-1)
    return flat.view(np.uint16) if is_half(array) else flat


def to_host(array: Array) -> np.ndarray:
    """`array` as a numpy array: itself or a view on the host, a copy from a device."""
    if is_torch(array):
        return np.asarray(array.detach().cpu().numpy())
    return np.asarray(array.get() if is_on_device(array) else array)


def into_problem(into: Array | None, array: Array, shape: Sequence[int]) -> str | None:
    """Reason why `into` cannot take a result of `shape` and of the dtype of `array`."""
    if into is None:
        return None
    if kind_of(into) != kind_of(array):
        return f"into is an array of {kind_of(into)}; the result is one of {kind_of(array)}."
    if tuple(into.shape) == tuple(shape) and into.dtype == array.dtype:
        return None if is_writable(into) else "into is read-only. Pass an array that can be written, or none."
    return f"into is {tuple(into.shape)} {dtype_name(into)}; the result is {tuple(shape)} {dtype_name(array)}."


def count(array: Array) -> int:
    """Its elements."""
    return prod(array.shape)


def share(n: int, parts: int, index: int) -> int:
    """This rank's part of the balanced split of n."""
    return n // parts + (index < n % parts)


# mallopt's parameters, as glibc numbers them.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
HEAP_KEPT = 2**30  # bytes of free memory at the end of the heap that stay with the process
HEAP_LARGEST = 2**25  # bytes; larger arrays come from the system and return to it. glibc accepts no more
HEAP_STEP = 2**26  # bytes by which the heap grows; those not yet used take no memory


def keep_freed_memory() -> None:
    """Let the C library give freed arrays to the next allocation instead of back to the system.

    Workspace is allocated and freed by every product. Without this each of its pages is unmapped, faulted in and zeroed
    again: 12 000 faults, a tenth of the processor time, in a 2048³ product on 8 ranks. Does nothing without glibc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((MMAP_THRESHOLD, HEAP_LARGEST), (TRIM_THRESHOLD, HEAP_KEPT), (TOP_PAD, HEAP_STEP)):
            mallopt(parameter, value)
