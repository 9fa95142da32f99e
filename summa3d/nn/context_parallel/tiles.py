"""Attention of a block of queries to a block of keys, its log-sums, and how blocks are merged: the arithmetic of contexts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...comm.transport.progress import IN_FLIGHT
from .split import Tile

PIECE = 1 << 26
"""Floating-point operations after which messages in flight are looked at: a few milliseconds of a core."""
MOST_PIECES = 16
"""About so many pieces of a tile at most: beyond it their calls would cost more than a late look at messages."""

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
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, diagonal and mask is None, attn_mask=mask
    )
    return found


def _triangle(q: Tensor, k: Tensor) -> Tensor:
    """Which keys of equal positions a causal query may attend to."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0, or −∞ where a query may not attend."""
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


def pieces_of(q: Tensor, k: Tensor, tile: Tile) -> list[tuple[slice, slice, slice]]:
    """The parts of a tile's arithmetic, rows and heads of K and of Q: between two of them messages are looked at."""
    shared = q.shape[1] // k.shape[1]
    queries, keys = (part.stop - part.start for part in (tile.queries, tile.keys))
    work = max(1, 4 * queries * keys * q.shape[3] * shared)
    piece = max(PIECE, work * q.shape[0] * k.shape[1] // MOST_PIECES)
    heads = max(1, min(k.shape[1], piece // work))
    rows = max(1, min(q.shape[0], piece // (work * k.shape[1]))) if heads == k.shape[1] else 1
    return [
        (slice(row, row + rows), slice(head, head + heads), slice(head * shared, (head + heads) * shared))
        for row in range(0, q.shape[0], rows)
        for head in range(0, k.shape[1], heads)
    ]


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

    out [b, a, q, d], sums [b, a, q] : of the blocks so far; the first one has all queries
    """

    def __init__(self, q: Tensor) -> None:
        self.q, self.begun = q, False
        self.out = _like(q).transpose(1, 2)
        self.sums = self.out.new_empty(q.shape[:3])

    def add(self, kv: Tensor, tile: Tile, allowed: Tensor | None) -> None:
        """Attend by a tile to keys and values [2, b, kv heads, positions, d]."""
        k, v = kv[:, :, :, tile.keys].unbind(0)
        for rows, of_k, heads in pieces_of(self.q, k, tile):
            part = (rows, heads, tile.queries)
            mask = None if allowed is None else allowed[rows if len(allowed) > 1 else slice(None)]
            out, sums = attended(self.q[part], k[rows, of_k], v[rows, of_k], tile.diagonal, mask)
            self._merge(self.out[part], self.sums[part], out, sums)
            IN_FLIGHT.advance()
        self.begun = True

    def _merge(self, out: Tensor, sums: Tensor, of_block: Tensor, sums_of_block: Tensor) -> None:
        """Overwrite what there is by what it is with another block."""
        if not self.begun:
            out.copy_(of_block)
            sums.copy_(sums_of_block)
            return
        whole = torch.stack((sums, sums_of_block)).logcumsumexp(0)[1]  # a dry run traces logaddexp 20 times as long
        share = (sums_of_block - whole).exp_()[..., None]
        out.lerp_(of_block.to(out.dtype), share)
        sums.copy_(whole)


class GradientSum:
    """The gradients of queries, of all blocks of keys, and what those of one block's keys and values are made of."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, sums: Tensor) -> None:
        self.grad, self.q, self.out, self.sums = grad, q, out, sums
        self.of_q = _like(q).zero_().transpose(1, 2)

    def add(self, kv: Tensor, tile: Tile, allowed: Tensor | None, of_kv: Tensor) -> None:
        """Add the gradients by a tile to those of the queries, and to `of_kv`, those of its keys and values."""
        k, v = kv[:, :, :, tile.keys].unbind(0)
        for rows, of_k, heads in pieces_of(self.q, k, tile):
            part, keys = (rows, heads, tile.queries), (slice(None), rows, of_k, tile.keys)
            mask = None if allowed is None else allowed[rows if len(allowed) > 1 else slice(None)]
            given = (self.grad[part], self.q[part], k[rows, of_k], v[rows, of_k], self.out[part], self.sums[part])
            of_q, *of_block = gradients(*given, tile.diagonal, mask)
            self.of_q[part] += of_q
            for total, summand in zip(of_kv[keys], of_block, strict=True):
                total += summand
            IN_FLIGHT.advance()
