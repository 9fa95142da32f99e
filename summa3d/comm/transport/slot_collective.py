"""Collectives in a slot of memory that a node's ranks share, as two steps on arrays: write one's part, combine the parts.

`PLANS` says for each collective where its parts lie. Who takes slots and waits is node.py; a dry run takes the steps alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..device.arrays import Array, copy_into, detached, empty, is_half, is_torch, library_of, overlap, quiet, sum_wide
from .call import Route
from .node_memory import SLOTS

IN_ONE_COPY = 1 << 16
"""Bytes in a slot below which one copy of a whole array costs less than to find the parts that others read."""
OPERATIONS = {"sum": "add", "max": "maximum", "min": "minimum"}
ALL, NOBODY = -1, -2
"""Whom a member waits for before it combines: all members, or none."""

Index = Any
"""What selects a part of an array; ... for the whole of it."""


class Part(NamedTuple):
    """An array in a slot: its offset in elements, its shape, and what of it is read."""

    offset: int
    shape: tuple[int, ...]
    index: Index = ...


class SlotPlan(NamedTuple):
    """Where the arrays of a collective lie in a slot, seen from one member.

    elements : those that all members write. mine : where this member's array goes, if it writes one. reads : what it combines.
    shape : the result's; None where there is none. reduces : whether what it reads is reduced; else it is copied to `places` of
    the result. waits_for : a member, ALL or NOBODY. own, others : of a reduce-scatter, this member's part of its own array, and
    the parts of the others. whole : the result as one array in the slot, where the parts adjoin.
    """

    elements: int
    mine: Part | None
    reads: Sequence[Part]
    shape: tuple[int, ...] | None
    reduces: bool = False
    waits_for: int = ALL
    own: Index = ...
    others: Sequence[Index] = ()
    places: Sequence[Index] = (...,)
    whole: Part | None = None


def plan_all_gather(route: Route, shape: tuple[int, ...], index: int, size: int) -> SlotPlan:
    """Members' blocks one after the other; where they adjoin, all are copied at once."""
    before, after = shape[: route.dim], shape[route.dim + 1 :]
    rest = prod(before) * prod(after)
    columns = [0, *accumulate(route.sizes)]
    parts = [Part(start * rest, (*before, extent, *after)) for start, extent in zip(columns, route.sizes, strict=False)]
    result = (*before, columns[-1], *after)
    whole = Part(0, result) if prod(before) == 1 else None
    places = [(*(slice(None),) * route.dim, slice(*ends)) for ends in pairwise(columns)]
    reads, to = (parts, places) if whole is None else ([whole], [...])
    return SlotPlan(columns[-1] * rest, parts[index], reads, result, places=to, whole=whole)


def plan_reduce_scatter(route: Route, shape: tuple[int, ...], index: int, size: int) -> SlotPlan:
    """Members' arrays one after the other; each member sums its part of all of them."""
    each, ends, before = prod(shape), [0, *accumulate(route.sizes)], (slice(None),) * route.dim
    own = (*before, slice(ends[index], ends[index + 1]))
    others = [(*before, slice(*part)) for part in ((0, ends[index]), (ends[index + 1], ends[-1])) if part[0] < part[1]]
    result = (*shape[: route.dim], route.sizes[index], *shape[route.dim + 1 :])
    reads = [Part(member * each, shape, own) for member in range(size)]
    return SlotPlan(size * each, Part(index * each, shape), reads, result, True, own=own, others=others)


def plan_reduction(route: Route, shape: tuple[int, ...], index: int, size: int) -> SlotPlan:
    """Members' arrays one after the other, which all members reduce, or the root alone: in one order, for the same bits."""
    each = prod(shape)
    parts = [Part(member * each, shape) for member in range(size)]
    if route.root not in (-1, index):
        return SlotPlan(size * each, parts[index], [], None, True, NOBODY)
    return SlotPlan(size * each, parts[index], parts, shape, True)


def plan_broadcast(route: Route, shape: tuple[int, ...], index: int, size: int) -> SlotPlan:
    """One array, which the root writes and the others copy into their own."""
    part = Part(0, shape)
    if route.root == index:
        return SlotPlan(prod(shape), part, [], shape, places=(), waits_for=NOBODY)
    return SlotPlan(prod(shape), None, [part], shape, waits_for=route.root)


PLANS: dict[str, Callable[[Route, tuple[int, ...], int, int], SlotPlan]] = {
    "all_gather": plan_all_gather,
    "reduce_scatter": plan_reduce_scatter,
    "all_reduce": plan_reduction,
    "reduce": plan_reduction,
    "broadcast": plan_broadcast,
}


