"""A text of a distributed tensor, and of a matrix a picture of which ranks hold which block."""

from __future__ import annotations

from ..columns import aligned
from ..comm.device.arrays import dtype_name
from .distributed import Distributed

RangePairs = tuple[tuple[int, int], ...]

LARGEST = 64
"""The largest rank count for which a table is made."""
RUNS = 3
"""Ranges of a block-cyclic dim that are shown."""


def summary(tensor: Distributed) -> str:
    """One line on the tensor and on this rank's part of it."""
    held = [ranges(runs) for runs in tensor.layout.runs(tensor.shape, tensor.grid.shape, tensor.grid.coordinates)]
    size = f"{'×'.join(map(str, tensor.shape))} {dtype_name(tensor.block)}"
    own = f"rows {held[0]}, columns {held[1]}" if tensor.DIMS == 2 else f"[{', '.join(held)}]"
    here = f"{own} here" if tensor.grid.inside else "nothing here"
    return f"{type(tensor).__name__}({size}, {tensor.layout} on {tensor.grid}, {here})"


def ranges(runs: tuple[slice, ...]) -> str:
    """``0:4`` or ``0:2,4:6,8:10,…``"""
    shown = ",".join(f"{run.start}:{run.stop}" for run in runs[:RUNS])
    return (shown or "none") + (",…" if len(runs) > RUNS else "")


def table(matrix: Distributed) -> list[str]:
    """A line per range of rows, a column per range of columns, in each cell the ranks that hold the block.

    Empty for more than 64 ranks.
    """
    grid, layout = matrix.grid, matrix.layout
    if grid.size > LARGEST:
        return []
    holders: dict[tuple[RangePairs, RangePairs], list[int]] = {}
    for rank in range(grid.size):
        coordinates = grid.coordinates_of(rank)
        if layout.holds_block(coordinates):
            runs = layout.runs(matrix.shape, grid.shape, coordinates)
            rows, columns = (tuple((run.start, run.stop) for run in part) for part in runs)
            holders.setdefault((rows, columns), []).append(grid.communicators.ranks[rank])
    lines, across = (sorted({key[dim] for key in holders}) for dim in (0, 1))
    table = [["rows \\ columns", *map(_written, across)]]
    for rows in lines:
        table.append([_written(rows), *(" ".join(map(str, holders[rows, columns])) for columns in across)])
    return [f"  {line}" for line in aligned(table)]


def _written(runs: RangePairs) -> str:
    return ranges(tuple(slice(*run) for run in runs))
