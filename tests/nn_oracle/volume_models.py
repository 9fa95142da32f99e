"""Closed forms of the other families: what their steps move beside, or instead of, what a GPT's does."""

from __future__ import annotations

from dataclasses import dataclass

from summa3d.gemm.cost.volume import Cost, block_words
from summa3d.layout.layout import Layout
from summa3d.layout.redistribute import Placement, Redistribution
from summa3d.nn.config import ModelConfig
from summa3d.nn.context import Context

from .volume import NONE, GPTVolume, StepCost


@dataclass(frozen=True)
class LlamaVolume(GPTVolume):
    """No positions and no biases; q and kv, gate and up, are one product each; pieces of kv heads are gathered."""

    def linears(self) -> StepCost:
        """The four products of a block."""
        h, f = self.config.hidden, self.config.ffn_dim
        kv = 2 * self.config.num_kv_heads * h // self.config.heads
        stream, inner = self.scheme.residual, self.scheme.after_linear(self.scheme.residual)
        down = self.scheme.down_form
        sizes = ((stream, h, h + kv, "nn"), (inner, h, h, "nn"), (stream, h, 2 * f, "nn"), (inner, f, h, down))
        return sum((self.linear(*size, bias=False) for size in sizes), StepCost(NONE, NONE))

    def shared_heads(self) -> StepCost:
        """k and v gathered among the ranks that hold pieces of one kv head, and their gradient scattered back."""
        inner = self.scheme.after_linear(self.scheme.residual)
        num_shards = inner.num_shards(-1, self.context.grid.shape)
        share = max(1, num_shards // self.config.num_kv_heads)
        piece = 2 * self.config.num_kv_heads * self.config.hidden // (self.config.heads * num_shards)
        cost = Cost((share - 1) * self._rows(inner) * piece, share - 1)
        return StepCost(cost, cost)

    def block(self) -> StepCost:
        """The linears, the shared kv heads, and two norms."""
        statistics = self._statistics(self.scheme.residual).times(2)
        return self.linears() + self.shared_heads() + statistics + self.joint(self._norm_vectors(2))

    def embedding(self) -> StepCost:
        """Tokens alone."""
        return self.lookup()


@dataclass(frozen=True)
class _Pooling(GPTVolume):
    """The families that read one token of each sequence."""

    def first_tokens(self) -> StepCost:
        """The first position of every sequence, sent by the ranks that hold it where an axis splits s."""
        scheme, (shape, at) = self.scheme, self._grid
        if not scheme.residual.dims[1]:
            return StepCost(NONE, NONE)
        (axis,) = scheme.residual.dims[1]
        whole, size = (self.batch, self.config.hidden), shape[axis]
        own = block_words(scheme.pooled, whole, shape, at)
        held = block_words(Layout(scheme.residual.dims[0], scheme.residual.dims[-1]), whole, shape, at)
        first = at[axis] == 0
        return StepCost(Cost(0 if first else own, size - 1), Cost(held - own if first else 0, size - 1))


@dataclass(frozen=True)
class BERTVolume(_Pooling):
    """Token types and a norm before the blocks; two heads after them."""

    def embedding(self) -> StepCost:
        return self.lookup() + self.small_table(self.config.sequence) + self.small_table(2) + self.norm()

    def relayout(self) -> StepCost:
        """From the layout that one linear leaves to the stream's, and back with the gradient."""
        scheme, shape = self.scheme, (self.batch, self.sequence, self.config.hidden)
        inner, stream = (
            Placement.on(self.context.grid, layout) for layout in (scheme.after_linear(scheme.residual), scheme.residual)
        )
        if inner.layout == stream.layout:
            return StepCost(NONE, NONE)
        plans = (Redistribution(shape, inner, stream), Redistribution(shape, stream, inner))
        return StepCost(
            *(Cost(plan.words_of(self.context.grid.rank), plan.messages_of(self.context.grid.rank)) for plan in plans)
        )

    def after_blocks(self) -> StepCost:
        """Masked tokens: transform, norm, the stream's layout again, the head with its bias. Relations: pooler, classifier."""
        scheme, h = self.scheme, self.config.hidden
        inner, pooled = scheme.after_linear(scheme.residual), scheme.after_linear(scheme.pooled)
        words = self.linear(scheme.residual, h, h) + self.norm(inner) + self.relayout()
        words += self.linear(scheme.residual, h, self.config.vocabulary, "nt") + self.loss(inner)
        relations = self.first_tokens() + self.linear(scheme.pooled, h, h, rows=self.batch)
        relations += self.linear(pooled, h, 2, rows=self.batch) + self.loss(scheme.after_linear(pooled))
        return words + relations


@dataclass(frozen=True)
class ViTVolume(_Pooling):
    """Patches and a class token before the blocks; a classifier after them."""

    def embedding(self) -> StepCost:
        _, patch, channels, _ = self.config.image_sizes
        inner = self.scheme.after_linear(self.scheme.residual)
        patches = self.linear(inner, channels * patch**2, self.config.hidden, need_input=False)
        token = self.vectors(self.scheme.residual, self.config.hidden)
        return patches + token + self.small_table(self.config.sequence)

    def after_blocks(self) -> StepCost:
        pooled, classes = self.scheme.pooled, self.config.image_sizes[3]
        head = self.linear(pooled, self.config.hidden, classes, rows=self.batch)
        return self.norm() + self.first_tokens() + head + self.loss(self.scheme.after_linear(pooled))


VOLUMES: dict[str, type[GPTVolume]] = {"gpt2": GPTVolume, "llama": LlamaVolume, "bert": BERTVolume, "vit": ViTVolume}


def model_volume(config: ModelConfig, context: Context, batch: int, sequence: int) -> GPTVolume:
    """The closed forms of the configuration's family, for the rank of `context.grid`: b rows of s tokens a micro-batch."""
    return VOLUMES[config.family](config, context, batch, sequence)
