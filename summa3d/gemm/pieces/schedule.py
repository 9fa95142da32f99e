"""A product in pieces, as data: which piece is exchanged with whom, what is multiplied when it is there, and what then leaves.

All of it follows from sizes and the number of pieces, never from what arrives first: each run sums in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ...layout.layout import Coordinates, split_range

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


class OperandPart(NamedTuple):
    """A part of a block: its ranges along the dim that an axis splits, and across it."""

    along: DimRange
    across: DimRange

    @property
    def words(self) -> int:
        """Its elements."""
        return prod(high - low for low, high in self)

    def moved(self, start: int) -> OperandPart:
        """The same of an array in which the block begins at `start` of the split dim."""
        return OperandPart((start + self.along[0], start + self.along[1]), self.across)

    def in_rows(self, dim: int, width: int) -> bool:
        """Return whether it is whole rows of an array of this width, whose split dim is `dim`."""
        return dim == 0 and self.across == (0, width)

    def slices(self, dim: int) -> tuple[slice, slice]:
        """The part as rows and columns, where the split dim is `dim`."""
        along, across = slice(*self.along), slice(*self.across)
        return (along, across) if dim == 0 else (across, along)


class Round(NamedTuple):
    """One exchange of an all-gather: the part of the whole that comes from `source`, and that of the own block for `target`.

    An empty block is no message: its part is None.
    """

    source: int
    receive: OperandPart | None
    target: int
    send: OperandPart | None


def parts_of(size: int, pieces: int, extent: int, crosswise: bool) -> list[OperandPart]:
    """The pieces of a member's block of `size` along the split dim, and of `extent` across it: cut along, or `crosswise`."""
    if crosswise:
        return [OperandPart((0, size), piece) for piece in pieces_of(extent, pieces)] if size else []
    return [OperandPart(piece, (0, extent)) for piece in pieces_of(size, pieces)]


def rounds(sizes: Sequence[int], index: int, pieces: int, extent: int, crosswise: bool = False) -> list[Round]:
    """The exchanges of member `index`, whose members' blocks have `sizes`: the nearest first, so that no two share a port.

    extent : of the other dim, along which pieces are cut where they are `crosswise`
    """
    starts, result = [0, *accumulate(sizes)], []
    for step in range(1, len(sizes)):
        source, target = (index + step) % len(sizes), (index - step) % len(sizes)
        coming = [part.moved(starts[source]) for part in parts_of(sizes[source], pieces, extent, crosswise)]
        leaving = parts_of(sizes[index], pieces, extent, crosswise)
        for number in range(max(len(coming), len(leaving))):
            receive, send = (each[number : number + 1] for each in (coming, leaving))
            result.append(Round(source, receive[0] if receive else None, target, send[0] if send else None))
    return result


class SumCell(NamedTuple):
    """A part of C that is summed onto one member, whose `number`-th it is."""

    member: int
    number: int
    part: OperandPart

    def ranges(self, dim: int) -> DimRanges:
        """Its ranges of m and n, where members' parts are split along `dim` of C."""
        return {"mn"[dim]: self.part.along, "mn"[1 - dim]: self.part.across}


def cells(sizes: Sequence[int], index: int, pieces: int, extent: int, crosswise: bool = False) -> list[SumCell]:
    """The cells of a summand whose parts have `sizes`, in the order of their products: those of the others, then the own.

    extent : of the other dim, along which pieces are cut where they are `crosswise`
    """
    starts = [0, *accumulate(sizes)]
    order = [(index + step) % len(sizes) for step in (*range(1, len(sizes)), 0)]
    return [
        SumCell(member, number, part.moved(starts[member]))
        for member in order
        for number, part in enumerate(parts_of(sizes[member], pieces, extent, crosswise))
    ]


class Step(NamedTuple):
    """A product of what is here after `needs` rounds: ranges of m, n, k, and whether it is the first into its part of C."""

    needs: int
    ranges: DimRanges
    first: bool


