"""Redistribute a tensor between any two ownerships, on two grids of one communicator: a plan, and one all-to-all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ..comm.device.arrays import Array, array_problem, dtype_name, empty, is_on_device
from ..comm.grid import BaseGrid, agree_on_call
from ..errors import LayoutError, ShapeError
from .cyclic import Ownership, Runs, ownership
from .layout import Coordinates

if TYPE_CHECKING:
    from ..comm.axis import Axis
    from ..comm.grid import BaseGrid

BlockKey = tuple[tuple[int, ...], ...]
"""Which part of a tensor a rank holds: per dim, its coordinates on the axes that split it. Equal keys are copies."""

SHORT_RUN = 128
"""Elements; below this many per run, one fancy-indexed copy is quicker than a slice per run (a slice costs ~0.5 µs)."""


class Placement:
    """An ownership together with the coordinates of every rank: where each element of a tensor is, and its copies.

    A point {} is that of a rank outside the grid, which holds nothing.
    """

    def __init__(self, layout: Ownership, grid_shape: Mapping[str, int], points: Sequence[Coordinates]) -> None:
        for axis in sorted(layout.axes.union(layout.root_only)):
            if axis not in grid_shape:
                raise LayoutError(f"{layout!r} names axis {axis!r}; the grid has the axes {', '.join(grid_shape)}.")
        self.layout: Ownership = layout
        self.grid_shape, self.points = grid_shape, points
        self.keys = [self._key(point) for point in points]
        self.holders: dict[BlockKey, list[int]] = {}
        for rank, key in enumerate(self.keys):
            if key is not None:
                self.holders.setdefault(key, []).append(rank)

    @classmethod
    def on(cls, grid: BaseGrid, layout: Ownership) -> Placement:
        """The placement of `layout` over the ranks of a grid."""
        return cls(layout, grid.shape, [grid.coordinates_of(rank) for rank in range(grid.size)])

    @classmethod
    def among_everyone(cls, grid: BaseGrid, layout: Ownership) -> Placement:
        """The placement of `layout` over all ranks of the communicator that the grid was made on."""
        return cls(layout, grid.shape, grid.places())

    def _key(self, point: Coordinates) -> BlockKey | None:
        if not point or (self.layout.dims and not self.layout.holds_block(point)):
            return None
        return tuple(tuple(point[axis] for axis in axes) for axes in self.layout.dims)

    def runs(self, shape: Sequence[int], rank: int) -> tuple[Runs, ...]:
        """Per dim, the ranges of global indices that `rank` holds, in the order in which it stores them."""
        return self.layout.runs(shape, self.grid_shape, self.points[rank])

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the block that `rank` holds."""
        return self.layout.local_shape(shape, self.grid_shape, self.points[rank])


@dataclass(frozen=True)
class Piece:
    """A box of elements that one rank sends to another: per dim, its ranges in the sender's block and in the receiver's."""

    sender: int
    receiver: int
    take: tuple[Runs, ...]
    put: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The elements of the box, per dim."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self.take)

    @property
    def words(self) -> int:
        """The elements of the box."""
        return prod(self.shape)


