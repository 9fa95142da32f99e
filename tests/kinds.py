"""Arrays of every kind and dtype that summa3d communicates, from small whole numbers that all of them hold exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from summa3d.comm.device.arrays import numpy_dtype

DTYPES = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def numbers(dtype: str, shape: tuple[int, ...], *seed: int) -> np.ndarray:
    """Whole numbers below 8 (0 and 1 for bool, whole parts for complex), so that sums over 27 ranks are exact in 8 bits."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 2 if dtype == "bool" else 8, shape)
    return values + 1j * random.integers(0, 8, shape) if dtype.startswith("complex") else values


def array(kind: str, dtype: str, values: Any, transposed: bool = False) -> Any:
    """`values` as a numpy array or torch tensor; `transposed` gives it the memory of the transpose (not C-ordered)."""
    values = np.asarray(values)
    if transposed:
        turned = array(kind, dtype, values.T)
        return turned.T if kind == "numpy" else turned.permute(tuple(reversed(range(values.ndim))))
    if kind == "numpy":
        values = values.astype(numpy_dtype(dtype))
        return np.ascontiguousarray(values) if values.ndim else values
    import torch

    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    return torch.from_numpy(wide.copy()).to(getattr(torch, dtype))


def plain(value: Any) -> np.ndarray:
    """Any array as float64 or complex128 numpy."""
    if not isinstance(value, np.ndarray):
        value = value.detach().to(value.dtype.to_complex() if value.is_complex() else value.double().dtype).numpy()
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)


def is_like(value: Any, kind: str, dtype: str) -> bool:
    """Return whether `value` is C-ordered, of this kind and dtype."""
    if kind == "numpy":
        return isinstance(value, np.ndarray) and value.dtype == dtype and value.flags.c_contiguous
    return not isinstance(value, np.ndarray) and str(value.dtype) == f"torch.{dtype}" and value.is_contiguous()
