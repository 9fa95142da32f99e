# Which grid axes split which dim of a tensor: pure functions of (shape, grid shape, coordinates), no communication.
# Imports errors only, so that every rule of ownership can be tested without MPI.
# Next: distribute.py, which moves blocks by these slices; gemm/cuboid.py, whose products are chosen by them.
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ..errors import LayoutError

if TYPE_CHECKING:
    from ..comm.grid import Grid

Coordinates = Mapping[str, int]
"""Axis → index of a rank; {} of a rank outside the grid, which holds nothing."""


def split_sizes(n: int, parts: int) -> list[int]:
    """Sizes of the balanced split of `n` into `parts`: they differ by at most one, larger first. Used everywhere."""
    quotient, remainder = divmod(n, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)


def split_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of the balanced split of start:stop."""
    quotient, remainder = divmod(stop - start, parts)
    begin = start + index * quotient + min(index, remainder)
    return begin, begin + quotient + (index < remainder)


class Layout:
    """For each dim of a tensor, the grid axes that split it, coarse first.

    ``Layout(("x", "y"), (), ("z",))``: dim 0 split by x, each part then by y; dim 1 whole; dim 2 split by z. An axis that
    appears nowhere holds equal copies, unless it is `hosted`: then one index holds the block and all others an empty one.
    That is index 0, or with ``follows={"y": "z"}`` the index on z: the block of a vector split by z lies on the diagonal y = z.
    Splits nest and are balanced at each level (`split_sizes`). Raises LayoutError where an axis appears twice.
    """

    __slots__ = ("dims", "follows", "hosted")
    dims: tuple[tuple[str, ...], ...]
    hosted: tuple[str, ...]
    follows: tuple[tuple[str, str], ...]

    def __init__(self, *dims: Sequence[str], hosted: Sequence[str] = (), follows: Mapping[str, str] | None = None) -> None:
        object.__setattr__(self, "dims", tuple(tuple(axes) for axes in dims))
        object.__setattr__(self, "hosted", tuple(hosted))
        object.__setattr__(self, "follows", tuple(sorted((follows or {}).items())))
        seen: set[str] = set()
        for axis in itertools.chain(*self.dims, self.hosted):
            if axis in seen:
                raise LayoutError(
                    f"Axis {axis!r} splits two dims, or one dim twice, in {self}. Each axis can split one dim once."
                )
            seen.add(axis)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Layout is immutable")

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[object, ...]]:
        return _restored, (self.dims, self.hosted, dict(self.follows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.dims, self.hosted, self.follows

    def __repr__(self) -> str:
        follows = dict(self.follows)
        axes = (f"{axis}={follows[axis]}" if axis in follows else axis for axis in self.hosted)
        hosted = f", hosted=({','.join(axes)})" if self.hosted else ""
        return f"Layout({', '.join('(' + ','.join(axes) + ')' for axes in self.dims)}{hosted})"

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split some dim."""
        return frozenset(itertools.chain.from_iterable(self.dims))

    def host(self, axis: str, coordinates: Coordinates) -> int:
        """The index on a hosted axis that holds the block of the line of ranks through `coordinates`."""
        follows = dict(self.follows)
        return coordinates[follows[axis]] if axis in follows else 0

    def is_host(self, coordinates: Coordinates) -> bool:
        """Whether the rank holds a block: it is on the grid, and the host on every hosted axis."""
        return bool(coordinates) and all(coordinates[axis] == self.host(axis, coordinates) for axis in self.hosted)

    def is_owner(self, coordinates: Coordinates) -> bool:
        """True on exactly one of the ranks that hold a block: the host, at index 0 of every axis that only copies it."""
        splits = {*self.axes, *self.hosted}
        return self.is_host(coordinates) and all(index == 0 for axis, index in coordinates.items() if axis not in splits)

    def slices(self, shape: Sequence[int], grid_shape: Mapping[str, int], coordinates: Coordinates) -> tuple[slice, ...]:
        """The part of a global tensor of `shape` that the rank at `coordinates` holds, one slice per dim."""
        if len(shape) != len(self.dims):
            raise LayoutError(f"{self} describes {len(self.dims)} dims; a tensor of shape {tuple(shape)} has {len(shape)}.")
        if not coordinates:
            return (slice(0, 0),) * len(shape)
        result = []
        for n, axes in zip(shape, self.dims, strict=True):
            start, stop = 0, n
            for axis in axes:
                if axis not in grid_shape:
                    raise LayoutError(f"{self} names axis {axis!r}; the grid has the axes {', '.join(grid_shape)}.")
                start, stop = split_range(start, stop, grid_shape[axis], coordinates[axis])
            result.append(slice(start, stop))
        if not self.is_host(coordinates):
            return tuple(slice(part.start, part.start) for part in result)
        return tuple(result)

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
        return Layout(*reversed(self.dims), hosted=self.hosted, follows=dict(self.follows))

    def ways(self, dim: int, grid_shape: Mapping[str, int]) -> int:
        """Into how many parts `dim` is split."""
        return prod(grid_shape[axis] for axis in self.dims[dim])


def _restored(dims: tuple[tuple[str, ...], ...], hosted: tuple[str, ...], follows: dict[str, str]) -> Layout:
    return Layout(*dims, hosted=hosted, follows=follows)


@dataclass(frozen=True)
class Sharding:
    """A layout together with the global shape it splits: what a block needs to know of the whole."""

    layout: Layout
    shape: tuple[int, ...]

    def slices(self, grid: Grid) -> tuple[slice, ...]:
        """The part of the global tensor that this rank holds."""
        return self.layout.slices(self.shape, grid.shape, grid.coordinates)

    def local_shape(self, grid: Grid) -> tuple[int, ...]:
        """Shape of this rank's block."""
        return self.layout.local_shape(self.shape, grid.shape, grid.coordinates)

    def owned(self, grid: Grid) -> bool:
        """True on exactly one of the ranks that hold a copy of this rank's block (`Layout.is_owner`)."""
        return self.layout.is_owner(grid.coordinates)
