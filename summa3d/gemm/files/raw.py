"""Matrices as bare elements by rows, behind a header of any kind: raw binary files, and the data of .npy files."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...comm.device.arrays import Array, dtype_name, is_torch, to_host
from ...comm.grid import BaseGrid
from ...errors import DataError
from ...files import check_regular
from ...layout.cyclic import Ownership, Runs
from ...layout.redistribute import boxes, put, taken
from .steps import new_file, on_all_ranks, replace, writes

SHORT = 4096
"""Bytes of a run of columns, below which a call to read each costs more than the pages around it."""


def read(path: Path, shape: tuple[int, int], dtype: np.dtype, offset: int, grid: BaseGrid, layout: Ownership) -> np.ndarray:
    """This rank's block of the matrix in a raw file, in this machine's byte order; only that is read. DataError on all ranks."""
    return on_all_ranks(grid, f"{path} cannot be read", lambda: _block(path, shape, dtype, offset, grid, layout))


def elements(path: Path, shape: tuple[int, int], dtype: np.dtype, offset: int, runs: tuple[Runs, ...]) -> np.ndarray:
    """The elements in ranges of rows and columns of a matrix by rows from `offset` on, in this machine's byte order.

    Whole rows and short runs of columns are copied from the mapped file; longer runs are read, row by row.
    """
    columns = runs[1]
    block = np.empty([sum(run.stop - run.start for run in each) for each in runs], dtype)
    has_whole_rows = block.shape[1] == shape[1] and len(columns) == 1
    if block.size and (has_whole_rows or block[0].nbytes < SHORT * len(columns)):
        block[...] = taken(np.memmap(path, dtype, "r", offset, shape), runs)
    elif block.size:
        with path.open("rb", buffering=0) as file:
            for (at, across), (row, column) in boxes(runs):
                for number, piece in enumerate(block[at, across]):
                    _fill_from(file.fileno(), piece, offset + ((row.start + number) * shape[1] + column.start) * dtype.itemsize)
    return block.astype(dtype.newbyteorder("="), copy=False)


def _fill_from(file: int, piece: np.ndarray, position: int) -> None:
    """Read the bytes of a contiguous array. Raises OSError where the file ends before."""
    data: Any = piece.reshape(-1).view(np.uint8)
    while len(data):
        got = os.preadv(file, [data], position)
        if not got:
            raise OSError(f"it ends at byte {position:,}")
        data, position = data[got:], position + got


def _block(path: Path, shape: tuple[int, int], dtype: np.dtype, offset: int, grid: BaseGrid, layout: Ownership) -> np.ndarray:
    check_regular(path)
    size, needed = path.stat().st_size, prod(shape) * dtype.itemsize
    if dtype.hasobject or not dtype.itemsize:
        raise DataError(f"{path}: no file has elements of dtype {dtype}; take one of numbers, such as float64.")
    if not hasattr(offset, "__index__") or offset < 0:
        raise DataError(f"{path}: offset is {offset!r}; it is the bytes before the first element, a whole number of at least 0.")
    if size != offset + needed:
        raise DataError(
            f"{path} has {size:,} bytes; a {shape[0]}×{shape[1]} matrix of {dtype} at offset {offset} takes "
            f"{offset:,} + {needed:,}. Shape, dtype or offset are others, or the file is not whole."
        )
    return elements(path, shape, dtype, offset, layout.runs(shape, grid.shape, grid.coordinates))


def write(block: Array, shape: tuple[int, int], grid: BaseGrid, layout: Ownership, path: Path, header: bytes = b"") -> None:
    """Write a matrix of such blocks by rows, behind a header, to a file that all ranks can reach; each element by one rank.

    The file is renamed to `path` when complete; a failure leaves no file. Raises DataError on all ranks.
    """
    block, first = _host(block), grid.rank == 0
    size, runs = len(header) + prod(shape) * block.dtype.itemsize, layout.runs(shape, grid.shape, grid.coordinates)
    fills = writes(grid, layout) and bool(block.size)
    replace(
        grid,
        path,
        lambda part: _create(part, header, size) if first else None,
        lambda part: _write(part, block, shape, runs, len(header)) if fills else None,
    )


def _host(block: Array) -> np.ndarray:
    """The block as an array of numpy's; bfloat16, which numpy has not, as its bits."""
    if is_torch(block) and dtype_name(block) == "bfloat16":
        import torch

        block = block.detach().view(torch.uint16)
    return to_host(block)


def _create(path: Path, header: bytes, size: int) -> None:
    with os.fdopen(new_file(path), "wb") as file:
        file.write(header)
        file.truncate(size)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a signal at a touch


def _write(path: Path, block: np.ndarray, shape: tuple[int, int], runs: tuple[Runs, ...], offset: int) -> None:
    whole = np.memmap(path, block.dtype, "r+", offset, shape)
    put(whole, runs, block)
    whole.flush()
