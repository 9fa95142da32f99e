"""Counter-based random numbers (Philox4x64-10): a function of (seed, name, step) and the *global* element index.

Each rank draws its own block only, and every grid draws the same numbers. Plain numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import numpy as np

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


def bits(philox_key: int, shape: Sequence[int], slices: Sequence[slice], first: int = 0) -> np.ndarray:
    """The 32-bit numbers of the block `slices` of a global tensor of `shape`, row-major.

    Parameters
    ----------
    philox_key : the key of the random numbers
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
        rows = [bits(philox_key, shape[1:], slices[1:], first + row * inner) for row in range(slices[0].start, slices[0].stop)]
        extent = [part.stop - part.start for part in slices]
        return np.stack(rows) if rows else np.empty(extent, np.uint32)
    columns = shape[-1]
    per_row = prod(shape[1:-1])
    begin, end = (slices[0].start * per_row, slices[0].stop * per_row) if len(shape) > 1 else (0, 1)
    out = np.empty((end - begin, slices[-1].stop - slices[-1].start), np.uint32)
    _fill(out, philox_key, first + begin * columns, columns, slices[-1])
    return out.reshape([part.stop - part.start for part in slices])


def _fill(out: np.ndarray, philox_key: int, first: int, columns: int, wanted: slice) -> None:
    """Set out[r, :] to the numbers first + r·columns + `wanted` of the stream."""
    rows, width = out.shape
    if columns - width > SKIP_WORTH_A_RESTART:
        for row in range(rows):
            out[row] = _run(philox_key, first + row * columns + wanted.start, width)
        return
    step = max(1, CHUNK // max(columns, 1))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        out[row : row + count] = _run(philox_key, first + row * columns, count * columns).reshape(count, columns)[:, wanted]


def _run(philox_key: int, first: int, count: int) -> np.ndarray:
    """The numbers first … first + count − 1 of the stream."""
    counter, skip = divmod(first, WORDS_PER_COUNTER)
    drawn = np.random.Philox(key=philox_key, counter=counter).random_raw((skip + count + 1) // 2)
    return drawn.astype("<u8", copy=False).view("<u4")[skip : skip + count]
