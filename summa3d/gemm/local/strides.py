"""The memory layout of a matrix as a BLAS reads it: rows, and the stride from one row to the next."""

from __future__ import annotations

from ...comm.device.arrays import Array, is_torch

OTHER_OP = {"n": "t", "t": "n"}


def by_rows(array: Array, letter: str) -> tuple[Array, str] | None:
    """The matrix as it lies by rows, and its op then; None where neither it nor its transpose does, or op is c and must stay."""
    if row_step(array):
        return array, letter
    return (array.T, OTHER_OP[letter]) if letter in OTHER_OP and row_step(array.T) else None


def row_step(array: Array) -> int:
    """The elements from one row to the next, where those of a row are adjacent and rows do not overlap; else 0."""
    rows, columns = array.shape
    if is_torch(array):
        row, element = array.stride()
        size = 1
    else:
        row, element = array.strides
        size = array.itemsize
    if element != size and columns != 1:
        return 0
    if rows == 1:
        return max(columns, 1)
    return int(row // size) if row >= columns * size and row % size == 0 else 0
