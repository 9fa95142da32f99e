"""Dropout with masks that depend on the global element index only, so that every grid drops the same elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from summa3d.kernels.mask import Mask

from ...layout.layout import Layout
from ...layout.random import key
from ..context import Context
from ..random import keep_mask
from .bias_fusion import bias_dropout_add


@dataclass(frozen=True)
class Batch:
    """The sizes of one forward pass on the inner grid, where its rows lie in the whole step, and what keys its dropout masks.

    Attributes
    ----------
    rows, sequence : b and s of this micro-batch, or of this replica's part of it
    seed, step : the seed and the step of the run
    first_row : the index of row 0 in the batch of the whole step
    count, pairs : what the sums over labels and over relations are divided by; None: those counted in these rows
    """

    rows: int
    sequence: int
    seed: int = 0
    step: int = 0
    first_row: int = 0
    count: int | None = None
    pairs: int | None = None


class Dropout(nn.Module):
    """Zero each element with `probability` and scale the others by 1/(1−p), in training only.

    Parameters
    ----------
    name : keys the masks, together with the seed, the step and the global element index
    layout : the layout of x, [b, …]

    The mask is the same on every grid. Moves nothing. Memory kept: the mask; on a device nothing, since backward draws the mask
    again.
    """

    def __init__(self, probability: float, name: str, scheme: Context, layout: Layout) -> None:
        super().__init__()
        self.probability, self.name, self.context, self.layout = probability, name, scheme, layout

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
        grid = self.context.grid
        rows, *rest = self.layout.slices((batch.rows, *shape), grid.shape, grid.coordinates)
        rows = slice(rows.start + batch.first_row, rows.stop + batch.first_row)
        stream = key(batch.seed, f"dropout/{self.name}", batch.step)
        whole, slices, stored = (rows.stop, *shape), (rows, *rest), x.dim() == 3

        meta = x.is_meta  # the mask is kept for backward, and must not keep x

        def draw() -> Tensor:
            mask = keep_mask(stream, whole, slices, self.probability, meta)
            return self.context.as_stored(mask) if stored else mask

        mask = Mask.of(stream, whole, slices, draw)
        if stored and self.context.scheme.spec.sequence_first:
            mask = mask.swapped()
        return bias_dropout_add(x, residual, bias, mask, self.probability)

    def extra_repr(self) -> str:
        """The probability and the name that torch prints for the module."""
        return f"{self.probability}, {self.name}"
