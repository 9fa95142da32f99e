"""Attention of a context's queries to the keys of all contexts, with gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...autograd.function import Function, once_differentiable
from .moves import KeyMoves
from .parts import BlockPart
from .split import ContextSplit, Tile
from .tiles import AttendedSum, GradientSum, TileMask, adjacent, apart


class _ContextAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, split: ContextSplit, moves: KeyMoves, causal: bool, mask: TileMask) -> Tensor:
        attended = AttendedSum(q := apart(q), kv.shape[1])
        for source, part, block in moves.blocks(kv):
            for tile in within(split.tiles(source, q.shape[2], causal), part):
                attended.add(block, part, tile, mask(tile, source))
        out = attended.out.to(q.dtype)
        ctx.save_for_backward(q, moves.kept(kv), out, attended.sums)
        ctx.how = split, moves, causal, mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, kv, out, sums), (split, moves, causal, mask) = ctx.saved_tensors, ctx.how
        gradient = GradientSum(adjacent(grad), q, out, sums, kv.shape[-4])

        def add(source: int, part: BlockPart, block: Tensor, of_block: Tensor) -> None:
            for tile in within(split.tiles(source, q.shape[2], causal), part):
                gradient.add(block, part, tile, mask(tile, source), of_block)

        of_kv = moves.add_gradients(kv, add)
        return gradient.of_q.to(q.dtype), of_kv.to(kv.dtype), None, None, None, None


def within(tiles: list[Tile], part: BlockPart) -> list[Tile]:
    """Parts of tiles whose keys lie in a part of a block."""
    first, behind = part.positions.start, part.positions.stop
    keys = [slice(max(tile.keys.start, first), min(tile.keys.stop, behind)) for tile in tiles]
    return [tile._replace(keys=own) for tile, own in zip(tiles, keys, strict=True) if own.start < own.stop]


def attend(q: Tensor, kv: Tensor, split: ContextSplit, moves: KeyMoves, causal: bool, mask: TileMask) -> Tensor:
    """softmax(Q·Kᵀ/√d)·V of this context's queries [b, a, s/c, d] and the keys and values of all contexts, [b, a, s/c, d].

    Parameters
    ----------
    q : the queries; their heads are a multiple of those of K and V
    kv : this context's keys and values, [b, kv heads, s/c, 2, d], adjacent
    split : which positions the contexts hold
    moves : how the blocks of keys and values reach this context; words and memory are theirs
    mask : which keys of a block the queries may attend to, beside causality

    Blocks are attended to one after the other and merged by their log-sums, and gradients of each block use the output and the
    log-sums of all (the identity of flash attention): no scores are kept. Sums are in float32 or wider.
    """
    return _ContextAttention.apply(q, kv, split, moves, causal, mask)
