"""The shape of a process grid: axes, sizes, order, tiles, and the coordinates of each rank. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import isqrt, log, prod
from operator import index

from ..errors import GridError

OUTER = ("cp", "ep", "dp", "pp")
"""Axes outside the tensor-parallel grid, over which no scheme splits a layer: contexts, experts, replicas, pipeline stages."""
REPLICAS = ("dp", "cp", "ep")
"""Outer axes along which ranks hold copies of dense weights, and compute with other rows or positions."""
SAME_ROWS = ("cp",)
"""Those whose ranks compute with other positions of the same rows."""
DEFAULT_ORDER = ("z", "y", "x", "d", *OUTER)
RUNS = "runs of "
"""What the label of runs of consecutive members of a plane begins its last part with; their size follows."""


@dataclass(frozen=True)
class Topology:
    """Named axes over consecutive ranks.

    shape : axis name → size. order : axis names, fastest first. tile : axis name → how many of its indices lie in one tile of
    consecutive ranks.
    """

    shape: dict[str, int]
    order: tuple[str, ...]
    tile: dict[str, int]

    @classmethod
    def checked(
        cls, axes: Mapping[str, int], order: str | Sequence[str] | None = None, tile: Mapping[str, int] | None = None
    ) -> Topology:
        """The topology of these axes. Raises GridError for axes, an order or a tile that do not fit."""
        shape = _sizes(axes)
        return cls(shape, _checked_order(shape, order), _checked_tile(shape, tile))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape.values())

    def check_size(self, ranks: int) -> None:
        """Raise GridError, naming shapes that would work, unless the axes have `ranks` ranks in all."""
        if self.size != ranks:
            raise GridError(_misfit(self.shape, ranks))

    def checked_rank(self, rank: int) -> int:
        """The rank. Raises GridError unless there is such a one."""
        if not hasattr(rank, "__index__") or not 0 <= rank < self.size:
            raise GridError(f"Grid {describe(self.shape)} has no rank {rank!r}; its ranks are 0 to {self.size - 1}.")
        return rank

    def checked_point(self, coordinates: Mapping[str, int]) -> Mapping[str, int]:
        """The point. Raises GridError unless there is such a one."""
        for name, size in self.shape.items():
            at = coordinates.get(name)
            if at is None or not hasattr(at, "__index__") or not 0 <= at < size:
                raise GridError(f"Grid {describe(self.shape)} has no point {dict(coordinates)}: index {at!r} of {name} = {size}.")
        return coordinates

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Axis name → index of `rank`: the digits of the rank, tile digits first, in `order`."""
        inner, outer = dict.fromkeys(self.shape, 0), dict.fromkeys(self.shape, 0)
        for name in self.order:
            rank, inner[name] = divmod(rank, self.tile[name])
        for name in self.order:
            rank, outer[name] = divmod(rank, self.shape[name] // self.tile[name])
        return {name: outer[name] * self.tile[name] + inner[name] for name in self.shape}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; the inverse of `coordinates_of`."""
        return sum(self._steps[name][coordinates[name]] for name in self.order)

    @cached_property
    def _steps(self) -> dict[str, list[int]]:
        """Axis name → what each of its indices adds to a rank."""
        inside, stride, result = {}, 1, {}
        for name in self.order:
            inside[name], stride = stride, stride * self.tile[name]
        for name in self.order:
            tile = self.tile[name]
            result[name] = [index % tile * inside[name] + index // tile * stride for index in range(self.shape[name])]
            stride *= self.shape[name] // tile
        return result

    def members(self, names: Sequence[str], coordinates: Mapping[str, int]) -> list[int]:
        """The ranks that share `coordinates` on all axes but `names`, in the order of the plane of `names`."""
        first = self.rank_of({**coordinates, **dict.fromkeys(names, 0)})
        return [first + sum(steps) for steps in itertools.product(*(self._steps[name] for name in names))]

    def part(self, names: Sequence[str]) -> Topology:
        """The topology of the ranks that differ on these axes alone, numbered in the order of their ranks."""
        order = tuple(name for name in self.order if name in names)
        return Topology({name: self.shape[name] for name in names}, order, {name: self.tile[name] for name in names})

    def extended(self, names: Sequence[str]) -> Topology:
        """Return this topology with further axes of size 1, which a layout may then name; ranks stay where they are."""
        ones = dict.fromkeys(names, 1)
        return Topology({**self.shape, **ones}, (*self.order, *ones), {**self.tile, **ones})

    def checked_names(self, names: object) -> tuple[str, ...]:
        """Return the names of axes as a tuple. Raises GridError for none, for one that there is not, or one that stands twice."""
        if not isinstance(names, Sequence):
            raise GridError(f"The grid has no axis {names!r}. Its axes: {', '.join(self.shape)}; several of them are a plane.")
        for name in names:
            if not isinstance(name, str) or name not in self.shape:
                raise GridError(f"The grid has no axis {name!r}. Its axes: {', '.join(self.shape)}.")
            if names.count(name) > 1:
                raise GridError(f"A plane of axes {', '.join(names)} names axis {name!r} twice.")
        return tuple(names)


def grids_of(ranks: int, names: Sequence[str]) -> list[dict[str, int]]:
    """Every grid of `ranks` ranks with these axes.

    >>> grids_of(4, ("x", "y"))
    [{'x': 1, 'y': 4}, {'x': 2, 'y': 2}, {'x': 4, 'y': 1}]
    """
    return [dict(zip(names, sizes, strict=True)) for sizes in _sizes_of_grids(ranks, len(names))]


@cache
def _sizes_of_grids(ranks: int, axes: int) -> list[tuple[int, ...]]:
    if axes == 1:
        return [(ranks,)]
    return [(size, *rest) for size in divisors(ranks) for rest in _sizes_of_grids(ranks // size, axes - 1)]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def describe(shape: Mapping[str, int]) -> str:
    """A grid's shape as text.

    >>> describe({"x": 2, "y": 2, "z": 1})
    'x=2,y=2,z=1'
    """
    return ",".join(f"{name}={size}" for name, size in shape.items())


def several(shape: Mapping[str, int]) -> dict[str, int]:
    """The axes that have several ranks.

    >>> several({"x": 2, "y": 1})
    {'x': 2}
    """
    return {name: size for name, size in shape.items() if size > 1}


def _misfit(shape: Mapping[str, int], ranks: int) -> str:
    def distance(candidate: Mapping[str, int]) -> float:
        return sum(abs(log(candidate[name] / max(shape[name], 1))) for name in shape)

    fits = sorted(grids_of(ranks, list(shape)), key=distance)[:6]
    places, plural = prod(shape.values()), "s" if prod(shape.values()) > 1 else ""
    there = "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
    return (
        f"Grid {describe(shape)} has {places} place{plural}, but there {there}. "
        f"Start {places} rank{plural}, or choose a grid of {ranks}: {' · '.join(describe(fit) for fit in fits)}."
    )


def _sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes as a dict of Python's own whole numbers; what is no whole number is left as it is, to be refused."""
    if not isinstance(axes, Mapping):
        raise GridError(f"axes is {axes!r}; a grid takes names and sizes, such as {{'x': 2, 'y': 2}}.")
    for name in axes:
        if not isinstance(name, str) or not name:
            raise GridError(f"axes names an axis {name!r}; the name of an axis is a text, such as 'x'.")
    return {name: index(size) if hasattr(size, "__index__") else size for name, size in axes.items()}


def _checked_order(shape: Mapping[str, int], order: str | Sequence[str] | None) -> tuple[str, ...]:
    if not shape:
        raise GridError("A grid needs at least one axis, such as x=1.")
    for name, size in shape.items():
        if not isinstance(size, int) or size < 1:
            raise GridError(f"Axis {name} has size {size!r}; sizes are whole numbers ≥ 1.")
    if order is not None and (not isinstance(order, Sequence) or not all(isinstance(name, str) for name in order)):
        raise GridError(f"order is {order!r}; it is a text such as 'z,y,x', or a list of axes.")
    named = [name for name in DEFAULT_ORDER if name in shape] if order is None else axes_in(order)
    for name in named:
        if name not in shape or named.count(name) > 1:
            text = order if isinstance(order, str) else ",".join(named)
            raise GridError(f"order {text!r} must name each axis at most once; the axes are {', '.join(shape)}.")
    return tuple(named + [name for name in shape if name not in named])


def axes_in(order: str | Sequence[str]) -> list[str]:
    """The axes that an order names: a text has commas between them, or is one-letter axes.

    >>> axes_in("zyx"), axes_in("z,y,x,dp")
    (['z', 'y', 'x'], ['z', 'y', 'x', 'dp'])
    """
    return [name.strip() for name in order.split(",")] if isinstance(order, str) and "," in order else list(order)


def replica_axes(shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a grid of this shape along which there are several replicas.

    >>> replica_axes({"z": 2, "ep": 1, "pp": 2, "dp": 3})
    ('dp',)
    """
    return tuple(axis for axis in REPLICAS if shape.get(axis, 1) > 1)


def _checked_tile(shape: Mapping[str, int], tile: Mapping[str, int] | None) -> dict[str, int]:
    if tile is not None and not isinstance(tile, Mapping):
        raise GridError(f"tile is {tile!r}; it takes names and sizes, such as {{'x': 2}}.")
    for name, size in (tile or {}).items():
        if name not in shape:
            raise GridError(f"tile names axis {name!r}; the axes are {', '.join(shape)}.")
        if not hasattr(size, "__index__"):
            raise GridError(f"tile {name} is {size!r}; tiles are whole numbers ≥ 1.")
        if size < 1 or shape[name] % size:
            fits = ", ".join(map(str, divisors(shape[name])))
            raise GridError(f"tile {name}={size} does not divide axis {name} = {shape[name]}. Tiles that fit: {fits}.")
    return {name: (tile or {}).get(name, 1) for name in shape}


def checked_ranks(ranks: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """The ranks that form a grid, all of them by default. Raises GridError for one that is named twice or does not exist."""
    given = list(ranks) if isinstance(ranks, Iterable) else range(size) if ranks is None else [ranks]
    if not all(hasattr(rank, "__index__") for rank in given):
        raise GridError(f"ranks is {ranks!r}; it takes whole numbers, ranks of the communicator from 0 to {size - 1}.")
    named = tuple(map(index, given))
    if not named:
        raise GridError(f"ranks names no rank; the communicator has 0 to {size - 1}.")
    for rank in named:
        if not 0 <= rank < size or named.count(rank) > 1:
            raise GridError(f"ranks {list(named)} must name each rank at most once; the communicator has 0 to {size - 1}.")
    return named
