"""2-D block-cyclic ownership as in ScaLAPACK. Pure functions of (shape, grid shape, coordinates)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import LayoutError, ShapeError
from .layout import Coordinates, Layout
from .notation import read, written

Runs = tuple[slice, ...]


def numroc(n: int, block: int, index: int, processes: int) -> int:
    """Number of n rows, dealt out in blocks, that go to process `index` (ScaLAPACK's NUMROC with source 0).

    >>> [numroc(10, 4, index, 2) for index in range(2)]
    [6, 4]
    """
    whole, rest = divmod(n, block)
    rounds, extra = divmod(whole, processes)
    return rounds * block + (block if index < extra else rest if index == extra else 0)


@dataclass(frozen=True)
class BlockCyclic:
    """Rows and columns dealt out in blocks, in turn, over the axes of a grid; the first block lies at index 0.

    ``BlockCyclic(rows=("x", 64), columns=("y", 64))``: row block i on x = i mod X, column block j on y = j mod Y. In place of
    an axis name stands a tuple of names for a plane (coarse first, as in ``grid["x", "z"]``), or () where the dim is not split.
    Axes in neither hold equal copies. A rank stores its rows and columns in ascending order, which is ScaLAPACK's local
    order; ScaLAPACK stores them by columns (F-ordered), and arrays of either order are taken everywhere.

    BLACS numbers a process grid by rows ("R") as ``Grid(comm, {"x": rows, "y": columns})`` does, by columns ("C") with
    order="xy".

    `str` prints ``0:x[64] 1:y[64]``, and every function that takes a layout takes that text.
    """

    rows: tuple[str | tuple[str, ...], int]
    columns: tuple[str | tuple[str, ...], int]

    def __post_init__(self) -> None:
        for field in ("rows", "columns"):
            axes, block = getattr(self, field)
            object.__setattr__(self, field, (_names(axes), block))
        for _, block in (self.rows, self.columns):
            if block < 1:
                raise LayoutError(f"{self!r} has a block of {block}; the sizes of blocks are whole numbers ≥ 1.")
        named = [*self.dims[0], *self.dims[1]]
        if len(set(named)) < len(named):
            raise LayoutError(
                f"An axis splits both rows and columns, or one twice, in {self!r}. Each axis can split one dim once."
            )

    def __str__(self) -> str:
        return written(None, self.dims, blocks=self.block)

    @classmethod
    def from_text(cls, text: str) -> BlockCyclic:
        """The ownership that `str` prints: ``m:x[64] k:y[32]``, ``0:(x,z)[8] 1[8]``. Names of dims are labels, not kept.

        Raises LayoutError where the text cannot be read or is not that of a block-cyclic matrix.
        """
        result = read(text)
        rows, columns = (*result.blocks, None, None)[:2]
        if len(result.dims) != 2 or rows is None or columns is None or result.root_only or result.grains:
            raise LayoutError(f"{text!r} is not block-cyclic: two dims, each with the size of its blocks, as 'm:x[64] k:y[32]'.")
        return cls((result.dims[0], rows), (result.dims[1], columns))

    @property
    def dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that split each dim, coarse first."""
        return _names(self.rows[0]), _names(self.columns[0])

    @property
    def root_only(self) -> tuple[str, ...]:
        """No axis: what does not split holds copies."""
        return ()

    def holds_block(self, coordinates: Coordinates) -> bool:
        """Every rank of the grid holds a block."""
        return bool(coordinates)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one block: MB and NB."""
        return self.rows[1], self.columns[1]

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split some dim."""
        return frozenset(self.dims[0] + self.dims[1])

    def runs(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[Runs, ...]:
        """Per dim, the ranges of global indices that the rank at `coordinates` holds, in the order in which it stores them."""
        return tuple(
            tuple(slice(start, min(start + block, n)) for start in range(index * block, n, block * processes))
            for n, block, index, processes in self._dealt(shape, grid_shape, coordinates)
        )

    def local_shape(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[int, ...]:
        """Shape of the block that the rank at `coordinates` holds: NUMROC of rows and columns."""
        return tuple(numroc(*dealt) for dealt in self._dealt(shape, grid_shape, coordinates))

    def transposed(self) -> BlockCyclic:
        """The ownership of the transpose."""
        return self.permuted(1, 0)

    def permuted(self, *dims: int) -> BlockCyclic:
        """The ownership with its dims in this order."""
        both = (self.rows, self.columns)
        return BlockCyclic(*(both[dim] for dim in dims))

    def descriptor(
        self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates, context: int = 0
    ) -> tuple[int, ...]:
        """ScaLAPACK's array descriptor of this rank's F-ordered block: (1, context, M, N, MB, NB, 0, 0, LLD)."""
        local_rows = self.local_shape(shape, grid_shape, coordinates)[0]
        return (1, context, shape[0], shape[1], *self.block, 0, 0, max(1, local_rows))

    def _dealt(
        self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates
    ) -> list[tuple[int, int, int, int]]:
        """Per dim: its size, the size of a block, this rank's index among the processes, their number."""
        if len(shape) != 2:
            raise ShapeError(f"{self!r} describes matrices; a tensor of shape {tuple(shape)} has {len(shape)} dims.")
        result = []
        for n, axes, block in zip(shape, self.dims, self.block, strict=True):
            index, outside = 0, not coordinates
            for axis in axes:
                if axis not in grid_shape:
                    raise LayoutError(f"{self!r} names axis {axis!r}; the grid has the axes {', '.join(grid_shape)}.")
                index = 0 if outside else index * grid_shape[axis] + coordinates[axis]
            result.append((0 if outside else n, block, index, prod(grid_shape[axis] for axis in axes)))
        return result


def _names(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


Ownership = Layout | BlockCyclic
"""The ownership of a tensor, as `redistribute` takes it: a Layout or a BlockCyclic."""


def ownership(layout: Ownership | str, grained: bool = False) -> Ownership:
    """An ownership itself, or the one of a text: ``m:x k:y`` is a Layout, ``m:x[64] k:y[64]`` a BlockCyclic.

    grained : whether its dims may be split into items that stay whole. Raises LayoutError for them else, and for what is neither.
    """
    if isinstance(layout, str):
        layout = BlockCyclic.from_text(layout) if any(read(layout).blocks) else Layout(layout)
    if not isinstance(layout, Ownership):
        raise LayoutError(f"{layout!r} is no layout; pass a Layout, a BlockCyclic, or its text, such as 'm:x k:y'.")
    if isinstance(layout, Layout) and layout.grains and not grained:
        raise LayoutError(f"{layout} splits whole items, as parameters of layers may be; matrices are split in elements.")
    return layout