class Views(NamedTuple):
    """The arrays of a plan in the memory of a slot: where this member writes, whole or by others' parts, and what it reads."""

    mine: Array | None
    others: Sequence[Array]
    parts: Sequence[Array]


class SlotCollective:
    """The collective of one route in slots, for arrays of one shape, dtype and kind. `like` is one of them.

    in_slots : whether its calls go through the slots, or only those whose array was allocated there.
    """

    def __init__(self, route: Route, like: Array, index: int, size: int, in_slots: bool = True) -> None:
        self.in_slots, self.in_place = in_slots, route.operation == "broadcast"
        self.plan = plan = PLANS[route.operation](route, tuple(like.shape), index, size)
        self.nbytes = plan.elements * like.itemsize
        self.like, self._index, self.is_torch = empty((0,), detached(like)), index, is_torch(like)
        self.views: list[Views | None] = [None] * SLOTS
        self._sums_wide = route.op == "sum" and is_half(like)
        self._copy, self._reduce = _functions(like, route.op)
        shape = plan.shape or ()
        self._new: Callable[[], Array] = (
            partial(self.like.new_empty, shape) if self.is_torch else partial(np.empty, shape, like.dtype)
        )
        self.whole = () if plan.whole is None else plan.whole.shape
        self.gives_view, self.strides = route.view and plan.whole is not None, row_major(self.whole)

    def views_in(self, part: Callable[[Array, int, tuple[int, ...]], Array]) -> Views:
        """Return the plan's arrays. part : makes an array like another one at an offset of the slot, of a shape."""
        plan = self.plan
        mine = None if plan.mine is None else part(self.like, plan.mine.offset, plan.mine.shape)
        wholes = [part(self.like, read.offset, read.shape) for read in plan.reads]
        parts = [whole if read.index is ... else whole[read.index] for whole, read in zip(wholes, plan.reads, strict=True)]
        return Views(mine, [] if mine is None else [mine[at] for at in plan.others], parts)

    def write(self, views: Views, array: Array, into: Array | None, blocking: bool) -> Array | None:
        """Write this member's array; return its own part of it where that is not written, since no other member reads it."""
        mine, others = views.mine, views.others
        if mine is None:
            return None
        if self.is_torch and array.requires_grad:
            array = array.detach()
        if others and self.nbytes >= IN_ONE_COPY and blocking and (into is None or not overlap(into, array)):
            for part, at in zip(others, self.plan.others, strict=True):
                self._copy(part, array[at])
            own: Array = array[self.plan.own]
            return own
        self._copy(mine, array)
        return None

    def combine(self, views: Views, into: Array | None, own: Array | None) -> Array | None:
        """Return the result of what all members have written, in `into` where it is given. own : what `write` returned."""
        plan = self.plan
        if plan.reduces:
            parts = views.parts
            if own is not None:
                parts = [*parts]
                parts[self._index] = own
            return self._reduced(parts, into) if parts else None
        out = self._new() if into is None else into
        target = out.detach() if self.is_torch and out.requires_grad else out
        if plan.whole is not None:
            self._copy(target, views.parts[0])
            return out
        for place, part in zip(plan.places, views.parts, strict=True):
            self._copy(target if place is ... else target[place], part)
        return out

    def _reduced(self, parts: Sequence[Array], out: Array | None) -> Array:
        """The members' parts reduced in their order: the same bits in every run. 16-bit floats are summed in float32."""
        first, second, *others = parts
        if self._sums_wide:
            return copy_into(empty(first.shape, first) if out is None else out, sum_wide(parts))
        if out is None:
            new = self.is_torch and first.is_contiguous()  # else torch's result would not lie in C order
            out = self._reduce(first, second) if new else self._reduce(first, second, out=empty(first.shape, first))
        else:
            self._reduce(first, second, out=out)
        for part in others:
            self._reduce(out, part, out=out)
        return out


def row_major(shape: Sequence[int]) -> list[int]:
    """The strides of a C-ordered array, in elements.

    >>> row_major((2, 3, 4))
    [12, 4, 1]
    """
    strides = [1]
    for extent in shape[:0:-1]:
        strides.append(strides[-1] * extent)
    return strides[: len(shape)][::-1]


def _functions(array: Array, op: str) -> tuple[Any, Any]:
    """Functions that copy one array into another, and reduce two of them by `op`."""
    library = library_of(array)
    reduce = getattr(library, OPERATIONS[op])
    return (library.Tensor.copy_, reduce) if is_torch(array) else (library.copyto, quiet(reduce))
