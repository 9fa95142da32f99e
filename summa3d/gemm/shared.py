# Matrix blocks in node-shared memory. Imports comm.shared, layout.
# Next: cuboid.py, whose gathers of such blocks are views.
from __future__ import annotations

import numpy as np

from ..comm.grid import Grid
from ..comm.shared import SharedBlocks
from ..errors import LayoutError
from ..layout.layout import Layout, split_sizes
from ..layout.redistribute import Ownership


def empty_shared(shape: tuple[int, int], grid: Grid, layout: Ownership, dtype: np.typing.DTypeLike) -> np.ndarray:
    """This rank's block of a matrix, unfilled, beside the blocks that an all-gather along the rows' last axis would join.

    Collective. Where no axis splits the rows, or the last of size 1, there is nothing to share, and the block is its own.
    """
    if not isinstance(layout, Layout):
        raise LayoutError(f"{layout} cannot share memory: only the blocks of a Layout lie one after the other.")
    rows, columns = layout.local_shape(shape, grid.shape, grid.coordinates)
    if not grid.inside:
        return np.empty((rows, columns), dtype)
    axis = grid[layout.dims[0][-1:]]
    if axis.size == 1:
        return np.empty((rows, columns), dtype)
    coarse = Layout(layout.dims[0][:-1], ()).local_shape(shape, grid.shape, grid.coordinates)
    blocks = SharedBlocks(axis.comm, axis.label, split_sizes(coarse[0], axis.size), (columns,), dtype)
    return np.asarray(axis.adopt(blocks))
