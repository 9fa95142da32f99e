"""Products of 16-bit floats on a device by cuBLAS through CuPy, summed in float32, without copies of the operands."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ...comm.device.arrays import Array, address, contiguous, dtype_name, is_torch, library_of
from .strides import by_rows, row_step

TURNS = {"n": "CUBLAS_OP_N", "t": "CUBLAS_OP_T"}
TYPES = {"float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF", "float32": "CUDA_R_32F"}


def multiply_halves(a: Array, b: Array, form: str, out: Array, alpha: float, beta: float) -> None:
    """out = α·op(A)·op(B) + β·out in one call; A, B of one 16-bit float, out of the same or of float32, rows of out adjacent.

    Queued on the caller's stream. Operands that lie neither by rows nor by columns are copied; nothing else is allocated.
    """
    form = form.replace("c", "t")  # 16-bit floats are real
    first, turn_a = by_rows(a, form[0]) or (contiguous(a), form[0])
    second, turn_b = by_rows(b, form[1]) or (contiguous(b), form[1])
    if is_torch(out) and out.is_meta:
        return  # a dry run: only the copies above are recorded
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
            *(address(second), operands, row_step(second)),
            *(address(first), operands, row_step(first)),
            *(at + factors.itemsize, address(out), sums, row_step(out)),
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
