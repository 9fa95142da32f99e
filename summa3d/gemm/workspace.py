# The buffers of an executor: allocated by its first run, counted in the ledger, kept for the next. Imports comm.arrays, blas.
# Next: plan.py, whose executors each own one.
from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..comm.arrays import Array, copy_into, dtype_name, empty, is_half, kind_of
from ..comm.grid import Grid
from .blas import accumulation_like, adds_in_place


class Workspace:
    """Named buffers that are allocated once, counted in the ledger, and live as long as the executor that owns them."""

    def __init__(self, grid: Grid) -> None:
        self._ledger = grid.ledger
        self._rooms: dict[str, Array] = {}

    def buffer(self, name: str, shape: Sequence[int], like: Array, room: int | None = None) -> Array:
        """A C-ordered array of `shape` and of `like`'s kind and dtype; `room`, its largest size, is what is kept."""
        held, count = self._rooms.get(name), prod(shape)
        if held is None or kind_of(held) != kind_of(like) or held.dtype != like.dtype or len(held) < count:
            self._rooms.pop(name, None)
            del held
            held = self._rooms[name] = self._ledger.track(empty((max(count, room or 0),), like))
        return held[:count].reshape(tuple(shape))

    def widened(self, name: str, array: Array, room: int | None = None) -> Array:
        """`array` in the dtype that sums are taken in: itself, or for 16-bit floats a copy in workspace `name`."""
        if not is_half(array):
            return array
        return copy_into(self.buffer(f"wide {name}", array.shape, accumulation_like(array), room), array)

    def scratch(self, out: Array, room: int | None = None) -> Array | None:
        """Where a product of out's shape waits to be added to it; None where it is added in place."""
        return None if adds_in_place(dtype_name(out)) else self.buffer("product", out.shape, out, room)
