"""The search for the cheapest compute layout of a product: all of a grid's at once, as arrays over ranks.

Every rank finds the same plan: words are compared as integers, seconds as whole picoseconds of one cluster's description.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from ...dtypes import Dtype
from ...layout.cyclic import BlockCyclic
from ...layout.layout import Layout
from ..cost.machine import Machine
from .blocks import public_ownership
from .plan import COLUMNS, DIRECT, ROWS, WHOLE, Alternative, AnyPlan, Owned, named, parts_of
from .vectors import DimSplit, RangeParts, RankParts, RankSpace, overlap

ALL_ORDERS = 4
"""Axes up to which each order of a dim's axes is tried; beyond, the grid's and those in which the operands have them."""
SHOWN = 7
PICOSECOND = 1e-12
OBJECTIVES = ("seconds", "words")
WAYS = (ROWS, COLUMNS, WHOLE, DIRECT)


@dataclass(frozen=True)
class AnyRequest:
    """A product to be planned: what it multiplies, and where operands lie. c : C's output layout; None, the cheapest."""

    form: str
    extents: dict[str, int]
    dtype: Dtype
    spaces: tuple[RankSpace, ...]
    a: Owned
    b: Owned
    c: Owned | None
    machine: Machine
    objective: str = "seconds"


class Combinations(NamedTuple):
    """Compute layouts as numbers of splits: of m, n, k, and of m and n split finely by k's axes, -1 where that is no split.

    summed : how many summands C has. even : whether no axis is left out. splits : by dim, those that the numbers mean.
    """

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    fine_m: np.ndarray
    fine_n: np.ndarray
    summed: np.ndarray
    even: np.ndarray
    splits: dict[str, list[DimSplit]]


class Costed(NamedTuple):
    """What a compute layout and a way of adding cost all ranks. `at` is the layout's number among the combinations."""

    picoseconds: int
    words: int
    messages: int
    at: int
    how: str


def cheapest(request: AnyRequest) -> AnyPlan:
    """The plan of fewest predicted seconds, then words, then messages, then the first; or by words, of layouts of even work.

    Even layouts give each axis of several members to m, n or k: without them the fewest words are those of one rank that
    multiplies what it holds.
    """
    found = []
    for grid, target in _targets(request):
        search = ComputeLayouts(replace(request, c=target), grid)
        found += [(each, search) for each in search.ranked()]
    key = (lambda one: one[0][:3]) if request.objective == "seconds" else (lambda one: (one[0][1], one[0][0], one[0][2]))
    found.sort(key=key)  # a stable sort: of equals, the one that was enumerated first
    best, search = found[0]
    plan = search.plan_of(best)
    others = tuple(
        Alternative(each.text_of(one), one.words, one.messages, one.picoseconds * PICOSECOND)
        for one, each in found[1 : SHOWN + 1]
    )
    return replace(plan, others=others)


def _targets(request: AnyRequest) -> Iterator[tuple[int, Owned | None]]:
    """The grids that may compute, and where C then goes: on A's grid, evenly, where nothing else is said."""
    for grid in range(len(request.spaces)):
        if request.c is not None or grid == 0:
            yield grid, request.c
            continue
        axes, shape = request.spaces[0].axes, (request.extents["m"], request.extents["n"])
        for layout in (Layout(axes, (), names="mn"), Layout((), axes, names="mn")):
            yield grid, Owned(layout, shape, "mn", 0)


