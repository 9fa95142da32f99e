"""Parts of a block of keys and values: what travels as one message, while the part before it is attended to."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from torch import Tensor

from ...comm.device.arrays import is_on_device
from ...layout.layout import split_sizes

LEAST_BYTES, MOST_PARTS = 1 << 18, 8
"""Of a part at least, and of a block at most: a message of so many bytes takes long beside its start on any network of hosts."""


class BlockPart(NamedTuple):
    """Rows, heads and positions of a block [b, kv heads, s, 2, d] whose elements are adjacent."""

    rows: slice
    heads: slice
    positions: slice

    @classmethod
    def whole(cls, block: Tensor) -> BlockPart:
        """All of a block."""
        return cls(*(slice(0, size) for size in block.shape[:3]))

    def of(self, block: Tensor) -> Tensor:
        """View the part of a block."""
        return block[self]


def parts_of(block: Tensor) -> list[BlockPart]:
    """The parts in which a block travels: groups of rows, of a row's heads, or of a head's positions; on a device, one.

    They depend on the block's shape and dtype alone, which are those of all members.
    """
    rows, heads, positions = block.shape[:3]
    wanted = 1 if is_on_device(block) else max(1, min(MOST_PARTS, block.nbytes // LEAST_BYTES))
    by_row = min(wanted, rows)
    by_head = min(ceil(wanted / rows), heads)
    by_position = min(ceil(wanted / (rows * heads)), positions)
    by_row = rows if by_head * by_position > 1 else by_row  # else the elements of a part were not adjacent
    by_head = heads if by_position > 1 else by_head
    cuts = (_cut(positions, by_position), _cut(rows, by_row), _cut(heads, by_head))
    return [BlockPart(row, head, place) for place in cuts[0] for row in cuts[1] for head in cuts[2]]


def _cut(size: int, parts: int) -> list[slice]:
    """Consecutive slices of a dim, whose sizes differ by 1 at most."""
    stops, result = 0, []
    for item in split_sizes(size, parts):
        result.append(slice(stops, stops := stops + item))
    return result