class PiecedSchedule(NamedTuple):
    """What a rank does: rounds of A, then of B; its products; and the cells of C, none where C is summed as a whole or stays.

    extents : of m, n, k in the gathered blocks. cut : the operands, of a, b and c, that move in pieces. own : the ranges of A's
    and B's split dims that are here at first
    """

    extents: Mapping[str, int]
    cut: Collection[str]
    rounds: Mapping[str, Sequence[Round]]
    own: Mapping[str, DimRange]
    steps: Sequence[Step]
    cells: Sequence[SumCell]

    @property
    def adds(self) -> bool:
        """Return whether some product is added to a part of C that holds another already."""
        return any(
            not step.first and all(step.ranges[letter][0] < step.ranges[letter][1] for letter in "mn") for step in self.steps
        )

    def in_columns(self, operand: str, dim: int, width: int) -> bool:
        """Return whether parts of A or B, split along `dim`, are no whole rows of what is gathered, of this width."""
        parts = (part for item in self.rounds[operand] for part in (item.receive, item.send) if part is not None)
        return not all(part.in_rows(dim, width) for part in parts)

    def messages(self, operand: str, size: int, index: int) -> int:
        """Messages that the rank receives of a, b or c, which is cut, as member `index` of an axis of `size` members."""
        if operand == "c":
            return (size - 1) * sum(cell.member == index for cell in self.cells)
        return sum(item.receive is not None for item in self.rounds[operand])


def schedule_of(plan: Any, grid_shape: Mapping[str, int], at: Coordinates, staged: Collection[str] = ()) -> PiecedSchedule:
    """The schedule of the rank at these coordinates.

    plan : a `CuboidPlan`. staged : axes that communicate in the node's memory, whose operands move as a whole; one without
    elements does not move
    """
    extents = dict(zip("mnk", plan.local_extents(grid_shape, at), strict=True))
    dims, letters = names_of(plan), plan.fine_dims
    members = {
        operand: (grid_shape[axis], at[axis])
        for operand, axis in (("a", plan.y), ("b", plan.x), ("c", plan.z))
        if grid_shape[axis] > 1 and axis not in staged and all(extents[letter] for letter in dims[operand])
    }
    sizes = {operand: plan.fine_sizes(operand, extents[letters[operand]], size) for operand, (size, _) in members.items()}
    moving: dict[str, Sequence[Round]] = {"a": (), "b": ()}
    own = {operand: (0, extents[letters[operand]]) for operand in "ab"}
    for operand in sizes.keys() & own.keys():
        index, across = members[operand][1], dims[operand].replace(letters[operand], "")
        start = sum(sizes[operand][:index])
        moving[operand] = rounds(sizes[operand], index, plan.pieces, extents[across], is_crosswise(plan, operand, grid_shape))
        own[operand] = start, start + sizes[operand][index]
    left: Sequence[SumCell] = ()
    if "c" in members:
        across = "mn".replace(letters["c"], "")
        left = cells(sizes["c"], members["c"][1], plan.pieces, extents[across], is_crosswise(plan, "c", grid_shape))
    return PiecedSchedule(extents, members.keys(), moving, own, _steps(extents, dims, letters, moving, own), left)


def names_of(plan: Any) -> dict[str, str]:
    """The dims of the stored blocks of a, b and c."""
    return {"a": plan.a_names, "b": plan.b_names, "c": "mn"}


