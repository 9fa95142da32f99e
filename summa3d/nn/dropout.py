"""Dropout with masks that depend on the global element index only, so that every grid drops the same elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from summa3d.kernels import dispatch
from summa3d.kernels.mask import Mask

from ..layout.layout import Layout
from .random import keep_mask, key
from .schemes import Scheme


@dataclass(frozen=True)
class Batch:
    """The global sizes of one forward pass, and the key of its dropout masks.

    Attributes
    ----------
    rows, sequence : the global b and s of this micro-batch
    seed, step : the seed and the step of the run
    first_row : the index of this micro-batch's row 0 in the batch of the whole step
    """

    rows: int
    sequence: int
    seed: int = 0
    step: int = 0
    first_row: int = 0


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None, mask: Mask, probability: float) -> Tensor:
        kept = dispatch.kernels_for(x).dropout_mask(x, mask)
        ctx.save_for_backward(*([kept] if isinstance(kept, Tensor) else []))
        ctx.mask, ctx.probability = kept if isinstance(kept, Mask) else None, probability
        return dispatch.kernels_for(x).dropout_add(x, kept, probability, residual, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors[0] if ctx.mask is None else ctx.mask
        of_x, of_residual, of_bias, *_ = ctx.needs_input_grad
        grads = (
            dispatch.kernels_for(grad).dropout_gradient(grad, kept, ctx.probability, of_bias) if of_x or of_bias else (None, None)
        )
        return grads[0], grad if of_residual else None, grads[1], None, None


class Dropout(nn.Module):
    """Zero each element with `probability` and scale the others by 1/(1−p), in training only.

    Parameters
    ----------
    name : keys the masks, together with the seed, the step and the global element index
    layout : the layout of x, [b, …]

    The mask is the same on every grid. Moves nothing. Memory kept: the mask; on a device nothing, since backward draws the mask
    again.
    """

    def __init__(self, probability: float, name: str, scheme: Scheme, layout: Layout) -> None:
        super().__init__()
        self.probability, self.name, self.scheme, self.layout = probability, name, scheme, layout

    def forward(
        self, x: Tensor, shape: Sequence[int], batch: Batch, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """residual + dropout(x + bias) for this rank's block x of a global tensor [batch.rows, *shape].

        Parameters
        ----------
        x : a block of three dims is in the scheme's stored order
        shape : the global shape without the batch dim
        batch : the global sizes and the key of the mask
        residual : a block of x's shape, or None
        bias : this rank's block of a bias along x's last dim that the layer before skipped (bias fusion), or None
        """
        if not self.training or self.probability == 0:
            x = x if bias is None else x + bias
            return x if residual is None else residual + x
        grid = self.scheme.grid
        rows, *rest = self.layout.slices((batch.rows, *shape), grid.shape, grid.coordinates)
        rows = slice(rows.start + batch.first_row, rows.stop + batch.first_row)
        stream = key(batch.seed, f"dropout/{self.name}", batch.step)
        whole, slices, stored = (rows.stop, *shape), (rows, *rest), x.dim() == 3

        def draw() -> Tensor:
            mask = keep_mask(stream, whole, slices, self.probability, x.is_meta)
            return self.scheme.as_stored(mask) if stored else mask

        mask = Mask.of(stream, whole, slices, draw)
        if stored and self.scheme.kind.sequence_first:
            mask = mask.swapped()
        return _DropoutAdd.apply(x, residual, bias, mask, self.probability)

    def extra_repr(self) -> str:
        """The probability and the name that torch prints for the module."""
        return f"{self.probability}, {self.name}"
