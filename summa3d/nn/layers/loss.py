"""Cross entropy over logits whose vocabulary a grid axis may split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from summa3d.kernels import dispatch, reference

from ...autograd.function import Function, once_differentiable
from ...comm.axis import Axis
from ...layout.layout import Layout
from ..context import Context


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, columns: Axis, rows: Axis, first: int, count: int) -> Tensor:
        ctx.first, ctx.is_whole = first, columns.size == 1 and dispatch.kernels_for(logits) is reference
        if ctx.is_whole:
            scale = (labels >= 0).to(logits.dtype) / count
            logarithms = torch.log_softmax(logits, 1)
            picked = logarithms.gather(1, labels.clamp(0)[:, None])[:, 0].masked_fill_(labels < 0, 0)
            ctx.save_for_backward(logarithms, labels, scale)
            return rows.all_reduce(-(picked * scale).sum(dtype=torch.float64)).to(logits.dtype)
        maximum = columns.all_reduce(dispatch.kernels_for(logits).row_maximum(logits), "max")
        values, sums = dispatch.kernels_for(logits).cross_entropy_sums(logits, maximum, labels, first)
        total, picked = columns.all_reduce(sums).unbind(1)
        scale = (labels >= 0).to(maximum.dtype) / count
        loss = rows.all_reduce(((total.log() - picked) * scale).sum(dtype=torch.float64))
        ctx.save_for_backward(*dispatch.kernels_for(values).cross_entropy_kept(values, maximum, total), labels, scale)
        return loss.to(maximum.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *kept, labels, scale = ctx.saved_tensors
        if ctx.is_whole:
            scale = scale * grad
            gradient = kept[0].exp().mul_(scale[:, None])
            gradient.scatter_add_(1, labels.clamp(0)[:, None], -scale[:, None])
            return gradient, None, None, None, None, None
        gradient = dispatch.kernels_for(scale).cross_entropy_gradient(tuple(kept), labels, ctx.first, scale * grad)
        return gradient, None, None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, scheme: Context, layout: Layout, vocabulary: int, count: int) -> Tensor:
    """The sum over all labels of −log softmax(logits)[label], divided by `count`: one number, the same on every rank.

    Parameters
    ----------
    logits : this rank's block [b/(XZ), s, v/Y] in `layout`
    labels : the labels of those rows [b/(XZ), s], global ids; a negative label is not counted
    vocabulary : the global v
    count : the global number of labels of the whole step, so that the loss is scaled once

    Words: an all-reduce of 1 word a row (the maximum) and one of 2 words a row along the axis that splits v, then one of 1 word
    over the axes that split rows; backward none. Memory kept: the softmax block (on a device, the logits). 16-bit logits are
    widened first (on a device, as they are read): the sums, the loss and the moved words are float32.
    """
    flat = dispatch.kernels_for(logits).loss_input(logits.flatten(0, -2))
    first = Layout(layout.dims[-1]).slices((vocabulary,), scheme.grid.shape, scheme.grid.coordinates)[0].start
    return _CrossEntropy.apply(flat, labels.flatten(), scheme.columns(layout), scheme.rows(layout), first, count)
