"""Several ranks that orthogonalise a matrix together: the products of an iteration, their layouts, and how many ranks pay."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ...comm.grid import Place
from ...comm.topology import divisors, several
from ...dtypes import dtype_of
from ...errors import ConfigError
from ...gemm.any_layout.plan import AnyPlan
from ...gemm.any_layout.planned import plan_any
from ...gemm.cost.machine import Machine
from ...gemm.one_matrix import plan_syrk
from ...gemm.symmetric.plan import SymmetricPlan
from ...layout.layout import Layout, split_sizes
from .newton_schulz import NewtonSchulz

LARGEST = 64
"""Ranks of a group that is looked for, at most: up to so many, planning is a matter of milliseconds."""
GAIN = 0.95
"""A larger group is looked at where its arithmetic alone takes no more than that part of the best prediction so far."""
Extent = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns of a matrix: first, and one behind the last."""


@dataclass(frozen=True)
class GroupPlan:
    """Newton–Schulz of one matrix X, short×long, on the ranks of a group, each of which holds a block of it.

    An iteration is three products in layouts of any kind: G = X·Xᵀ, G·Gᵀ, which is G², and (bG + cG²)·X. The first two take half
    of the arithmetic of a general product, by `plan_syrk`, where that is predicted to be faster.

    Attributes
    ----------
    shape : short and long side of the matrix
    axes : the group's grid, axis name → size. x, g : the layouts of X and of G
    gram, square, update : the plans of the products
    """

    shape: tuple[int, int]
    axes: Mapping[str, int]
    x: Layout
    g: Layout
    gram: SymmetricPlan | AnyPlan
    square: SymmetricPlan | AnyPlan
    update: AnyPlan

    @property
    def products(self) -> tuple[SymmetricPlan | AnyPlan, ...]:
        """The products of an iteration."""
        return self.gram, self.square, self.update

    @property
    def seconds(self) -> float:
        """Predicted for an iteration."""
        return sum(plan.seconds for plan in self.products)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of an iteration, of the rank that does most of each product."""
        return sum(plan.max_multiply_adds for plan in self.products)

    def words_of(self, place: int) -> int:
        """Words that a rank receives in an iteration."""
        return sum(plan.words_of(place) for plan in self.products)

    def messages_of(self, place: int) -> int:
        """Messages that a rank receives in an iteration."""
        return sum(plan.messages_of(place) for plan in self.products)

    def part_of(self, place: int) -> Extent:
        """The rows and columns of X that a rank of the group holds."""
        point = self.gram.space.points[place]
        rows, columns = self.x.slices(self.shape, dict(self.axes), point)
        return (rows.start, rows.stop), (columns.start, columns.stop)


class Grouping(NamedTuple):
    """Which ranks compute together: groups of `size`, and the group of each matrix; seconds of the busiest group, predicted."""

    size: int
    owners: tuple[int, ...]
    seconds: float


@lru_cache(maxsize=256)
def group_plan(short: int, long: int, size: int, dtype: str) -> GroupPlan:
    """The plan of fewest predicted seconds on `size` ranks: of all grids of rows and columns, and some layouts of G."""
    return min(_plans(short, long, size, dtype), key=lambda plan: round(plan.seconds * 1e12))


def _plans(short: int, long: int, size: int, dtype: str) -> Iterator[GroupPlan]:
    """The plans that are compared: X in parts of rows and of columns; G copied, in blocks, or in parts of rows."""
    for rows in divisors(size):
        if rows * rows > size:
            continue  # the long side has the more parts
        columns = size // rows
        named = several({f"rows={rows}×{columns}": rows, f"columns={columns}": columns})
        row, column = tuple(named)[:-1], tuple(named)[-1:]
        grid, x = Place(named, order=(*column, *row)), Layout(row, column)
        for g in dict.fromkeys([Layout((), ()), Layout(row, column), Layout((*row, *column), ())]):
            grams = plan_syrk(x, short, long, grid, g, dtype=dtype)
            squares = plan_syrk(g, short, short, grid, g, dtype=dtype)
            update = plan_any(g, x, short, long, short, grid, x, dtype=dtype)
            yield GroupPlan((short, long), named, x, g, _faster(grams), _faster(squares), update)


def group_axes(label: str) -> dict[str, int]:
    """The axes of the group's grid that an axis of this label is of, the fastest first; none, where it is of another grid.

    >>> group_axes("rows=2×4"), group_axes("columns=3"), group_axes("x·y")
    ({'columns=4': 4, 'rows=2×4': 2}, {'columns=3': 3}, {})
    """
    named = dict(name.split("=") for name in label.split("·") if "=" in name)
    if "rows" in named:
        rows, columns = map(int, named["rows"].split("×"))
        return {f"columns={columns}": columns, f"rows={rows}×{columns}": rows}
    return {f"columns={named['columns']}": int(named["columns"])} if "columns" in named else {}


def _faster(plan: SymmetricPlan) -> SymmetricPlan | AnyPlan:
    """The symmetric product, or the general one where that is predicted to take less time."""
    return plan if plan.seconds <= plan.general.seconds else plan.general


def grouped(shapes: Sequence[tuple[int, int]], members: int, how: NewtonSchulz, dtype: Any, ranks: int | None = None) -> Grouping:
    """The groups of fewest predicted seconds for matrices of these shapes on so many ranks.

    ranks : ranks of a group, where that is given. Of sizes that divide the ranks, ascending, the search ends at the first that is
    looked at and is slower than the best. Predicted are the products, and the two all-to-alls of what the busiest rank computes,
    on the cluster by which all products are compared (`Machine`), so that all ranks and a dry run choose alike.

    Raises ConfigError for a number of ranks that does not divide the members.
    """
    dtype, fits = dtype_of(dtype).name, divisors(members)
    if ranks is not None:
        if ranks not in fits:
            raise ConfigError(
                f"Muon: {ranks} ranks compute a matrix together, but groups of that size do not divide the {members} ranks that "
                f"hold the matrices. Sizes that do: {', '.join(map(str, fits))}."
            )
        return _grouping(shapes, members, ranks, how, dtype)
    best = _grouping(shapes, members, 1, how, dtype)
    for size in fits[1:] if shapes else ():
        arithmetic = max(_loads(shapes, _owners(shapes, members // size, how), members // size, how)) / size
        if size > LARGEST or arithmetic * _flop_seconds(dtype) > GAIN * best.seconds:
            continue
        result = _grouping(shapes, members, size, how, dtype)
        if result.seconds >= best.seconds:
            break
        best = result
    return best


def _grouping(shapes: Sequence[tuple[int, int]], members: int, size: int, how: NewtonSchulz, dtype: str) -> Grouping:
    """Groups of one size."""
    owners = _owners(shapes, members // size, how)
    seconds, words = [0.0] * (members // size), [0] * (members // size)
    for (rows, columns), owner in zip(shapes, owners, strict=True):
        seconds[owner] += how.steps * iteration_seconds(rows, columns, size, dtype)
        words[owner] += rows * columns
    moved = 2 * max(words) * (members - 1) // (members * size)  # what its rank lacks of a matrix comes, and goes back
    machine = Machine()
    travel = machine.transfer(moved, 0, 2 * (members - 1), dtype_of(dtype), members) if members > 1 else 0.0
    return Grouping(size, owners, max(seconds) + travel)


def iteration_seconds(rows: int, columns: int, size: int, dtype: str) -> float:
    """Predicted seconds of an iteration of a matrix on `size` ranks."""
    short, long = sorted((rows, columns))
    if size > 1:
        return group_plan(short, long, size, dtype).seconds
    machine, number = Machine(), dtype_of(dtype)
    return 2 * machine.product(short, long, short, number) + machine.product(short, short, short, number)


def norm_words(matrices: int, size: int, place: int) -> int:
    """Words that a rank of a group receives while the squares of the norms of so many matrices are added."""
    return matrices + (size - 2) * split_sizes(matrices, size)[place] if size > 1 and matrices else 0


def dealt(work: Sequence[int], members: int) -> tuple[int, ...]:
    """Member that takes each piece of work: the largest first, each to the member that has least so far, of equals the first.

    >>> dealt([3, 5, 3, 4], 2)
    (1, 0, 0, 1)
    """
    loads = [(0, member) for member in range(members)]
    owners = [0] * len(work)
    for number in sorted(range(len(work)), key=lambda item: -work[item]):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + work[number], owners[number]))
    return tuple(owners)


def _owners(shapes: Sequence[tuple[int, int]], groups: int, how: NewtonSchulz) -> tuple[int, ...]:
    return dealt([how.flops(*shape) for shape in shapes], groups)


def _loads(shapes: Sequence[tuple[int, int]], owners: Sequence[int], groups: int, how: NewtonSchulz) -> list[int]:
    """Flops of each group."""
    loads = [0] * groups
    for shape, owner in zip(shapes, owners, strict=True):
        loads[owner] += how.flops(*shape)
    return loads


def _flop_seconds(dtype: str) -> float:
    """Seconds of a flop at the full rate."""
    return 1 / Machine().cluster.peak(dtype)
