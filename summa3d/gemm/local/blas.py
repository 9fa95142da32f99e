"""C = α·op(A)·op(B) + β·C on one rank, accumulated in place: numpy's matmul cannot add to C, a BLAS can."""

from __future__ import annotations

import importlib

import numpy as np

from ...blas_library import BlasRule, gemm, library
from ...comm.device.arrays import Array, dtype_name, empty, is_half, is_torch, library_of, quiet
from ...dtypes import HALVES, LETTERS
from .cublas import multiply_halves
from .strides import by_rows, row_step
from .tensors import multiplied

OPS = "ntc"
"""op of a product: none, transpose, conjugate transpose."""
SMALL = 128**3
"""m·n·k below which numpy's call, the quickest there is, makes up for a faster BLAS."""


def adds_in_place(dtype: str) -> bool:
    """Return whether products of this dtype are added to C without a buffer; integers, which no BLAS multiplies, are not."""
    return gemm("float32" if dtype in HALVES else dtype) is not None


def accumulate(
    a: Array,
    b: Array,
    form: str,
    out: Array,
    alpha: complex = 1,
    beta: complex = 0,
    scratch: Array | None = None,
    rule: BlasRule | None = None,
) -> None:
    """out = α·op(A)·op(B) + β·out for one block each; `form` is two of the letters n, t, c. With β = 0, `out` is not read.

    Rows may be strided. Allocates nothing where a row's elements are adjacent and either β = 0 or `adds_in_place`; elsewhere
    `scratch`, an array of out's shape, saves an allocation. 16-bit floats are multiplied on a device, into 16 bits or float32; on
    the host executors widen them first. `rule` says what multiplies torch's host tensors; default torch.
    """
    if 0 in out.shape:
        return
    if 0 in a.shape:
        return scale(out, beta)
    if is_torch(out):
        if a.dtype != out.dtype:
            return multiply_halves(a, b, form, out, float(alpha.real), float(beta.real))
        if rule is not None and multiplied(a, b, form, out, alpha.real, beta.real, rule) is not None:
            return
        import torch

        torch.addmm(out, _op(a, form[0]), _op(b, form[1]), alpha=alpha, beta=beta, out=out)
        return
    if not isinstance(out, np.ndarray):
        return _accumulate_on_device(a, b, form, out, alpha, beta)
    _accumulate_here(a, b, form, out, alpha, beta, scratch)


@quiet
def _accumulate_here(
    a: np.ndarray, b: np.ndarray, form: str, out: np.ndarray, alpha: complex, beta: complex, scratch: np.ndarray | None
) -> None:
    """`accumulate` for numpy's arrays."""
    if beta == 0 and alpha == 1 and "c" not in form and (library().is_numpys or out.size * a.size < SMALL * len(out)):
        np.matmul(_op(a, form[0]), _op(b, form[1]), out=out)
        return
    bound = gemm(dtype_name(out))
    if bound is not None and row_step(out):
        first, second = by_rows(a, form[0]), by_rows(b, form[1])
        if first is not None and second is not None:
            return bound(first[0], second[0], first[1] + second[1], out, alpha, beta)
    product = out if beta == 0 else np.empty_like(out) if scratch is None else scratch
    np.matmul(_op(a, form[0]), _op(b, form[1]), out=product)
    if alpha != 1:
        product *= alpha
    if beta != 0:
        add(product, out, beta)


def _accumulate_on_device(a: Array, b: Array, form: str, out: Array, alpha: complex, beta: complex) -> None:
    """`accumulate` for CuPy's arrays: by cuBLAS straight into C, or for integers by a product that is added."""
    if is_half(a):
        return multiply_halves(a, b, form, out, float(alpha.real), float(beta.real))
    if dtype_name(out) not in LETTERS:
        product = library_of(out).matmul(_op(a, form[0]), _op(b, form[1]))
        if alpha != 1:
            product *= alpha
        return add(product, out, beta)
    first, second = (_op(block, "c") if letter == "c" else block for block, letter in zip((a, b), form, strict=True))
    turns = ["T" if letter == "t" else "N" for letter in form]  # a conjugate was copied: cuBLAS conjugates only what it turns
    cublas = importlib.import_module(f"{library_of(out).__name__}.cublas")
    cublas.gemm(turns[0], turns[1], first, second, out=out, alpha=alpha, beta=beta)


@quiet
def add(product: Array, out: Array, beta: complex) -> None:
    """out = product + β·out; with β = 0, what `out` held is never read."""
    if beta == 0:
        out[...] = product
        return
    if beta != 1:
        out *= beta
    out += product


@quiet
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
    transposed = array if letter == "n" else array.T
    return transposed.conj() if letter == "c" and dtype_name(array).startswith("complex") else transposed


def accumulation_like(array: Array) -> Array:
    """An empty array of the kind of `array` in the dtype its products are summed in: float32 for the 16-bit floats."""
    if not is_half(array):
        return empty((0,), array)  # sparse tensors, which are refused elsewhere, have no slices
    makes = library_of(array)
    return array.new_empty((0,), dtype=makes.float32) if is_torch(array) else makes.empty((0,), "float32")
