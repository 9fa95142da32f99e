"""How blocks of keys and values reach every context, and their gradients come home: a ring, or an all-gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...comm.axis import Axis
from ...comm.pending import Pending
from .tiles import wide

KEYS, GRADIENTS = 0, 1
"""Tags of what travels along a ring."""

Add = Callable[[int, Tensor, Tensor], None]
"""(source, its keys and values, their gradients to add to)"""


class RingMoves:
    """Keys and values travel from each member of an axis to the next, so that each sees those of all: c−1 hops of c members.

    The next hop is in flight while a block is attended to. Backward sends keys and values again, and behind them their
    gradients, which each member adds to and which come home behind the last hop. Words: (c−1)·n forward and 2(c−1)·n backward,
    of n elements of keys and values. Memory: two blocks beside the own one; in backward as many, and three blocks of gradients
    beside those of the own one.
    Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def kept(self, kv: Tensor) -> Tensor:
        """What backward needs: the own block."""
        return kv

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every member's block, the own one first; each holds until the next is asked for."""
        axis, block = self.axis, kv
        spare = [torch.empty_like(kv) for _ in range(min(2, axis.size - 1))]
        for hop in range(axis.size):
            moving: list[Pending] = []
            coming = spare[hop % len(spare)]
            if hop + 1 < axis.size:
                moving = self._pass(block, coming, KEYS)
            yield (axis.index - hop) % axis.size, block
            for pending in moving:
                pending.wait()
            block = coming

    def add_gradients(self, kv: Tensor, add: Add) -> Tensor:
        """Call `add` for every member's block, and return the gradients of the own one, summed over the members."""
        own, travels, spare = torch.zeros_like(kv, dtype=wide(kv.dtype)), list[Pending](), list[Tensor]()
        arriving = leaving = None
        for hop, (source, block) in enumerate(self.blocks(kv)):
            if hop == 0:
                add(source, block, own)
                continue
            total = spare.pop().zero_() if spare else torch.zeros_like(own)
            add(source, block, total)
            if leaving is not None and arriving is not None:
                for pending in travels:
                    pending.wait()
                total += arriving
                spare += leaving, arriving
            leaving, arriving = total, spare.pop() if spare else torch.empty_like(own)
            travels = self._pass(leaving, arriving, GRADIENTS)
        for pending in travels:
            pending.wait()
        return own if arriving is None else own.add_(arriving)

    def _pass(self, leaving: Tensor, coming: Tensor, tag: int) -> list[Pending]:
        """Start the hop of a block to the next member, and of the one before's to this one."""
        axis = self.axis
        receive = axis.start_receive(coming, (axis.index - 1) % axis.size, tag)
        return [receive, axis.start_send(leaving, (axis.index + 1) % axis.size, tag)]


class GatherMoves:
    """Keys and values of all members of an axis are gathered, while the own block is attended to; backward sums their gradients.

    Words: (c−1)·n forward and as many backward, of n elements of keys and values. Memory: all blocks, kept for backward.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._whole: Tensor | None = None

    def kept(self, kv: Tensor) -> Tensor:
        """What backward needs: all blocks."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every member's block, the own one first."""
        axis, pending = self.axis, self.axis.start_all_gather(kv[None])
        yield axis.index, kv
        self._whole = pending.wait()
        for hop in range(1, axis.size):
            source = (axis.index - hop) % axis.size
            yield source, self._whole[source]

    def add_gradients(self, whole: Tensor, add: Add) -> Tensor:
        """Call `add` for every member's block, and return the gradients of the own one, summed over the members."""
        axis = self.axis
        total = torch.zeros_like(whole, dtype=wide(whole.dtype))
        for hop in range(axis.size):
            source = (axis.index - hop) % axis.size
            add(source, whole[source], total[source])
        return axis.reduce_scatter(total)[0]


KeyMoves = RingMoves | GatherMoves
