# The collectives of an axis whose members share a node, through its ring of slots: one copy in, one out, or none at all.
# Imports arrays, node. Each starts by laying this member's part in a slot, and ends by reading what the others laid there.
# Next: collectives.py, which calls these where it can, and MPI elsewhere.
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from math import prod
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from .arrays import Array, contiguous, copy_into, count, detached, empty, is_contiguous, is_half, is_torch, overlap, share, widen
from .node import Ring, Turn

OPERATIONS = {"sum": "add", "max": "maximum", "min": "minimum"}
ALL_REDUCE_LIMIT = 1 << 20
"""Bytes up to which every member reads every array to reduce it; of larger ones each sums its share, and shares are gathered."""


P = ParamSpec("P")
R = TypeVar("R")


def guarded(collective: Callable[Concatenate[Ring, P], R]) -> Callable[Concatenate[Ring, P], R]:
    """Break the ring where a member fails in a collective: the others would wait for it."""

    @wraps(collective)
    def run(ring: Ring, *args: P.args, **options: P.kwargs) -> R:
        try:
            return collective(ring, *args, **options)
        except BaseException as error:
            ring.fail(error)
            raise

    return run


@guarded
def all_gather(ring: Ring, block: Array, dim: int, sizes: Sequence[int], into: Array | None, view: bool) -> Turn | None:
    """`Axis.all_gather`. With `view`, the result may lie in the slot; it does where the parts adjoin there."""
    rest = prod(block.shape[:dim]) * prod(block.shape[dim + 1 :])
    starts = [0, *accumulate(size * rest for size in sizes)]
    turn = ring.turn(starts[-1] * block.itemsize)
    if turn is None:
        return None
    copy_into(turn.part(block, starts[ring.index], block.shape), block)
    turn.post()
    shape = [*block.shape]
    shape[dim] = sum(sizes)
    if view and into is None and prod(block.shape[:dim]) == 1:
        ring.keep(turn)

        def look() -> Array:
            turn.wait_for_all()
            return turn.part(block, 0, shape)

        turn.read = look
        return turn

    def read() -> Array:
        out = empty(shape, block) if into is None else into
        columns = [0, *accumulate(sizes)]
        turn.wait_for_all()
        if dim == 0:
            return copy_into(out, turn.part(block, 0, shape))
        for member in range(ring.size):
            part = turn.part(block, starts[member], [*shape[:dim], sizes[member], *shape[dim + 1 :]])
            copy_into(out[(slice(None),) * dim + (slice(columns[member], columns[member + 1]),)], part)
        return out

    turn.read = read
    return turn


@guarded
def reduce_scatter(
    ring: Ring,
    array: Array,
    dim: int,
    sizes: Sequence[int],
    into: Array | None,
    blocking: bool,
    turn: Turn | None = None,
) -> Turn | None:
    """`Axis.reduce_scatter`: every member reads its part of every array, and adds them in the members' order.

    With `turn`, `array` is that turn's room, and lies already where it is read.
    """
    whole = count(array)
    begin = sum(sizes[: ring.index])
    if turn is None:
        turn = ring.turn(ring.size * whole * array.itemsize)
        if turn is None:
            return None
        mine = turn.part(array, ring.index * whole, array.shape)
        end = begin + sizes[ring.index]
        for part in (slice(0, begin), slice(end, array.shape[dim])):  # nobody else reads this member's own part ...
            at = (slice(None),) * dim + (part,)
            copy_into(mine[at], array[at])
        own = array[(slice(None),) * dim + (slice(begin, end),)]
        if not blocking or (into is not None and overlap(into, own)):
            own = copy_into(empty(own.shape, array), own)  # ... but the caller may overwrite it meanwhile, or the sum
    else:
        own = None
    turn.post()
    shape, at = tuple(array.shape), (slice(None),) * dim + (slice(begin, begin + sizes[ring.index]),)
    like = empty((0,), array)

    def part_of(member: int) -> Array:
        if member == ring.index and own is not None:
            return own
        return turn.part(like, member * whole, shape)[at]

    def read() -> Array:
        out = into if into is not None else empty(part_of(ring.index).shape, like)
        turn.wait_for_all()
        return _reduced(ring, part_of, out, "sum")

    turn.read = read
    return turn


