"""Matrices as datasets of HDF5 files: ranks read their own hyperslabs at once, and write them in turn."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ...comm.device.arrays import Array, dtype_name, to_host
from ...comm.grid import BaseGrid
from ...errors import ConfigError, DataError
from ...files import check_regular
from ...layout.cyclic import Ownership
from ...layout.redistribute import boxes, indices
from .steps import new_file, on_all_ranks, replace, writes

SHORT = 4096
"""Bytes of a run of columns, below which all from the first to the last are read at once: a hyperslab costs some 50 µs."""


def read(path: Path, dataset: str, grid: BaseGrid, layout: Ownership) -> tuple[np.ndarray, tuple[int, int]]:
    """This rank's block of a dataset of 2 dims, in this machine's byte order, and its whole shape. DataError on all ranks."""
    return on_all_ranks(grid, f"{path} cannot be read as HDF5", lambda: _block(path, dataset, grid, layout))


def write(block: Array, shape: tuple[int, int], grid: BaseGrid, layout: Ownership, path: Path, dataset: str) -> None:
    """Write a matrix of such blocks as a contiguous dataset, in place of one of that name; a file's others are kept, by a copy.

    Each element is written by one of the ranks that hold it, rank after rank; at once, where h5py was built with MPI. The file is
    renamed to `path` when complete; a failure leaves the old one. Raises DataError on all ranks.
    """
    if dtype_name(block) == "bfloat16":
        raise DataError("An HDF5 file cannot hold bfloat16; supported: numpy's dtypes, such as float32. to_raw writes its bits.")
    block, comm, first = to_host(block), grid.everyone.comm, grid.rank == 0
    own = writes(grid, layout) and bool(block.size)
    runs = layout.runs(shape, grid.shape, grid.coordinates)
    h5py = on_all_ranks(grid, "h5py cannot be imported", _h5py)
    at_once = bool(h5py.get_config().mpi)

    def create(part: Path) -> None:
        check_regular(path)
        with os.fdopen(new_file(part), "wb") as copy:
            if path.exists():
                with path.open("rb") as old:
                    shutil.copyfileobj(old, copy, 2**24)
        with h5py.File(part, "r+" if path.exists() else "w") as file:
            if dataset in file:
                del file[dataset]
            file.create_dataset(dataset, shape, block.dtype)

    def fill(part: Path, turn: int) -> None:
        options = {"driver": "mpio", "comm": comm} if at_once else {}
        if at_once or turn == comm.rank:
            with h5py.File(part, "r+", **options) as file:
                for inside, outside in boxes(runs) if own else ():
                    file[dataset][outside] = block[inside]

    turns = [rank for rank, has in enumerate(comm.allgather(own)) if has][: 1 if at_once else None]
    steps = [lambda part, turn=turn: fill(part, turn) for turn in turns]
    replace(grid, path, lambda part: create(part) if first else None, *steps)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("HDF5 files need the package h5py: pip install 'summa3d[hdf5]'.") from error
    return h5py


def _block(path: Path, dataset: str, grid: BaseGrid, layout: Ownership) -> tuple[np.ndarray, tuple[int, int]]:
    check_regular(path)
    with _h5py().File(path, "r") as file:
        if dataset not in file or not hasattr(file[dataset], "shape"):
            names = ", ".join(sorted(name for name, item in file.items() if hasattr(item, "shape"))) or "none"
            raise DataError(f"{path} has no dataset {dataset!r}. Datasets of its root: {names}.")
        stored = file[dataset]
        if stored.shape is None or len(stored.shape) != 2:
            raise DataError(f"{path}: the dataset {dataset!r} is no matrix (2 dims), but {stored.shape}.")
        if stored.dtype.hasobject:
            raise DataError(f"{path}: the dataset {dataset!r} has elements of dtype {stored.dtype}, not numbers.")
        rows, columns = layout.runs(stored.shape, grid.shape, grid.coordinates)
        block = np.empty([sum(run.stop - run.start for run in runs) for runs in (rows, columns)], stored.dtype.newbyteorder("="))
        if columns and len(columns) > 1 and block.shape[1] // len(columns) * block.itemsize < SHORT:
            span, wanted = slice(columns[0].start, columns[-1].stop), indices(columns) - columns[0].start
            for inside, outside in boxes((rows, (span,))):
                block[inside[0]] = stored[outside][:, wanted]
        else:
            for inside, outside in boxes((rows, columns)):
                if block[inside].size:
                    stored.read_direct(block, outside, inside)
    return block, stored.shape
