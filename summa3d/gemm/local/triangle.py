"""The lower triangle of C = op(A)·op'(A) on one rank: by a BLAS's syrk and herk, else in halves; packed, whole, transposed."""

from __future__ import annotations

import numpy as np

from ...blas_library import follow_threads, rank_k
from ...comm.device.arrays import Array, dtype_name, is_on_device, is_torch
from ...dtypes import HALVES
from .blas import accumulate
from .strides import by_rows, row_step

LEAF = 64
"""Rows of a triangle that is multiplied as a square, where no BLAS has syrk for its dtype: 1/32 more arithmetic of 2,048 rows."""
TILE = 64
"""Side of the tiles in which a block is transposed: a row of a tile is some cache lines."""


def accumulate_lower(a: Array, form: str, out: Array) -> None:
    """The lower triangle of the square `out` = op(A)·op'(A), form nt, tn, nc or cn; above the diagonal it is undefined."""
    if 0 in a.shape:
        out[...] = 0
        return
    on_host = not is_on_device(a) and not (is_torch(a) and a.is_meta)
    bound = rank_k(dtype_name(a), form) if on_host and row_step(out) else None
    lies = (a, form[0]) if "c" in form else by_rows(a, form[0])
    if bound is not None and lies is not None and row_step(lies[0]):
        return bound(_numbers(lies[0]), form if lies[1] == form[0] else form[::-1], _numbers(out))
    n = len(out)
    if n <= LEAF:
        return accumulate(a, a, form, out)
    half = n // 2
    first, second = (a[:half], a[half:]) if form[0] == "n" else (a[:, :half], a[:, half:])
    accumulate_lower(first, form, out[:half, :half])
    accumulate(second, first, form, out[half:, :half])
    accumulate_lower(second, form, out[half:, half:])


def _numbers(array: Array) -> np.ndarray:
    """A host array as numpy's; before, the library's threads are set to torch's for a tensor."""
    if not is_torch(array):
        return np.asarray(array)
    import torch

    follow_threads(torch.get_num_threads())
    return np.asarray(array.detach().resolve_conj().resolve_neg().numpy())


def _numpys(array: Array) -> Array:
    """A view of a host tensor as numpy's array, whose rows are copied with less Python; others as they are."""
    if not is_torch(array) or is_on_device(array) or dtype_name(array) in HALVES:
        return array
    return array.detach().numpy()


def pack_lower(square: Array, packed: Array) -> None:
    """Copy the rows of the lower triangle of `square`, one after the other, to the vector `packed`."""
    if is_torch(square) and square.is_meta:  # of a dry run: one copy of as many elements
        packed[...] = square.reshape(-1)[: len(packed)]
        return
    at, square, packed = 0, _numpys(square), _numpys(packed)
    for row in range(len(square)):
        packed[at : at + row + 1] = square[row, : row + 1]
        at += row + 1


def unpack_lower(packed: Array, square: Array, conjugates: bool) -> None:
    """Fill `square` from its packed lower triangle: above the diagonal the mirror image, or its conjugate."""
    if is_torch(square) and square.is_meta:
        square[...] = packed.new_empty(square.shape)
        return
    at, square, packed = 0, _numpys(square), _numpys(packed)
    for row in range(len(square)):
        square[row, : row + 1] = packed[at : at + row + 1]
        at += row + 1
    for start in range(0, len(square), TILE):
        stop = start + TILE
        corner = square[start:stop, start:stop]
        for row in range(len(corner) - 1):
            corner[row, row + 1 :] = conjugate(corner[row + 1 :, row], conjugates)
        put_transposed(square[start:stop, stop:], square[stop:, start:stop], conjugates)


def put_transposed(out: Array, block: Array, conjugates: bool = False) -> None:
    """out = blockᵀ, or its conjugate; on the host in tiles, of which both sides stay in the cache."""
    if is_torch(out) or not isinstance(out, np.ndarray):
        out[...] = conjugate(block.T, conjugates)
        return
    for row in range(0, out.shape[0], TILE):
        for column in range(0, out.shape[1], TILE):
            tile = block[column : column + TILE, row : row + TILE].T
            out[row : row + TILE, column : column + TILE] = conjugate(tile, conjugates)


def conjugate(array: Array, wanted: bool = True) -> Array:
    """The conjugate of complex numbers, where it is wanted; of others the array itself."""
    if not wanted or not dtype_name(array).startswith("complex"):
        return array
    return array.conj().resolve_conj() if is_torch(array) else array.conj()
