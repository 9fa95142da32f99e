"""Random weights and masks of blocks, from the numbers of `layout.random`: every grid draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..layout.random import CHUNK, bits


def normal_(out: Tensor, philox_key: int, shape: Sequence[int], slices: Sequence[slice], std: float) -> Tensor:
    """Overwrite `out`, the block `slices` of a global tensor of `shape`, by normal numbers of mean 0 and deviation `std`.

    The inverse of the normal distribution is applied to the uniform numbers of the stream. Numbers are drawn and rounded on the
    host, `CHUNK` elements at a time, so that a block on a device is bitwise the same.
    """
    if out.numel() == 0 or out.is_meta:
        return out
    step = max(1, CHUNK // prod(out.shape[1:]))
    for row in range(0, len(out), step):
        part = slice(slices[0].start + row, min(slices[0].start + row + step, slices[0].stop))
        uniform = (bits(philox_key, shape, (part, *slices[1:])) + 0.5) / 2**32
        out[row : row + step].copy_(torch.special.ndtri(torch.from_numpy(uniform)).mul_(std).to(out.dtype))
    return out


def keep_mask(philox_key: int, shape: Sequence[int], slices: Sequence[slice], probability: float, meta: bool = False) -> Tensor:
    """A bool mask of the block `slices` of a global tensor of `shape`: True with probability 1 − `probability`.

    meta : return a meta tensor of the mask's shape instead, and draw nothing
    """
    if meta:
        return torch.empty([part.stop - part.start for part in slices], dtype=torch.bool, device="meta")
    drawn = bits(philox_key, shape, slices)
    mask = torch.empty(drawn.shape, dtype=torch.bool)  # backward keeps the mask, so torch allocates and counts its memory
    np.greater_equal(drawn, np.uint32(round(probability * 2**32)), out=mask.numpy())
    return mask
