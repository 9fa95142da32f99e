"""Building blocks of the closed forms: the cost of one rank, of all ranks, and of one collective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from ...comm.device.arrays import share
from ...dtypes import HALVES
from ...layout.layout import Coordinates, Layout, without
from ..local.blas import adds_in_place

GridShape = Mapping[str, int]


@dataclass(frozen=True)
class Cost:
    """What one rank moves and needs: words received, messages received, words of peak workspace."""

    words: int
    messages: int
    workspace: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.words + other.words, self.messages + other.messages, max(self.workspace, other.workspace))


@dataclass(frozen=True)
class Volume:
    """The cost of an operation on every rank of a grid; `cost_of` gives one rank's."""

    grid_shape: GridShape
    cost_of: Callable[[Coordinates], Cost]

    def costs(self) -> list[Cost]:
        """One cost per rank, coordinates counted with the last axis fastest."""
        return [self.cost_of(coordinates) for coordinates, _ in Layout().blocks((), self.grid_shape)]

    def words_of(self, coordinates: Coordinates) -> int:
        """Words that the rank receives."""
        return self.cost_of(coordinates).words

    def messages_of(self, coordinates: Coordinates) -> int:
        """Messages that the rank receives."""
        return self.cost_of(coordinates).messages

    def workspace_of(self, coordinates: Coordinates) -> int:
        """Words of workspace; times the bytes of a word, the peak that the ledger tracks."""
        return self.cost_of(coordinates).workspace

    @property
    def max_words(self) -> int:
        """Words of the rank that receives most."""
        return max(cost.words for cost in self.costs())

    @property
    def mean_words(self) -> Fraction:
        """Words that a rank receives on average, exactly."""
        return Fraction(sum(cost.words for cost in self.costs()), prod(self.grid_shape.values()))


def block_words(layout: Layout, shape: tuple[int, ...], grid_shape: GridShape, at: Coordinates) -> int:
    """Elements of the block at a rank."""
    return prod(layout.local_shape(shape, grid_shape, at))


def gather(layout: Layout, shape: tuple[int, ...], axis: str, grid_shape: GridShape, at: Coordinates) -> Cost:
    """An all-gather along `axis`: the gathered block less the rank's own; the workspace is the gathered block."""
    size = grid_shape[axis]
    if size == 1:
        return Cost(0, 0)
    gathered = block_words(without(layout, axis), shape, grid_shape, at)
    return Cost(gathered - block_words(layout, shape, grid_shape, at), size - 1, gathered)


def scatter(layout: Layout, shape: tuple[int, ...], axis: str, grid_shape: GridShape, at: Coordinates) -> Cost:
    """A reduce-scatter along `axis` into `layout`: (g−1) times the rank's own block; the workspace is the g parts summed."""
    size = grid_shape[axis]
    if size == 1:
        return Cost(0, 0)
    own = block_words(layout, shape, grid_shape, at)
    return Cost((size - 1) * own, size - 1, size * own)


def all_reduce(n: int, axes: tuple[str, ...], grid_shape: GridShape, at: Coordinates) -> Cost:
    """An all-reduce of n words over the plane of `axes`: n + (g−2)·n_r."""
    size, index = 1, 0
    for axis in axes:
        size, index = size * grid_shape[axis], index * grid_shape[axis] + at[axis]
    if size == 1:
        return Cost(0, 0)
    return Cost(n + (size - 2) * share(n, size, index), 2 * (size - 1))


def combined(*costs: Cost) -> Cost:
    """The sum of costs whose workspace is held at one time."""
    return Cost(sum(cost.words for cost in costs), sum(cost.messages for cost in costs), sum(cost.workspace for cost in costs))


@dataclass(frozen=True)
class Conditions:
    """The conditions that workspace depends on: dtype, device, transport. `wide` words hold one summed element.

    `widened` words hold an element of an operand in the float32 that it is copied to, 0 where it is multiplied as it is;
    `scratch`: products are not added in place; `staged`: the axes that communicate in the node's memory.
    """

    wide: int
    widened: int
    scratch: bool
    complex: bool
    staged: frozenset[str] = frozenset()

    @classmethod
    def of(cls, dtype: str, staged: Collection[str] = (), device: bool = False) -> Conditions:
        """The conditions of a product of `dtype`, with the axes `staged` in the node's memory, on the host or a device."""
        half = dtype in HALVES
        wide, widened = 2 if half else 1, 2 if half and not device else 0
        return cls(wide, widened, not adds_in_place(dtype), dtype.startswith("complex"), frozenset(staged))
