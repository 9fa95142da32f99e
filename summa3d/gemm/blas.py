# C = α·op(A)·op(B) + β·C on one rank, accumulated in place: numpy's matmul cannot add to C, the BLAS that numpy loaded can.
# Imports comm.arrays only. The BLAS is found through numpy's own extension module, and checked before it is trusted.
# Next: plan.py, whose executors call `accumulate`; local.py, the product without accumulation.
from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..comm.arrays import Array, dtype_name, is_half, is_torch

LETTERS = "ntc"
"""op of a product: none, transpose, conjugate transpose."""
ROW_MAJOR, TRANSPOSE = 101, {"n": 111, "t": 112, "c": 113}
KINDS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
NAMES = ("scipy_cblas_{}gemm64_", "cblas_{}gemm64_", "cblas_{}gemm")
"""What the BLAS of numpy's wheels, of distributions with 64-bit integers, and of all others call it."""


def adds_in_place(dtype: str) -> bool:
    """Whether products of this dtype are added to C without a buffer; integers, which no BLAS multiplies, are not."""
    return _gemm("float32" if dtype in ("float16", "bfloat16") else dtype) is not None


def accumulate(
    a: Array, b: Array, form: str, out: Array, alpha: complex = 1, beta: complex = 0, scratch: Array | None = None
) -> None:
    """out = α·op(A)·op(B) + β·out for one block each; `form` is two of the letters n, t, c. With β = 0, `out` is not read.

    Rows may be strided. Allocates nothing where a row's elements are adjacent and either β = 0 or `adds_in_place`; elsewhere
    `scratch`, an array of out's shape, saves an allocation. Not for 16-bit floats, which executors widen first.
    """
    if 0 in out.shape:
        return
    if 0 in a.shape:
        return scale(out, beta)
    if is_torch(out):
        import torch

        torch.addmm(out, _op(a, form[0]), _op(b, form[1]), alpha=alpha, beta=beta, out=out)
        return
    if beta == 0 and alpha == 1 and "c" not in form:  # numpy's own call is the quickest there is
        np.matmul(_op(a, form[0]), _op(b, form[1]), out=out)
        return
    gemm = _gemm(dtype_name(out))
    if gemm is not None and all(_adjacent(array) for array in (a, b, out)):
        return gemm(a, b, form, out, alpha, beta)
    product = out if beta == 0 else np.empty_like(out) if scratch is None else scratch
    np.matmul(_op(a, form[0]), _op(b, form[1]), out=product)
    if alpha != 1:
        product *= alpha
    if beta != 0:
        add(product, out, beta)


def add(product: Array, out: Array, beta: complex) -> None:
    """out = product + β·out; with β = 0, what `out` held is never read."""
    if beta == 0:
        out[...] = product
        return
    if beta != 1:
        out *= beta
    out += product


def scale(out: Array, beta: complex) -> None:
    """out = β·out; with β = 0, what `out` held is never read."""
    if beta == 0:
        out[...] = 0
    elif beta != 1:
        out *= beta


def seed(partial: Array, sizes: list[int], index: int, out: Array, beta: complex) -> int:
    """Prepare a summand that will be scattered over ranks by rows of `sizes`, so that the sum brings β·C along.

    Returns the β with which to accumulate into it: 0, or 1 once it holds β·out in the rows of `index` and 0 elsewhere.
    """
    if beta == 0:
        return 0
    partial[...] = 0
    start = sum(sizes[:index])
    own = partial[start : start + sizes[index]]
    own[...] = out
    scale(own, beta)
    return 1


def _op(array: Array, letter: str) -> Array:
    turned = array if letter == "n" else array.T
    return turned.conj() if letter == "c" and dtype_name(array).startswith("complex") else turned


def _adjacent(array: np.ndarray) -> bool:
    """Whether BLAS can read a matrix by rows: adjacent elements in a row, rows that do not overlap."""
    rows, columns = array.shape
    row, element = array.strides
    size = array.itemsize
    return (element == size or columns == 1) and (rows == 1 or (row >= columns * size and row % size == 0))


Gemm = Callable[[np.ndarray, np.ndarray, str, np.ndarray, complex, complex], None]


@cache
def _gemm(dtype: str) -> Gemm | None:
    """The gemm of numpy's BLAS for a dtype; None where there is none, or where it fails a small product."""
    if dtype not in KINDS or sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        gemm = _bound(dtype)
    except (OSError, AttributeError):
        return None
    a, b, out = (np.arange(rows * 9, dtype=dtype).reshape(rows, 9) for rows in (3, 2, 3))
    a, b, out = a[:, :4], b[:, :4], out[:, :2].copy()
    want = 2 * (a @ b.T) + 3 * out
    gemm(a, b, "nt", out, 2, 3)
    return gemm if np.array_equal(out, want) else None


def _bound(dtype: str) -> Gemm:
    core: Any = getattr(np, "_core", None) or np.core
    library = ctypes.CDLL(core._multiarray_umath.__file__)  # its symbols include those of the BLAS it is linked to
    names = [name.format(KINDS[dtype]) for name in NAMES]
    function = next(getattr(library, name) for name in [*filter(lambda name: hasattr(library, name), names), names[-1]])
    # 64-bit integers suit both kinds of BLAS: a 32-bit callee on these platforms reads the low half of each slot.
    enum, number, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    is_complex = dtype.startswith("complex")
    scalar = pointer if is_complex else ctypes.c_float if dtype == "float32" else ctypes.c_double
    function.restype = None
    function.argtypes = (
        enum,
        enum,
        enum,
        number,
        number,
        number,
        scalar,
        pointer,
        number,
        pointer,
        number,
        scalar,
        pointer,
        number,
    )

    def gemm(a: np.ndarray, b: np.ndarray, form: str, out: np.ndarray, alpha: complex, beta: complex) -> None:
        m, n = out.shape
        k = a.shape[1] if form[0] == "n" else a.shape[0]
        factors = np.array((alpha, beta), dtype)
        first = _address(factors)
        scalars = (first, first + factors.itemsize) if is_complex else (alpha, beta)
        function(
            ROW_MAJOR, TRANSPOSE[form[0]], TRANSPOSE[form[1]], m, n, k,
            scalars[0], _address(a), _leading(a), _address(b), _leading(b), scalars[1], _address(out), _leading(out),
        )  # fmt: skip

    return gemm


def _address(array: np.ndarray) -> int:
    """Where its first element lies (`array.ctypes.data` says the same, ten times slower)."""
    return int(array.__array_interface__["data"][0])


def _leading(array: np.ndarray) -> int:
    """Elements from one row to the next."""
    return int(array.strides[0] // array.itemsize) if array.shape[0] > 1 else max(1, int(array.shape[1]))


def accumulation_like(array: Array) -> Array:
    """An empty array of the kind of `array` in the dtype its products are summed in: float32 for the 16-bit floats."""
    sample = array[:0]
    if not is_half(array):
        return sample
    return sample.float() if is_torch(array) else sample.astype(np.float32)
