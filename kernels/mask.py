# Which numbers of a random stream the elements of a block meet, so that a kernel can draw its dropout mask where it needs it.
# Imports torch only. summa3d/nn/random.py says how numbers follow from a stream and an index.
# Next: dropout.cu (the device's drawing), summa3d/nn/dropout.py, which makes these.
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """The dropout mask of a block: element (i, j, …) has number origin + i·strides[0] + j·strides[1] + … of the stream `key`.

    sizes, strides : of the block as it is stored; the last stride is 1. draw : the mask itself, for those who store it.
    """

    key: int
    origin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    draw: Callable[[], Tensor]

    @classmethod
    def of(cls, key: int, shape: Sequence[int], slices: Sequence[slice], draw: Callable[[], Tensor]) -> Mask:
        """The mask of the block `slices` of a global tensor of `shape`, in row-major order."""
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        origin = sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
        return cls(key, origin, tuple(part.stop - part.start for part in slices), strides, draw)

    def swapped(self) -> Mask:
        """The same with the first two dims of the block stored in the other order; `draw` gives the mask as it is stored."""
        (a, b, *sizes), (i, j, *strides) = self.sizes, self.strides
        return Mask(self.key, self.origin, (b, a, *sizes), (j, i, *strides), self.draw)

    @property
    def rows(self) -> int:
        return prod(self.sizes[:-1])

    @property
    def columns(self) -> int:
        return self.sizes[-1]

    def arguments(self, probability: float) -> tuple[int, ...]:
        """What dropout.cu's kernels take: where rows begin, the key in two halves, and the least number that is kept.

        Raises ValueError for a block of more than four dims.
        """
        outer = (*self.sizes[:-1],)
        if len(outer) > 3:
            raise ValueError(f"a mask has at most 4 dims; this one has {len(self.sizes)}: {self.sizes}.")
        sizes, strides = (1,) * (3 - len(outer)) + outer, (0,) * (3 - len(outer)) + self.strides[:-1]
        halves = (_signed(self.key & (2**64 - 1)), _signed(self.key >> 64))
        return (self.origin, *sizes[1:], *strides, *halves, round(probability * 2**32))


def _signed(word: int) -> int:
    """The 64-bit number with these bits."""
    return word - 2**64 if word >= 2**63 else word
