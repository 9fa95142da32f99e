"""Blocks of random matrices, the same on every grid: element (i, j) is a function of the seed, i, j and the number of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ShapeError
from ...layout.cyclic import Runs
from ...layout.random import CHUNK, bits, key
from ...layout.redistribute import indices

DIGITS = {"float64": 53, "complex128": 53, "float32": 24, "complex64": 24, "float16": 11, "bfloat16": 8}
"""Binary digits of each dtype that is drawn."""


def drawn(seed: int, shape: tuple[int, int], runs: tuple[Runs, ...], dtype: np.dtype[Any], normal: bool) -> np.ndarray:
    """The block of a random matrix of `shape` in the ranges `runs` of rows and columns; local.

    Uniform numbers lie in [0, 1) and have all digits of the dtype; normal ones have mean 0 and deviation 1 (Box and Muller,
    1958). Of complex numbers that holds of both parts. Workspace: some times `CHUNK` numbers of 8 bytes. Where columns are dealt
    out, a rank draws all from its first to its last. Raises ShapeError for another dtype, and for a seed that is none.
    """
    if dtype.name not in DIGITS:
        raise ShapeError(f"random: {dtype.name} numbers are not drawn; drawn are {', '.join(DIGITS)}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ShapeError(f"random: seed is {seed!r}; it is a whole number.")
    rows, columns = map(indices, runs)
    block = np.empty((len(rows), len(columns)), dtype)
    if not block.size:
        return block
    each = 2 if normal or dtype.kind == "c" else 1  # 64-bit numbers of the stream
    stream, first, last = key(seed, "normal" if normal else "uniform"), int(columns[0]), int(columns[-1]) + 1
    step, row = max(1, CHUNK // (each * (last - first))), 0
    for run in runs[0]:
        for start in range(run.start, run.stop, step):
            part = slice(start, min(start + step, run.stop)), slice(2 * each * first, 2 * each * last)
            words = bits(stream, (shape[0], 2 * each * shape[1]), part).view(np.uint64)
            numbers = words.reshape(len(words), last - first, each)[:, columns - first]
            count = len(numbers)
            block[row : row + count] = _values(numbers, dtype, normal)
            row += count
    return block


def _values(numbers: np.ndarray, dtype: np.dtype[Any], normal: bool) -> np.ndarray:
    """The elements made of the 64-bit numbers in the last dim."""
    digits = 53 if normal else DIGITS[dtype.name]
    uniform = (numbers >> np.uint64(64 - digits)) / 2.0**digits
    if not normal:
        return uniform[..., 0] + 1j * uniform[..., 1] if dtype.kind == "c" else uniform[..., 0]
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[..., 0])), 2 * np.pi * uniform[..., 1]
    return radius * (np.cos(angle) + 1j * np.sin(angle) if dtype.kind == "c" else np.cos(angle))
