"""The plan of a product of operands in any layouts: plain data, exact for each rank, that says what moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ...columns import aligned, counted
from ...comm.topology import describe
from ...dtypes import Dtype
from ...layout.cyclic import Ownership
from ...layout.redistribute import Placement, Redistribution
from ..cost.machine import Machine
from ..cost.mean import used_words
from .blocks import Splits, ownership_of
from .matrices import MatrixView, matrix_view
from .subscripts import Subscripts
from .vectors import DimSplit, RankParts, RankSpace, overlap
from .workspace import DIRECT, SCATTERED, WHOLE, peak_of

MATRICES = ("rows", "columns")
PANEL = "panel of"
"""The axis along which panels lie; no grid's is called so."""
ALL_RANKS = 256
"""Ranks up to which the workspace of each is looked at for the one that needs most."""
HEADINGS = ("", "compute layout", "words", "messages", "seconds")


class Owned(NamedTuple):
    """Where a tensor lies: its ownership, its shape and the letters of its dims, as it is stored, and on which space's grid."""

    layout: Ownership
    shape: tuple[int, ...]
    names: str
    space: int

    def placement(self, spaces: Sequence[RankSpace]) -> Placement:
        """Placement: the elements of each rank."""
        space = spaces[self.space]
        return Placement(self.layout, space.shape, space.points)


class Adding(NamedTuple):
    """How the summands of C are added: `SCATTERED` along dim `dim` of C, `DIRECT`, or `WHOLE`; and what that is called."""

    kind: str
    text: str
    dim: int = -1


def ways_of_adding(names: str) -> tuple[Adding, ...]:
    """The ways in which summands of a C with these letters may be added."""
    texts = MATRICES if len(names) == 2 else [f"along {letter}" for letter in names]
    scattered = [Adding(SCATTERED, text, dim) for dim, text in enumerate(texts)]
    return *scattered, Adding(WHOLE, WHOLE), Adding(DIRECT, DIRECT)


class Alternative(NamedTuple):
    """A plan that was looked at: what it says of itself, its words and messages of all ranks, its predicted seconds."""

    text: str
    words: int
    messages: int
    seconds: float


class PlannedWords(ABC):
    """The words of a plan that is exact for each rank."""

    @cached_property
    @abstractmethod
    def received(self) -> dict[str, np.ndarray]:
        """Words that each rank receives, by what moves."""

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