class ComputeLayouts:
    """The compute layouts of one grid for a request, with what each costs."""

    def __init__(self, request: AnyRequest, grid: int) -> None:
        self.request, self.grid, self.space = request, grid, request.spaces[grid]
        matrices = [one for one in (request.a, request.b, request.c) if one is not None]
        dealt: dict[str, list[DimSplit]] = {dim: [] for dim in "mnk"}
        hints: list[tuple[str, ...]] = []
        for one in matrices:
            if one.space != grid:
                continue
            blocks = one.layout.block if isinstance(one.layout, BlockCyclic) else (0, 0)
            for dim, axes, block in zip(one.names, one.layout.dims, blocks, strict=True):
                split = DimSplit(self.space.true_axes(axes), block)
                hints.append(split.axes)
                if block and split.axes and split not in dealt[dim]:
                    dealt[dim].append(split)
        sizes = tuple((axis, self.space.shape[axis]) for axis in self.space.axes)
        own_dealt = tuple(tuple(dealt[dim]) for dim in "mnk")
        seen = tuple(dict.fromkeys(hints)) if len(sizes) > ALL_ORDERS else ()
        self.all = combinations(sizes, seen, own_dealt, request.objective == "seconds")
        self.parts = {dim: self._parts(dim) for dim in "mnk"}
        self.sizes = {dim: np.stack([part.size for part in parts]) for dim, parts in self.parts.items()}
        self.held = {
            name: request.spaces[one.space].held(one.layout, one.shape)
            for name, one in (("a", request.a), ("b", request.b), ("c", request.c))
            if one is not None
        }

    def _parts(self, dim: str) -> list[RankParts]:
        """What each rank has of a dim, for each split: a longer list of axes splits the parts of its beginning."""
        extent = self.request.extents[dim]
        found: list[RankParts] = []
        known: dict[tuple[str, ...], RangeParts] = {(): self.space.whole(extent)}
        for axes, block in self.all.splits[dim]:
            if block:
                found.append(parts_of(self.space, extent, DimSplit(axes, block)))
                continue
            for length in range(1, len(axes) + 1):
                if axes[:length] not in known:
                    known[axes[:length]] = self.space.halves(known[axes[: length - 1]], axes[length - 1])
            found.append(known[axes])
        return found

    def _overlaps(self, held: RankParts, dim: str) -> np.ndarray:
        """Indices of a dim that each rank holds and computes with, a row for each split."""
        parts = self.parts[dim]
        ranges = [part for part in parts if isinstance(part, RangeParts)]
        stacked = RangeParts(np.stack([part.start for part in ranges]), np.stack([part.stop for part in ranges]))
        rows, found = iter(overlap(held, stacked)), []
        for part in parts:
            found.append(next(rows) if isinstance(part, RangeParts) else overlap(held, part))
        return np.stack(found)

    # -- costs of the steps -------------------------------------------------------------------------------------------------

    def _exchange(self, words: np.ndarray, received: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Seconds of all-to-alls: of the rank that receives or sends most; nothing where no words move."""
        ranks, busiest = len(self.space), np.maximum(received.max(-1), sent.max(-1))
        seconds = self.request.machine.transfer(busiest, 0, ranks - 1, self.request.dtype, ranks)
        return np.where(words > 0, seconds, 0.0)

    def _fetch(self, name: str, one: Owned, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Words and seconds of bringing A or B to the splits of these numbers."""
        rows, columns = self.held[name]
        wanted = self.sizes[one.names[0]][first] * self.sizes[one.names[1]][second]
        kept = self._overlaps(rows, one.names[0])[first] * self._overlaps(columns, one.names[1])[second]
        received, size = wanted - kept, rows.size * columns.size
        words = received.sum(-1)
        copies = wanted.sum(-1) // max(1, prod(one.shape))
        return words, self._exchange(words, received, self._sent(size, rows, columns, copies, kept))

    def _sent(self, size: np.ndarray, rows: RankParts, columns: RankParts, copies: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Words that each rank sends of the block that it holds: each element to as many ranks as want it and have it not.

        Of a block with several holders each sends its share: exact on average over them.
        """
        wanted = copies[..., None] * size
        groups = _holders_alike(rows, columns)
        if groups is None:
            return np.asarray(wanted - kept)
        order, starts, counts, back = groups
        together = np.add.reduceat(kept[..., order], starts, axis=-1)
        return np.asarray((wanted - together[..., back]) // counts[back])

    def _local(self) -> np.ndarray:
        """Seconds of the largest local product."""
        most = {dim: sizes.max(-1) for dim, sizes in self.sizes.items()}
        m, n, k = (most[dim][numbers] for dim, numbers in zip("mnk", self.all[:3], strict=True))
        known: dict[tuple[int, int, int], float] = {}
        for sizes in zip(m.tolist(), n.tolist(), k.tolist(), strict=True):
            if sizes not in known:
                known[sizes] = self.request.machine.product(*sizes, self.request.dtype)
        return np.array([known[sizes] for sizes in zip(m.tolist(), n.tolist(), k.tolist(), strict=True)])

    def _sums(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """For each way of adding summands: where it is one, and words, seconds and messages of adding and delivering C."""
        every, request, ranks = self.all, self.request, len(self.space)
        full = self.sizes["m"][every.m] * self.sizes["n"][every.n]
        rest = every.summed - 1
        for how, m, n in ((ROWS, every.fine_m, every.n), (COLUMNS, every.m, every.fine_n), (WHOLE, every.m, every.n)):
            fine = self.sizes["m"][m] * self.sizes["n"][n]
            possible = (every.summed == 1) if how == WHOLE else (every.summed > 1) & (m >= 0) & (n >= 0)
            if request.c is None:
                possible = possible & self._natural(m, n)
            words = rest * fine.sum(-1)
            received = rest[:, None] * fine
            busiest = np.maximum(received.max(-1), (full - fine).max(-1))
            seconds = np.where(words > 0, request.machine.transfer(0, busiest, cast(Any, rest), request.dtype, ranks), 0.0)
            messages = rest * int(self.space.inside.sum())
            if request.c is not None:
                more, delivered = self._delivery(fine, m, n, 1 + 0 * rest)
                words, seconds = words + more, seconds + delivered
                messages = messages + (more > 0) * ranks * (ranks - 1)
            yield how, possible, words, seconds, messages
        if request.c is not None:
            words, seconds = self._delivery(full, every.m, every.n, every.summed)
            added = request.dtype.nbytes * request.machine.cluster.byte_time() * 3 * self._wanted().max() * every.summed
            yield DIRECT, every.summed > 1, words, seconds + added, (words > 0) * ranks * (ranks - 1)

    def _wanted(self) -> np.ndarray:
        rows, columns = self.held["c"]
        return np.asarray(rows.size * columns.size)

    def _delivery(self, own: np.ndarray, m: np.ndarray, n: np.ndarray, summands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Words and seconds of bringing C, or each of its summands, from the splits of these numbers to its output layout."""
        assert self.request.c is not None
        rows, columns = self.held["c"]
        kept = self._overlaps(rows, "m")[m] * self._overlaps(columns, "n")[n]
        wanted = self._wanted()
        received = summands[:, None] * wanted - kept
        words, copies = received.sum(-1), int(wanted.sum()) // max(1, prod(self.request.c.shape))
        return words, self._exchange(words, received, copies * own - kept)

    def _natural(self, m: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Whether C may stay in the splits of these numbers: both in ranges or dealt out, but not one of each."""
        both = [(self.all.splits[dim], numbers) for dim, numbers in (("m", m), ("n", n))]
        in_ranges = [np.array([not split.block for split in splits])[numbers] for splits, numbers in both]
        dealt = [np.array([bool(split.block) or not split.axes for split in splits])[numbers] for splits, numbers in both]
        found: np.ndarray = (in_ranges[0] & in_ranges[1]) | (dealt[0] & dealt[1])
        return found

    # -- results ------------------------------------------------------------------------------------------------------------

    def ranked(self) -> list[Costed]:
        """The best layouts, best first, one more than are shown."""
        every, request, ranks = self.all, self.request, len(self.space)
        numbers = dict(zip("mnk", every[:3], strict=True))
        moved = []
        for name, one in (("a", request.a), ("b", request.b)):
            moved.append(self._fetch(name, one, numbers[one.names[0]], numbers[one.names[1]]))
        (words_a, seconds_a), (words_b, seconds_b) = moved
        local, crowding = self._local(), request.machine.cluster.crowding(ranks)
        apart = ((words_a > 0) * 1 + (words_b > 0)) * ranks * (ranks - 1)
        tables = []
        for how, possible, words, seconds, messages in self._sums():
            if request.objective == "words":
                possible = possible & every.even
            at = np.flatnonzero(possible)
            total = crowding * (local + seconds_a + seconds_b + seconds)
            picoseconds = np.rint(total / PICOSECOND).astype(np.int64)
            columns = (picoseconds, words + words_a + words_b, messages + apart)
            tables.append(np.stack([*(column[at] for column in columns), at, np.full(len(at), WAYS.index(how))]))
        table = np.concatenate(tables, axis=1)
        first, second = (0, 1) if request.objective == "seconds" else (1, 0)
        order = np.lexsort((table[4], table[3], table[2], table[second], table[first]))[: SHOWN + 1]
        return [
            Costed(seconds, words, messages, at, WAYS[way]) for seconds, words, messages, at, way in table[:, order].T.tolist()
        ]

    def _splits_at(self, at: int) -> tuple[DimSplit, DimSplit, DimSplit]:
        splits = self.all.splits
        return splits["m"][self.all.m[at]], splits["n"][self.all.n[at]], splits["k"][self.all.k[at]]

    def plan_of(self, found: Costed) -> AnyPlan:
        """The plan of a compute layout and a way of adding."""
        request, (m, n, k) = self.request, self._splits_at(found.at)
        shape = (request.extents["m"], request.extents["n"])
        fine = {ROWS: 0, COLUMNS: 1}.get(found.how)
        rows, columns = (DimSplit(split.axes + k.axes) if dim == fine else split for dim, split in enumerate((m, n)))
        layout = public_ownership((rows, columns), shape, "mn")
        c = request.c
        if c is None:
            assert layout is not None
            c = Owned(layout, shape, "mn", self.grid)
        return AnyPlan(
            request.form, request.extents, request.dtype, request.spaces, request.a, request.b, c, self.grid, m, n, k,
            found.how, found.picoseconds * PICOSECOND, request.machine, request.objective,
        )  # fmt: skip

    def text_of(self, found: Costed) -> str:
        """What the table of alternatives calls a compute layout."""
        text = named(*self._splits_at(found.at), self.space if len(self.request.spaces) > 1 else None)
        return text if found.how == WHOLE else f"{text}, C {found.how}"


@lru_cache(maxsize=64)
def combinations(
    axes: tuple[tuple[str, int], ...],
    hints: tuple[tuple[str, ...], ...],
    dealt: tuple[tuple[DimSplit, ...], ...],
    with_copies: bool,
) -> Combinations:
    """All compute layouts over `axes` (name, size), which may also be `dealt` out in m, n, k as operands are.

    hints : orders of axes to try beside the grid's, where there are too many axes to try all
    """
    names, sizes = tuple(name for name, _ in axes), dict(axes)
    splits: dict[str, list[DimSplit]] = {dim: [] for dim in "mnk"}
    numbers: dict[str, dict[DimSplit, int]] = {dim: {} for dim in "mnk"}

    def number(dim: str, split: DimSplit) -> int:
        if split not in numbers[dim]:
            numbers[dim][split] = len(splits[dim])
            splits[dim].append(split)
        return numbers[dim][split]

    rows = []
    for roles in product("mnk-" if with_copies else "mnk", repeat=len(names)):
        given = [tuple(name for name, role in zip(names, roles, strict=True) if role == dim) for dim in "mnk"]
        choices = [
            [*map(DimSplit, _orders(one, names, hints)), *(split for split in also if set(split.axes) == set(one))]
            for one, also in zip(given, dealt, strict=True)
        ]
        for m, n, k in product(*choices):
            fine = [-1 if split.block else number(dim, DimSplit(split.axes + k.axes)) for dim, split in (("m", m), ("n", n))]
            summed = prod(sizes[axis] for axis in k.axes)
            rows.append((number("m", m), number("n", n), number("k", k), *fine, summed, "-" not in roles))
    m, n, k, fine_m, fine_n, sums, even = np.array(rows, np.int64).T
    return Combinations(m, n, k, fine_m, fine_n, sums, even.astype(bool), splits)


def _orders(axes: tuple[str, ...], names: Sequence[str], hints: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The orders of a dim's axes that are tried: the grid's first."""
    if len(names) <= ALL_ORDERS:
        return list(permutations(axes))
    found = [axes]
    for hint in hints:
        held = tuple(axis for axis in hint if axis in axes)
        found.append(held + tuple(axis for axis in axes if axis not in held))
    return list(dict.fromkeys(found))


def _holders_alike(rows: RankParts, columns: RankParts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Ranks in the order of the blocks that they hold, where each block begins in it, its holders, and each rank's block.

    None where no block has two holders.
    """
    keys = []
    for part in (rows, columns):
        keys += [part.start, part.stop] if isinstance(part, RangeParts) else [part.turn]
    empty = rows.size * columns.size == 0
    keys.append(np.where(empty, 1 + np.arange(len(empty)), 0))  # a rank that holds nothing is alone
    order = np.lexsort(keys)
    sorted_keys = np.stack(keys)[:, order]
    new = np.concatenate([[True], (sorted_keys[:, 1:] != sorted_keys[:, :-1]).any(0)])
    starts = np.flatnonzero(new)
    if len(starts) == len(order):
        return None
    back = np.empty(len(order), np.int64)
    back[order] = np.cumsum(new) - 1
    return order, starts, np.diff(np.append(starts, len(order))), back