@guarded
def all_reduce(ring: Ring, array: Array, op: str, into: Array | None) -> Turn | None:
    """`Axis.all_reduce`: every member reads every array, in the members' order, so that all have the same bits."""
    laid = _laid_whole(ring, array)
    if laid is None:
        return None
    turn, part_of = laid

    def read() -> Array:
        turn.wait_for_all()
        first = part_of(0)
        return _reduced(ring, part_of, empty(first.shape, first) if into is None else into, op)

    turn.read = read
    return turn


def all_reduce_in_parts(
    ring: Ring, array: Array, into: Array | None, blocking: bool, otherwise: Callable[[Array, Array, Sequence[int]], object]
) -> Callable[[], Array] | None:
    """`Axis.all_reduce` by sum of a large array: each member sums its share, and the shares are gathered.

    What is returned completes it, and takes a turn of its own: all members call it at the same place among their
    communications over this axis. `otherwise`(share, out, sizes) gathers where the node lacks the memory.
    """
    out = into if into is not None and is_contiguous(into) else empty(array.shape, array)
    sizes = [share(count(array), ring.size, member) for member in range(ring.size)]
    summing = reduce_scatter(ring, contiguous(array).reshape(-1), 0, sizes, None, blocking)
    if summing is None:
        return None

    def gather() -> Array:
        part, flat = summing.result(), out.reshape(-1)
        gathering = all_gather(ring, part, 0, sizes, flat, False)
        if gathering is None:
            otherwise(part, flat, sizes)
        else:
            gathering.finish()
        return out if into is None or out is into else copy_into(into, out)

    return gather


@guarded
def broadcast(ring: Ring, array: Array, root: int) -> Turn | None:
    """`Axis.broadcast`: the root lays its array in the slot, the others read it."""
    turn = ring.turn(count(array) * array.itemsize)
    if turn is None:
        return None
    if ring.index == root:
        copy_into(turn.part(array, 0, array.shape), detached(array))
        turn.post()

    def read() -> Array:
        if ring.index != root:
            turn.wait(root)
            copy_into(detached(array), turn.part(array, 0, array.shape))
        return array

    turn.read = read
    return turn


@guarded
def reduce(ring: Ring, array: Array, root: int, op: str, into: Array | None) -> Turn | None:
    """`Axis.reduce`: the root reads every array."""
    laid = _laid_whole(ring, array)
    if laid is None:
        return None
    turn, part_of = laid

    def read() -> Array | None:
        if ring.index != root:
            return None
        turn.wait_for_all()
        first = part_of(0)
        return _reduced(ring, part_of, empty(first.shape, first) if into is None else into, op)

    turn.read = read
    return turn


@guarded
def meet(ring: Ring) -> None:
    """Return once every member has called."""
    turn = ring.turn(0)
    if turn is None:
        ring.comm.Barrier()
        return
    turn.post()
    turn.wait_for_all()
    turn.close()


def _laid_whole(ring: Ring, array: Array) -> tuple[Turn, Callable[[int], Array]] | None:
    """Lay this member's whole array in a slot and post it: the turn, and where each member's lies in it."""
    whole, shape, like = count(array), tuple(array.shape), empty((0,), array)
    turn = ring.turn(ring.size * whole * array.itemsize)
    if turn is None:
        return None
    copy_into(turn.part(array, ring.index * whole, shape), array)
    turn.post()
    return turn, lambda member: turn.part(like, member * whole, shape)


def _reduced(ring: Ring, part_of: Callable[[int], Array], out: Array, op: str) -> Array:
    """The members' parts reduced in their order: the same bits in every run. 16-bit floats are summed in float32."""
    first, second = part_of(0), part_of(1)
    if op == "sum" and is_half(first):
        total = widen(first)
        for member in range(1, ring.size):
            total += widen(part_of(member))
        return copy_into(out, total)
    combine = _operation(first, op)
    combine(first, second, out=out)
    for member in range(2, ring.size):
        combine(out, part_of(member), out=out)
    return out


def _operation(array: Array, op: str) -> Any:
    if is_torch(array):
        import torch

        return getattr(torch, OPERATIONS[op])
    return getattr(np, OPERATIONS[op])
