# Products of 16-bit floats on a device: operands as they lie there, summed in float32, C in 16 bits or in float32.
# By cuBLAS through CuPy, for CuPy's arrays and torch's tensors alike. Imports comm.arrays; CuPy and torch when it is called.
# Next: blas.py, which comes here; plan.py, whose executors decide in what C is summed.
from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..comm.arrays import Array, address, contiguous, dtype_name, is_torch, library_of

TURNS = {"n": "CUBLAS_OP_N", "t": "CUBLAS_OP_T", "c": "CUBLAS_OP_T"}
"""op of a real matrix, by the name of its constant."""
TYPES = {"float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF", "float32": "CUDA_R_32F"}


def multiply_halves(a: Array, b: Array, form: str, out: Array, alpha: float, beta: float) -> None:
    """out = α·op(A)·op(B) + β·out in one call; A, B of one 16-bit float, out of the same or of float32, rows of out adjacent.

    Queued on the caller's stream. Operands that lie neither by rows nor by columns are copied; nothing else is allocated.
    """
    (first, step_a, turn_a), (second, step_b, turn_b) = _by_rows(a, form[0]), _by_rows(b, form[1])
    rows, columns = out.shape
    inner = a.shape[1] if form[0] == "n" else a.shape[0]
    factors = np.array([alpha, beta], np.float32)
    at = factors.ctypes.data
    cuda, on_callers_stream = bindings(out)
    operands, sums = getattr(cuda.runtime, TYPES[dtype_name(a)]), getattr(cuda.runtime, TYPES[dtype_name(out)])
    with on_callers_stream:
        # cuBLAS counts by columns: what lies by rows is the transpose to it, and Cᵀ = op(B)ᵀ·op(A)ᵀ.
        cuda.cublas.gemmEx(
            *(cuda.get_cublas_handle(), getattr(cuda.cublas, TURNS[turn_b]), getattr(cuda.cublas, TURNS[turn_a])),
            *(columns, rows, inner, at),
            *(address(second), operands, step_b),
            *(address(first), operands, step_a),
            *(at + factors.itemsize, address(out), sums, _row_step(out)),
            *(cuda.cublas.CUBLAS_COMPUTE_32F, cuda.cublas.CUBLAS_GEMM_DEFAULT),
        )


def bindings(array: Array) -> tuple[Any, AbstractContextManager[Any]]:
    """`cupy.cuda`, and the context in which what it queues goes to the current stream of the library of `array`."""
    if not is_torch(array):
        return importlib.import_module(f"{library_of(array).__name__}.cuda"), nullcontext()
    import torch

    from summa3d.kernels.streams import taken_over

    cuda = importlib.import_module("cupy.cuda")
    return cuda, taken_over(cuda, torch.cuda.current_stream(array.device).cuda_stream)


def _by_rows(array: Array, letter: str) -> tuple[Array, int, str]:
    """The matrix as it lies by rows, the elements from one row to the next, and its letter then."""
    if _row_step(array):
        return array, _row_step(array), letter
    if _row_step(array.T):
        return array.T, _row_step(array.T), "n" if letter in "tc" else "t"
    packed = contiguous(array)
    return packed, _row_step(packed), letter


def _row_step(array: Array) -> int:
    """The elements from one row to the next, where the elements of a row are adjacent and rows do not overlap; else 0."""
    rows, columns = array.shape
    if is_torch(array):
        row, element = array.stride()
    else:
        row, element = (step // array.itemsize for step in array.strides)
    if columns > 1 and element != 1:
        return 0
    if rows == 1:
        return max(columns, 1)
    return int(row) if row >= columns else 0