def is_crosswise(plan: Any, operand: str, grid_shape: Mapping[str, int]) -> bool:
    """Return whether an operand's blocks are cut across the dim that their axis splits, where products then pass fewer elements.

    Pieces along a split k all pass C, and those along a split m (n) all of B (A): each is read and written, or laid anew for the
    BLAS. Cut across, with an own block as wide as before, they pass it in parts; but columns of A and B travel through memory at
    both ends, and C is cut as A or B arrive, where they do, so that its parts are complete early. By the mean of all ranks, which
    agree.
    """
    if operand == "c" and grid_shape[plan.x] * grid_shape[plan.y] > 1:
        return False
    axes = {"m": plan.x, "n": plan.y, "k": plan.z}
    extents = {letter: getattr(plan, letter) / grid_shape[axis] for letter, axis in axes.items()}
    split = plan.fine_dims[operand]
    other = names_of(plan)[operand].replace(split, "")
    extents[split] /= grid_shape[{"a": plan.y, "b": plan.x, "c": plan.z}[operand]]

    def passed(cut: str) -> float:
        m, n, k = ({**extents, cut: max(1.0, extents[cut] / plan.pieces)}[letter] for letter in "mnk")
        return 2 * plan.pieces * (m * k + k * n + m * n)

    if operand == "c":
        return plan.pieces > 1 and passed(other) <= passed(split)  # where both pass as much, a BLAS is faster at tall products
    return passed(other) + 4 * extents[split] * extents[other] < passed(split)


def _steps(
    extents: Mapping[str, int],
    dims: Mapping[str, str],
    letters: Mapping[str, str],
    moving: Mapping[str, Sequence[Round]],
    own: Mapping[str, DimRange],
) -> list[Step]:
    """The products in order: as A arrives, with the B that is here, then with all of A as B arrives."""
    whole, a, b = {letter: (0, extent) for letter, extent in extents.items()}, letters["a"], letters["b"]
    other = {operand: dims[operand].replace(letters[operand], "") for operand in "ab"}
    here = {**whole, b: own["b"]}
    result = [Step(0, {**here, a: _shared(own["a"], here[a])}, True)]
    for needs, item in enumerate(moving["a"], 1):
        if item.receive is not None:
            ranges = {**here, a: _shared(item.receive.along, here[a])}
            ranges[other["a"]] = _shared(item.receive.across, ranges[other["a"]])
            result.append(Step(needs, ranges, _is_first(item.receive, a, other["a"])))
    for needs, item in enumerate(moving["b"], len(moving["a"]) + 1):
        if item.receive is not None:
            ranges = {**whole, b: item.receive.along, other["b"]: item.receive.across}
            result.append(Step(needs, ranges, _is_first(item.receive, b, other["b"])))
    return result


def _is_first(part: OperandPart, split: str, other: str) -> bool:
    """Return whether nothing is in the part of C before what an operand's part, of the dims `split` and `other`, gives to it."""
    return split != "k" and (other != "k" or part.across[0] == 0)


def _shared(part: DimRange, other: DimRange) -> DimRange:
    """The range that two share, empty where they share nothing."""
    low = max(part[0], other[0])
    return low, max(low, min(part[1], other[1]))


def shared(ranges: DimRanges, other: DimRanges) -> DimRanges | None:
    """The ranges of a step that lie in a part of C, given by its ranges of m and n; None where none do."""
    both = {letter: _shared(ranges[letter], other[letter]) for letter in "mn"}
    return {**ranges, **both} if all(low < high for low, high in both.values()) else None


def within(ranges: DimRanges, letters: str) -> tuple[slice, ...]:
    """The part of a block, whose dims are `letters`, in these ranges."""
    return tuple(slice(*ranges[letter]) for letter in letters)


def slabs(ranges: DimRanges, whole: int, letters: str = "mnk") -> Iterator[DimRanges]:
    """The ranges of a local product, halved along its longest dim until each is at most 1/SLABS of a product of `whole`.

    So a BLAS packs the least anew: of an operand, what is cut along the other's dim. letters : the dims that may be cut; those of
    the same m and n come in the order of k, and all but the first of them are added to C. whole : in multiply-adds
    """
    letter = max(letters, key=lambda each: ranges[each][1] - ranges[each][0])
    (start, stop), work = ranges[letter], prod(high - low for low, high in ranges.values())
    if work * SLABS <= whole or work < 2 * SMALLEST_SLAB or stop - start < 2:
        yield ranges
        return
    for number in range(2):
        yield from slabs({**ranges, letter: split_range(start, stop, 2, number)}, whole, letters)
