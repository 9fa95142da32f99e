"""Conversion between a global array on every rank and the blocks of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..comm.device.arrays import Array, contiguous, copy_into, dtype_name, empty
from ..comm.grid import BaseGrid, agree_on_call
from ..errors import ShapeError
from .layout import Layout, Sharding


def distribute(whole: Array, grid: BaseGrid, layout: Layout | str) -> Array:
    """This rank's block of a global array that every rank holds: a C-ordered copy. Moves nothing.

    `layout` is a Layout or its text, such as ``b:(x,y) s h:z``.
    Raises LayoutError where the text cannot be read, where the layout has another number of dims, or an axis that the grid lacks.
    """
    layout = Layout.of(layout)
    part = whole[layout.slices(whole.shape, grid.shape, grid.coordinates)]
    return copy_into(empty(part.shape, part), part)


def collect(block: Array, grid: BaseGrid, layout: Layout | str, shape: Sequence[int]) -> Array:
    """The global array of `shape` from its blocks, on every rank.

    Each block travels once, from the rank that owns it (index 0 on the axes that only copy it). Moves, per rank, the words
    it does not own; needs the global array once more as workspace. Raises ShapeError where `block` is not this rank's block,
    and AgreementError on all ranks where that is so on some, at the first call of a kind.
    """
    layout, problem = Layout.of(layout), None
    sharding = Sharding(layout, tuple(shape))
    expected = sharding.local_shape(grid)
    if tuple(block.shape) != expected:
        problem = (
            f"Rank {grid.rank} holds a block of shape {tuple(block.shape)}; "
            f"{layout} of {tuple(shape)} on {grid} gives {expected}."
        )
    facts = {"shape": tuple(shape), "dtype": dtype_name(block), "layout": str(layout)}
    agree_on_call(grid, "collect", facts if problem is None or grid.job.check else {}, problem=problem)
    if problem is not None:
        raise ShapeError(problem)
    owners = {
        grid.rank_of(coordinates): slices
        for coordinates, slices in layout.blocks(shape, grid.shape)
        if layout.is_primary(coordinates)
    }
    world = [owners.get(rank) for rank in world_ranks(grid)]
    sizes = [0 if slices is None else prod(part.stop - part.start for part in slices) for slices in world]
    flat = contiguous(block).reshape(-1) if sharding.is_primary(grid) else empty((0,), block)
    gathered = grid.world.all_gather(flat, sizes=sizes)
    whole, start = empty(shape, block), 0
    for slices, size in zip(world, sizes, strict=True):
        if slices is not None:
            whole[slices] = gathered[start : start + size].reshape([part.stop - part.start for part in slices])
            start += size
    return whole


def world_ranks(grid: BaseGrid) -> list[int]:
    """The ranks in the order of `grid.world`: coordinates counted in the order of the axes, the last fastest."""
    return [grid.rank_of(coordinates) for coordinates, _ in Layout().blocks((), grid.shape)]
