"""One product on one rank, for numpy, CuPy and torch."""

from __future__ import annotations

from ...blas_library import BlasRule
from ...comm.device.arrays import Array, cast, empty, is_half, is_torch, quiet, widen
from .blas import accumulate
from .tensors import multiplied


def multiply(a: Array, b: Array, form: str, out: Array | None = None, rule: BlasRule | None = None) -> Array:
    """op(A)·op(B), where `form` says for A and B whether op is none (n) or the transpose (t); in `out` where it is given.

    What `out` held is never read. numpy's float16 is multiplied in float32 and rounded once. `rule` says what multiplies host
    tensors: by default torch.
    """
    left = a.T if form[0] == "t" else a
    right = b.T if form[1] == "t" else b
    if is_torch(a):
        product = None if rule is None else multiplied(a, b, form, out, 1, 0, rule)
        if product is not None:
            return product
        if out is None:
            return left.mm(right)
        import torch

        return torch.mm(left, right, out=out)
    if is_half(a):
        product = _multiply_wide(left, right)
        if out is None:
            return product
        out[...] = product
        return out
    if out is None:
        out = empty((left.shape[0], right.shape[1]), a)
    accumulate(a, b, form, out)
    return out


@quiet
def _multiply_wide(left: Array, right: Array) -> Array:
    return cast(widen(left) @ widen(right), left)
