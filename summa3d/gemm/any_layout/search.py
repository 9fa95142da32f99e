"""The search for the cheapest compute layout of a product: all of a grid's at once, as arrays over ranks.

Every rank finds the same plan: words are compared as integers, seconds as whole picoseconds of one cluster's description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import permutations, product
from math import prod
from operator import mul
from typing import Any, NamedTuple, cast

import numpy as np

from ...dtypes import Dtype
from ...layout.cyclic import BlockCyclic
from ...layout.layout import Layout
from ..cost.machine import Machine
from .blocks import public_ownership
from .panels import bounded
from .plan import Adding, Alternative, AnyPlan, Owned, named, parts_of, ways_of_adding, with_way
from .subscripts import Subscripts
from .vectors import DimSplit, RangeParts, RankParts, RankSpace, overlap
from .workspace import DIRECT, SCATTERED

ALL_ORDERS = 4
"""Axes up to which each order of a dim's axes is tried; beyond, the grid's and those in which the operands have them."""
MOST_ROLES = 4096
"""Ways to give the axes to a product's letters, up to which all are tried; beyond, an axis goes to fewer letters."""
SHOWN = 7
PICOSECOND = 1e-12
OBJECTIVES = ("seconds", "words")


@dataclass(frozen=True)
class AnyRequest:
    """A product to be planned: what it multiplies, and where operands lie. c : C's output layout; None, the cheapest."""

    form: str
    subscripts: Subscripts
    extents: dict[str, int]
    dtype: Dtype
    spaces: tuple[RankSpace, ...]
    a: Owned
    b: Owned
    c: Owned | None
    machine: Machine
    objective: str = "seconds"
    workspace: int | None = None
    """Bytes that each rank's workspace is at most."""


class Combinations(NamedTuple):
    """Compute layouts as numbers of splits: letter → those of its split.

    fine : the same for C's letters, split finely by the axes of the inner letters; -1 where that is no split. summed : how many
    summands C has. even : whether no axis is left out. splits : by letter, those that the numbers mean.
    """

    numbers: dict[str, np.ndarray]
    fine: dict[str, np.ndarray]
    summed: np.ndarray
    even: np.ndarray
    splits: dict[str, list[DimSplit]]


class Costed(NamedTuple):
    """What a compute layout and a way of adding cost all ranks. `at` is the layout's number among the combinations."""

    picoseconds: int
    words: int
    messages: int
    at: int
    how: Adding


def cheapest(request: AnyRequest) -> AnyPlan:
    """The plan of fewest predicted seconds, then words, then messages, then the first; or by words, of layouts of even work.

    Even layouts give each axis of several members to a letter: without them the fewest words are those of one rank that
    multiplies what it holds.
    """
    result: list[tuple[Costed, ComputeLayouts]] = []
    for grid, target in _targets(request):
        search = ComputeLayouts(replace(request, c=target), grid)
        result += [(each, search) for each in search.ranked(None if request.workspace is not None else SHOWN + 1)]
    key = (lambda item: item[0][:3]) if request.objective == "seconds" else (lambda item: (item[0][1], item[0][0], item[0][2]))
    result.sort(key=key)  # a stable sort: of equals, the one that was enumerated first
    if request.workspace is not None:
        return bounded((search.plan_of(each) for each, search in result), request.workspace)
    best, search = result[0]
    plan = search.plan_of(best)
    others = tuple(
        Alternative(each.text_of(item), item.words, item.messages, item.picoseconds * PICOSECOND)
        for item, each in result[1 : SHOWN + 1]
    )
    return replace(plan, others=others)


def _targets(request: AnyRequest) -> Iterator[tuple[int, Owned | None]]:
    """The grids that may compute, and where C then goes: on A's grid, evenly, where nothing else is said."""
    for grid in range(len(request.spaces)):
        if request.c is not None or grid == 0:
            yield grid, request.c
            continue
        axes, names = request.spaces[0].axes, request.subscripts.c
        shape = tuple(request.extents[letter] for letter in names)
        for name in names:
            layout = Layout(*(axes if letter == name else () for letter in names), names=names)
            yield grid, Owned(layout, shape, names, 0)


