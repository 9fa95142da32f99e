"""Self-attention: behind the first linear layer each rank holds whole heads, of whole sequences or of its context's part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...autograd.collectives import all_gather
from ...autograd.recompute import recompute
from ...comm.topology import describe, divisors
from ...errors import LayoutError
from ...gemm.any_layout.blocks import nested_sizes
from ...gemm.pieces.behind import BehindQueue
from ...layout.layout import Layout
from ..config import ModelConfig
from ..context import Context
from ..context_parallel.attention import attend as attend_over
from ..context_parallel.heads import to_heads, to_positions
from ..context_parallel.moves import GatherMoves, RingMoves
from ..context_parallel.positions import indices, order
from ..context_parallel.split import ContextSplit, Tile
from ..schemes.heads import HeadSplit, heads_of
from .attention_mask import TokenMask, Visible
from .dropout import Batch, Dropout
from .fused_linear import FusedLinear, have_like_items
from .linear import Linear
from .norm import RMSNorm
from .rotary import Rotary


class AttentionCore(nn.Module):
    """softmax(Q·Kᵀ/√d)·V of this rank's heads: local where it holds whole sequences, else with the keys of the other contexts.

    It uses torch's fused attention, except with attention dropout, whose masks are counter-based. k and v may have fewer heads
    than q; consecutive query heads then share one. With `recomputed`, backward keeps only q, k and v and recomputes the rest,
    what contexts exchange too. Words of contexts: those of `to_heads`, `RingMoves` and `GatherMoves`.
    """

    def __init__(self, heads: int, causal: bool, dropout: float, name: str, scheme: Context, of_heads: Layout) -> None:
        super().__init__()
        self.heads, self.causal, self.recomputed, self.context = heads, causal, False, scheme
        self.dropout = Dropout(dropout, f"{name}.attention", scheme, of_heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, visible: Visible) -> Tensor:
        """Attend: q [b/(XZ), a/Y, s, d], k and v [b/(XZ), kv/Y, s, d] → [b/(XZ), a/Y, s, d], with s of this rank's context."""
        attend = self._attend if self.context.contexts.size == 1 else self._over_contexts
        fills = self.context.prefetcher is not None and self.context.contexts.size == 1
        behind = BehindQueue.of(self.context.grid) if fills else None

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, batch, visible)

        if behind is not None:
            behind.fill()
        out = recompute(run, (q, k, v)) if self.recomputed else run(q, k, v)
        if behind is not None and out.requires_grad:
            out.register_hook(lambda gradient: behind.fill())
        return out

    def _over_contexts(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, visible: Visible) -> Tensor:
        contexts, context = self.context.contexts, self.context
        if contexts.heads > 1:
            q, k, v = to_heads(q, k, v, context.head_axis)
        if contexts.rings == 1:
            out = self._attend(q, k, v, batch, visible)
        elif self.training and self.dropout.probability:
            out = self._gathered(q, k, v, batch, visible)
        else:
            axis, split = context.ring_axis, contexts.group
            moves = GatherMoves(axis) if contexts.options.kind == "gather" else RingMoves(axis)
            mask = partial(_of_tile, visible.mask, split, q.shape[2] * split.size)
            out = attend_over(q, torch.stack((k, v), 3), split, moves, self.causal, mask)
        return to_positions(out, context.head_axis) if contexts.heads > 1 else out

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, visible: Visible) -> Tensor:
        """Attention with dropout of this context's queries to the gathered keys."""
        axis, split = self.context.ring_axis, self.context.contexts.group
        length = q.shape[2]
        s = length * split.size
        blocks = all_gather(torch.stack((k, v))[None], axis, 0, [1] * axis.size)  # [c, 2, b/(XZ), kv/Y, s/c, d]
        k, v = blocks.movedim(0, 3).flatten(3, 4).index_select(3, order(split, s, q.device)).unbind(0)
        queries, keys = indices(split.runs(s), q.device), torch.arange(s, device=q.device)
        allowed = queries[:, None] >= keys if self.causal else None
        if visible.mask is not None:
            beside = visible.mask.allowed(queries, keys)
            allowed = beside if allowed is None else beside & allowed
        return self._unfused(q, k, v, batch, allowed)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, visible: Visible) -> Tensor:
        if q.numel() == 0:  # a rank without heads, or without sequences: its backward takes part in the sums of k and v
            return q + (k + v)[:, :1] * 0
        if self.training and self.dropout.probability:
            return self._unfused(q, k, v, batch, visible.allowed)
        causal = self.causal and visible.allowed is None
        if q.is_meta:  # on meta tensors torch would choose an attention that keeps the scores
            mask = None if visible.allowed is None else visible.allowed.to(q.dtype)
            fused: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=mask
            )
            return fused[0]
        return functional.scaled_dot_product_attention(
            q, k, v, visible.allowed, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
        )

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, allowed: Tensor | None) -> Tensor:
        s, shared = k.shape[2], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # [b/(XZ), a/Y, s of the context, s]
        if allowed is None and self.causal:
            allowed = torch.ones(s, s, dtype=torch.bool, device=q.device).tril_()
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        return self.dropout(scores.softmax(-1), (self.heads, s, s), batch, runs=self._held(s, q.shape[1])) @ v

    def _held(self, s: int, heads: int) -> dict[int, Sequence[range]]:
        """Part on this rank of the dims [heads, queries, keys] beside what the layout says."""
        contexts, grid = self.context.contexts, self.context.grid
        if contexts.rings > 1:
            return {1: contexts.group.runs(s)}
        if contexts.heads == 1:
            return {}
        of_heads = Layout(self.dropout.layout.dims[1], grains=self.dropout.layout.grains[1:2])
        first = of_heads.slices((self.heads,), grid.shape, grid.coordinates)[0].start
        return {0: [range(first + contexts.index * heads, first + (contexts.index + 1) * heads)]}


