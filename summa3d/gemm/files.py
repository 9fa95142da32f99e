"""Read and write a distributed matrix in one .npy file; each rank reads or writes its own part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from ..comm.device.arrays import dtype_name, to_host
from ..comm.grid import BaseGrid
from ..comm.health.agreement import agree_on_error
from ..errors import DataError
from ..layout.layout import Layout
from ..layout.redistribute import Ownership, put, taken
from .distributed import Distributed


def read(path: str | Path, grid: BaseGrid, layout: Ownership) -> tuple[np.ndarray, tuple[int, int]]:
    """This rank's block of the matrix in a .npy file, in this machine's byte order, and the shape of the whole.

    Only the block is read from disk.

    Raises DataError on all ranks, also where one alone cannot read the file.
    """
    error, block, shape = None, np.empty((0, 0)), (0, 0)
    try:
        whole = _mapped(Path(path), "r")
        shape = (whole.shape[0], whole.shape[1])
        runs = layout.runs(shape, grid.shape, grid.coordinates)
        block = np.array(taken(whole, runs), whole.dtype.newbyteorder("="), order="C", subok=False)
    except (OSError, ValueError, DataError) as caught:
        error = caught if isinstance(caught, DataError) else DataError(f"{path} is not a .npy file that can be read: {caught}")
    agree_on_error(grid.everyone.comm, error)
    return block, shape


def write(matrix: Distributed, path: str | Path) -> None:
    """Write the matrix to a .npy file that all ranks can reach; each element is written by one rank that holds it.

    The file is renamed to `path` when complete; a failure leaves no file. Raises DataError on all ranks.
    """
    grid, layout, path = matrix.grid, matrix.layout, Path(path)
    if dtype_name(matrix.block) == "bfloat16":
        raise DataError("A .npy file cannot hold bfloat16; supported: numpy's dtypes, such as float32.")
    part = path.with_name(path.name + ".part")
    block = to_host(matrix.block)
    first = grid.rank == 0
    try:
        _on_all_ranks(grid, part, lambda: _create(part, block.dtype, matrix.shape) if first else None)
        _on_all_ranks(grid, part, lambda: _fill(part, matrix, block) if _owns(grid, layout) and block.size else None)
        _on_all_ranks(grid, path, lambda: part.replace(path) if first else None)
    except DataError:
        if first:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        raise


def _on_all_ranks(grid: BaseGrid, path: Path, step: Callable[[], object]) -> None:
    """Run a step on every rank; raise its error on all if it fails on any. No rank goes on before all have ended."""
    error = None
    try:
        step()
    except (OSError, ValueError) as caught:
        error = DataError(f"{path} cannot be written: {caught}")
    agree_on_error(grid.everyone.comm, error)


def _mapped(path: Path, mode: Literal["r", "r+"]) -> np.ndarray:
    whole = np.load(path, mmap_mode=mode, allow_pickle=False)
    if not isinstance(whole, np.ndarray) or whole.ndim != 2:
        raise DataError(f"{path} does not hold a matrix (an array of 2 dims), but {getattr(whole, 'shape', 'an archive')}.")
    return whole


def _create(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # no link is followed
    if 0 in shape:
        with path.open("wb") as file:
            np.save(file, np.empty(shape, dtype))
        return
    np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)  # a full disk is an error now, not a signal at a touch


def _fill(path: Path, matrix: Distributed, block: np.ndarray) -> None:
    whole = _mapped(path, "r+")
    put(whole, matrix.layout.runs(matrix.shape, matrix.grid.shape, matrix.grid.coordinates), block)
    whole.flush()  # type: ignore[attr-defined]


def _owns(grid: BaseGrid, layout: Ownership) -> bool:
    """True on one of the ranks that hold copies of a block."""
    if isinstance(layout, Layout):
        return layout.is_primary(grid.coordinates)
    return grid.inside and all(grid.coordinates[axis] == 0 for axis in grid.shape if axis not in layout.axes)
