# The closed set of products under differentiation: every gradient of NN, NT, TN, TT is again one of them. Needs torch.
# dA's scatter is in flight while dB is computed; the gather of dC is shared by both.
# Next: nn/linear.py, which is this with parameters.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.collectives import Axis
from ..comm.pending import Pending
from ..errors import ShapeError
from ..gemm.cuboid import Cuboid
from ..gemm.local import multiply

GRADIENTS = {
    # form: (form of dA, C first?), (form of dB, C first?) — the product's other operand is B for dA and A for dB
    "nn": (("nt", True), ("tn", False)),
    "nt": (("nn", True), ("tn", True)),
    "tn": (("nt", False), ("nn", False)),
    "tt": (("tt", False), ("tt", True)),
}


@dataclass(frozen=True)
class Product:
    """C = op(A)·op(B) (+ bias) on a grid, and its gradients, each callable alone.

    `regather` keeps only the shards for backward and gathers them again: memory 1/P. Without it the gathered operands
    are kept: fewer words. `rows` is the plane of axes that split C's rows: over it a bias gradient is summed.
    """

    cuboid: Cuboid
    regather: bool = True
    rows: Axis | None = None

    def __post_init__(self) -> None:
        if self.cuboid.plan.form not in GRADIENTS:
            raise ShapeError(f"form {self.cuboid.plan.form!r} has no gradient here. Forms that have: {', '.join(GRADIENTS)}.")

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """C's block [m/(XZ), n/Y], and the operands to keep for the gradients."""
        self.cuboid.check(a, b)
        a_gathered, b_gathered = self.cuboid.gather_a(a), self.cuboid.gather_b(b)
        c = self.cuboid.scatter_c(self.cuboid.multiply(a_gathered, b_gathered))
        if bias is not None:
            c += bias
        return c, (a, b) if self.regather else (a_gathered, b_gathered)

    def start_grad_a(self, c_gathered: Tensor, b: Tensor) -> Pending:
        """Start dA from the gathered dC and B as kept; the scatter along y is in flight when this returns."""
        form, c_first = GRADIENTS[self.cuboid.plan.form][0]
        b_gathered = self.cuboid.gather_b(b) if self.regather else b
        return self.cuboid.start_scatter_a(_product(form, c_gathered, b_gathered, c_first))

    def start_grad_b(self, c_gathered: Tensor, a: Tensor) -> Pending:
        """Start dB from the gathered dC and A as kept; the scatter along x is in flight when this returns."""
        form, c_first = GRADIENTS[self.cuboid.plan.form][1]
        a_gathered = self.cuboid.gather_a(a) if self.regather else a
        return self.cuboid.start_scatter_b(_product(form, c_gathered, a_gathered, c_first))


def _product(form: str, c: Tensor, other: Tensor, c_first: bool) -> Tensor:
    return multiply(c, other, form) if c_first else multiply(other, c, form)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        flat = a.reshape(-1, a.shape[-1])
        c, kept = product.forward(flat, b, bias)
        ctx.save_for_backward(*kept)
        ctx.product, ctx.lead = product, a.shape[:-1]
        return c if a.dim() == 2 else c.view(-1, *a.shape[1:-1], c.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        product: Product = ctx.product
        a, b = ctx.saved_tensors
        c = grad.reshape(-1, grad.shape[-1])
        c = c if c.is_contiguous() else c.contiguous()
        need_a, need_b, need_bias, _ = ctx.needs_input_grad
        bias = product.rows.start_all_reduce(c.sum(0)) if need_bias and product.rows is not None else None
        c_gathered = product.cuboid.gather_c(c) if need_a or need_b else c
        grad_a = product.start_grad_a(c_gathered, b) if need_a else None
        grad_b = product.start_grad_b(c_gathered, a) if need_b else None
        return (
            grad_a.wait().view(*ctx.lead, -1) if grad_a else None,
            grad_b.wait() if grad_b else None,
            bias.wait() if bias else None,
            None,
        )


def matmul(a: Tensor, b: Tensor, product: Product, bias: Tensor | None = None) -> Tensor:
    """C = op(A)·op(B) + bias with gradients, on this rank's blocks.

    Parameters
    ----------
    a : A's block, its rows possibly as several leading dims ([b, s, k] for [b·s, k])
    b : B's block
    product : the plan bound to a grid, and what to keep for backward
    bias : the block of n that C's columns need, equal on the ranks of `product.rows`, or None

    Returns C's block, with A's trailing row dims.
    Moves forward [(Y−1)mk + (X−1)kn + (Z−1)mn]/P; backward [(Z−1)mn + (Y−1)mk + (X−1)kn]/P, and with regather
    [(Y−1)mk + (X−1)kn]/P more (`gemm.volume.gradients`); a bias gradient is one all-reduce over `product.rows`.
    Memory kept: both shards, or with regather=False both gathered operands.
    Source: the closed set of Bian et al. 2021, Algorithms 2, 4, 6 (with 6 read as AᵀB).
    """
    return _Matmul.apply(a, b, bias, product)
