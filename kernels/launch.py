# What starts a kernel, and how many blocks and threads it is given. Imports torch only.
# A launcher is the device's (load.py) or, under test, the kernels' host build; nothing else differs.
# Next: elements.py and rows.py, which call kernels through it.
from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

THREADS = 256  # of a block at most: MOST_THREADS in blocks.cuh
WARP = 32
ACCESS = 16  # bytes
BLOCKS_A_PROCESSOR = 8  # blocks of 256 threads that fill a processor
SUMMING_BLOCKS_A_PROCESSOR = 4  # of those that leave a row of partial sums behind: half as many, to be added up later
SUMMED_ACROSS = 32  # columns a block of sum_lanes takes: blocks.cuh

Argument = Tensor | int | float | None


class Launcher(Protocol):
    """Starts ``kernel`` with `blocks` blocks of `threads` threads: tensors are passed as pointers, None as a null pointer.

    device : where its kernels run. processors : of that device. most_blocks : the largest grid it takes.
    """

    device: torch.device
    processors: int
    most_blocks: int

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None: ...


def suffix(dtype: torch.dtype) -> str:
    """How kernels for elements of `dtype` end; raises TypeError where there are none."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("float64", "float32", "bfloat16", "float16"):
        raise TypeError(f"no kernel takes elements of {name}; float64, float32, bfloat16 and float16 will do.")
    return name


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel computes in, and gives row statistics in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Matrix(NamedTuple):
    """A tensor seen as rows of its last dim, `stride` elements apart."""

    data: Tensor
    rows: int
    columns: int
    stride: int


def matrix(x: Tensor) -> Matrix:
    """x as rows; copied only where its elements or rows are not evenly spread."""
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else x.shape[:-1].numel()
    if columns > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    flat = x.reshape(rows, columns)
    return Matrix(flat, rows, columns, flat.stride(0) if rows > 1 else columns)


class Tiling(NamedTuple):
    """Blocks and walks over [rows, columns] (walk.cuh): `lanes` walks down, `across` threads of a block side by side."""

    blocks: int
    lanes: int
    across: int


def tiling(launch: Launcher, rows: int, columns: int, width: int, summing: bool = False) -> Tiling:
    """How threads that take `width` columns each cover a matrix with enough walks to fill the device; no columns, no blocks."""
    across = 1
    while across < THREADS and across * width < columns:
        across *= 2
    down, strips = THREADS // across, -(-columns // (across * width))
    wanted = launch.processors * (SUMMING_BLOCKS_A_PROCESSOR if summing else BLOCKS_A_PROCESSOR)
    steps = max(1, min(-(-rows // down), wanted // max(strips, 1)))
    return Tiling(min(strips * steps, launch.most_blocks), steps * down, across)


def row_threads(columns: int, dtype: torch.dtype) -> int:
    """Threads for a block that walks along one row."""
    packs = columns * dtype.itemsize // ACCESS + 1
    return min(THREADS, -(-packs // WARP) * WARP)
