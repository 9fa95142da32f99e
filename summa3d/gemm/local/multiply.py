"""One product on one rank, for numpy, CuPy and torch."""

from __future__ import annotations

from ...blas_library import Rule
from ...comm.arrays import Array, cast, empty, is_half, is_torch, widen
from .blas import accumulate, add
from .tensors import multiplied

FORMS = ("nn", "nt", "tn", "tt")


def multiply(
    a: Array, b: Array, form: str, out: Array | None = None, alpha: float = 1, beta: float = 0, rule: Rule | None = None
) -> Array:
    """C = α·op(A)·op(B) + β·C, where `form` says for A and B whether op is none (n) or the transpose (t).

    `out` is C, overwritten in place; without it a new array is returned and β must be 0. With β = 0, what `out` held is
    never read. numpy's float16 is multiplied in float32 and rounded once. `rule` says what multiplies host tensors: by default
    torch.
    """
    left = a.T if form[0] == "t" else a
    right = b.T if form[1] == "t" else b
    if is_torch(a):
        product = None if rule is None else multiplied(a, b, form, out, alpha, beta, rule)
        if product is not None:
            return product
        if out is not None:
            return _multiply_torch(left, right, out, alpha, beta)
        product = left.mm(right)
        return product if alpha == 1 else product.mul_(alpha)
    if is_half(a):
        product = cast(alpha * (widen(left) @ widen(right)), a)
        if out is None:
            return product
        add(product, out, beta)
        return out
    if out is None:
        out = empty((left.shape[0], right.shape[1]), a)
    accumulate(a, b, form, out, alpha, beta)
    return out


def _multiply_torch(left: Array, right: Array, out: Array, alpha: float, beta: float) -> Array:
    import torch

    if beta == 0 and alpha == 1:
        return torch.mm(left, right, out=out)
    return torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)
