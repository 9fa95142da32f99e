"""Attention of a block of queries to a block of keys, its log-sums, and how blocks are merged: the arithmetic of contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.device.arrays import is_on_device
from ...comm.transport.progress import IN_FLIGHT
from .parts import BlockPart
from .split import Tile

PIECE = 1 << 26
"""Floating-point operations after which messages in flight are looked at: a few milliseconds of a core."""
MOST_PIECES = 16
"""About so many pieces of a tile at most: beyond it their calls would cost more than a late look at messages."""

LONG_PIECE, FEWEST_QUERIES = 1 << 29, 256
"""Operations of a piece of one head, of which queries are a part, and the fewest of these: fewer are slower on hosts."""

TileMask = Callable[[Tile, int], Tensor | None]
"""(tile, the block its keys are of) → which key [k] each query [q] may attend to, bool [b or 1, 1, q, k]; None, all."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sums and of sums over blocks: float32, or the wider one of queries and keys."""
    return dtype if dtype == torch.float64 else torch.float32


def attended(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(Q·Kᵀ/√d)·V of one block of keys [b, a, q, d], and the log of each row's sum of exponentials [b, a, q].

    A row that may attend to no key of the block has the least finite log-sum: its weight beside others is 0.
    """
    blind = None
    if allowed is not None:
        allowed = allowed & _triangle(q, k) if diagonal else allowed
        blind = ~allowed.any(-1)
    mask = None if allowed is None or blind is None else _additive(allowed | blind[..., None], q.dtype)
    if q.is_cuda:
        out, sums = _plain(q, k, v, diagonal and mask is None, mask)
    else:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, diagonal and mask is None, attn_mask=mask
        )
    if blind is not None:
        sums = sums.masked_fill(blind, torch.finfo(sums.dtype).min)
    return out, sums


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, diagonal: bool, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of Q, K and V of one block of keys. out, sums : of *all* blocks together."""
    mask = None
    if allowed is not None:
        mask = _additive(allowed & _triangle(q, k) if diagonal else allowed, q.dtype)
    if q.is_cuda:
        return _plain_gradients(grad, q, k, v, out, sums, diagonal and mask is None, mask)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, diagonal and mask is None, attn_mask=mask
    )
    return result


def _triangle(q: Tensor, k: Tensor) -> Tensor:
    """Mask of the keys of equal positions that a causal query may attend to."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask that is added to scores: 0, or −∞ where a query may not attend."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def _scores(q: Tensor, k: Tensor, diagonal: bool, mask: Tensor | None) -> Tensor:
    """Q·Kᵀ/√d [b, kv heads, query heads of each, q, k] in float32 or wider, with what is added to it."""
    kind = wide(q.dtype)
    heads = q.unflatten(1, (k.shape[1], -1)).to(kind)
    scores = heads @ k[:, :, None].to(kind).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if diagonal:
        return scores.masked_fill_(~_triangle(q, k), -math.inf)
    return scores if mask is None else scores.add_(mask[:, :, None])


def _plain(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, diagonal, mask)
    sums = scores.logsumexp(-1)
    out = (scores - sums[..., None]).exp() @ v[:, :, None].to(scores.dtype)
    return out.flatten(1, 2).to(q.dtype), sums.flatten(1, 2)


def _plain_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, diagonal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    scores, groups = _scores(q, k, diagonal, mask), (k.shape[1], -1)
    weights = (scores - sums.unflatten(1, groups)[..., None]).exp_()
    of_out = grad.unflatten(1, groups).to(scores.dtype)
    means = (of_out * out.unflatten(1, groups)).sum(-1, keepdim=True)
    of_scores = weights * (of_out @ v[:, :, None].to(scores.dtype).transpose(-1, -2) - means) / math.sqrt(q.shape[-1])
    of_q = of_scores @ k[:, :, None].to(scores.dtype)
    of_k = (of_scores.transpose(-1, -2) @ q.unflatten(1, groups).to(scores.dtype)).sum(2)
    of_v = (weights.transpose(-1, -2) @ of_out).sum(2)
    return of_q.flatten(1, 2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


class TilePiece(NamedTuple):
    """A part of a tile's arithmetic. again : whether another piece before it has these queries."""

    rows: slice
    kv_heads: slice
    heads: slice
    queries: slice
    keys: slice
    diagonal: bool
    again: bool = False