def _of_tile(mask: TokenMask | None, split: ContextSplit, s: int, tile: Tile, source: int) -> Tensor | None:
    """Mask of the keys that the queries of a tile may attend to, apart from causality; None without a mask."""
    if mask is None:
        return None
    queries, keys = split.runs_of(tile.queries, s), replace(split, index=source).runs_of(tile.keys, s)
    return mask.allowed(indices(queries, mask.device), indices(keys, mask.device))


class SelfAttention(nn.Module):
    """Y = softmax(QKᵀ/√d)·V·W_o for the residual stream X [b, s, h], with a heads of d = h/a elements.

    The columns of the QKV weight are ordered [head][q, k, v][d], so that a block of columns is a block of whole heads.
    Words: those of the two linear layers; each rank holds b/(XZ) whole sequences of a/Y heads in between.
    """

    def __init__(
        self, config: ModelConfig, scheme: Context, name: str, out_std: float = 0.02, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.context, self.size = scheme, config.hidden // config.heads
        split = heads_of(config, scheme.scheme)
        self.qkv = Linear(config.hidden, 3 * config.hidden, scheme, dtype=dtype, together=split.of_kv)
        self.qkv.weight.joined = config.heads, 3
        inner = scheme.scheme.after_linear(scheme.residual, split.of_q)
        self.out = Linear(config.hidden, config.hidden, scheme, inner, std=out_std, dtype=dtype)
        attended = config.attention_dropout, name, scheme, layout_of_heads(inner, self.size)
        self.core = AttentionCore(config.heads, config.architecture.causal, *attended)

    def forward(
        self, x: Tensor, batch: Batch, visible: Visible, skip_bias_add: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """This rank's block of Y for its block of X, or with `skip_bias_add` the pair (Y without W_o's bias, that bias)."""
        rows = self.context.scheme.rows(batch.rows, batch.sequence)
        qkv = self.context.batch_first(self.qkv(x, rows)).unflatten(-1, (-1, 3, self.size))  # [b/(XZ), s, a/Y, 3, d]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))  # [b/(XZ), a/Y, s, d]
        return self.out(_stored(self.core(q, k, v, batch, visible), self.context), rows, skip_bias_add)  # [b/(XY), s, h/Z]


class GroupedAttention(nn.Module):
    """Grouped-query attention: `kv_heads` heads of k and v, each shared by a/kv_heads query heads; rotary where the family is.

    q and kv, with columns [kv head][k, v][d], are one product (`FusedLinear`). Each rank holds whole kv heads with their query
    heads, as evenly as they come. Where kv_heads divides the number of shards of the columns and either is 1 or leaves equal
    pieces, each rank holds a piece of one kv head instead, and the g = Y/kv_heads consecutive ranks that share the head
    all-gather it, (g−1)·b·s·2d/(g·XZ) words; backward reduce-scatters its gradient. Query heads that these do not share evenly
    have a product of their own. Raises LayoutError where contexts exchange heads of which ranks hold unlike numbers.

    Where the family norms q and k, each head by itself moves one all-reduce of γ's gradients over all ranks in backward; all
    together, an `RMSNorm` each.
    """

    def __init__(
        self, config: ModelConfig, scheme: Context, name: str, out_std: float = 0.02, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        h, width, bias = config.hidden, config.attention_width, config.has_qkv_bias
        self.context, self.size, self.largest = scheme, config.head_size, config.clip_qkv
        groups, split = config.num_kv_heads, heads_of(config, scheme.scheme)
        if split.of_q > 1 and scheme.contexts.heads > 1:
            raise LayoutError(_no_exchange(config, scheme))
        self.q = Linear(h, width, scheme, bias=bias, dtype=dtype, together=split.of_q)
        self.kv = Linear(h, 2 * groups * self.size, scheme, bias=bias, dtype=dtype, together=split.of_kv)
        self.kv.weight.joined = groups, 2
        inner, shards = self.q.output_layout, scheme.columns(self.q.output_layout).size
        self.run = scheme.grid.contiguous_sub_axis(inner.dims[-1], split.sharing)
        even = split.of_q == 1 and self.kv.n % shards == 0
        self.joined = FusedLinear(self.q, self.kv) if even or have_like_items(self.q, self.kv) else None
        self.out = Linear(width, h, scheme, inner, bias=config.architecture.biases, std=out_std, dtype=dtype)
        self.normed = config.architecture.qk_norm
        if self.normed:
            self.q_norm, self.k_norm = norms_of_heads(config, scheme, inner, split, dtype)
        self.rotary = Rotary(self.size, config) if "rotary_base" in config.architecture.options else None
        attended = config.attention_dropout, name, scheme, layout_of_heads(inner, self.size)
        self.core = AttentionCore(config.heads, config.architecture.causal, *attended)
        counts = [scheme.grid.shape[axis] for axis in inner.dims[-1]] if groups == 1 else [self.run.size]
        self._pieces = nested_sizes(2 * self.size, counts)  # columns of a kv head that each of the ranks holds which share it

    def forward(
        self, x: Tensor, batch: Batch, visible: Visible, skip_bias_add: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """This rank's block of Y for its block of X, or with `skip_bias_add` the pair (Y without W_o's bias, that bias)."""
        rows = self.context.scheme.rows(batch.rows, batch.sequence)
        both = (self.q(x, rows), self.kv(x, rows)) if self.joined is None else self.joined(x, rows)
        q, kv = (self.context.batch_first(part) for part in both)  # [b/(XZ), s, h/Y], [b/(XZ), s, 2·kv·d/Y]
        if self.run.size > 1:
            kv = all_gather(kv, self.run, 2, self._pieces)
        k, v = kv.unflatten(-1, (-1, 2, self.size)).unbind(3)  # [b/(XZ), s, kv/Y, d]
        if self.normed == "width":
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.flatten(2)).unflatten(-1, (-1, self.size))
        q, k, v = (part.transpose(1, 2) for part in (q.unflatten(-1, (-1, self.size)), k, v))  # [b/(XZ), a/Y, s, d]
        if self.normed == "head":
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if self.largest is not None:
            q, k, v = (part.clamp(-self.largest, self.largest) for part in (q, k, v))
        if self.rotary is not None:
            contexts = self.context.contexts
            q, k = self.rotary(q, k, contexts.runs(batch.sequence * contexts.size))
        return self.out(_stored(self.core(q, k, v, batch, visible), self.context), rows, skip_bias_add)  # [b/(XY), s, h/Z]


def layout_of_heads(inner: Layout, size: int) -> Layout:
    """The layout of [b, heads, s, s] for the attended values [b, s, heads·size] in `inner`."""
    grains = tuple(columns // size for columns in inner.grains[-1]) if inner.grains else ()
    return Layout(inner.dims[0], inner.dims[-1], (), (), grains=((), grains, (), ()))


def norms_of_heads(
    config: ModelConfig, scheme: Context, inner: Layout, split: HeadSplit, dtype: torch.dtype
) -> tuple[RMSNorm, RMSNorm]:
    """The norms of q and k, of each head, or of all heads together.

    inner : the layout of q. Raises LayoutError for vectors on the diagonal, and where
    ranks share a kv head whose norm is that of all heads.
    """
    if config.architecture.qk_norm == "head":
        if scheme.scheme.vectors == "diagonal":
            raise LayoutError("vectors 'diagonal' have no place for a norm of heads, which no axis splits. Use vectors 'copied'.")
        layout = Layout(inner.dims[0], inner.dims[-1], (), ())  # [b, a, s, d]
        q_norm, k_norm = (RMSNorm(config.head_size, scheme, layout, config.eps, dtype) for _ in "qk")
        return q_norm, k_norm
    if split.sharing > 1:
        columns = scheme.columns(inner).size
        fits = [heads for heads in divisors(config.heads) if heads % columns == 0]
        raise LayoutError(
            f"kv_heads {config.num_kv_heads} cannot be split over {'·'.join(inner.dims[-1])} = {columns} (grid "
            f"{describe(scheme.grid.shape)}).\n  k is normed over all heads, so each rank holds whole ones.\n"
            f"  Values of kv_heads that fit heads {config.heads}: {', '.join(map(str, fits))}."
        )
    layouts = inner, scheme.scheme.after_linear(scheme.residual, split.of_k)
    widths = config.attention_width, config.num_kv_heads * config.head_size
    q_norm, k_norm = (RMSNorm(*each, config.eps, dtype) for each in zip(widths, (scheme, scheme), layouts, strict=True))
    return q_norm, k_norm


def _no_exchange(config: ModelConfig, context: Context) -> str:
    """That contexts do not exchange heads of which ranks have unlike numbers."""
    num_shards = context.columns(context.scheme.after_linear(context.residual)).size
    fits = [heads for heads in divisors(config.heads) if heads % num_shards == 0]
    return (
        f"kv_heads {config.num_kv_heads} cannot be split evenly over {num_shards} shards of heads (grid "
        f"{describe(context.grid.shape)}), as contexts that exchange heads need (context.kind = "
        f"{context.contexts.options.kind!r}).\n"
        f"  Values of kv_heads that fit heads {config.heads}: {', '.join(map(str, fits)) or 'none'}. "
        'Or context.kind = "gather" or "ring", which leave heads where they are.'
    )


def _stored(heads: Tensor, context: Context) -> Tensor:
    """[b/(XZ), a/Y, s, d] → [b/(XZ), s, h/Y], contiguous in the scheme's order."""
    return context.as_stored(heads.transpose(1, 2).flatten(2))


def new_attention(
    config: ModelConfig, context: Context, name: str, out_std: float, dtype: torch.dtype
) -> SelfAttention | GroupedAttention:
    """Create the attention of the model's family; `name` keys its dropout masks."""
    kind = GroupedAttention if config.grouped else SelfAttention
    return kind(config, context, name, out_std, dtype)
