"""The distributed product as an autograd function, whose backward overlaps the sums of the gradients with arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..comm.axis import Axis
from ..comm.pending import Completed, Pending
from .deferred import DeferredWeightGradient
from .differentiable import Product
from .function import Function, once_differentiable


class _Matmul(Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        product: Product,
        rows: Axis | None,
        deferred: DeferredWeightGradient | None,
    ) -> Tensor:
        flat = a.flatten(0, -2)
        c, kept = product.forward(flat, b)
        if bias is not None:
            c += bias
        ctx.save_for_backward(*kept)
        ctx.product, ctx.rows, ctx.shape, ctx.deferred = product, rows, a.shape, deferred
        return c.unflatten(0, (product.items_of_rows() if 0 in a.shape[1:-1] else -1, *a.shape[1:-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product: Product = ctx.product
        a, b = ctx.saved_tensors
        c = grad.flatten(0, -2).contiguous()
        need_a, need_b, need_bias, *_ = ctx.needs_input_grad
        bias = _start_sum(c.sum(0), ctx.rows) if need_bias else None
        shared = product.share(c) if need_a or need_b else c
        if ctx.deferred is not None:
            ctx.deferred.record(partial(_weight_gradient, product, a, product.keep_share(c, shared)))
        grad_b = product.start_grad_b(shared, a) if need_b and product.takes_weight_first else None
        grad_a = product.start_grad_a(shared, b) if need_a else None
        if grad_a and not product.in_flight.input_gradient:
            grad_a.wait()
        if need_b and not grad_b:
            grad_b = product.start_grad_b(shared, a)
        return (
            grad_a.wait().reshape(ctx.shape) if grad_a else None,
            grad_b.wait() if grad_b else None,
            bias.wait() if bias else None,
            None,
            None,
            None,
        )


def _start_sum(summand: Tensor, rows: Axis | None) -> Pending:
    return Completed(summand) if rows is None else rows.start_all_reduce(summand)


def _weight_gradient(product: Product, a: Tensor, kept: Any) -> Tensor:
    """Return the dB that was deferred, of A and dC as the product keeps them: shards or copies, no view of a node's memory."""
    gradient: Tensor = product.start_grad_b(product.share_again(kept), a).wait()
    return gradient


def matmul(a: Tensor, b: Tensor, product: Product, bias: Tensor | None = None, sums_bias: bool = True) -> Tensor:
    """Compute C = op(A)·op(B) + bias with gradients, on this rank's blocks.

    Parameters
    ----------
    a : this rank's block of A; its rows may be several leading dims ([b, s, k] for [b·s, k])
    b : this rank's block of B
    product : a plan bound to a grid (`product(plan, grid)`); it says what backward keeps and what may be in flight
    bias : this rank's block of the bias, along C's columns and equal on the ranks of `product.rows`; or None
    sums_bias : whether backward sums the bias gradient over those ranks; else it is this rank's summand

    Returns this rank's block of C, with the leading dims of `a`.

    Words forward: those of the plan's algorithm; backward: those of the same algorithm's products for dA and dB. For the
    cuboid, mean per rank: forward [(Y−1)mk + (X−1)kn + (Z−1)mn]/P, backward [(Z−1)mn + (Y−1)mk + (X−1)kn]/P, and with regather
    [(Y−1)mk + (X−1)kn]/P more (`gemm.volume` has the other algorithms' words). The bias gradient is one all-reduce over
    `product.rows`.
    Where the pass defers gradients of B (`autograd.deferred`), backward records a `DeferredWeightGradient` instead of dB.
    Raises ShapeError for blocks that the plan does not have, before any communication; AgreementError on all ranks where they
    call differently, or want other gradients, which they compare at a product's first use.
    Memory kept for backward: both shards; for the cuboid with regather=False, both gathered operands.
    Source: Bian et al. 2021, Algorithms 2, 4 and 6, a closed set (with 6 read as AᵀB).
    """
    product.agree(a, b, bias)
    if product.in_flight.source is not None:
        product.in_flight.source.prepare(None if product.source is None else b)
    state, rows = product.in_flight.state, product.rows if sums_bias else None
    if state is None or state.deferred is None or not (a.requires_grad and b.requires_grad):
        if product.is_torchs(a, b):
            return functional.linear(a, b.t() if product.plan.form == "nn" else b, bias)
        return _Matmul.apply(a, b, bias, product, rows, None)
    return _Matmul.apply(a, b.detach(), bias, product, rows, DeferredWeightGradient(b, state))
