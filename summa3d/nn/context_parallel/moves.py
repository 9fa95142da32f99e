"""How blocks of keys and values reach every context, and their gradients come home: a ring, or an all-gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.axis import Axis
from ...comm.pending import Pending
from .parts import BlockPart, parts_of
from .tiles import wide

KEYS, GRADIENTS = 0, 1
"""Tags of what travels along a ring."""

Add = Callable[[int, BlockPart, Tensor, Tensor], None]
"""(source, which part of its block, these keys and values, their gradients to add to)"""


class RingHop(NamedTuple):
    """A part of a block on its way: from the member before, and to the one behind."""

    arriving: Pending
    leaving: Pending

    def wait(self) -> None:
        """Return once it has arrived, and what is sent may be overwritten."""
        self.arriving.wait()
        self.leaving.wait()


class RingMoves:
    """Keys and values travel from each member of an axis to the next, so that each sees those of all: c−1 hops of c members.

    A hop is a message for each of `parts_of` a block, so that a part is attended to, and travels on, while the next one is in
    flight; with two members nothing else is there to hide a hop behind, beside the own block. Backward sends keys and values
    again, and behind each part its gradients, which each member adds to and which come home behind the last hop. Of n elements
    of keys and values in p parts: words (c−1)·n forward and 2(c−1)·n backward; messages (c−1)·p and 2(c−1)·p. Memory: two blocks
    beside the own one; in backward as many, and three blocks of gradients beside those of the own one.
    Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def kept(self, kv: Tensor) -> Tensor:
        """Tensor that backward needs: the own block."""
        return kv

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, BlockPart, Tensor]]:
        """Every member's block, the own one first as a whole, others in parts; each holds until the next is asked for."""
        axis, parts = self.axis, parts_of(kv)
        spare = [torch.empty_like(kv) for _ in range(min(2, axis.size - 1))]
        moving = [self._pass(part.of(kv), part.of(spare[0]), KEYS) for part in parts if spare]
        yield axis.index, BlockPart.whole(kv), kv
        for source in _others(axis):
            hop = (axis.index - source) % axis.size
            block, coming = spare[(hop - 1) % len(spare)], spare[hop % len(spare)]
            for place, part in enumerate(parts):
                moving[place].arriving.wait()
                if hop + 1 < axis.size:
                    moving[place].leaving.wait()  # from the memory that the next hop takes
                    moving[place] = self._pass(part.of(block), part.of(coming), KEYS)
                yield source, part, part.of(block)
        for item in moving:
            item.leaving.wait()

    def add_gradients(self, kv: Tensor, add: Add) -> Tensor:
        """Call `add` for every member's block, and return the gradients of the own one, summed over the members."""
        own, blocks = torch.zeros_like(kv, dtype=wide(kv.dtype)), self.blocks(kv)
        add(*next(blocks), own)
        if self.axis.size == 1:
            return own
        totals, arriving, parts = [torch.empty_like(own)], torch.empty_like(own), len(parts_of(kv))
        travels: list[RingHop] = []
        for number, (source, part, block) in enumerate(blocks):
            place = number % parts
            if number == parts:
                totals.append(torch.empty_like(own))
            total = part.of(totals[number // parts % 2]).zero_()
            add(source, part, block, total)
            if number < parts:
                travels.append(self._pass(total, part.of(arriving), GRADIENTS))
                continue
            travels[place].wait()
            total += part.of(arriving)
            travels[place] = self._pass(total, part.of(arriving), GRADIENTS)
        for part, travel in zip(parts_of(kv), travels, strict=True):
            travel.wait()
            part.of(own).add_(part.of(arriving))
        return own

    def _pass(self, leaving: Tensor, coming: Tensor, tag: int) -> RingHop:
        """Start the hop of a part to the next member, and of that of the one before to this one."""
        axis = self.axis
        receive = axis.start_receive(coming, (axis.index - 1) % axis.size, tag)
        return RingHop(receive, axis.start_send(leaving, (axis.index + 1) % axis.size, tag))


class GatherMoves:
    """Keys and values of all members of an axis are gathered, while the own block is attended to; backward sums their gradients.

    Words: (c−1)·n forward and as many backward, of n elements of keys and values. Memory: all blocks, kept for backward.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._whole: Tensor | None = None

    def kept(self, kv: Tensor) -> Tensor:
        """Tensor that backward needs: all blocks."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, BlockPart, Tensor]]:
        """Every member's block, the own one first."""
        axis, pending, all_of_it = self.axis, self.axis.start_all_gather(kv[None]), BlockPart.whole(kv)
        yield axis.index, all_of_it, kv
        self._whole = pending.wait()
        for source in _others(axis):
            yield source, all_of_it, self._whole[source]

    def add_gradients(self, whole: Tensor, add: Add) -> Tensor:
        """Call `add` for every member's block, and return the gradients of the own one, summed over the members."""
        axis = self.axis
        total, all_of_it = torch.zeros_like(whole, dtype=wide(whole.dtype)), BlockPart.whole(whole[0])
        for source in chain((axis.index,), _others(axis)):
            add(source, all_of_it, whole[source], total[source])
        return axis.reduce_scatter(total)[0]


def _others(axis: Axis) -> Iterator[int]:
    """The other members, the one before this one first. Hops from members below are alike, and so are those from above."""
    sources = [(axis.index - hop) % axis.size for hop in range(1, axis.size)]
    kinds = [(source < axis.index, hop == axis.size) for hop, source in enumerate(sources, 2)]
    return (sources[place] for place in axis.ledger.alike(kinds))


KeyMoves = RingMoves | GatherMoves
