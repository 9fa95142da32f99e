"""The plan of a product of operands in any layouts: plain data, exact for each rank, that says what moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ...columns import aligned, counted
from ...comm.topology import describe
from ...dtypes import HALVES, Dtype
from ...layout.cyclic import Ownership
from ...layout.redistribute import Placement, Redistribution
from ..cost.machine import Machine
from ..cost.mean import lower_bound
from .blocks import ownership_of
from .vectors import DimSplit, RankParts, RankSpace, overlap

ROWS, COLUMNS, DIRECT, WHOLE = "rows", "columns", "direct", "whole"
"""How the summands of C are added: scattered by rows or by columns, sent to who wants them, or there is one summand alone."""
ALL_RANKS = 256
"""Ranks up to which the workspace of each is looked at for the one that needs most."""
HEADINGS = ("", "compute layout", "words", "messages", "seconds")


class Owned(NamedTuple):
    """Where a matrix lies: its ownership, its shape and the names of its dims, as it is stored, and on which space's grid."""

    layout: Ownership
    shape: tuple[int, int]
    names: str
    space: int

    def placement(self, spaces: Sequence[RankSpace]) -> Placement:
        """Which rank holds which elements."""
        space = spaces[self.space]
        return Placement(self.layout, space.shape, space.points)


class Alternative(NamedTuple):
    """A plan that was looked at: what it says of itself, its words and messages of all ranks, its predicted seconds."""

    text: str
    words: int
    messages: int
    seconds: float


