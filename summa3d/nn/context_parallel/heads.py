"""Exchange of positions for heads among contexts, with gradients: each then has longer parts of sequences and fewer heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...autograd.collectives import conjugate
from ...comm.axis import Axis


def wanted_kv_heads(heads: int, kv_heads: int, members: int) -> list[range]:
    """The heads of K and V that each member needs for its equal part of the query heads.

    >>> wanted_kv_heads(6, 2, 3)
    [range(0, 1), range(0, 2), range(1, 2)]
    """
    own, shared = heads // members, heads // kv_heads
    return [range(member * own // shared, ((member + 1) * own - 1) // shared + 1) for member in range(members)]


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange q [b, a, s/c, d], k and v [b, kv heads, s/c, d] along `axis` for parts of their heads: [b, a/c, s, d] and so on.

    A head of K and V goes to every member whose query heads share it; backward sums its gradients. Where a member's query heads
    do not share them evenly, each has a copy of its own. Words: (c−1)/c of q, k and v where c divides the kv heads; backward the
    same. Source: Jacobs et al., DeepSpeed-Ulysses, 2023.
    """
    heads, members = q.shape[1], axis.size
    own, shared, wanted = heads // members, heads // k.shape[1], wanted_kv_heads(heads, k.shape[1], members)
    order: list[int] = []
    for member, of_kv in enumerate(wanted):
        order += range(member * own, (member + 1) * own)
        order += [first + head for first in (heads, heads + k.shape[1]) for head in of_kv]
    sizes, mine = [own + 2 * len(of_kv) for of_kv in wanted], wanted[axis.index]
    stacked = torch.cat((q, k, v), 1).transpose(0, 1)  # [heads, b, s/c, d]
    moved = _exchanged(stacked[order], axis, sizes, [sizes[axis.index]] * members)
    whole = moved.unflatten(0, (members, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)  # [b, heads, s, d]
    q, k, v = whole.split([own, len(mine), len(mine)], 1)
    users = [(axis.index * own + head) // shared - mine.start for head in range(own)]
    if users != [head * len(mine) // own for head in range(own)] or own % len(mine):
        k, v = k[:, users], v[:, users]
    return q, k, v


def to_positions(out: Tensor, axis: Axis) -> Tensor:
    """Exchange a part of the heads [b, a/c, s, d] along `axis` for positions, [b, a, s/c, d]. Words: (c−1)/c of it."""
    members, own = axis.size, out.shape[1]
    parts = out.unflatten(2, (members, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)  # [c·a/c, b, s/c, d]
    return _exchanged(parts, axis, [own] * members, [own] * members).transpose(0, 1)


def _exchanged(x: Tensor, axis: Axis, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
    """All-to-all of dim 0; backward is the all-to-all back."""
    return conjugate(
        x,
        lambda block: axis.all_to_all(block.detach().contiguous(), 0, sizes, receive_sizes),
        lambda block: axis.all_to_all(block.detach().contiguous(), 0, receive_sizes, sizes),
    )
