"""Matrices in .npy files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ...comm.device.arrays import Array, dtype_name, to_host
from ...comm.grid import BaseGrid
from ...errors import DataError
from ...files import check_regular
from ...layout.cyclic import Ownership
from ...layout.redistribute import taken
from . import raw
from .steps import on_all_ranks

MAGIC = b"\x93NUMPY"
OTHERS = {b"\x89HDF": "an HDF5 file", b"PK": "an archive, as numpy.savez writes", b"\x80": "a pickle, which is never loaded"}
"""How files of other kinds begin."""


def read(path: Path, grid: BaseGrid, layout: Ownership) -> tuple[np.ndarray, tuple[int, int]]:
    """This rank's block of the matrix in a .npy file, in this machine's byte order, and the shape of the whole.

    Only the block is read from disk. Raises DataError on all ranks, also where one alone cannot read the file.
    """
    return on_all_ranks(grid, f"{path} is not a .npy file that can be read", lambda: _block(path, grid, layout))


def write(block: Array, shape: tuple[int, int], grid: BaseGrid, layout: Ownership, path: Path) -> None:
    """Write a matrix of such blocks to a .npy file, as `raw.write`. Raises DataError on all ranks."""
    if dtype_name(block) == "bfloat16":
        raise DataError("A .npy file cannot hold bfloat16; supported: numpy's dtypes, such as float32. to_raw writes its bits.")
    header, dtype = io.BytesIO(), to_host(block[:0, :0]).dtype
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, facts)
    raw.write(block, shape, grid, layout, path, header.getvalue())


def _block(path: Path, grid: BaseGrid, layout: Ownership) -> tuple[np.ndarray, tuple[int, int]]:
    check_regular(path)
    with path.open("rb") as file:
        begins = file.read(len(MAGIC) + 2)
    if not begins.startswith(MAGIC):
        kind = next((kind for magic, kind in OTHERS.items() if begins.startswith(magic)), None)
        raise DataError(
            f"{path} is {kind or 'no .npy file: it has no header of one'}. from_raw(path, shape, dtype, …) reads bare elements, "
            "from_hdf5(path, dataset, …) HDF5; numpy.save writes a .npy file."
        )
    whole = np.load(path, mmap_mode="r", allow_pickle=False)
    if whole.ndim != 2:
        raise DataError(f"{path} does not hold a matrix (an array of 2 dims), but {whole.shape}.")
    runs = layout.runs(whole.shape, grid.shape, grid.coordinates)
    if isinstance(whole, np.memmap) and whole.flags.c_contiguous:
        return raw.elements(path, whole.shape, whole.dtype, whole.offset, runs), whole.shape
    return np.array(taken(whole, runs), whole.dtype.newbyteorder("="), order="C", subok=False), whole.shape
