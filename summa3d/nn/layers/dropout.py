"""Dropout with masks that depend on the global element index only, so that every grid drops the same elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from summa3d.kernels.mask import Mask

from ...layout.layout import Layout
from ...layout.random import key
from ..context import Context
from ..random import keep_mask
from .bias_fusion import bias_dropout_add

NONE: Mapping[int, Sequence[range]] = {}
"""A block that holds what its layout says."""


@dataclass(frozen=True)
class Batch:
    """The sizes of one forward pass on the inner grid, where its rows lie in the whole step, and what keys its dropout masks.

    Attributes
    ----------
    rows, sequence : b and s of this micro-batch, or of this replica's and this context's part of it
    seed, step : the seed and the step of the run
    first_row : the index of row 0 in the batch of the whole step
    count, pairs : what the sums over labels and over relations are divided by; None: those counted in these rows
    step_rows : the rows of the whole step, over which router losses are means; None: these rows
    """

    rows: int
    sequence: int
    seed: int = 0
    step: int = 0
    first_row: int = 0
    count: int | None = None
    pairs: int | None = None
    step_rows: int | None = None


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
        self,
        x: Tensor,
        shape: Sequence[int],
        batch: Batch,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        runs: Mapping[int, Sequence[range]] = NONE,
    ) -> Tensor:
        """residual + dropout(x + bias) for this rank's block x of a global tensor [batch.rows, *shape].

        Parameters
        ----------
        x : a block of three dims is in the scheme's stored order
        shape : the global shape without the batch dim; of a block of three dims, that of this rank's context
        batch : the global sizes and the key of the mask
        residual : a block of x's shape, or None
        bias : this rank's block of a bias along x's last dim that the layer before skipped (bias fusion), or None
        runs : dim of `shape` → what the block holds of it, where that is not what the layout says; several runs of one dim alone
        """
        if not self.training or self.probability == 0:
            x = x if bias is None else x + bias
            return x if residual is None else residual + x
        grid, contexts, stored = self.context.grid, self.context.contexts, x.dim() == 3
        rows, *rest = self.layout.slices((batch.rows, *shape), grid.shape, grid.coordinates)
        rows = slice(rows.start + batch.first_row, rows.stop + batch.first_row)
        whole = [rows.stop, *shape]
        if stored and contexts.size > 1:
            whole[1] *= contexts.size
            runs = {0: contexts.runs_of(rest[0], whole[1])}
        held = [[rows], *([part] for part in rest)]
        for dim, result in runs.items():
            held[1 + dim] = [slice(run.start, run.stop) for run in result]
        pieces = [list(piece) for piece in product(*held)]
        if len(pieces) == 1:
            return self._dropped(x, whole, pieces[0], batch, residual, bias)
        dim = next(dim for dim, parts in enumerate(held) if len(parts) > 1)
        sizes, place = [part.stop - part.start for part in held[dim]], dim
        if stored and self.context.scheme.spec.sequence_first:
            place = 1 - dim
        parts = (x.split(sizes, place), [None] * len(sizes) if residual is None else residual.split(sizes, place))
        dropped = (
            self._dropped(part.contiguous(), whole, piece, batch, None if add is None else add.contiguous(), bias)
            for part, add, piece in zip(*parts, pieces, strict=True)
        )
        return torch.cat([*dropped], place)

    def _dropped(
        self, x: Tensor, whole: list[int], slices: list[slice], batch: Batch, residual: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """residual + dropout(x + bias) for the block `slices` of a global tensor of shape `whole`."""
        stream, stored = key(batch.seed, f"dropout/{self.name}", batch.step), x.dim() == 3
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
