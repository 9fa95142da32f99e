"""Which elements of a distributed matrix a rank counts, over which axes they differ, and the dtype in which they are summed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...comm.device.arrays import Array, is_half, is_torch
from ...errors import ShapeError
from ...layout.cyclic import BlockCyclic, Ownership
from ...layout.layout import Coordinates, Layout
from ..distributed import Distributed


def splitting(layout: Ownership) -> tuple[str, ...]:
    """The axes over which values differ: those that split a dim, and those along which some ranks hold nothing."""
    return tuple(dict.fromkeys([*(axis for axes in layout.dims for axis in axes), *layout.root_only]))


def counts(matrix: Distributed) -> bool:
    """Return whether this rank's block counts in a sum over `splitting`: of equal copies at several indices, the first."""
    return counts_at(matrix, matrix.grid.coordinates)


def counts_at(matrix: Distributed, coordinates: Coordinates) -> bool:
    """`counts` of the rank there."""
    layout = matrix.layout
    if not layout.holds_block(coordinates) or not isinstance(layout, Layout):
        return layout.holds_block(coordinates)
    return all(axis in layout.axes or coordinates[axis] == layout.root_index(axis, coordinates) for axis in layout.root_only)


def without(layout: Ownership, dim: int) -> Ownership:
    """The layout of a matrix with 1 in place of a dim's size, one for each line along it: on all ranks of the dim's axes.

    >>> str(without(Layout("m:x n:(y,z)"), 1)), str(without(BlockCyclic(("x", 2), ("y", 3)), 0))
    ('m:x n', '0[2] 1:y[3]')
    """
    if isinstance(layout, BlockCyclic):
        rows, columns = layout.rows, layout.columns
        return BlockCyclic(((), rows[1]), columns) if dim == 0 else BlockCyclic(rows, ((), columns[1]))
    split = layout.dims[dim]
    follows = {axis: other for axis, other in layout.follows if other not in split}
    gone = {*split, *(axis for axis, other in layout.follows if other in split)}
    kept = tuple(axis for axis in layout.root_only if axis not in gone)
    at = {axis: indices for axis, indices in layout.at if axis in kept}
    dims = tuple(() if each == dim else axes for each, axes in enumerate(layout.dims))
    return Layout(*dims, root_only=kept, follows=follows, at=at, names=layout.names)


def along(layout: Ownership, dim: int) -> tuple[str, ...]:
    """The axes over which the lines along a dim are summed: those that split it, and those whose holder follows one of them."""
    split = layout.dims[dim]
    followed = (axis for axis, other in layout.follows if other in split) if isinstance(layout, Layout) else ()
    return (*split, *followed)


def wide_dtype(block: Array) -> Any:
    """The dtype that sums of this block are taken in: float64, complex128 or int64. Raises ShapeError for no numbers."""
    if is_torch(block):
        import torch

        if block.is_complex():
            return torch.complex128
        return torch.float64 if block.is_floating_point() else torch.int64
    kind = "f" if is_half(block) else block.dtype.kind
    wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "b": np.int64, "u": np.int64}.get(kind)
    if wide is None:
        raise ShapeError(f"The block's dtype is {block.dtype}; sums and the like are of numbers.")
    return np.dtype(wide)


def widened(block: Array) -> Array:
    """The block in `wide_dtype`; itself where it has that dtype."""
    wide = wide_dtype(block)
    if block.dtype == wide:
        return block
    return block.detach().to(wide) if is_torch(block) else block.astype(wide)


def is_whole_dtype(wide: Any) -> bool:
    """Return whether a `wide_dtype` is one of whole numbers."""
    return "int" in str(wide)
