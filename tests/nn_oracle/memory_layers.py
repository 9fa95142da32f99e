"""Closed forms: the bytes that one rank's layers hold, one by one, in any scheme.

Nothing is run. tracked.py measures the same, and tests hold one against the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from summa3d.layout.layout import Layout
from summa3d.nn.config import ModelConfig
from summa3d.nn.context import Context
from summa3d.nn.schemes.scheme import Scheme

from .memory_peak import Step
from .memory_products import Need, product_need

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class LayerMemory:
    """What layers hold on the rank of `context.grid`, which may be a `Place`: b rows of s tokens a micro-batch.

    config : a BERT has types and relations given; none has padding. A vit's images are in the model's dtype.
    dtype : of activations; 16-bit ones have float32 parameters, gradients and moments beside 16-bit copies of the weights.
    recompute, layers : "none"; "full", every `layers` blocks from their input; "selective", the attention core.
    staged : the axes that communicate through their node's memory, `Grid.staged`; the others go through MPI.
    device : on a CUDA device, by NCCL and the fused kernels, which draw masks twice and keep none.
    MPI's own buffers and numpy's (masks while they are drawn) are not counted.
    """

    config: ModelConfig
    context: Context
    batch: int
    sequence: int
    dtype: str = "float32"
    recompute: str = "none"
    layers: int = 1
    staged: Collection[str] = ()
    device: bool = False

    # -- sizes of this rank's blocks, in bytes -----------------------------------------------------------------------------

    @property
    def scheme(self) -> Scheme:
        return self.context.scheme

    @property
    def word(self) -> int:
        return BYTES[self.dtype]

    @property
    def master(self) -> int:
        """Bytes of a parameter's element."""
        return max(self.word, BYTES["float32"])

    @property
    def statistic(self) -> int:
        """Bytes of a number that a norm keeps for a row: a kernel on a device keeps 32 bits of 16-bit rows."""
        return self.master if self.device else self.word

    def block(self, layout: Layout, *shape: int) -> int:
        """Elements of this rank's block."""
        return prod(layout.local_shape(shape, self.context.grid.shape, self.context.grid.coordinates))

    def activation(self, layout: Layout, n: int) -> int:
        """An activation [b, s, n]."""
        return self.word * self.block(layout, self.batch, self.sequence, n)

    def vector(self, layout: Layout, n: int) -> int:
        """A vector of n along the last dim of an activation in `layout`, as it is stored."""
        return self.master * self.block(self.scheme.vector(layout), n)

    def spread(self, layout: Layout, n: int) -> int:
        """That vector as a layer uses it, where it is a copy of what its host or the diagonal stores."""
        own, columns, shape = self.scheme.vector(layout), layout.dims[-1], self.context.grid.shape
        num_shards = prod(shape[axis] for axis in (*own.root_only, *own.dims[0][len(columns) :]))
        return self.word * self.block(Layout(columns), n) if num_shards > 1 else 0

    def rows(self, layout: Layout) -> int:
        """Rows (b, s) of an activation, a count."""
        return self.block(Layout(*layout.dims[:2]), self.batch, self.sequence)

    @cached_property
    def stream(self) -> int:
        return self.activation(self.scheme.residual, self.config.hidden)

    @cached_property
    def inner(self) -> Layout:
        return self.scheme.after_linear(self.scheme.residual)

    # -- layers ------------------------------------------------------------------------------------------------------------

    def product(self, layout: Layout, form: str, k: int, n: int, rows: int = 0) -> Need:
        plan = self.scheme.plan(layout, form, rows or self.batch * self.sequence, n, k)
        return product_need(plan, self.context, self.word, self.staged, self.device)

    def linear(
        self,
        layout: Layout,
        k: int,
        n: int,
        bias: bool = True,
        seen: bool = False,
        copied: bool = False,
        rows: int = 0,
        form: str = "nn",
    ) -> Step:
        """A linear of `rows` rows, or of all tokens.

        seen : its input is saved by the layer before as well. copied : its weight is a copy made for this product.
        form : nt where its block of the weight is transposed for the product, and for dX's, where dW is not there yet.
        """
        need = self.product(layout, form, k, n, rows)
        turned = need.b if form == "nt" else 0
        output = self.scheme.after_linear(layout)
        weight = need.b if copied else 0
        saved = need.kept_a + need.kept_b
        saved += (weight if need.kept_b == 0 else 0) - (need.a if seen and need.kept_a == need.a else 0)
        held = self.master * (need.b // self.word) + (self.vector(output, n) if bias else 0)
        forward = need.forward + weight + turned + (self.spread(output, n) if bias else 0)
        return Step(saved, forward, need.backward, held, gathers=need.gathers, copies=weight)

    def norm(self, layout: Layout | None = None, seen: bool = False) -> Step:
        """x, unless it is `seen`, and, a row, mean and 1/σ (RMSNorm: 1/σ); of the stream, or of what lies as `layout` says."""
        layout, n = layout or self.scheme.residual, self.config.hidden
        s, layer = self.activation(layout, n), self.config.architecture.norm == "layer"
        statistics = (2 if layer else 1) * self.rows(layout) * self.statistic
        gamma = self.spread(layout, n)
        vectors = 2 if layer else 1
        forward, backward = (3, 5) if layer else (2, 4)
        if self.device or (layer and self.context.columns(layout).size == 1 and self.word > 2):  # one kernel, or torch's own
            forward, backward = 1 if seen else 2, 2
        saved = (0 if seen else s) + statistics + gamma
        return Step(saved, forward * s + vectors * gamma, backward * s, vectors * self.vector(layout, n))

    def residual(self) -> Step:
        """The sum, after dropout whose mask is a byte an element; on a device both in one, and no mask."""
        if self.device or not self.config.dropout:
            return Step(0, 2 * self.stream, 2 * self.stream)
        mask = self.stream // self.word
        return Step(mask, 3 * self.stream + mask, 2 * self.stream + mask)

    def activation_function(self) -> Step:
        """GELU keeps its input. SwiGLU: gate and up side by side."""
        f = self.activation(self.inner, self.config.ffn_dim)
        return Step(2 * f, 3 * f, 3 * f) if self.config.architecture.activation == "swiglu" else Step(f, 2 * f, 2 * f)

    def attention_core(self) -> Step:
        """Fused: q, k, v, the context and a log-sum a query. Unfused: q, k, v, the scores before and after dropout, two masks.

        Grouped heads have turned q and k, and the tables that turn them. Computed again: q, k and v alone.
        """
        config, inner = self.config, self.inner
        context = self.activation(inner, config.hidden)
        queries = self.block(Layout(inner.dims[0], inner.dims[-1], ()), self.batch, config.heads, self.sequence)
        qkv = self.joined_columns() if self.grouped else 3 * context
        kept = self._turned(context) if self.grouped else qkv
        made = context + (kept if self.grouped else 0)
        if self.recompute == "selective":
            inside = self._unfused(context, queries * self.sequence) if config.attention_dropout else 2 * context
            return Step(kept, qkv + made, kept + inside + context)
        if config.attention_dropout:
            scores = queries * self.sequence
            saved = self._unfused(context, scores)
            return Step(saved, saved + qkv + 2 * scores * self.word, 3 * scores * self.word + qkv)
        sums = queries * max(self.word, BYTES["float32"])
        return Step(kept + context + sums, qkv + made + sums, kept + max(qkv, context))

    def _unfused(self, context: int, scores: int) -> int:
        """Kept by the unfused core: q (in qkv, where its rows can be seen as one dim), k, v, softmax, dropped, two masks."""
        plain = not self.grouped and (self.scheme.spec.sequence_first or 1 in self._sequences_and_heads)
        tables = self._tables if self.grouped else 0
        masks = scores * (not self.device) + self.sequence**2 * self.config.architecture.causal
        return (5 if plain else 3) * context + 2 * scores * self.word + masks + tables

    @property
    def _sequences_and_heads(self) -> tuple[int, int]:
        """Return how many of each this rank's attention has."""
        return self.block(Layout(self.inner.dims[0]), self.batch), self.block(Layout(self.inner.dims[-1]), self.config.heads)

    def joined_columns(self) -> int:
        """q and kv as one product leaves them."""
        config = self.config
        return self.activation(self.inner, config.hidden) + self.activation(self.inner, 2 * config.num_kv_heads * self._size)

    def _turned(self, context: int) -> int:
        """Turned q and k with their tables, and v where it lies: in the product's output, or gathered where ranks share heads."""
        num_shards = self.context.columns(self.inner).size
        kv = self.rows(self.inner) * self._size * max(1, self.config.num_kv_heads // num_shards) * self.word
        return context + kv + (self.joined_columns() if self.config.num_kv_heads >= num_shards else 2 * kv) + self._tables

    @property
    def _tables(self) -> int:
        """Cosines and sines of one layer's rotary positions."""
        return self.sequence * self._size * self.word

    @property
    def qkv_columns(self) -> int:
        """Of q, k and v together."""
        return self.config.hidden + 2 * self.config.num_kv_heads * self._size

    @property
    def _size(self) -> int:
        return self.config.hidden // self.config.heads

    @property
    def grouped(self) -> bool:
        """Return whether attention has rotary positions and may have fewer heads of k and v."""
        return "rotary_base" in self.config.architecture.options

    def context_seen(self) -> bool:
        """True if the context that the output linear takes is the tensor that attention saved, and no copy in stored order."""
        sequences, heads = self._sequences_and_heads
        in_order = heads == 1 and (sequences == 1 or not self.scheme.spec.sequence_first) if self.grouped else True
        return in_order and not self.config.attention_dropout and self.recompute != "selective"

    def attention(self, seen: bool = False) -> list[Step]:
        """seen : its input is kept by who is before it as well."""
        config, grouped, stream = self.config, self.grouped, self.scheme.residual
        enter = self.linear(stream, config.hidden, self.qkv_columns, bias=not grouped, seen=seen, copied=grouped)
        leave = self.linear(self.inner, config.hidden, config.hidden, bias=not grouped, seen=self.context_seen())
        return [enter, self.attention_core(), leave]

    def mlp(self) -> list[Step]:
        config, gated = self.config, self.config.architecture.activation == "swiglu"
        columns = 2 * config.ffn_dim if gated else config.ffn_dim
        up = self.linear(self.scheme.residual, config.hidden, columns, bias=not gated, copied=gated)
        down = self.linear(self.inner, config.ffn_dim, config.hidden, bias=not gated, form=self.scheme.down_form)
        return [up, self.activation_function(), down]

    def transformer_block(self, seen: bool = False) -> list[Step]:
        """Norms and branches. The stream's gradient waits beside each branch; the last linear's is that tensor, undropped.

        seen : the block's input is kept anyway.
        """
        steps: list[Step] = []
        after = self.config.architecture.post_norm
        for branch in (self.attention(seen and after), self.mlp()):
            inside = branch if after else [self.norm(seen=seen and not steps), *branch]
            waiting = [self.stream] * (len(inside) - 1) + [self.stream if self.config.dropout else 0]
            steps += [replace(step, carried=size) for step, size in zip(inside, waiting, strict=True)]
            steps += [self.residual(), self.norm()] if after else [self.residual()]
        return steps

    def stretch(self, count: int) -> Step:
        """`count` blocks of which only the input is kept: backward runs them forward first, beside the gradient of their output.

        That gradient stays until the stretch has been differentiated. The layers up to the last branch count it as theirs.
        """
        inside = self.transformer_block(seen=True)
        for _ in range(count - 1):
            inside += self.transformer_block()
        own = 1 if self.config.architecture.post_norm else len(self.mlp()) + 2
        waiting = [self.stream] * (len(inside) - own) + [0] * own
        inside = [replace(step, carried=step.carried + size) for step, size in zip(inside, waiting, strict=True)]
        gradients = sum(step.gradients for step in inside)
        return Step(self.stream, 0, self.stream, gradients, inside=tuple(inside))