@dataclass(frozen=True, eq=False)
class AnyPlan:
    """C (m×n) = op(A)·op(B) by a compute layout, which gives each axis of a grid to m, to n, to k, or to none of them.

    A rank fetches op(A)[m, k] and op(B)[k, n] of its parts of m, n and k; its product is a summand of C[m, n]. The summands of
    the ranks along the axes of k are added, and C is redistributed to its output layout. On the axes of none, ranks multiply
    the same.

    spaces : the grids of the operands, of which `spaces[grid]` computes; ranks are numbered as that of one grid, and where
    operands lie on two grids as in the communicator that both were made on
    m, n, k : the split of each dim. how : the way in which summands are added (`ROWS`, …)
    """

    form: str
    extents: dict[str, int]
    dtype: Dtype
    spaces: tuple[RankSpace, ...]
    a: Owned
    b: Owned
    c: Owned
    grid: int
    m: DimSplit
    n: DimSplit
    k: DimSplit
    how: str
    seconds: float
    """Predicted by `machine`, for the busiest rank of each step."""
    machine: Machine
    objective: str
    others: tuple[Alternative, ...] = ()
    """The next best, best first."""

    # -- the blocks ---------------------------------------------------------------------------------------------------------

    @property
    def space(self) -> RankSpace:
        """The ranks as points of the grid that computes."""
        return self.spaces[self.grid]

    def split_of(self, names: str) -> tuple[DimSplit, DimSplit]:
        """The splits of two dims."""
        splits = {"m": self.m, "n": self.n, "k": self.k}
        return splits[names[0]], splits[names[1]]

    @property
    def summed(self) -> int:
        """Z: how many summands C has."""
        return prod(self.space.shape[axis] for axis in self.k.axes)

    @property
    def is_even(self) -> bool:
        """Whether each axis of several members divides the work, so that no two ranks multiply the same."""
        return {*self.m.axes, *self.n.axes, *self.k.axes} >= {*self.space.axes}

    @property
    def scattered(self) -> tuple[DimSplit, DimSplit]:
        """The split of C's rows and columns once its summands are added; where they are sent directly, before."""
        fine = {ROWS: 0, COLUMNS: 1}.get(self.how)
        splits = (self.m, self.n)
        pairs = [DimSplit(split.axes + self.k.axes) if dim == fine else split for dim, split in enumerate(splits)]
        return pairs[0], pairs[1]

    def computed(self, operand: Owned) -> Placement:
        """Where the blocks of A or B lie that ranks multiply."""
        layout = ownership_of(self.split_of(operand.names), operand.shape, operand.names)
        return Placement(layout, self.space.shape, self.space.points)

    @cached_property
    def fetches(self) -> tuple[Redistribution, Redistribution]:
        """How A and B come to who multiplies them."""
        a, b = (Redistribution(one.shape, one.placement(self.spaces), self.computed(one)) for one in (self.a, self.b))
        return a, b

    @cached_property
    def deliveries(self) -> tuple[Redistribution, ...]:
        """The redistributions of C to its output layout: of the sum at once, or of each summand; empty where it has it."""
        shape, target = self.c.shape, self.c.placement(self.spaces)
        space, axes = self.space, self.k.axes
        indices = product(*(range(space.shape[axis]) for axis in axes)) if self.how == DIRECT else [()]
        layouts = [
            ownership_of(self.scattered, shape, "mn", dict(zip(axes, index, strict=True)) if index else None) for index in indices
        ]
        plans = tuple(Redistribution(shape, Placement(layout, space.shape, space.points), target) for layout in layouts)
        return plans if self.how == DIRECT or not self.stays else ()

    @property
    def stays(self) -> bool:
        """Whether C lies where the sum of its summands is made."""
        same = self.grid == self.c.space and self.how != DIRECT
        return same and ownership_of(self.scattered, self.c.shape, "mn") == self.c.layout

    # -- what it costs ------------------------------------------------------------------------------------------------------

    @cached_property
    def received(self) -> dict[str, np.ndarray]:
        """Words that each rank receives: of A, of B, of summands of C that it adds, and of C."""
        spaces = self.spaces
        found = {}
        for name, one in (("a", self.a), ("b", self.b)):
            wanted = [self._parts(dim, split) for dim, split in zip(one.names, self.split_of(one.names), strict=True)]
            held = spaces[one.space].held(one.layout, one.shape)
            found[name] = _product(wanted) - _common(held, wanted)
        target = spaces[self.c.space].held(self.c.layout, self.c.shape)
        whole = [self._parts(dim, split) for dim, split in zip("mn", self.scattered, strict=True)]
        if self.how == DIRECT:
            return {**found, "sums": 0 * found["a"], "c": self.summed * _product(target) - _common(target, whole)}
        own = _product(whole)
        return {**found, "sums": (self.summed - 1) * own, "c": _product(target) - _common(target, whole)}

    def _parts(self, dim: str, split: DimSplit) -> RankParts:
        return parts_of(self.space, self.extents[dim], split)

    def words_of(self, rank: int) -> int:
        """Words that `rank` receives."""
        return sum(int(words[rank]) for words in self.received.values())

    @property
    def words(self) -> int:
        """Words that all ranks receive together."""
        return sum(int(words.sum()) for words in self.received.values())

    @property
    def max_words(self) -> int:
        """Words of the rank that receives most."""
        return int(sum(self.received.values()).max())  # type: ignore[union-attr]

    def sent_of(self, rank: int) -> int:
        """Words that `rank` sends: exact, by the pieces of each redistribution."""
        sent = sum(piece.words for plan in (*self.fetches, *self.deliveries) for piece in plan.sent_by(rank))
        if self.how in (ROWS, COLUMNS):
            sent += self._summand_of(rank) - int(self.received["sums"][rank]) // (self.summed - 1)
        return sent

    def messages_of(self, rank: int) -> int:
        """Messages that `rank` receives: of an all-to-all for each matrix that moves, and of the sum."""
        moves = sum(bool(self.received[name].any()) for name in ("a", "b", "c"))
        adds = self.how in (ROWS, COLUMNS) and bool(self.space.inside[rank])
        return moves * (len(self.space) - 1) + adds * (self.summed - 1)

    def workspace_of(self, rank: int) -> int:
        """Words of workspace at its peak, summands and what is received held in float32 for 16 bits counted as two.

        That is where MPI moves host arrays, C-ordered and not added to what C holds; sums in a node's memory need less.
        """
        wide = 2 if self.dtype.name in HALVES else 1
        moves = [bool(self.received[name].any()) for name in "ab"]
        blocks = [prod(plan.target.local_shape(plan.shape, rank)) for plan in self.fetches]
        fetched = [size if moved else 0 for size, moved in zip(blocks, moves, strict=True)]
        exchanged = [plan.workspace_of(rank) if moved else 0 for plan, moved in zip(self.fetches, moves, strict=True)]
        widened = 2 * sum(blocks) if wide > 1 else 0
        own, steps, scatters = self._summand_of(rank), self.deliveries, self.how in (ROWS, COLUMNS)
        summand = wide * own if scatters or steps or wide > 1 else 0
        peaks = [fetched[0] + exchanged[0], sum(fetched) + exchanged[1], sum(fetched) + widened + summand]
        if self.how == DIRECT:
            received, added = sum(plan.words_of(rank) for plan in steps), prod(steps[0].target.local_shape(self.c.shape, rank))
            exchange = sum(plan.workspace_of(rank) for plan in steps)
            return max(*peaks, summand + wide * max(exchange, received + 2 * added))
        if scatters:
            own = int(self.received["sums"][rank]) // (self.summed - 1)
            peaks.append(summand + wide * self.summed * own)
        rounded = own if wide > 1 and steps else 0
        moved = steps and self.received["c"].any()
        return max(*peaks, wide * own + rounded if steps or wide > 1 else 0, own + steps[0].workspace_of(rank) if moved else 0)

    @property
    def max_workspace(self) -> int:
        """`workspace_of` the rank that needs most; of more than `ALL_RANKS`, of the one that receives most words."""
        received, ranks = sum(self.received.values(), start=np.zeros(len(self.space), np.int64)), len(self.space)
        return max(self.workspace_of(rank) for rank in (range(ranks) if ranks <= ALL_RANKS else [int(received.argmax())]))

    def _summand_of(self, rank: int) -> int:
        layout = ownership_of((self.m, self.n), self.c.shape, "mn")
        return prod(layout.local_shape(self.c.shape, self.space.shape, self.space.points[rank]))

    @property
    def bound(self) -> float:
        """Words that some rank must receive, whatever the algorithm: what a product reads and writes less what a rank holds.

        The bound of Al Daas et al. (SPAA 2022) without its assumption that operands are spread evenly: what is subtracted is the
        most that a rank holds of A and B and shall hold of C.
        """
        m, n, k = (self.extents[dim] for dim in "mnk")
        ranks = len(self.space)
        used = lower_bound(m, n, k, ranks) + (m * k + k * n + m * n) / ranks
        held = sum(_product(self.spaces[one.space].held(one.layout, one.shape)) for one in (self.a, self.b, self.c))
        return max(0.0, used - int(held.max())) if min(m, n, k) else 0.0  # type: ignore[union-attr]

    # -- text ---------------------------------------------------------------------------------------------------------------

    @property
    def compute_layout(self) -> str:
        """``m:x n k:(y,z)``: the split of each dim; with the grid, where operands lie on two."""
        return named(self.m, self.n, self.k, self.space if len(self.spaces) > 1 else None)

    @property
    def summary(self) -> str:
        """One line on what moves."""
        parts = []
        for letter, one in (("A", self.a), ("B", self.b)):
            words = int(self.received[letter.lower()].sum())
            layout = ownership_of(self.split_of(one.names), one.shape, one.names)
            parts.append(f"{letter} {one.layout} → {layout} ({words:,} words)" if words else f"{letter} {one.layout} stays")
        axes, moved = ", ".join(self.k.axes), int(self.received["c"].sum())
        if self.how in (ROWS, COLUMNS):
            parts.append(f"C summed over {axes} and scattered by {self.how} ({int(self.received['sums'].sum()):,} words)")
        if self.how == DIRECT:
            parts.append(f"C's summands over {axes} sent to {self.c.layout} ({moved:,} words)")
        elif moved:
            parts.append(f"C → {self.c.layout} ({moved:,} words)")
        else:
            parts.append(f"C in {self.c.layout}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        m, n, k = (self.extents[dim] for dim in "mnk")
        lies = f"A {self.a.layout}, B {self.b.layout}, C {self.c.layout}"
        return f"AnyPlan({self.form} {m}×{n}×{k}, {lies}, by {self.compute_layout}, {self.how})"

    def __str__(self) -> str:
        m, n, k = (self.extents[dim] for dim in "mnk")
        ranks = len(self.space)
        head = f"C {m}×{n} = op(A) {m}×{k} · op(B) {k}×{n}, form {self.form}, {self.dtype.name}, on {counted(ranks, 'rank')}"
        workspace = self.max_workspace * self.dtype.nbytes
        most = f"most words of a rank {self.max_words:,} (bound {self.bound:,.0f}), workspace {workspace:,} bytes"
        messages = sum(self.messages_of(rank) for rank in range(ranks))
        way = f", C {self.how}" if self.how != WHOLE else ""
        best = Alternative(self.compute_layout + way, self.words, messages, self.seconds)
        rows: list[tuple[str, ...]] = [HEADINGS]
        for one in (best, *self.others):
            rows.append(
                ("→" if one is best else "", one.text, f"{one.words:,}", f"{one.messages:,}", f"{one.seconds:.3g}"),
            )
        return "\n".join([head, self.summary, most, *aligned(rows, left=(0, 1))])


def named(m: DimSplit, n: DimSplit, k: DimSplit, space: RankSpace | None = None) -> str:
    """The text of a compute layout; of several grids' with the sizes of its own, that of `space`."""
    text = f"m{m} n{n} k{k}"
    return text if space is None else f"{text} on {describe(space.shape)}"


def parts_of(space: RankSpace, extent: int, split: DimSplit) -> RankParts:
    """What each rank computes with of a dim."""
    if split.block:
        return space.dealt(extent, split.axes, split.block)
    parts = space.whole(extent)
    for axis in split.axes:
        parts = space.halves(parts, axis)
    return parts


def _product(parts: Sequence[RankParts]) -> np.ndarray:
    size: np.ndarray = parts[0].size * parts[1].size
    return size


def _common(one: Sequence[RankParts], other: Sequence[RankParts]) -> np.ndarray:
    """Elements that each rank has in both of two matrices' blocks."""
    common: np.ndarray = overlap(one[0], other[0]) * overlap(one[1], other[1])
    return common
