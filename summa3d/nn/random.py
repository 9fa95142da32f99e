# Counter-based random numbers: a pure function of (seed, name, step) and the *global* element index (Philox4x64-10).
# Imports numpy and torch. Every grid draws the same weights and masks, each rank its own block only.
# Next: parameter.py (weights), dropout.py (masks).
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

WORDS_PER_COUNTER = 8
"""32-bit numbers that one Philox4x64 counter yields."""
SKIP_WORTH_A_RESTART = 8192
"""Unwanted numbers that cost as much to draw as starting the generator anew."""
CHUNK = 1 << 22
"""Elements drawn at once, so that a large block needs little memory besides itself."""


def key(seed: int, name: str, step: int = 0) -> int:
    """The 128-bit Philox key of a stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=16).digest(), "little")


def bits(stream: int, shape: Sequence[int], slices: Sequence[slice], first: int = 0) -> np.ndarray:
    """The 32-bit numbers of the elements `slices` of a global tensor of `shape` whose element 0 has index `first`.

    Number e of the stream is 32-bit word e % 8 of the output of counter e // 8 + 1.
    """
    whole = [part.start == 0 and part.stop == n for part, n in zip(slices, shape, strict=True)]
    if len(shape) > 2 and not all(whole[1:-1]):
        inner = prod(shape[1:])
        rows = [bits(stream, shape[1:], slices[1:], first + row * inner) for row in range(slices[0].start, slices[0].stop)]
        extent = [part.stop - part.start for part in slices]
        return np.stack(rows) if rows else np.empty(extent, np.uint32)
    columns = shape[-1]
    per_row = prod(shape[1:-1])
    begin, end = (slices[0].start * per_row, slices[0].stop * per_row) if len(shape) > 1 else (0, 1)
    out = np.empty((end - begin, slices[-1].stop - slices[-1].start), np.uint32)
    _fill(out, stream, first + begin * columns, columns, slices[-1])
    return out.reshape([part.stop - part.start for part in slices])


def _fill(out: np.ndarray, stream: int, first: int, columns: int, wanted: slice) -> None:
    """out[r, :] = numbers first + r·columns + wanted."""
    rows, width = out.shape
    if columns - width > SKIP_WORTH_A_RESTART:
        for row in range(rows):
            out[row] = _run(stream, first + row * columns + wanted.start, width)
        return
    step = max(1, CHUNK // max(columns, 1))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        out[row : row + count] = _run(stream, first + row * columns, count * columns).reshape(count, columns)[:, wanted]


def _run(stream: int, first: int, count: int) -> np.ndarray:
    """Numbers first … first + count of the stream."""
    counter, skip = divmod(first, WORDS_PER_COUNTER)
    drawn = np.random.Philox(key=stream, counter=counter).random_raw((skip + count + 1) // 2)
    return drawn.astype("<u8", copy=False).view("<u4")[skip : skip + count]


def normal_(out: Tensor, stream: int, shape: Sequence[int], slices: Sequence[slice], std: float) -> Tensor:
    """Overwrite a block by normal numbers of mean 0 and deviation `std`, by the inverse of the normal distribution.

    They are drawn and rounded on the host, some at a time, so that a block on a device gets the same numbers.
    """
    if out.numel() == 0 or out.is_meta:
        return out
    step = max(1, CHUNK // prod(out.shape[1:]))
    for row in range(0, len(out), step):
        part = slice(slices[0].start + row, min(slices[0].start + row + step, slices[0].stop))
        uniform = (bits(stream, shape, (part, *slices[1:])) + 0.5) / 2**32
        out[row : row + step].copy_(torch.special.ndtri(torch.from_numpy(uniform)).mul_(std).to(out.dtype))
    return out


def keep_mask(stream: int, shape: Sequence[int], slices: Sequence[slice], probability: float, meta: bool = False) -> Tensor:
    """True with chance 1 − probability for each element of a block; `meta`: its shape alone, in a tensor without memory."""
    if meta:
        return torch.empty([part.stop - part.start for part in slices], dtype=torch.bool, device="meta")
    drawn = bits(stream, shape, slices)
    mask = torch.empty(drawn.shape, dtype=torch.bool)  # kept for backward, so it is torch's and in torch's account of memory
    np.greater_equal(drawn, np.uint32(round(probability * 2**32)), out=mask.numpy())
    return mask
