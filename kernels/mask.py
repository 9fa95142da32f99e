"""The description of a dropout mask: which numbers of a random stream the elements of a block take.

From it a kernel draws the mask in registers, forward and backward; summa3d/layout/random.py defines the numbers of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """The dropout mask of a block: element (i, j, …) takes number origin + i·strides[0] + j·strides[1] + … of a random stream.

    Attributes
    ----------
    key : the Philox key of the stream
    origin : the number of the block's first element
    sizes, strides : of the block as it is stored; the last stride is 1
    draw : computes the mask as a tensor, for the host, where backward keeps it
    """

    key: int
    origin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    draw: Callable[[], Tensor]

    @classmethod
    def of(cls, key: int, shape: Sequence[int], slices: Sequence[slice], draw: Callable[[], Tensor]) -> Mask:
        """Describe the mask of the block `slices` of a global tensor of `shape`, in row-major order.

        >>> mask = Mask.of(7, (4, 6), (slice(2, 4), slice(3, 6)), draw=lambda: None)
        >>> mask.origin, mask.sizes, mask.strides
        (15, (2, 3), (6, 1))
        """
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        origin = sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
        return cls(key, origin, tuple(part.stop - part.start for part in slices), strides, draw)

    def swapped(self) -> Mask:
        """Return the mask of a block stored with its first two dims swapped; `draw` already returns the stored order."""
        (a, b, *sizes), (i, j, *strides) = self.sizes, self.strides
        return Mask(self.key, self.origin, (b, a, *sizes), (j, i, *strides), self.draw)

    @property
    def rows(self) -> int:
        """The rows of the block: the product of all sizes but the last."""
        return prod(self.sizes[:-1])

    @property
    def columns(self) -> int:
        """The size of the block's last dim."""
        return self.sizes[-1]

    def arguments(self, probability: float) -> tuple[int, ...]:
        """The arguments of dropout.cu's kernels: origin, sizes and strides of the rows, the key's halves, the threshold.

        An element is kept where its 32-bit number is at least the threshold, `probability`·2³².
        Raises ValueError for a block of more than four dims.
        """
        outer = (*self.sizes[:-1],)
        if len(outer) > 3:
            raise ValueError(f"dropout supports blocks of at most 4 dims; this one has {len(self.sizes)}: {self.sizes}.")
        sizes, strides = (1,) * (3 - len(outer)) + outer, (0,) * (3 - len(outer)) + self.strides[:-1]
        halves = (_signed(self.key & (2**64 - 1)), _signed(self.key >> 64))
        return (self.origin, *sizes[1:], *strides, *halves, round(probability * 2**32))


def _signed(word: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return word - 2**64 if word >= 2**63 else word