@dataclass
class Redistribution:
    """The plan of a redistribution: which rank sends which piece to which, from one placement to another. Plain data.

    Each rank receives each element of its new block once: from itself where it holds it; else from the one rank that holds
    it; else, of several that hold copies, the receivers of a part take turns over its holders. Every rank computes the same plan.
    """

    shape: tuple[int, ...]
    source: Placement
    target: Placement
    _overlaps: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Runs, Runs]] = field(default_factory=dict, repr=False)
    _receivers: dict[BlockKey, list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if len(self.source.points) != len(self.target.points):
            before, after = len(self.source.points), len(self.target.points)
            raise LayoutError(f"A tensor on {before} ranks cannot go to {after}: both placements must list the same ranks.")
        if not self.shape and None in (*self.source.keys, *self.target.keys):
            raise ShapeError("A tensor without dims is one element: it cannot go from or to a grid that leaves ranks outside.")

    def words_of(self, rank: int) -> int:
        """Words that `rank` receives: its new block less what it holds of it already."""
        wanted = prod(self.target.local_shape(self.shape, rank))
        return wanted - self._common(self.source.keys[rank], rank)

    def moves(self) -> bool:
        """Return whether any rank receives elements."""
        return any(self.words_of(rank) for rank in range(len(self.target.points)))

    def messages_of(self, rank: int) -> int:
        """Messages that `rank` receives: those of one all-to-all, or none where nothing moves."""
        return len(self.target.points) - 1 if self.moves() else 0

    def workspace_of(self, rank: int) -> int:
        """Words of workspace: what `rank` sends and what it receives, packed."""
        return sum(piece.words for piece in self.sent_by(rank)) + self.words_of(rank)

    def kept_by(self, rank: int) -> Piece | None:
        """The piece that `rank` holds before and after; None if there is none."""
        return self._piece(rank, rank) if self._common(self.source.keys[rank], rank) else None

    def sent_by(self, rank: int) -> list[Piece]:
        """The pieces that `rank` sends, by ascending receiver."""
        part = self.source.keys[rank]
        if part is None:
            return []
        holders = self.source.holders[part]
        receivers = enumerate(self._receivers_of(part))
        return [self._piece(rank, receiver) for turn, receiver in receivers if holders[turn % len(holders)] == rank]

    def received_by(self, rank: int) -> list[Piece]:
        """The pieces that `rank` receives, by ascending sender."""
        senders = []
        for part in self._parts_of(rank):
            holders = self.source.holders[part]
            if part != self.source.keys[rank]:
                turn = self._receivers_of(part).index(rank) if len(holders) > 1 else 0
                senders.append(holders[turn % len(holders)])
        return [self._piece(sender, rank) for sender in sorted(senders)]

    def _overlap(
        self, dim: int, source: tuple[int, ...], target: tuple[int, ...], sender: int, receiver: int
    ) -> tuple[Runs, Runs]:
        """The ranges of `dim` that both ranks hold, in the sender's block and in the receiver's. Cached by the keys."""
        key = (dim, source, target)
        if key not in self._overlaps:
            given, taken = self.source.runs(self.shape, sender)[dim], self.target.runs(self.shape, receiver)[dim]
            self._overlaps[key] = common_runs(given, taken)
        return self._overlaps[key]

    def _piece(self, sender: int, receiver: int) -> Piece:
        pairs = self._overlaps_of(self.source.keys[sender] or (), self.target.keys[receiver] or (), sender, receiver)
        return Piece(sender, receiver, tuple(take for take, _ in pairs), tuple(put for _, put in pairs))

    def _overlaps_of(self, part: BlockKey, wanted: BlockKey, sender: int, receiver: int) -> list[tuple[Runs, Runs]]:
        return [self._overlap(dim, *keys, sender, receiver) for dim, keys in enumerate(zip(part, wanted, strict=True))]

    def _common(self, part: BlockKey | None, receiver: int) -> int:
        """Elements of `part` that the receiver's new block needs."""
        wanted = self.target.keys[receiver]
        if part is None or wanted is None:
            return 0
        pairs = self._overlaps_of(part, wanted, self.source.holders[part][0], receiver)
        return prod(sum(run.stop - run.start for run in take) for take, _ in pairs)

    def _parts_of(self, receiver: int) -> Iterator[BlockKey]:
        """The parts of the source that hold elements of the receiver's new block."""
        return (part for part in self.source.holders if self._common(part, receiver))

    def _receivers_of(self, part: BlockKey) -> list[int]:
        """The ranks that need something of `part` and do not hold it."""
        if part not in self._receivers:
            ranks = range(len(self.target.points))
            self._receivers[part] = [rank for rank in ranks if self.source.keys[rank] != part and self._common(part, rank)]
        return self._receivers[part]


def common_runs(given: Runs, taken: Runs) -> tuple[Runs, Runs]:
    """Places of the indices in both lists of ascending ranges in the storage of each: two lists of ranges of equal total."""
    in_given: list[slice] = []
    in_taken: list[slice] = []
    i = j = given_start = taken_start = 0
    while i < len(given) and j < len(taken):
        start, stop = max(given[i].start, taken[j].start), min(given[i].stop, taken[j].stop)
        if start < stop:
            _append(in_given, given_start + start - given[i].start, stop - start)
            _append(in_taken, taken_start + start - taken[j].start, stop - start)
        if given[i].stop <= taken[j].stop:
            given_start += given[i].stop - given[i].start
            i += 1
        else:
            taken_start += taken[j].stop - taken[j].start
            j += 1
    return tuple(in_given), tuple(in_taken)


def _append(runs: list[slice], start: int, length: int) -> None:
    """Append a range, joined to the last one where it follows it."""
    if runs and runs[-1].stop == start:
        start, length = runs[-1].start, length + start - runs.pop().start
    runs.append(slice(start, start + length))


def redistribute(
    block: Array,
    shape: Sequence[int],
    grid: BaseGrid,
    layout: Ownership | str,
    to: Ownership | str,
    to_grid: BaseGrid | None = None,
    order: str = "C",
) -> Array:
    """This rank's block of a tensor of global `shape` in the ownership `to`, from its block in `layout`.

    Parameters
    ----------
    block : this rank's block under `layout` on `grid`, in any memory order
    layout, to : the ownership before and after, or its text, such as ``m:x k:y``
    to_grid : the grid of `to`; None is the same grid. Another is made on the same communicator, and either
        may leave ranks of it outside: they make the same call, with a block without elements, or get one
    order : "C", or "F" for a numpy array stored by columns, as ScaLAPACK wants it

    Returns a new array. Moves, per rank, the words of its new block that it does not hold (`Redistribution.words_of`) in one
    all-to-all over the grid's ranks, or from grid to grid over `Grid.everyone`, counted in `grid`'s ledger; nothing, and no
    message, where no rank lacks anything. Needs `Redistribution.workspace_of` words of workspace.
    Raises LayoutError or ShapeError, before any communication, where the grids have no common communicator or `block` is not
    this rank's; AgreementError on all ranks where they call differently, which they compare at the first call of a kind.
    """
    layout, to = ownership(layout, grained=True), ownership(to, grained=True)
    problem, target = problem_of(block, shape, order), to_grid or grid
    check_common(grid, target)
    if problem is not None:
        if grid.inside or target is not grid:
            agree_on_call(grid, "redistribute", {}, grid.ranked if target is grid else grid.everyone, problem)
        raise ShapeError(problem)
    if target is grid:
        if not grid.inside:
            return _new_block((0,) * len(shape), block, order)
        plan, axis = Redistribution(tuple(shape), Placement.on(grid, layout), Placement.on(grid, to)), grid.ranked
    else:
        places = Placement.among_everyone(grid, layout), Placement.among_everyone(target, to)
        plan, axis = Redistribution(tuple(shape), *places), grid.everyone
    here, problem = axis.index, None
    expected = plan.source.local_shape(shape, here)
    if tuple(block.shape) != expected:
        problem = (
            f"Rank {here} holds a block of shape {tuple(block.shape)}; {layout} of {tuple(shape)} on {grid} gives {expected}."
        )
    facts = {"shape": tuple(shape), "dtype": dtype_name(block), "layout": str(layout), "to": str(to), "grid": repr(to_grid)}
    agree_on_call(grid, "redistribute", facts if problem is None or grid.job.check else {}, axis, problem)
    if problem is not None:
        raise ShapeError(problem)
    out = _new_block(plan.target.local_shape(shape, here), block, order)
    Exchange([plan], axis).run(block, out)
    return out


def problem_of(block: Array, shape: Sequence[int], order: str) -> str | None:
    """Reason why these are no array, no shape, or no memory order; None if they are."""
    problem = array_problem(block, has_memory=False)
    if problem is None and not (isinstance(shape, Sequence) and all(hasattr(size, "__index__") and size >= 0 for size in shape)):
        problem = f"a shape is whole numbers of at least 0; it is {shape!r}"
    if problem is None and order not in ("C", "F"):
        problem = f"order {order!r} does not exist; orders: C, F"
    return None if problem is None else f"redistribute: {problem}."


def check_common(grid: BaseGrid, other: BaseGrid) -> None:
    """Raise LayoutError unless both grids were made on communicators of the same processes in the same order. Local."""
    from mpi4py import MPI

    if grid is other:
        return
    mine, others = grid.communicators.common, other.communicators.common
    if MPI.Comm.Compare(mine, others) not in (MPI.IDENT, MPI.CONGRUENT):
        raise LayoutError(
            f"{grid} and {other} have no common communicator: one was made on {mine.size} ranks, the other on "
            f"{others.size}, or on the same in another order.\n"
            f"  Make both on one; Grid(comm, axes, ranks=range(n)) fills a part of it."
        )


class Exchange:
    """Redistributions bound to an axis of the ranks that their placements list, all in one all-to-all.

    A rank sends of one block: of several plans, it holds a block of one of them at most. Its pieces are worked out once.
    """

    def __init__(self, plans: Sequence[Redistribution], axis: Axis) -> None:
        here, self.axis, self.shape = axis.index, axis, plans[0].target.local_shape(plans[0].shape, axis.index)
        self.moves = any(plan.moves() for plan in plans)
        """Whether any rank receives elements."""
        self._kept = [plan.kept_by(here) for plan in plans]
        self._gives = [piece for plan in plans for piece in plan.sent_by(here)] if self.moves else []
        self._takes = [plan.received_by(here) if self.moves else [] for plan in plans]
        self._sizes, self._receive_sizes = [0] * axis.size, [0] * axis.size
        for piece in self._gives:
            self._sizes[piece.receiver] += piece.words
        for piece in itertools.chain.from_iterable(self._takes):
            self._receive_sizes[piece.sender] += piece.words

    def kept(self, block: Array) -> Array:
        """This rank's new block where nothing moves: a view of its old one, or a copy."""
        own = self._kept[0]
        return empty(self.shape, block) if own is None else taken(block, own.take)

    def run(self, block: Array, out: Array) -> None:
        """Fill `out`, this rank's new block, by the one plan."""
        for pieces in self.pieces(block):
            for piece, elements in pieces:
                put(out, piece.put, elements)

    def pieces(self, block: Array) -> Iterator[list[tuple[Piece, Array]]]:
        """Exchange, then yield the pieces of this rank's new block by each plan: what it keeps of `block`, and what came."""
        kept = [[] if own is None else [(own, taken(block, own.take))] for own in self._kept]
        if not self.moves:
            yield from kept
            return
        packed, start = self.axis.ledger.track(empty((sum(self._sizes),), block)), 0
        for piece in sorted(self._gives, key=lambda item: item.receiver):
            packed[start : start + piece.words] = taken(block, piece.take).reshape(-1)
            start += piece.words
        arrived = self.axis.ledger.track(self.axis.all_to_all(packed, sizes=self._sizes, receive_sizes=self._receive_sizes))
        del packed
        starts = list(itertools.accumulate(self._receive_sizes, initial=0))
        for own, takes in zip(kept, self._takes, strict=True):
            firsts = [starts[piece.sender] for piece in takes]
            came = [arrived[first : first + piece.words].reshape(piece.shape) for first, piece in zip(firsts, takes, strict=True)]
            yield own + list(zip(takes, came, strict=True))


def taken(block: Array, runs: tuple[Runs, ...]) -> Array:
    """The elements of `block` in the ranges of each dim: a view where each dim has one range, else a copy."""
    if _single(runs):
        return block[tuple(part[0] for part in runs)]
    if _short(runs) and not is_on_device(block):
        return block[_open_mesh(runs)]
    result = empty([sum(run.stop - run.start for run in part) for part in runs], block)
    for inside, outside in boxes(runs):
        result[inside] = block[outside]
    return result


def put(out: Array, runs: tuple[Runs, ...], piece: Array) -> None:
    """Overwrite the elements of `out` in the ranges of each dim by `piece`; the inverse of `taken`."""
    if _single(runs):
        out[tuple(part[0] for part in runs)] = piece
    elif _short(runs) and not is_on_device(out):
        out[_open_mesh(runs)] = piece
    else:
        for inside, outside in boxes(runs):
            out[outside] = piece[inside]


def _single(runs: tuple[Runs, ...]) -> bool:
    return all(len(part) == 1 for part in runs)


def _short(runs: tuple[Runs, ...]) -> bool:
    count = prod(len(part) for part in runs)
    return prod(sum(run.stop - run.start for run in part) for part in runs) < SHORT_RUN * count


def _open_mesh(runs: tuple[Runs, ...]) -> tuple[np.ndarray, ...]:
    return np.ix_(*map(indices, runs))


def indices(runs: Runs) -> np.ndarray:
    """The indices in the ranges, in their order."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs] or [np.arange(0)])


def boxes(runs: tuple[Runs, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each box of ranges: where it lies when the ranges are stored one after the other, and where in the block."""
    ends = [list(itertools.accumulate(run.stop - run.start for run in part)) for part in runs]
    pairs = [
        [(slice(end - (run.stop - run.start), end), run) for end, run in zip(part_ends, part, strict=True)]
        for part_ends, part in zip(ends, runs, strict=True)
    ]
    for box in itertools.product(*pairs):
        yield tuple(inside for inside, _ in box), tuple(outside for _, outside in box)


def _new_block(shape: tuple[int, ...], like: Array, order: str) -> Array:
    return empty(shape, like, "F" if order == "F" else "C")
