"""A product in pieces, as data: which piece is exchanged with whom, what is multiplied when it is there, and what then leaves.

All of it follows from sizes and the number of pieces, never from what arrives first: each run sums in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ...layout.layout import split_range, split_sizes

SLABS = 16
"""Local products of a rank, at least, between which MPI is asked to move what is in flight."""
SMALLEST_SLAB = 1 << 21
"""m·n·k of a local product that is not divided for it."""

DimRange = tuple[int, int]
DimRanges = Mapping[str, DimRange]


def pieces_of(extent: int, pieces: int) -> list[DimRange]:
    """The balanced ranges of a block's extent, none of them empty: at most `pieces`.

    >>> pieces_of(7, 3), pieces_of(1, 3), pieces_of(0, 3)
    ([(0, 3), (3, 5), (5, 7)], [(0, 1)], [])
    """
    count = min(pieces, extent)
    return [split_range(0, extent, count, number) for number in range(count)]


class Round(NamedTuple):
    """One exchange of an all-gather: the range of the whole that comes from `source`, and that of the own block for `target`.

    An empty block is no message: its range is None.
    """

    source: int
    receive: DimRange | None
    target: int
    send: DimRange | None


def rounds(sizes: Sequence[int], index: int, pieces: int) -> list[Round]:
    """The exchanges of member `index`, whose members' blocks have `sizes`: the nearest first, so that no two share a port."""
    starts, found = [0, *accumulate(sizes)], []
    for step in range(1, len(sizes)):
        source, target = (index + step) % len(sizes), (index - step) % len(sizes)
        coming = [(starts[source] + low, starts[source] + high) for low, high in pieces_of(sizes[source], pieces)]
        leaving = pieces_of(sizes[index], pieces)
        for number in range(max(len(coming), len(leaving))):
            receive, send = (each[number : number + 1] for each in (coming, leaving))
            found.append(Round(source, receive[0] if receive else None, target, send[0] if send else None))
    return found


def messages(sizes: Sequence[int], index: int, pieces: int) -> int:
    """Messages that member `index` receives in `rounds`."""
    return sum(len(pieces_of(size, pieces)) for member, size in enumerate(sizes) if member != index)


class SumCell(NamedTuple):
    """A range of C's rows or columns that is summed onto one member, whose `number`-th it is."""

    member: int
    number: int
    start: int
    stop: int


def cells(sizes: Sequence[int], index: int, pieces: int) -> list[SumCell]:
    """The cells of a summand whose parts have `sizes`, in the order of their products: those of the others, then the own."""
    starts = [0, *accumulate(sizes)]
    order = [(index + step) % len(sizes) for step in (*range(1, len(sizes)), 0)]
    return [
        SumCell(member, number, starts[member] + low, starts[member] + high)
        for member in order
        for number, (low, high) in enumerate(pieces_of(sizes[member], pieces))
    ]


class Step(NamedTuple):
    """A product of what is here after `needs` rounds: ranges of m, n, k, and whether it is the first into its part of C."""

    needs: int
    ranges: DimRanges
    first: bool


class PiecedSchedule(NamedTuple):
    """What a rank does: rounds of A, then of B; its products; and the cells of C, none where C is summed as a whole or stays.

    own : the ranges of A's and B's cut dims that are here at first
    """

    rounds: Mapping[str, Sequence[Round]]
    own: Mapping[str, DimRange]
    steps: Sequence[Step]
    cells: Sequence[SumCell]


def schedule(
    extents: Mapping[str, int], letters: Mapping[str, str], members: Mapping[str, tuple[int, int]], pieces: int
) -> PiecedSchedule:
    """The schedule of one rank.

    extents : of m, n, k in its gathered blocks. letters : the dim along which a, b and c are put together. members : of each
    operand that is cut, the size of its axis and the rank's index on it
    """
    sizes = {operand: split_sizes(extents[letters[operand]], size) for operand, (size, _) in members.items()}
    moving: dict[str, Sequence[Round]] = {"a": (), "b": ()}
    own = {operand: (0, extents[letters[operand]]) for operand in "ab"}
    for operand in sizes.keys() & own.keys():
        index = members[operand][1]
        start = sum(sizes[operand][:index])
        moving[operand] = rounds(sizes[operand], index, pieces)
        own[operand] = start, start + sizes[operand][index]
    left = cells(sizes["c"], members["c"][1], pieces) if "c" in members else ()
    return PiecedSchedule(moving, own, _steps(extents, letters, moving, own), left)


def _steps(
    extents: Mapping[str, int], letters: Mapping[str, str], moving: Mapping[str, Sequence[Round]], own: Mapping[str, DimRange]
) -> list[Step]:
    """The products in order: as A arrives, with the B that is here, then with all of A as B arrives."""
    whole, a, b = {letter: (0, extent) for letter, extent in extents.items()}, letters["a"], letters["b"]
    here, found = {**whole, b: own["b"]}, []
    for needs, part in enumerate([own["a"], *(one.receive for one in moving["a"])]):
        if part is not None:
            low = max(part[0], here[a][0])
            found.append(Step(needs, {**here, a: (low, max(low, min(part[1], here[a][1])))}, a != "k" or needs == 0))
    for needs, one in enumerate(moving["b"], len(moving["a"]) + 1):
        if one.receive is not None:
            found.append(Step(needs, {**whole, b: one.receive}, b == "n"))
    return found


def shared(one: DimRanges, other: DimRanges) -> DimRanges | None:
    """The ranges of a step that lie in a part of C, given by its ranges of m and n; None where none do."""
    both = {letter: (max(one[letter][0], other[letter][0]), min(one[letter][1], other[letter][1])) for letter in "mn"}
    return {**one, **both} if all(low < high for low, high in both.values()) else None


def slabs(ranges: DimRanges, whole: int) -> Iterator[DimRanges]:
    """The ranges of a local product, divided along m: each is at most 1/SLABS of a product of `whole` multiply-adds."""
    work, (start, stop) = prod(high - low for low, high in ranges.values()), ranges["m"]
    count = max(1, min(stop - start, -(-work * SLABS // max(1, whole)), work // SMALLEST_SLAB))
    for number in range(count):
        yield {**ranges, "m": split_range(start, stop, count, number)}
