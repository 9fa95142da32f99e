"""The stages of a pipeline as data: which layers each has, and which rank holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Stages:
    """A model's layers in stages, in order. The first stage has the embedding as well, and the last one the head.

    Attributes
    ----------
    homes : the index on axis pp of the rank that holds each stage
    layers : the number of layers of each stage

    >>> Stages((0, 1, 0, 1), (2, 2, 2, 1)).extents
    ((0, 2), (2, 4), (4, 6), (6, 7))
    """

    homes: Sequence[int]
    layers: Sequence[int]

    @property
    def ranks(self) -> int:
        """The number of ranks that hold them."""
        return max(self.homes) + 1

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each stage, and the one behind its last."""
        return tuple(pairwise(accumulate(self.layers, initial=0)))

    def home_of(self, layer: int) -> int:
        """The index on axis pp of the rank that holds a layer."""
        return next(home for home, (first, last) in zip(self.homes, self.extents, strict=True) if first <= layer < last)