@dataclass(frozen=True, eq=False)
class AnyPlan(PlannedWords):
    """A product of two tensors by a compute layout, which gives each axis of a grid to one of its letters, or to none of them.

    C (m×n) = op(A)·op(B) has the letters m, n and k; `einsum` has any. A rank fetches of A and B its parts of their letters; its
    product is a summand of its part of C. The summands of the ranks along the axes of the inner letters are added, and C is
    redistributed to its output layout. On the axes of none, ranks multiply the same.

    form : op of A and of B, as products of matrices have it; empty for einsum, whose letters say it
    spaces : the grids of the operands, of which `spaces[grid]` computes; ranks are numbered as that of one grid, and where
    operands lie on two grids as in the communicator that both were made on
    splits : letter → its split, C's letters first. how : the way in which summands are added
    """

    form: str
    extents: dict[str, int]
    dtype: Dtype
    spaces: tuple[RankSpace, ...]
    a: Owned
    b: Owned
    c: Owned
    grid: int
    splits: dict[str, DimSplit]
    how: Adding
    seconds: float
    """Predicted by `machine`, for the busiest rank of each step."""
    machine: Machine
    objective: str
    others: tuple[Alternative, ...] = ()
    """The next best, best first."""
    panels: int = 1
    """Parts into which a rank's range of `panelled` is cut: operands come panel by panel, and C adds up."""

    # -- the blocks ---------------------------------------------------------------------------------------------------------

    @property
    def subscripts(self) -> Subscripts:
        """The letters of A, B and C."""
        return Subscripts(self.a.names, self.b.names, self.c.names)

    @property
    def space(self) -> RankSpace:
        """The ranks as points of the grid that computes."""
        return self.spaces[self.grid]

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes of the letters that are summed over: the ranks along them have summands of one part of C."""
        return tuple(axis for letter in self.subscripts.inner for axis in self.splits[letter].axes)

    @property
    def summed(self) -> int:
        """Z: how many summands C has."""
        return prod(self.space.shape[axis] for axis in self.inner_axes)

    @property
    def is_even(self) -> bool:
        """Return whether each axis of several members divides the work, so that no two ranks multiply the same."""
        return {axis for split in self.splits.values() for axis in split.axes} >= {*self.space.axes}

    def split_of(self, names: str) -> Splits:
        """The splits of some letters."""
        return tuple(self.splits[letter] for letter in names)

    @property
    def scattered(self) -> Splits:
        """The split of C's dims once its summands are added; where they are sent directly, before."""
        splits = enumerate(self.split_of(self.c.names))
        return tuple(DimSplit(split.axes + self.inner_axes) if dim == self.how.dim else split for dim, split in splits)

    @property
    def panelled(self) -> str:
        """The inner letter that panels cut: the longest in ranges; empty where there is none."""
        inner = [letter for letter in self.subscripts.inner if not self.splits[letter].block]
        return max(inner, key=self.extents.__getitem__, default="")

    def computed(self, operand: Owned, panel: int = 0) -> Placement:
        """Placement of the blocks of A or B that are multiplied: of one panel."""
        splits, shape, points = self.splits, self.space.shape, self.space.points
        if self.panels > 1:  # ranks lie along one more axis, at the panel's index
            splits = {**splits, self.panelled: DimSplit((*splits[self.panelled].axes, PANEL))}
            shape, points = {**shape, PANEL: self.panels}, [point and {**point, PANEL: panel} for point in points]
        layout = ownership_of(tuple(splits[letter] for letter in operand.names), operand.shape, operand.names)
        return Placement(layout, shape, points)

    @cached_property
    def fetches(self) -> tuple[tuple[Redistribution, Redistribution], ...]:
        """Moves of A and B to the ranks that multiply them, panel by panel."""
        lie = [(item, item.placement(self.spaces)) for item in (self.a, self.b)]
        result = []
        for panel in range(self.panels):
            a, b = (Redistribution(item.shape, source, self.computed(item, panel)) for item, source in lie)
            result.append((a, b))
        return tuple(result)

    @cached_property
    def moving(self) -> tuple[tuple[bool, bool], ...]:
        """Return whether A, and whether B, moves in each panel."""
        if self.panels == 1:
            return ((bool(self.received["a"].any()), bool(self.received["b"].any())),)
        return tuple((a.moves(), b.moves()) for a, b in self.fetches)

    @cached_property
    def deliveries(self) -> tuple[Redistribution, ...]:
        """The redistributions of C to its output layout: of the sum at once, or of each summand; empty where it has it."""
        shape, target = self.c.shape, self.c.placement(self.spaces)
        space, axes, is_direct = self.space, self.inner_axes, self.how.kind == DIRECT
        indices = product(*(range(space.shape[axis]) for axis in axes)) if is_direct else [()]
        layouts = [
            ownership_of(self.scattered, shape, self.c.names, dict(zip(axes, index, strict=True)) if index else None)
            for index in indices
        ]
        plans = tuple(Redistribution(shape, Placement(layout, space.shape, space.points), target) for layout in layouts)
        return plans if is_direct or not self.stays else ()

    @property
    def stays(self) -> bool:
        """Return whether C lies where the sum of its summands is made."""
        same = self.grid == self.c.space and self.how.kind != DIRECT
        return same and ownership_of(self.scattered, self.c.shape, self.c.names) == self.c.layout

    @cached_property
    def views(self) -> tuple[MatrixView, MatrixView, MatrixView]:
        """Views of the blocks of A, B and C as matrices: of rows × inner, inner × columns, rows × columns."""
        letters = self.subscripts
        batch, rows, columns, inner = letters.batch, letters.rows, letters.columns, letters.inner
        a, b = matrix_view(letters.a, batch, rows, inner), matrix_view(letters.b, batch, inner, columns)
        return a, b, matrix_view(letters.c, batch, rows, columns)

    # -- what it costs ------------------------------------------------------------------------------------------------------

    @cached_property
    def received(self) -> dict[str, np.ndarray]:
        """Words that each rank receives: of A, of B, of summands of C that it adds, and of C."""
        spaces = self.spaces
        result = {}
        for name, item in (("a", self.a), ("b", self.b)):
            wanted = self._parts(item.names, self.split_of(item.names))
            held = spaces[item.space].held(item.layout, item.shape)
            result[name] = _product(wanted) - _common(held, wanted)
        target = spaces[self.c.space].held(self.c.layout, self.c.shape)
        whole = self._parts(self.c.names, self.scattered)
        if self.how.kind == DIRECT:
            return {**result, "sums": 0 * result["a"], "c": self.summed * _product(target) - _common(target, whole)}
        own = _product(whole)
        return {**result, "sums": (self.summed - 1) * own, "c": _product(target) - _common(target, whole)}

    def _parts(self, names: str, splits: Splits) -> list[RankParts]:
        """Parts of some letters that each rank computes with."""
        return [parts_of(self.space, self.extents[letter], split) for letter, split in zip(names, splits, strict=True)]

    @property
    def max_multiply_adds(self) -> int:
        """Multiply-adds of the rank that does most."""
        sizes = [part.size for part in self._parts("".join(self.splits), tuple(self.splits.values()))]
        return int(np.multiply.reduce(sizes).max())

    def sent_of(self, rank: int) -> int:
        """Words that `rank` sends: exact, by the pieces of each redistribution."""
        moved = (*(fetch for panel in self.fetches for fetch in panel), *self.deliveries)
        sent = sum(piece.words for plan in moved for piece in plan.sent_by(rank))
        if self.how.kind == SCATTERED:
            sent += self.summand_of(rank) - int(self.received["sums"][rank]) // (self.summed - 1)
        return sent

    def messages_of(self, rank: int) -> int:
        """Messages that `rank` receives: of an all-to-all for each matrix, or panel of one, that moves, and of the sum."""
        moves = sum(map(sum, self.moving)) + bool(self.received["c"].any())
        adds = self.how.kind == SCATTERED and bool(self.space.inside[rank])
        return moves * (len(self.space) - 1) + adds * (self.summed - 1)

    def workspace_of(self, rank: int) -> int:
        """Words of workspace at its peak, summands and what is received held in float32 for 16 bits counted as two.

        That is where MPI moves host arrays, C-ordered and not added to what C holds; sums in a node's memory need less.
        """
        return peak_of(self, rank)

    @property
    def max_workspace(self) -> int:
        """`workspace_of` the rank that needs most; of more than `ALL_RANKS`, of the one that receives most words."""
        received, ranks = sum(self.received.values(), start=np.zeros(len(self.space), np.int64)), len(self.space)
        return max(self.workspace_of(rank) for rank in (range(ranks) if ranks <= ALL_RANKS else [int(received.argmax())]))

    def longest_part(self, letter: str) -> int:
        """Indices of a letter that the rank with most has."""
        return int(parts_of(self.space, self.extents[letter], self.splits[letter]).size.max())

    def rough_workspace(self, panels: int) -> int:
        """About the words of workspace of the rank that needs most with so many panels, without a loop over ranks."""
        rough = sum(
            _product(self._parts(item.names, self.split_of(item.names))) + self.received[name]
            for name, item in (("a", self.a), ("b", self.b))
            if self.received[name].any()
        )
        if self.how.kind == SCATTERED or not self.stays:
            return int((rough // panels + 2 * _product(self._parts(self.c.names, self.split_of(self.c.names)))).max())
        return int(np.max(rough // panels))

    def summand_of(self, rank: int) -> int:
        """Elements of the summand of C that `rank` makes."""
        layout = ownership_of(self.split_of(self.c.names), self.c.shape, self.c.names)
        return prod(layout.local_shape(self.c.shape, self.space.shape, self.space.points[rank]))

    @property
    def bound(self) -> float:
        """Words that some rank must receive, whatever the algorithm: what a product reads and writes less what a rank holds.

        The bound of Al Daas et al. (SPAA 2022) without its assumption that operands are spread evenly: what is subtracted is the
        most that a rank holds of A and B and shall hold of C. Of a batch, a rank reads and writes the fewest words where its part
        of the work is whole entries, and a part of one: what an entry takes grows ever less than the work done of it.
        """
        letters, ranks = self.subscripts, len(self.space)
        groups = (letters.batch, letters.rows, letters.columns, letters.inner)
        entries, m, n, k = (prod(self.extents[letter] for letter in group) for group in groups)
        used = used_words(m, n, k, Fraction(entries, ranks))
        held = sum(_product(self.spaces[item.space].held(item.layout, item.shape)) for item in (self.a, self.b, self.c))
        return max(0.0, used - int(held.max())) if min(entries, m, n, k) else 0.0  # type: ignore[union-attr]

    # -- text ---------------------------------------------------------------------------------------------------------------

    @property
    def compute_layout(self) -> str:
        """``m:x n k:(y,z)``: the split of each letter; with the grid, where operands lie on two."""
        return named(self.splits, self.space if len(self.spaces) > 1 else None)

    @property
    def text(self) -> str:
        """The compute layout, the way of adding C's summands, and the panels, if there are several."""
        text = with_way(self.compute_layout, self.how)
        return text if self.panels == 1 else f"{text}, {self.panelled} in {self.panels} panels"

    @property
    def summary(self) -> str:
        """One line on what moves."""
        parts = []
        for letter, item in (("A", self.a), ("B", self.b)):
            words = int(self.received[letter.lower()].sum())
            layout = ownership_of(self.split_of(item.names), item.shape, item.names)
            parts.append(f"{letter} {item.layout} → {layout} ({words:,} words)" if words else f"{letter} {item.layout} stays")
        axes, moved = ", ".join(self.inner_axes), int(self.received["c"].sum())
        if self.how.kind == SCATTERED:
            by = f"by {self.how.text}" if self.how.text in MATRICES else self.how.text
            parts.append(f"C summed over {axes} and scattered {by} ({int(self.received['sums'].sum()):,} words)")
        if self.how.kind == DIRECT:
            parts.append(f"C's summands over {axes} sent to {self.c.layout} ({moved:,} words)")
        elif moved:
            parts.append(f"C → {self.c.layout} ({moved:,} words)")
        else:
            parts.append(f"C in {self.c.layout}")
        if self.panels > 1:
            parts.append(f"{self.panelled} in {self.panels} panels")
        return ", ".join(parts)

    @property
    def sizes(self) -> str:
        """The product and its sizes: ``nn 64×48×96`` (m, n, k), or ``bmk,bkn->bmn b=8 m=64 n=48 k=96``."""
        if self.form:
            return f"{self.form} {'×'.join(str(self.extents[dim]) for dim in 'mnk')}"
        return " ".join([str(self.subscripts), *(f"{letter}={size}" for letter, size in self.extents.items())])

    def __repr__(self) -> str:
        lies = f"A {self.a.layout}, B {self.b.layout}, C {self.c.layout}"
        panels = f", {self.panels} panels" if self.panels > 1 else ""
        return f"AnyPlan({self.sizes}, {lies}, by {self.compute_layout}, {self.how.text}{panels})"

    def __str__(self) -> str:
        ranks, head = len(self.space), f"C of {self.sizes}"
        if self.form:
            m, n, k = (self.extents[dim] for dim in "mnk")
            head = f"C {m}×{n} = op(A) {m}×{k} · op(B) {k}×{n}, form {self.form}"
        head += f", {self.dtype.name}, on {counted(ranks, 'rank')}"
        workspace = self.max_workspace * self.dtype.nbytes
        most = f"most words of a rank {self.max_words:,} (bound {self.bound:,.0f}), workspace {workspace:,} bytes"
        messages = sum(self.messages_of(rank) for rank in range(ranks))
        best = Alternative(self.text, self.words, messages, self.seconds)
        rows: list[tuple[str, ...]] = [HEADINGS]
        for item in (best, *self.others):
            rows.append(
                ("→" if item is best else "", item.text, f"{item.words:,}", f"{item.messages:,}", f"{item.seconds:.3g}"),
            )
        return "\n".join([head, self.summary, most, *aligned(rows, left=(0, 1))])


def named(splits: Mapping[str, DimSplit], space: RankSpace | None = None) -> str:
    """The text of a compute layout; of several grids' with the sizes of its own, that of `space`."""
    text = " ".join(f"{letter}{split}" for letter, split in splits.items())
    return text if space is None else f"{text} on {describe(space.shape)}"


def with_way(compute_layout: str, how: Adding) -> str:
    """The text of a compute layout and of a way of adding C's summands, if there are several."""
    return compute_layout if how.kind == WHOLE else f"{compute_layout}, C {how.text}"


def parts_of(space: RankSpace, extent: int, split: DimSplit) -> RankParts:
    """Part of a dim that each rank computes with."""
    if split.block:
        return space.dealt(extent, split.axes, split.block)
    parts = space.whole(extent)
    for axis in split.axes:
        parts = space.halves(parts, axis)
    return parts


def _product(parts: Sequence[RankParts]) -> np.ndarray:
    size: np.ndarray = np.prod([part.size for part in parts], axis=0)
    return size


def _common(mine: Sequence[RankParts], other: Sequence[RankParts]) -> np.ndarray:
    """Elements that each rank has in both of two tensors' blocks."""
    common: np.ndarray = np.prod([overlap(*parts) for parts in zip(mine, other, strict=True)], axis=0)
    return common
