"""The blocks that ranks compute with: an ownership of dims, each in nested ranges or dealt out in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ...layout.cyclic import BlockCyclic, Ownership, Runs
from ...layout.layout import Coordinates, Layout, split_sizes
from .vectors import DimSplit

Splits = tuple[DimSplit, ...]


@dataclass(frozen=True)
class MixedBlocks:
    """Dims of which some are split into ranges and others dealt out: no Layout, and no BlockCyclic.

    at : axis → the index at which alone ranks hold a block.
    """

    splits: Splits
    at: tuple[tuple[str, int], ...] = ()

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes that split each dim, coarse first."""
        return tuple(split.axes for split in self.splits)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split some dim."""
        return frozenset(axis for axes in self.dims for axis in axes)

    @property
    def root_only(self) -> tuple[str, ...]:
        """The axes along which one index holds a block."""
        return tuple(axis for axis, _ in self.at)

    def holds_block(self, coordinates: Coordinates) -> bool:
        """Return whether the rank holds a block."""
        return bool(coordinates) and all(coordinates[axis] == index for axis, index in self.at)

    def runs(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[Runs, ...]:
        """Per dim, the ranges of global indices that the rank holds, ascending."""
        if not self.holds_block(coordinates):
            return ((),) * len(self.splits)
        result = []
        for extent, (axes, block) in zip(shape, self.splits, strict=True):
            item: Ownership = BlockCyclic((axes, block), ((), 1)) if block else Layout(axes, ())
            result.append(item.runs((extent, 1), grid_shape, coordinates)[0])
        return tuple(result)

    def local_shape(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[int, ...]:
        """Shape of the block that the rank holds."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self.runs(shape, grid_shape, coordinates))

    def __str__(self) -> str:
        return " ".join(f"{name}{split}" for name, split in enumerate(self.splits))


def public_ownership(splits: Splits, shape: Sequence[int], names: str) -> Ownership | None:
    """The ownership of blocks that a tensor may have; None where one dim is in ranges and another dealt out."""
    if not any(split.block for split in splits):
        return Layout(*(split.axes for split in splits), names=names)
    if len(splits) == 2 and all(split.block or not split.axes for split in splits):
        rows, columns = ((split.axes, split.block or max(1, extent)) for split, extent in zip(splits, shape, strict=True))
        return BlockCyclic(rows, columns)
    return None


def ownership_of(splits: Splits, shape: Sequence[int], names: str, at: Mapping[str, int] | None = None) -> Ownership:
    """The ownership of blocks that ranks compute with; of summands, those at the indices `at` of some axes alone."""
    if at and not any(split.block for split in splits):
        return Layout(*(split.axes for split in splits), at={axis: (index,) for axis, index in at.items()}, names=names)
    result = None if at else public_ownership(splits, shape, names)
    return cast(Ownership, MixedBlocks(splits, tuple(at.items()) if at else ())) if result is None else result


def nested_sizes(extent: int, counts: Sequence[int]) -> list[int]:
    """Sizes of the parts of `extent` split into the first of `counts`, each part into the next: other than a split by all.

    >>> nested_sizes(7, (2, 2)), nested_sizes(6, (2, 2))
    ([2, 2, 2, 1], [2, 1, 2, 1])
    """
    sizes = [extent]
    for count in counts:
        sizes = [part for size in sizes for part in split_sizes(size, count)]
    return sizes
