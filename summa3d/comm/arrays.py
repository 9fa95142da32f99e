# The few array operations that communication needs, for numpy and torch alike. Imports numpy; never torch itself.
# A torch tensor is recognised by a method that numpy arrays lack, so that summa3d.gemm works where torch is not installed.
# Next: transport.py, which hands the bytes to MPI.
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

Array = Any
"""A numpy array or a torch tensor on the CPU, C-contiguous where it is communicated."""


def is_torch(array: Array) -> bool:
    return hasattr(type(array), "data_ptr")


def address(array: Array) -> int:
    """Where the first element lies."""
    return int(array.data_ptr() if is_torch(array) else array.__array_interface__["data"][0])


def empty(shape: Sequence[int], like: Array) -> Array:
    """An uninitialised C-ordered array of `like`'s kind, dtype and device."""
    if is_torch(like):
        return like.new_empty(tuple(shape))
    return np.empty(tuple(shape), like.dtype)


def contiguous(array: Array) -> Array:
    """`array` itself if it is C-contiguous, else a C-ordered copy."""
    if not is_torch(array):
        return np.asarray(array, order="C")
    return array if is_contiguous(array) else array.detach().resolve_conj().resolve_neg().contiguous()


def detached(array: Array) -> Array:
    """`array` without its history of gradients."""
    return array.detach() if is_torch(array) else array


def is_contiguous(array: Array) -> bool:
    """Whether the memory holds the elements in C order, as they are (torch may leave a conjugation or a sign to its readers)."""
    if not is_torch(array):
        return bool(array.flags.c_contiguous)
    return array.is_contiguous() and not array.is_conj() and not array.is_neg()


def swap_front(array: Array, dim: int) -> Array:
    """A view with `dim` moved to the front."""
    return array.movedim(dim, 0) if is_torch(array) else np.moveaxis(array, dim, 0)


def restore_front(array: Array, dim: int) -> Array:
    """The inverse of `swap_front`."""
    return array.movedim(0, dim) if is_torch(array) else np.moveaxis(array, 0, dim)


def copy_into(out: Array, source: Array) -> Array:
    """Copy `source` into `out`, in place; returns `out`."""
    if is_torch(out):
        out.copy_(source)
    else:
        np.copyto(out, source)
    return out


def cast(array: Array, like: Array) -> Array:
    """`array` in the dtype of `like`."""
    return array.to(like.dtype) if is_torch(array) else array.astype(like.dtype)


def widen(array: Array) -> Array:
    """A 16-bit float array in float32."""
    return array.detach().float() if is_torch(array) else array.astype(np.float32)


def dtype_name(array: Array) -> str:
    """``float32``, ``bfloat16``, ``int64``, … for numpy and torch alike."""
    return _name_of(array.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_half(array: Array) -> bool:
    """True for the 16-bit floats, whose sums are accumulated in float32."""
    return dtype_name(array) in ("float16", "bfloat16")


def sum_parts(parts: Array, out: Array) -> Array:
    """out = Σ parts over their first dim, always in the order 0, 1, …, so that a sum is the same in every run.

    16-bit floats are accumulated in float32 and rounded once.
    """
    if is_half(parts):
        total = widen(parts[0])
        for part in parts[1:]:
            total += widen(part)
        return copy_into(out, total)
    if len(parts) == 1:
        return copy_into(out, parts[0])
    if is_torch(parts):
        import torch

        torch.add(parts[0], parts[1], out=out)
    else:
        np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out


def raw(array: Array) -> np.ndarray:
    """The memory of a C-contiguous array as a flat numpy array; 16-bit floats as uint16, which MPI can carry."""
    if is_torch(array):
        import torch

        flat = array.detach().reshape(-1)
        return flat.view(torch.uint16).numpy() if is_half(array) else flat.numpy()
    flat = array.reshape(-1)
    return flat.view(np.uint16) if is_half(array) else flat


def delivered(out: Array, dim: int, into: Array | None) -> Array:
    """`out`, gathered with its dim in front, in the caller's order of dims."""
    result = restore_front(out, dim)
    return contiguous(result) if into is None else copy_into(into, result)


def into_problem(into: Array | None, array: Array, shape: Sequence[int]) -> str | None:
    """Why `into` cannot take a result of `shape` and of the dtype of `array`."""
    if into is None or (tuple(into.shape) == tuple(shape) and into.dtype == array.dtype):
        return None
    return f"into is {tuple(into.shape)} {dtype_name(into)}; the result is {tuple(shape)} {dtype_name(array)}."


def count(array: Array) -> int:
    """Its elements."""
    return prod(array.shape)


def share(n: int, parts: int, index: int) -> int:
    """This rank's part of the balanced split of n."""
    return n // parts + (index < n % parts)