def pieces_of(q: Tensor, k: Tensor, diagonal: bool = False) -> list[TilePiece]:
    """The parts of a tile's arithmetic, of queries q and keys k: between two of them messages are looked at.

    They are rows and heads, and of a long head queries; below a diagonal, of equal positions, these meet the keys in front. A dry
    run of a device has the tile as one: its kernel would keep no scores, and its messages need no look.
    """
    if q.is_meta and is_on_device(q):
        whole = [slice(0, size) for size in (len(q), k.shape[1], *q.shape[1:3], k.shape[2])]
        return [TilePiece(whole[0], whole[1], whole[2], whole[3], whole[4], diagonal)]
    shared, (queries, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    work = max(1, 4 * queries * keys * q.shape[3] * shared)
    piece = max(PIECE, work * q.shape[0] * k.shape[1] // MOST_PIECES)
    heads = max(1, min(k.shape[1], piece // work))
    rows = max(1, min(q.shape[0], piece // (work * k.shape[1]))) if heads == k.shape[1] else 1
    each = queries if q.is_meta or q.is_cuda else max(FEWEST_QUERIES, ceil(queries * LONG_PIECE / work))
    return [
        TilePiece(
            slice(row, row + rows),
            slice(head, head + heads),
            slice(head * shared, (head + heads) * shared),
            *of_queries,
        )
        for row in range(0, q.shape[0], rows)
        for head in range(0, k.shape[1], heads)
        for of_queries in _by_queries(queries, keys, each, diagonal)
    ]


def _by_queries(queries: int, keys: int, each: int, diagonal: bool) -> Iterator[tuple[slice, slice, bool, bool]]:
    """(Queries, keys, whether diagonal, whether another one has these queries) of a head's pieces, of `each` queries."""
    for first in range(0, queries, each):
        own = slice(first, min(queries, first + each))
        yield own, own if diagonal else slice(0, keys), diagonal, False
        if diagonal and first:
            yield own, slice(0, first), False, True


def adjacent(heads: Tensor) -> Tensor:
    """The tensor with the elements of a head adjacent, which torch's kernels take for granted."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def apart(q: Tensor) -> Tensor:
    """The tensor, not as a part of a larger one, which would be kept for backward with it."""
    alone = q.untyped_storage().nbytes() == q.nbytes
    return adjacent(q) if alone else q.clone(memory_format=torch.contiguous_format)


def _like(q: Tensor) -> Tensor:
    """Memory for sums over blocks [b, q, a, d]: heads of one position are adjacent, as the layer behind takes them."""
    return torch.empty_like(q.transpose(1, 2), dtype=wide(q.dtype), memory_format=torch.contiguous_format)


class AttendedSum:
    """Attention to blocks of keys, merged one after the other by their log-sums, in float32 or wider.

    out [b, a, q, d], sums [b, a, q] : of the blocks so far; the first one has all queries. kv_heads : of all blocks
    """

    def __init__(self, q: Tensor, kv_heads: int) -> None:
        self.q, self.shared, self.begun = q, q.shape[1] // kv_heads, False
        self.out = _like(q).transpose(1, 2)
        self.sums = self.out.new_empty(q.shape[:3])

    def add(self, kv: Tensor, part: BlockPart, tile: Tile, allowed: Tensor | None) -> None:
        """Attend by a tile to the keys and values [b, kv heads, s, 2, d] of a part of a block, which has the tile's keys."""
        k, v = kv[:, :, _from(tile.keys, part.positions.start)].unbind(3)
        met = part.rows, _times(part.heads, self.shared), tile.queries
        q, out, sums = self.q[met], self.out[met], self.sums[met]
        for piece in pieces_of(q, k, tile.diagonal):
            of_q, of_k = (piece.rows, piece.heads, piece.queries), (piece.rows, piece.kv_heads, piece.keys)
            mask = _of_piece(allowed, part, piece)
            of_block = attended(q[of_q], k[of_k], v[of_k], piece.diagonal, mask)
            self._merge(out[of_q], sums[of_q], *of_block, self.begun or piece.again)
            IN_FLIGHT.advance()
        self.begun = True

    def _merge(self, out: Tensor, sums: Tensor, of_block: Tensor, sums_of_block: Tensor, begun: bool) -> None:
        """Overwrite what there is by what it is with another block."""
        if not begun:
            out.copy_(of_block)
            sums.copy_(sums_of_block)
            return
        whole = torch.stack((sums, sums_of_block)).logcumsumexp(0)[1]  # a dry run traces logaddexp 20 times as long
        share = (sums_of_block - whole).exp_()[..., None]
        out.lerp_(of_block.to(out.dtype), share)
        sums.copy_(whole)


class GradientSum:
    """The gradients of queries, of all blocks of keys, and what those of one block's keys and values are made of."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, kv_heads: int) -> None:
        self.grad, self.q, self.out, self.sums, self.shared = grad, q, out, sums, q.shape[1] // kv_heads
        self.of_q = _like(q).zero_().transpose(1, 2)

    def add(self, kv: Tensor, part: BlockPart, tile: Tile, allowed: Tensor | None, of_kv: Tensor) -> None:
        """Add the gradients by a tile to those of the queries, and to `of_kv`, those of the part's keys and values."""
        own = _from(tile.keys, part.positions.start)
        (k, v), totals = kv[:, :, own].unbind(3), of_kv[:, :, own].unbind(3)
        met = part.rows, _times(part.heads, self.shared), tile.queries
        grad, q, out, sums, total = (item[met] for item in (self.grad, self.q, self.out, self.sums, self.of_q))
        for piece in pieces_of(q, k, tile.diagonal):
            of_q, of_k = (piece.rows, piece.heads, piece.queries), (piece.rows, piece.kv_heads, piece.keys)
            given = (grad[of_q], q[of_q], k[of_k], v[of_k], out[of_q], sums[of_q])
            result, *of_block = gradients(*given, piece.diagonal, _of_piece(allowed, part, piece))
            total[of_q] += result
            for summed, summand in zip(totals, of_block, strict=True):
                summed[of_k] += summand
            IN_FLIGHT.advance()


def _from(positions: slice, first: int) -> slice:
    """Positions counted from another one."""
    return slice(positions.start - first, positions.stop - first)


def _times(heads: slice, shared: int) -> slice:
    """The query heads that share kv heads."""
    return slice(heads.start * shared, heads.stop * shared)


def _of_piece(allowed: Tensor | None, part: BlockPart, piece: TilePiece) -> Tensor | None:
    """Keys that a piece of a part may attend to, of what a tile may."""
    if allowed is None:
        return None
    rows = allowed[part.rows][piece.rows] if len(allowed) > 1 else allowed
    return rows[:, :, piece.queries, piece.keys]
