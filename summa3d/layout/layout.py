"""Layouts: which grid axes split which dim of a tensor. Pure functions of (shape, grid shape, coordinates)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING

from ..errors import LayoutError
from .notation import WORD, Notation, read, written

if TYPE_CHECKING:
    from ..comm.grid import BaseGrid

MOST_DIMS = 64
"""Dims of an array, of numpy and torch alike."""
Coordinates = Mapping[str, int]
"""Axis → index of a rank; {} of a rank outside the grid, which holds nothing."""


def split_sizes(n: int, parts: int) -> list[int]:
    """Sizes of the balanced split of `n` into `parts`: they differ by at most one, larger first. Used everywhere.

    >>> split_sizes(7, 3)
    [3, 2, 2]
    """
    quotient, remainder = divmod(n, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)


def split_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of the balanced split of start:stop.

    >>> [split_range(0, 7, 3, index) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    quotient, remainder = divmod(stop - start, parts)
    begin = start + index * quotient + min(index, remainder)
    return begin, begin + quotient + (index < remainder)


class Layout:
    """For each dim of a tensor, the grid axes that split it, coarse first.

    ``Layout("b:(x,y) s h:z")`` and ``Layout(("x", "y"), (), ("z",), names="bsh")`` are the same: dim 0 is split by x, each part
    then by y; dim 1 is whole; dim 2 is split by z. `str` prints the text; every function that takes a layout takes the text.
    Names of dims are labels for the reader: a dim without one prints as its position (``0:(x,y) 1 2:z``), and two layouts that
    differ in names alone are equal.

    An axis that appears nowhere holds equal copies, unless it is in `root_only` (behind ``@`` in the text): then one index
    holds the block and all others an empty one. ``m:x k:z @y=0`` is held at index 0 of y; ``h:z @y=z``, or
    ``follows={"y": "z"}``, at the index on z: the block of a vector split by z lies on the diagonal y = z. ``h @pp=2``, or
    ``at={"pp": (2,)}``, is held at index 2 of pp; ``v h @pp=0+3``, or ``at={"pp": (0, 3)}``, at both, as equal copies; and
    ``v:pp h @pp=0+3`` at both, a half each: an axis that is held at several indices may split a dim, for those indices.

    Splits nest and are balanced at each level (`split_sizes`). Raises LayoutError where a text cannot be read, an axis appears
    twice, or `names` has another length than the dims.

    >>> Layout("m:(x,y) k:z").local_shape((7, 5), {"x": 2, "y": 2, "z": 2}, {"x": 0, "y": 1, "z": 0})
    (2, 3)
    """

    __slots__ = ("_hash", "_identity", "at", "dims", "follows", "names", "root_only")
    dims: tuple[tuple[str, ...], ...]
    root_only: tuple[str, ...]
    """The axes along which some indices hold the block and the others an empty one."""
    follows: tuple[tuple[str, str], ...]
    at: tuple[tuple[str, tuple[int, ...]], ...]
    """The root-only axes whose block is not at index 0 alone, with the indices that hold it, ascending."""
    names: tuple[str, ...] | None
    _identity: tuple[object, ...]
    _hash: int

    def __init__(
        self,
        *dims: Sequence[str],
        root_only: Sequence[str] = (),
        follows: Mapping[str, str] | None = None,
        at: Mapping[str, Sequence[int]] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if len(dims) == 1 and isinstance(dims[0], str):
            text = read(dims[0])
            _check_text_alone(dims[0], text, root_only, follows, at, names)
            dims, root_only, follows, at, names = text.dims, text.root_only, text.follows, text.at, text.names
        if len(dims) > MOST_DIMS:
            raise LayoutError(f"a layout of {len(dims)} dims is of no array: they have at most {MOST_DIMS}.")
        own_dims = tuple([axes if type(axes) is tuple else _axes_of(axes) for axes in dims])
        own_root_only, own_follows = tuple(root_only), tuple(sorted(follows.items())) if follows else ()
        own_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
        once = own_root_only
        if at:
            own_root_only += tuple(axis for axis in at if axis not in own_root_only)
            own_at = tuple(sorted((axis, found) for axis in at if (found := _indices_of(axis, at[axis])) != (0,)))
            once = tuple(axis for axis in own_root_only if len(dict(own_at).get(axis, ())) < 2)
        put = object.__setattr__
        put(self, "dims", own_dims)
        put(self, "root_only", own_root_only)
        put(self, "follows", own_follows)
        put(self, "at", own_at)
        put(self, "names", _checked_names(tuple(names), len(own_dims)) if names else None)
        put(self, "_identity", (own_dims, own_root_only, own_follows, own_at))
        put(self, "_hash", hash(self._identity))
        flat = [axis for axes in (*own_dims, once) for axis in axes]
        if len(set(flat)) < len(flat) or own_follows:
            _check(self, flat)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Layout is immutable")

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[object, ...]]:
        made = partial(Layout, root_only=self.root_only, follows=dict(self.follows), at=dict(self.at), names=self.names)
        return made, self.dims

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return written(self.names, self.dims, self.root_only, {**dict(self.follows), **dict(self.at)})

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    @classmethod
    def of(cls, layout: Layout | str) -> Layout:
        """The layout of a text; a Layout itself. Raises LayoutError for what is neither."""
        if not isinstance(layout, (str, Layout)):
            raise LayoutError(f"{layout!r} is no layout here; pass a Layout, or its text, such as 'm:x k:y'.")
        return cls(layout) if isinstance(layout, str) else layout

    def named(self, *names: str) -> Layout:
        """The same layout with a label for each dim."""
        return self._with(self.dims, names)

    def held_at(self, at: Mapping[str, Sequence[int]]) -> Layout:
        """The same layout, held at these indices of these axes alone.

        >>> Layout("h:z n").held_at({"pp": (2,)})
        Layout('h:z n @pp=2')
        """
        return self._with(self.dims, self.names, {**dict(self.at), **at}) if at else self

    def sharded_over(self, axes: Sequence[str]) -> Layout:
        """The layout whose blocks are split further, along dim 0, by these axes as its finest: the shards of equal copies.

        Short dims leave empty shards. Raises LayoutError for an axis that the layout names already, unless it is held at several
        indices of it.

        >>> Layout("h:z n:y").sharded_over(("dp",))
        Layout('h:(z,dp) n:y')
        """
        return self._with(((*self.dims[0], *axes), *self.dims[1:]), self.names)

    def _with(
        self, dims: tuple[tuple[str, ...], ...], names: Sequence[str] | None, at: Mapping[str, Sequence[int]] | None = None
    ) -> Layout:
        return Layout(*dims, root_only=self.root_only, follows=dict(self.follows), at=at or dict(self.at), names=names)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split some dim."""
        return frozenset(itertools.chain.from_iterable(self.dims))

    def root_index(self, axis: str, coordinates: Coordinates) -> int:
        """The first index on a root-only axis that holds the block of the line of ranks through `coordinates`."""
        follows = dict(self.follows)
        return coordinates[follows[axis]] if axis in follows else dict(self.at).get(axis, (0,))[0]

    def holds_block(self, coordinates: Coordinates) -> bool:
        """Whether the rank holds a block: it is on the grid, and at an index that holds it on every root-only axis."""
        if not self.root_only or not coordinates:
            return bool(coordinates)
        at = dict(self.at)
        return all(
            coordinates[axis] in at[axis] if axis in at else coordinates[axis] == self.root_index(axis, coordinates)
            for axis in self.root_only
        )

    def is_primary(self, coordinates: Coordinates) -> bool:
        """True on one rank of each block's copies: at the first index that holds it, and at 0 of the axes that only copy it."""
        split = self.axes
        copied = (index == 0 for axis, index in coordinates.items() if axis not in split and axis not in self.root_only)
        first = (
            axis in split or coordinates[axis] == self.root_index(axis, coordinates)  # in axes: each holds its own part
            for axis in self.root_only
        )
        return self.holds_block(coordinates) and all(first) and all(copied)

    def slices(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[slice, ...]:
        """The part of a global tensor of `shape` that the rank at `coordinates` holds, one slice per dim."""
        if len(shape) != len(self.dims):
            raise LayoutError(f"{self!r} describes {len(self.dims)} dims; a tensor of shape {tuple(shape)} has {len(shape)}.")
        if not coordinates:
            return (slice(0, 0),) * len(shape)
        for axis, indices in self.at:
            if grid_shape.get(axis, 0) <= indices[-1]:
                raise LayoutError(
                    f"{self!r} is held at index {indices[-1]} of axis {axis}, whose size is {grid_shape.get(axis, 'not known')}; "
                    f"the grid has the axes {', '.join(f'{name}={size}' for name, size in grid_shape.items())}."
                )
        result, held, holds = [], dict(self.at), self.holds_block(coordinates)
        for n, axes in zip(shape, self.dims, strict=True):
            start, stop = 0, n
            for axis in axes:
                if axis not in grid_shape:
                    raise LayoutError(f"{self!r} names axis {axis!r}; the grid has the axes {', '.join(grid_shape)}.")
                parts, index = grid_shape[axis], coordinates[axis]
                if axis in held:
                    parts, index = len(held[axis]), held[axis].index(index) if holds else 0
                start, stop = split_range(start, stop, parts, index)
            result.append(slice(start, stop))
        return tuple(result) if holds else tuple(slice(part.start, part.start) for part in result)

    def runs(
        self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates
    ) -> tuple[tuple[slice, ...], ...]:
        """`slices` in the form that every ownership offers: per dim, the ranges that the rank holds, here one."""
        return tuple((part,) for part in self.slices(shape, grid_shape, coordinates))

    def local_shape(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[int, ...]:
        """Shape of the block that the rank at `coordinates` holds."""
        return tuple(part.stop - part.start for part in self.slices(shape, grid_shape, coordinates))

    def blocks(self, shape: Sequence[int], grid_shape: Mapping[str, int]) -> Iterator[tuple[dict[str, int], tuple[slice, ...]]]:
        """Coordinates and slices of every rank of the grid, copies included."""
        for index in itertools.product(*(range(size) for size in grid_shape.values())):
            coordinates = dict(zip(grid_shape, index, strict=True))
            yield coordinates, self.slices(shape, grid_shape, coordinates)

    def transposed(self) -> Layout:
        """The layout of the transpose: dims in reverse order."""
        return self.permuted(*range(len(self.dims))[::-1])

    def permuted(self, *dims: int) -> Layout:
        """The layout with its dims in this order.

        >>> Layout("b:x m n:y").permuted(2, 0, 1)
        Layout('n:y b:x m')
        """
        names = None if self.names is None else [self.names[dim] for dim in dims]
        return self._with(tuple(self.dims[dim] for dim in dims), names)

    def num_shards(self, dim: int, grid_shape: Mapping[str, int]) -> int:
        """Into how many parts `dim` is split."""
        held = dict(self.at)
        return prod(len(held[axis]) if axis in held else grid_shape[axis] for axis in self.dims[dim])


def _axes_of(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of one dim as a tuple. A string is one-letter axes; the text of a layout stands alone."""
    if isinstance(axes, str) and axes and not axes.isidentifier():
        raise LayoutError(f"{axes!r} is not the axes of one dim. Write a layout as one text, Layout('m:x k:y'), or as tuples.")
    return tuple(axes)


def _indices_of(axis: str, given: Sequence[int]) -> tuple[int, ...]:
    """The indices that hold a block, ascending. Raises LayoutError where there is none, or one is no index."""
    found = tuple(sorted(set(given)))
    if not found or not all(isinstance(index, int) and index >= 0 for index in found):
        raise LayoutError(f"at={{{axis!r}: {given!r}}} must name the indices that hold the block, such as {{{axis!r}: (0, 3)}}.")
    return found


def _check_text_alone(text: str, notation: Notation, *others: object) -> None:
    """Raise LayoutError unless `text` is the text of a Layout and says everything."""
    if any(others):
        raise LayoutError(f"Layout({text!r}, …) has a text and keywords. The text says everything: '@y=0' makes y root-only.")
    if any(notation.blocks):
        raise LayoutError(
            f"{text!r} is block-cyclic. BlockCyclic.from_text makes it; functions that take a layout take the text."
        )


def _check(layout: Layout, axes: list[str]) -> None:
    """Raise LayoutError where an axis appears twice, or one that is not root-only, or is held at an index, follows another."""
    for axis in axes:
        if axes.count(axis) > 1:
            raise LayoutError(
                f"Axis {axis!r} splits two dims, or one dim twice, in {layout!r}. Each axis can split one dim once."
            )
    for axis, other in layout.follows:
        if axis not in layout.root_only:
            raise LayoutError(f"follows={{{axis!r}: {other!r}}} needs {axis!r} in root_only, which is {layout.root_only}.")
        if axis in dict(layout.at):
            raise LayoutError(f"Axis {axis!r} cannot be held at {dict(layout.at)[axis]} and follow {other!r}. Give one of them.")


@lru_cache(maxsize=1024)
def _checked_names(names: tuple[str, ...], dims: int) -> tuple[str, ...]:
    """`names`. Raises LayoutError unless they are one word for each dim."""
    for position, name in enumerate(names):
        if not WORD.fullmatch(name) or (name.isdigit() and name != str(position)):
            raise LayoutError(f"{name!r} cannot name dim {position} of a layout: take a word without :(),@=[] or blanks.")
    if len(names) != dims:
        raise LayoutError(f"A layout of {dims} dims has the names {', '.join(names)}; it takes one for each dim.")
    return names


@dataclass(frozen=True)
class Sharding:
    """A layout together with the global shape that it splits."""

    layout: Layout
    shape: tuple[int, ...]

    def slices(self, grid: BaseGrid) -> tuple[slice, ...]:
        """The part of the global tensor that this rank holds."""
        return self.layout.slices(self.shape, grid.shape, grid.coordinates)

    def local_shape(self, grid: BaseGrid) -> tuple[int, ...]:
        """Shape of this rank's block."""
        return self.layout.local_shape(self.shape, grid.shape, grid.coordinates)

    def sharded_over(self, axes: Sequence[str]) -> Sharding:
        """The sharding whose blocks are split further by these axes (`Layout.sharded_over`)."""
        return Sharding(self.layout.sharded_over(axes), self.shape)

    def is_primary(self, grid: BaseGrid) -> bool:
        """True on exactly one of the ranks that hold a copy of this rank's block (`Layout.is_primary`)."""
        return self.layout.is_primary(grid.coordinates)
