"""Layouts: which grid axes split which dim of a tensor. Pure functions of (shape, grid shape, coordinates)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import LayoutError
from .notation import WORD, Notation, read, written

if TYPE_CHECKING:
    from ..comm.grid import BaseGrid

MOST_DIMS = 64
"""Dims of an array, of numpy and torch alike."""
Coordinates = Mapping[str, int]
"""Axis → index of a rank; {} of a rank outside the grid, which holds nothing."""


def split_sizes(n: int, parts: int, grain: int = 1) -> list[int]:
    """Sizes of the balanced split of `n` into `parts`: they differ by at most one item, larger first. Used everywhere.

    grain : the elements of an item, which stays whole; or of a number −i, i items of equal size

    >>> split_sizes(7, 3), split_sizes(14, 3, 2), split_sizes(14, 3, -7)
    ([3, 2, 2], [6, 4, 4], [6, 4, 4])
    """
    if grain != 1:
        item = item_of(n, grain)
        return [item * size for size in split_sizes(n // item, parts)]
    quotient, remainder = divmod(n, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)


def split_range(start: int, stop: int, parts: int, index: int, grain: int = 1) -> tuple[int, int]:
    """Start and stop of part `index` of the balanced split of start:stop, as `split_sizes` has it.

    >>> [split_range(0, 7, 3, index) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    if grain != 1:
        item = item_of(stop - start, grain)
        low, high = split_range(0, (stop - start) // item, parts, index)
        return start + item * low, start + item * high
    quotient, remainder = divmod(stop - start, parts)
    begin = start + index * quotient + min(index, remainder)
    return begin, begin + quotient + (index < remainder)


def item_of(n: int, grain: int) -> int:
    """The elements of an item of a dim of `n`. Raises LayoutError where they are no whole items."""
    item = grain if grain > 0 else max(1, n // -grain)
    if n % item or (grain < 0 and n % -grain):
        what = f"items of {grain}" if grain > 0 else f"number in each of {-grain} items"
        raise LayoutError(f"{n} elements are no whole {what}.")
    return item


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

    Splits nest and are balanced at each level (`split_sizes`), in elements, or in items that stay whole: ``n:y*21``, or
    ``grains=((21,),)``, gives each rank of y heads of 21 columns, and ``m:(x*11,y/11)`` splits by y into 11 items of equal size
    what x has split into items of 11 rows: whole sequences over x, positions over y.

    Raises LayoutError where a text cannot be read, an axis appears twice, or `names` has another length than the dims.

    >>> Layout("m:(x,y) k:z").local_shape((7, 5), {"x": 2, "y": 2, "z": 2}, {"x": 0, "y": 1, "z": 0})
    (2, 3)
    """

    __slots__ = ("_hash", "_identity", "at", "dims", "follows", "grains", "names", "root_only")
    dims: tuple[tuple[str, ...], ...]
    grains: tuple[tuple[int, ...], ...]
    """For each dim, what its axes keep whole (`split_sizes`), 1 for those that are not named; () where that is 1 of all."""
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
        grains: Sequence[Sequence[int]] = (),
    ) -> None:
        if len(dims) == 1 and isinstance(dims[0], str):
            text = read(dims[0])
            _check_text_alone(dims[0], text, root_only, follows, at, names, grains)
            dims, root_only, follows, at, names = text.dims, text.root_only, text.follows, text.at, text.names
            grains = text.grains
        if len(dims) > MOST_DIMS:
            raise LayoutError(f"a layout of {len(dims)} dims is of no array: they have at most {MOST_DIMS}.")
        own_dims = tuple([axes if type(axes) is tuple else _axes_of(axes) for axes in dims])
        own_root_only, own_follows = tuple(root_only), tuple(sorted(follows.items())) if follows else ()
        own_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
        once = own_root_only
        if at:
            own_root_only += tuple(axis for axis in at if axis not in own_root_only)
            own_at = tuple(sorted((axis, result) for axis in at if (result := _indices_of(axis, at[axis])) != (0,)))
            once = tuple(axis for axis in own_root_only if len(dict(own_at).get(axis, ())) < 2)
        put = object.__setattr__
        put(self, "dims", own_dims)
        put(self, "root_only", own_root_only)
        put(self, "follows", own_follows)
        put(self, "at", own_at)
        put(self, "names", _checked_names(tuple(names), len(own_dims)) if names else None)
        put(self, "grains", _checked_grains(grains, own_dims) if grains else ())
        put(self, "_identity", (own_dims, own_root_only, own_follows, own_at, self.grains))
        put(self, "_hash", hash(self._identity))
        flat = [axis for axes in (*own_dims, once) for axis in axes]
        if len(set(flat)) < len(flat) or own_follows:
            _check(self, flat)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Layout is immutable")

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[object, ...]]:
        kept: dict[str, Any] = {"follows": dict(self.follows), "at": dict(self.at), "names": self.names, "grains": self.grains}
        return partial(Layout, root_only=self.root_only, **kept), self.dims

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        held: dict[str, str | Sequence[int]] = {**dict(self.follows), **dict(self.at)}
        return written(self.names, self.dims, self.root_only, held, grains=self.grains)

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

    def grained(self, *grains: Sequence[int]) -> Layout:
        """The same layout, each of whose dims keeps these items whole, along each of its axes in turn.

        >>> Layout("h:z n:(y,x)").grained((), (21, 21))
        Layout('h:z n:(y*21,x*21)')
        """
        trimmed = [grain[: len(axes)] for grain, axes in zip(grains, self.dims, strict=True)]
        return self._with(self.dims, self.names, grains=trimmed)

    def _with(
        self,
        dims: tuple[tuple[str, ...], ...],
        names: Sequence[str] | None,
        at: Mapping[str, Sequence[int]] | None = None,
        grains: Sequence[Sequence[int]] | None = None,
    ) -> Layout:
        at, grains = at or dict(self.at), self.grains if grains is None else grains
        return Layout(*dims, root_only=self.root_only, follows=dict(self.follows), at=at, names=names, grains=grains)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split some dim."""
        return frozenset(itertools.chain.from_iterable(self.dims))

    def root_index(self, axis: str, coordinates: Coordinates) -> int:
        """The first index on a root-only axis that holds the block of the line of ranks through `coordinates`."""
        follows = dict(self.follows)
        return coordinates[follows[axis]] if axis in follows else dict(self.at).get(axis, (0,))[0]

    def holds_block(self, coordinates: Coordinates) -> bool:
        """Return whether the rank holds a block: it is on the grid, and at an index that holds it on every root-only axis."""
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
        for dim, (n, axes) in enumerate(zip(shape, self.dims, strict=True)):
            start, stop = 0, n
            grains = self.grains[dim] if self.grains else ()
            for level, axis in enumerate(axes):
                if axis not in grid_shape:
                    raise LayoutError(f"{self!r} names axis {axis!r}; the grid has the axes {', '.join(grid_shape)}.")
                parts, index = grid_shape[axis], coordinates[axis]
                if axis in held:
                    parts, index = len(held[axis]), held[axis].index(index) if holds else 0
                start, stop = split_range(start, stop, parts, index, grains[level] if level < len(grains) else 1)
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
        grains = [self.grains[dim] for dim in dims] if self.grains else ()
        return self._with(tuple(self.dims[dim] for dim in dims), names, grains=grains)

    def num_shards(self, dim: int, grid_shape: Mapping[str, int]) -> int:
        """Into how many parts `dim` is split."""
        held = dict(self.at)
        return prod(len(held[axis]) if axis in held else grid_shape[axis] for axis in self.dims[dim])


def without(layout: Layout, axis: str) -> Layout:
    """The layout of the blocks that the ranks of `axis`, which splits a dim last, hold together.

    >>> without(Layout("m:(x,y) k:z"), "y")
    Layout('m:x k:z')
    """
    kept = [[level for level, name in enumerate(axes) if name != axis] for axes in layout.dims]
    dims = [tuple(axes[level] for level in levels) for axes, levels in zip(layout.dims, kept, strict=True)]
    if not layout.grains:
        return Layout(*dims, names=layout.names)
    grains = [[grain[level] for level in levels if level < len(grain)] for grain, levels in zip(layout.grains, kept, strict=True)]
    return Layout(*dims, names=layout.names, grains=grains)


def _axes_of(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of one dim as a tuple. A string is one-letter axes; the text of a layout stands alone."""
    if isinstance(axes, str) and axes and not axes.isidentifier():
        raise LayoutError(f"{axes!r} is not the axes of one dim. Write a layout as one text, Layout('m:x k:y'), or as tuples.")
    return tuple(axes)


def _indices_of(axis: str, given: Sequence[int]) -> tuple[int, ...]:
    """The indices that hold a block, ascending. Raises LayoutError where there is none, or one is no index."""
    result = tuple(sorted(set(given)))
    if not result or not all(isinstance(index, int) and index >= 0 for index in result):
        raise LayoutError(f"at={{{axis!r}: {given!r}}} must name the indices that hold the block, such as {{{axis!r}: (0, 3)}}.")
    return result


def _checked_grains(grains: Sequence[Sequence[int]], dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Indices that each dim's axes keep together, without ones at the end, none where that is all. Raises LayoutError."""
    if len(grains) != len(dims):
        raise LayoutError(f"grains {grains} of a layout of {len(dims)} dims: they have as many, () where each element counts.")
    kept = []
    for dim, grain in enumerate(grains):
        if len(grain) > len(dims[dim]) or any(type(item) is not int or item == 0 for item in grain):
            raise LayoutError(
                f"grains {tuple(grain)} of dim {dim} are whole numbers other than 0, at most {len(dims[dim])} of them."
            )
        long = max((level + 1 for level, item in enumerate(grain) if item != 1), default=0)
        kept.append(tuple(grain[:long]))
    return tuple(kept) if any(kept) else ()


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