class ComputeLayouts:
    """The compute layouts of one grid for a request, with what each costs."""

    def __init__(self, request: AnyRequest, grid: int) -> None:
        self.request, self.grid, self.space = request, grid, request.spaces[grid]
        tensors = [item for item in (request.a, request.b, request.c) if item is not None and item.space == grid]
        letters, c = request.subscripts.letters, request.subscripts.c
        dealt: dict[str, list[DimSplit]] = {letter: [] for letter in letters}
        hints: list[tuple[str, ...]] = []
        for tensor in tensors:
            blocks = tensor.layout.block if isinstance(tensor.layout, BlockCyclic) else (0,) * len(tensor.names)
            for letter, axes, block in zip(tensor.names, tensor.layout.dims, blocks, strict=True):
                split = DimSplit(self.space.true_axes(axes), block)
                hints.append(split.axes)
                if block and split.axes and split not in dealt[letter]:
                    dealt[letter].append(split)
        sizes = tuple((axis, self.space.shape[axis]) for axis in self.space.axes)
        own_dealt = tuple(tuple(dealt[letter]) for letter in letters)
        seen = tuple(dict.fromkeys(hints)) if len(sizes) > ALL_ORDERS else ()
        self.all = combinations(letters, c, sizes, self._roles(tensors), seen, own_dealt)
        self.parts = {letter: self._parts(letter) for letter in letters}
        self.sizes = {letter: np.array([part.size for part in parts]) for letter, parts in self.parts.items()}
        self._stacked: dict[str, RangeParts] = {}
        self._overlapping: dict[tuple[str, int], np.ndarray] = {}
        self.addings = ways_of_adding(c)
        self.held = {
            name: request.spaces[item.space].held(item.layout, item.shape)
            for name, item in (("a", request.a), ("b", request.b), ("c", request.c))
            if item is not None
        }

    def _roles(self, tensors: Sequence[Owned]) -> tuple[str, ...]:
        """For each axis, the letters that it may divide, and ``-`` where it may divide none.

        Of many letters and axes: those that it splits in A, B or C, and the longest of each kind.
        """
        letters, extents = self.request.subscripts, self.request.extents
        none = "-" if self.request.objective == "seconds" else ""
        axes = self.space.axes
        if len(letters.letters) == 3 or len(letters.letters + none) ** len(axes) <= MOST_ROLES:
            return (letters.letters + none,) * len(axes)
        groups = (letters.batch, letters.rows, letters.columns, letters.inner)
        longest = {max(group, key=lambda letter: extents[letter]) for group in groups if group}
        result = []
        for axis in axes:
            own = {
                letter
                for tensor in tensors
                for letter, split in zip(tensor.names, tensor.layout.dims, strict=True)
                if axis in split
            }
            result.append("".join(letter for letter in letters.letters if letter in longest | own) + none)
        return tuple(result)

    def _parts(self, dim: str) -> list[RankParts]:
        """Part of a letter's dim on each rank, for each split: a longer list of axes splits the parts of its beginning."""
        extent = self.request.extents[dim]
        result: list[RankParts] = []
        known: dict[tuple[str, ...], RangeParts] = {(): self.space.whole(extent)}
        for axes, block in self.all.splits[dim]:
            if block:
                result.append(parts_of(self.space, extent, DimSplit(axes, block)))
                continue
            for length in range(1, len(axes) + 1):
                if axes[:length] not in known:
                    known[axes[:length]] = self.space.halves(known[axes[: length - 1]], axes[length - 1])
            result.append(known[axes])
        return result

    def _overlaps(self, name: str, place: int, dim: str) -> np.ndarray:
        """Indices of a dim of A, B or C that each rank holds and computes with, a row for each split."""
        if (name, place) not in self._overlapping:
            held, parts = self.held[name][place], self.parts[dim]
            if dim not in self._stacked:
                ranges = [part for part in parts if isinstance(part, RangeParts)]
                starts, stops = np.array([part.start for part in ranges]), np.array([part.stop for part in ranges])
                self._stacked[dim] = RangeParts(starts, stops)
            result = overlap(held, self._stacked[dim])
            if len(result) < len(parts):
                rows = iter(result)
                result = np.array([next(rows) if isinstance(part, RangeParts) else overlap(held, part) for part in parts])
            self._overlapping[name, place] = result
        return self._overlapping[name, place]

    # -- costs of the steps -------------------------------------------------------------------------------------------------

    def _exchange(self, words: np.ndarray, received: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Seconds of all-to-alls: of the rank that receives or sends most; nothing where no words move."""
        ranks, busiest = len(self.space), np.maximum(received.max(-1), sent.max(-1))
        seconds = self.request.machine.transfer(busiest, 0, ranks - 1, self.request.dtype, ranks)
        return np.where(words > 0, seconds, 0.0)

    def _blocks(self, names: str, numbers: Mapping[str, np.ndarray]) -> np.ndarray:
        """Elements that each rank computes with of the letters of a tensor, in the splits of these numbers."""
        return _product([self.sizes[letter][numbers[letter]] for letter in names])

    def _common(self, name: str, names: str, numbers: Mapping[str, np.ndarray]) -> np.ndarray:
        """Elements that each rank has in both its block of A, B or C and what it computes with."""
        return _product([self._overlaps(name, place, letter)[numbers[letter]] for place, letter in enumerate(names)])

    def _fetch(self, name: str, part: Owned) -> tuple[np.ndarray, np.ndarray]:
        """Words and seconds of bringing A or B to each compute layout."""
        numbers = self.all.numbers
        wanted, kept = self._blocks(part.names, numbers), self._common(name, part.names, numbers)
        received = wanted - kept
        words = received.sum(-1)
        copies = wanted.sum(-1) // max(1, prod(part.shape))
        return words, self._exchange(words, received, self._sent(self.held[name], copies, kept))

    def _sent(self, held: Sequence[RankParts], copies: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Words that each rank sends of the block that it holds: each element to as many ranks as want it and have it not.

        Of a block with several holders each sends its share: exact on average over them.
        """
        wanted = copies[..., None] * _product([part.size for part in held])
        groups = _holders_alike(held)
        if groups is None:
            return np.asarray(wanted - kept)
        order, starts, counts, back = groups
        together = np.add.reduceat(kept[..., order], starts, axis=-1)
        return np.asarray((wanted - together[..., back]) // counts[back])

    def _local(self) -> np.ndarray:
        """Seconds of the local products of the busiest rank."""
        letters = self.request.subscripts
        ones = np.ones(len(self.all.even), np.int64)
        most = {letter: sizes.max(-1)[self.all.numbers[letter]] for letter, sizes in self.sizes.items()}
        groups = (letters.rows, letters.columns, letters.inner, letters.batch)
        columns = [_product([ones, *(most[letter] for letter in group)]).tolist() for group in groups]
        known: dict[tuple[int, int, int], float] = {}
        seconds = []
        for *sizes, entries in zip(*columns, strict=True):
            key = (sizes[0], sizes[1], sizes[2])
            if key not in known:
                known[key] = self.request.machine.product(*key, self.request.dtype)
            seconds.append(known[key] * entries)
        return np.array(seconds)

    def _sums(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """For each way of adding summands: where it is one, and words, seconds and messages of adding and delivering C."""
        every, request, ranks, names = self.all, self.request, len(self.space), self.request.subscripts.c
        full, rest = self._blocks(names, every.numbers), every.summed - 1
        for way in self.addings:
            if way.kind == DIRECT:
                yield self._direct(full)
                continue
            numbers = dict(every.numbers)
            possible = every.summed == 1
            if way.kind == SCATTERED:
                letter = names[way.dim]
                numbers[letter] = every.fine[letter]
                possible = (every.summed > 1) & (numbers[letter] >= 0)
            fine = self._blocks(names, numbers)
            if request.c is None:
                possible = possible & self._natural(numbers)
            words = rest * fine.sum(-1)
            received = rest[:, None] * fine
            busiest = np.maximum(received.max(-1), (full - fine).max(-1))
            seconds = np.where(words > 0, request.machine.transfer(0, busiest, cast(Any, rest), request.dtype, ranks), 0.0)
            messages = rest * int(self.space.inside.sum())
            if request.c is not None:
                more, delivered = self._delivery(fine, numbers, 1 + 0 * rest)
                words, seconds = words + more, seconds + delivered
                messages = messages + (more > 0) * ranks * (ranks - 1)
            yield possible, words, seconds, messages

    def _direct(self, full: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The same where summands are sent to who shall hold C: none where C is left free."""
        summed, request, ranks = self.all.summed, self.request, len(self.space)
        if request.c is None:
            return summed < 0, summed, summed, summed
        words, seconds = self._delivery(full, self.all.numbers, summed)
        wanted = _product([part.size for part in self.held["c"]]).max()
        added = request.dtype.nbytes * request.machine.cluster.byte_time() * 3 * wanted * summed
        return summed > 1, words, seconds + added, (words > 0) * ranks * (ranks - 1)

    def _delivery(
        self, own: np.ndarray, numbers: Mapping[str, np.ndarray], summands: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Words and seconds of bringing C, or each of its summands, from the splits of these numbers to its output layout."""
        assert self.request.c is not None
        kept = self._common("c", self.request.c.names, numbers)
        wanted = _product([part.size for part in self.held["c"]])
        received = summands[:, None] * wanted - kept
        words, copies = received.sum(-1), int(wanted.sum()) // max(1, prod(self.request.c.shape))
        return words, self._exchange(words, received, copies * own - kept)

    def _natural(self, numbers: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return whether C may stay in the splits of these numbers: all in ranges, or both dealt out."""
        names = self.request.subscripts.c
        both = [(self.all.splits[letter], numbers[letter]) for letter in names]
        in_ranges = [np.array([not split.block for split in splits])[at] for splits, at in both]
        dealt = [np.array([bool(split.block) or not split.axes for split in splits])[at] for splits, at in both]
        result: np.ndarray = np.logical_and.reduce(in_ranges)
        return result | np.logical_and.reduce(dealt) if len(names) == 2 else result

    # -- results ------------------------------------------------------------------------------------------------------------

    def ranked(self, count: int | None) -> list[Costed]:
        """The best layouts, best first, so many; None, all."""
        every, request, ranks = self.all, self.request, len(self.space)
        (words_a, seconds_a), (words_b, seconds_b) = self._fetch("a", request.a), self._fetch("b", request.b)
        local, crowding = self._local(), request.machine.cluster.crowding(ranks)
        apart = ((words_a > 0) * 1 + (words_b > 0)) * ranks * (ranks - 1)
        tables = []
        for way, (possible, words, seconds, messages) in enumerate(self._sums()):
            if request.objective == "words":
                possible = possible & every.even
            at = np.flatnonzero(possible)
            total = crowding * (local + seconds_a + seconds_b + seconds)
            picoseconds = np.rint(total / PICOSECOND).astype(np.int64)
            columns = (picoseconds, words + words_a + words_b, messages + apart)
            tables.append(np.stack([*(column[at] for column in columns), at, np.full(len(at), way)]))
        table = np.concatenate(tables, axis=1)
        first, second = (0, 1) if request.objective == "seconds" else (1, 0)
        order = np.lexsort((table[4], table[3], table[2], table[second], table[first]))[:count]
        result = table[:, order].T.tolist()
        return [Costed(seconds, words, messages, at, self.addings[way]) for seconds, words, messages, at, way in result]

    def _splits_at(self, at: int) -> dict[str, DimSplit]:
        return {letter: splits[self.all.numbers[letter][at]] for letter, splits in self.all.splits.items()}

    def plan_of(self, costed: Costed) -> AnyPlan:
        """The plan of a compute layout and a way of adding."""
        request, splits, names = self.request, self._splits_at(costed.at), self.request.subscripts.c
        shape = tuple(request.extents[letter] for letter in names)
        free = Owned(Layout(*([()] * len(names)), names=names), shape, names, self.grid)
        plan = AnyPlan(
            request.form, request.extents, request.dtype, request.spaces, request.a, request.b, request.c or free, self.grid,
            splits, costed.how, costed.picoseconds * PICOSECOND, request.machine, request.objective,
        )  # fmt: skip
        if request.c is not None:
            return plan
        layout = public_ownership(plan.scattered, shape, names)
        assert layout is not None
        return replace(plan, c=free._replace(layout=layout))

    def text_of(self, costed: Costed) -> str:
        """Name of a compute layout in the table of alternatives."""
        space = self.space if len(self.request.spaces) > 1 else None
        return with_way(named(self._splits_at(costed.at), space), costed.how)


@lru_cache(maxsize=64)
def combinations(
    letters: str,
    c: str,
    axes: tuple[tuple[str, int], ...],
    roles: tuple[str, ...],
    hints: tuple[tuple[str, ...], ...],
    dealt: tuple[tuple[DimSplit, ...], ...],
) -> Combinations:
    """All compute layouts over `axes` (name, size), which may also be `dealt` out in a letter's dim as operands are.

    c : the first of the letters, which are C's. roles : the letters that each axis may divide. hints : orders of axes to try
    beside the grid's, where there are too many axes to try all
    """
    names, sizes = tuple(name for name, _ in axes), dict(axes)
    splits: dict[str, list[DimSplit]] = {letter: [] for letter in letters}
    known: dict[str, dict[DimSplit, int]] = {letter: {} for letter in letters}

    def number(letter: str, split: DimSplit) -> int:
        if split not in known[letter]:
            known[letter][split] = len(splits[letter])
            splits[letter].append(split)
        return known[letter][split]

    rows = []
    for given in product(*roles):
        own = [tuple(name for name, role in zip(names, given, strict=True) if role == letter) for letter in letters]
        choices = [
            [*map(DimSplit, _orders(item, names, hints)), *(split for split in also if set(split.axes) == set(item))]
            for item, also in zip(own, dealt, strict=True)
        ]
        for chosen in product(*choices):
            inner = tuple(axis for split in chosen[len(c) :] for axis in split.axes)
            pairs = [*zip(letters, chosen, strict=True)]
            fine = [-1 if split.block else number(letter, DimSplit(split.axes + inner)) for letter, split in pairs[: len(c)]]
            summed = prod(sizes[axis] for axis in inner)
            rows.append((*(number(letter, split) for letter, split in pairs), *fine, summed, "-" not in given))
    *columns, sums, even = np.array(rows, np.int64).T
    numbers = dict(zip(letters, columns, strict=False))
    return Combinations(numbers, dict(zip(c, columns[len(letters) :], strict=True)), sums, even.astype(bool), splits)


def _orders(axes: tuple[str, ...], names: Sequence[str], hints: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The orders of a dim's axes that are tried: the grid's first."""
    if len(names) <= ALL_ORDERS:
        return list(permutations(axes))
    result = [axes]
    for hint in hints:
        held = tuple(axis for axis in hint if axis in axes)
        result.append(held + tuple(axis for axis in axes if axis not in held))
    return list(dict.fromkeys(result))


def _product(factors: Sequence[np.ndarray]) -> np.ndarray:
    result: np.ndarray = reduce(mul, factors)
    return result


def _holders_alike(held: Sequence[RankParts]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Ranks in the order of the blocks that they hold, where each block begins in it, its holders, and each rank's block.

    None where no block has two holders.
    """
    keys = []
    for part in held:
        keys += [part.start, part.stop] if isinstance(part, RangeParts) else [part.turn]
    empty = _product([part.size for part in held]) == 0
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
