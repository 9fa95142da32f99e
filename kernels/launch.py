"""The interface that launches kernels, and the number of blocks and threads that a launch is given.

A launcher is the device's (load.py) or, under test, that of the kernels' host build.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

THREADS = 256  # the most threads of a block: MOST_THREADS in blocks.cuh
WARP = 32
ACCESS = 16  # bytes of the widest load and store: ACCESS in common.cuh
BLOCKS_A_PROCESSOR = 8  # blocks of 256 threads that fill a streaming multiprocessor
SUMMING_BLOCKS_A_PROCESSOR = 4  # half as many where each lane writes a row of partial sums, which a second kernel adds
SUMMED_ACROSS = 32  # columns that one block of sum_lanes adds: SUMMED_ACROSS in blocks.cuh

Argument = Tensor | int | float | None


class KernelLauncher(Protocol):
    """Launches ``kernel`` with `blocks` blocks of `threads` threads; tensors are passed as pointers, None as a null pointer.

    Attributes
    ----------
    device : the device that its kernels run on
    processors : the number of streaming multiprocessors of that device
    most_blocks : the largest number of blocks of one launch
    """

    device: torch.device
    processors: int
    most_blocks: int

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None: ...


def suffix(dtype: torch.dtype) -> str:
    """The ending of the names of kernels for elements of `dtype`; raises TypeError for a dtype without kernels.

    >>> suffix(torch.bfloat16)
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("float64", "float32", "bfloat16", "float16"):
        raise TypeError(f"the fused kernels do not support dtype {name}; supported: float64, float32, bfloat16, float16.")
    return name


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a kernel's arithmetic and of its row statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Matrix(NamedTuple):
    """A tensor viewed as [rows, columns], its rows `stride` elements apart."""

    data: Tensor
    rows: int
    columns: int
    stride: int


def matrix(x: Tensor) -> Matrix:
    """View x as rows of its last dim; x is copied only where one stride cannot describe its rows.

    >>> matrix(torch.zeros(2, 3, 8)[..., :4])[1:]
    (6, 4, 8)
    """
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else x.shape[:-1].numel()
    if columns > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    flat = x.reshape(rows, columns)
    return Matrix(flat, rows, columns, flat.stride(0) if rows > 1 else columns)


class Tiling(NamedTuple):
    """A launch over [rows, columns] (walk.cuh): its blocks, its lanes (the row stride), and a block's threads side by side."""

    blocks: int
    lanes: int
    across: int


def tiling(launch: KernelLauncher, rows: int, columns: int, width: int, summing: bool = False) -> Tiling:
    """Cover a matrix by threads of `width` columns each, with enough lanes to fill the device.

    summing : whether each lane writes partial sums, which favours fewer lanes

    A matrix without columns gets 0 blocks.
    """
    across = 1
    while across < THREADS and across * width < columns:
        across *= 2
    down, strips = THREADS // across, -(-columns // (across * width))
    wanted = launch.processors * (SUMMING_BLOCKS_A_PROCESSOR if summing else BLOCKS_A_PROCESSOR)
    steps = max(1, min(-(-rows // down), wanted // max(strips, 1)))
    return Tiling(min(strips * steps, launch.most_blocks), steps * down, across)


def row_threads(columns: int, dtype: torch.dtype) -> int:
    """The threads of a block that walks along one row: whole warps, one 16-byte access per thread where they suffice."""
    packs = columns * dtype.itemsize // ACCESS + 1
    return min(THREADS, -(-packs // WARP) * WARP)
