"""Counter-based random numbers (Philox4x64-10): a function of (seed, name, step) and the *global* element index.

Each rank draws its own block only, and every grid draws the same weights and masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

WORDS_PER_COUNTER = 8
"""The 32-bit numbers that one Philox4x64 counter yields."""
SKIP_WORTH_A_RESTART = 8192
"""The count of unused numbers that cost as much to draw as restarting the generator."""
CHUNK = 1 << 22
"""The elements drawn at once, which bounds the workspace of a large block."""


def key(seed: int, name: str, step: int = 0) -> int:
    """The 128-bit Philox key of a random stream.

    >>> key(1, "blocks.0.mlp.up.weight") == key(1, "blocks.0.mlp.up.weight", step=0) != key(2, "blocks.0.mlp.up.weight")
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=16).digest(), "little")


def bits(stream: int, shape: Sequence[int], slices: Sequence[slice], first: int = 0) -> np.ndarray:
    """The 32-bit numbers of the block `slices` of a global tensor of `shape`, row-major.

    Parameters
    ----------
    stream : the key of the random stream
    first : the index in the stream of the tensor's element 0

    Number e of the stream is 32-bit word e % 8 of the output of counter e // 8 + 1. A block holds the same numbers as the same
    slice of the whole tensor:

    >>> whole = bits(key(1, "w"), (4, 6), (slice(0, 4), slice(0, 6)))
    >>> block = bits(key(1, "w"), (4, 6), (slice(1, 3), slice(2, 5)))
    >>> bool((block == whole[1:3, 2:5]).all())
    True
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
    """Set out[r, :] to the numbers first + r·columns + `wanted` of the stream."""
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
    """The numbers first … first + count − 1 of the stream."""
    counter, skip = divmod(first, WORDS_PER_COUNTER)
    drawn = np.random.Philox(key=stream, counter=counter).random_raw((skip + count + 1) // 2)
    return drawn.astype("<u8", copy=False).view("<u4")[skip : skip + count]


def normal_(out: Tensor, stream: int, shape: Sequence[int], slices: Sequence[slice], std: float) -> Tensor:
    """Overwrite `out`, the block `slices` of a global tensor of `shape`, by normal numbers of mean 0 and deviation `std`.

    The inverse of the normal distribution is applied to the uniform numbers of the stream. Numbers are drawn and rounded on the
    host, `CHUNK` elements at a time, so that a block on a device is bitwise the same.
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
    """A bool mask of the block `slices` of a global tensor of `shape`: True with probability 1 − `probability`.

    meta : return only its shape, as a tensor without memory.
    """
    if meta:
        return torch.empty([part.stop - part.start for part in slices], dtype=torch.bool, device="meta")
    drawn = bits(stream, shape, slices)
    mask = torch.empty(drawn.shape, dtype=torch.bool)  # backward keeps the mask, so torch allocates and counts its memory
    np.greater_equal(drawn, np.uint32(round(probability * 2**32)), out=mask.numpy())
    return mask
