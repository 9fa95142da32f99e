# Dropout with masks that depend on the global element index only. Imports random, kernels.reference.
# Next: attention.py.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from summa3d.kernels import reference as kernel

from ..layout.layout import Layout
from .random import keep_mask, key
from .schemes import Scheme


@dataclass(frozen=True)
class Batch:
    """The global sizes of one forward pass, and what keys its masks.

    rows, sequence : b and s of this micro-batch. step, seed : of the run. first_row : the global batch row, over all
    micro-batches of the step, of this micro-batch's row 0.
    """

    rows: int
    sequence: int
    seed: int = 0
    step: int = 0
    first_row: int = 0


class Dropout(nn.Module):
    """Zero each element with `probability` and scale the rest, in training; x is a block [b, …] in `layout`.

    The mask is a function of (seed, `name`, step, global element index), so it is the same on every grid and differs
    wherever blocks differ. Moves nothing.
    """

    def __init__(self, probability: float, name: str, scheme: Scheme, layout: Layout) -> None:
        super().__init__()
        self.probability, self.name, self.scheme, self.layout = probability, name, scheme, layout

    def forward(self, x: Tensor, shape: Sequence[int], batch: Batch) -> Tensor:
        """Drop from this block x of a global tensor [batch.rows, *shape]; one of three dims lies as the scheme stores it."""
        if not self.training or self.probability == 0:
            return x
        grid = self.scheme.grid
        rows, *rest = self.layout.slices((batch.rows, *shape), grid.shape, grid.coordinates)
        rows = slice(rows.start + batch.first_row, rows.stop + batch.first_row)
        stream = key(batch.seed, f"dropout/{self.name}", batch.step)
        mask = keep_mask(stream, (rows.stop, *shape), (rows, *rest), self.probability)
        return kernel.dropout(x, self.scheme.as_stored(mask) if mask.dim() == 3 else mask, self.probability)

    def extra_repr(self) -> str:
        return f"{self.probability}, {self.name}"
