"""CuBLAS without a GPU: the names of `cupy.cuda` and `cupy.cublas` by which products are taken, on the arrays of fake_device.

gemmEx reads addresses and leading dims by columns, with nothing else known of the arrays, as the real one.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import numpy as np

Queue = Callable[[tuple[Any, ...], Callable[[], None]], None]
"""Puts what a call does on the stream on which CuPy queues; the call's own words come first."""
TURNED = {10: False, 11: True}
WIDE, HALF, BRAIN = 40, 41, 42
SINGLE_SUMS, ANY = 68, -1


class Cublas:
    """`cupy.cuda.cublas`: its constants are numbers of no meaning elsewhere, so that one in another's place is an error."""

    CUBLAS_OP_N, CUBLAS_OP_T = 10, 11
    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = SINGLE_SUMS, ANY

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def gemmEx(self, handle: int, turn_a: int, turn_b: int, m: int, n: int, k: int, alpha: int, *operands: int) -> None:
        """C (m×n) = α·op(A)·op(B) + β·C by columns: address, type, leading dim of A, of B; β, those of C; type of sums, rule."""
        a, type_a, step_a, b, type_b, step_b, beta, c, type_c, step_c, sums, rule = operands
        assert (handle, sums, rule) == (77, SINGLE_SUMS, ANY)
        assert type_a == type_b in (HALF, BRAIN) and type_c in (WIDE, type_a)
        assert step_a >= (k if TURNED[turn_a] else m) and step_b >= (n if TURNED[turn_b] else k) and step_c >= m
        factors = [ctypes.c_float.from_address(address).value for address in (alpha, beta)]  # read at the call, as from a host

        def run() -> None:
            left = _columns(a, type_a, step_a, *((k, m) if TURNED[turn_a] else (m, k)))
            right = _columns(b, type_b, step_b, *((n, k) if TURNED[turn_b] else (k, n)))
            product = factors[0] * (_wide(left.T if TURNED[turn_a] else left) @ _wide(right.T if TURNED[turn_b] else right))
            target = _columns(c, type_c, step_c, m, n)
            _store(target, product if factors[1] == 0 else product + factors[1] * _wide(target))

        self.queue(("gemm", *factors), run)


def cuda(queue: Queue) -> Any:
    """`cupy.cuda`, of which products take the handle, the constants and gemmEx."""
    return types.SimpleNamespace(
        cublas=Cublas(queue),
        get_cublas_handle=lambda: 77,
        runtime=types.SimpleNamespace(CUDA_R_32F=WIDE, CUDA_R_16F=HALF, CUDA_R_16BF=BRAIN),
    )


def _columns(address: int, kind: int, step: int, rows: int, columns: int) -> np.ndarray:
    """The matrix that lies there by columns; bfloat16 as the 16 bits that it has."""
    dtype = np.dtype({WIDE: np.float32, HALF: np.float16, BRAIN: np.uint16}[kind])
    memory = (ctypes.c_char * (((columns - 1) * step + rows) * dtype.itemsize)).from_address(address)
    return np.ndarray((rows, columns), dtype, memory, strides=(dtype.itemsize, step * dtype.itemsize))


def _wide(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.uint16:
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def _store(target: np.ndarray, values: np.ndarray) -> None:
    if target.dtype != np.uint16:
        target[...] = values
        return
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    target[...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even; no test multiplies NaN


def plain(queue: Callable[..., None]) -> Any:
    """`cupy.cublas`: gemm of float32, float64 and complex arrays of one dtype."""

    def gemm(turn_a: str, turn_b: str, a: Any, b: Any, out: Any, alpha: Any, beta: Any) -> Any:
        left, right = a._view.T if turn_a == "T" else a._view, b._view.T if turn_b == "T" else b._view
        assert turn_a in "NT" and turn_b in "NT" and out.dtype.char in "fdFD" and a.dtype == b.dtype == out.dtype
        target = out._view

        def run() -> None:
            product = alpha * (left @ right)
            np.copyto(target, product if beta == 0 else product + beta * target)

        queue(a._device, ("gemm", alpha, beta), run, out.size * left.shape[1])
        return out

    return types.SimpleNamespace(gemm=gemm)
