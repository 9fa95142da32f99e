# Closed forms: the bytes that one rank holds in a training step, layer by layer, in any scheme. Nothing is run.
# Imports memory_products, memory_peak, schemes, config. tracked.py measures the same, and tests hold one against the other.
# Next: memory_products.py (what a product needs), plan/, which looks for grids that fit.
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ..comm.node import SLOTS
from ..errors import ConfigError
from ..layout.layout import Layout
from .config import ModelConfig
from .memory_peak import Step, peak_of
from .memory_products import Need, largest, product_need
from .overlap import Overlap
from .schemes import Scheme

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
INDEX = 8  # bytes of a token id
MOMENTS = 2  # of AdamW
TYPES = 2  # of tokens (BERT)
FAMILIES = ("gpt2", "llama", "bert")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    parameters : with their 16-bit copies, where there are. gradients : of all parameters. optimizer : AdamW's moments.
    activations : what forward saves for backward. workspace : the most that a single layer holds at once, forward or backward,
    beyond what is saved. in_flight : the most that weights gathered ahead of layers and sums sent behind them hold. peak : the
    most of these at any time of a step; not all are there at that time, so it is below their sum. node : this rank's share of
    the node's memory that its axes communicate through, at most; beside the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    in_flight: int
    peak: int
    node: int


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model on the rank of `scheme.grid`, which may be a `Place`: b rows of s tokens a micro-batch.

    config : of a GPT, a Llama or a BERT, the last with types and relations given and without padding.
    dtype : of activations; 16-bit ones have float32 parameters, gradients and moments beside 16-bit copies of the weights.
    recompute, layers : "none"; "full", every `layers` blocks from their input; "selective", the attention core.
    staged : the axes that communicate through their node's memory, `Grid.staged`; the others go through MPI.
    MPI's own buffers and numpy's (masks while they are drawn) are not counted.
    """

    config: ModelConfig
    scheme: Scheme
    batch: int
    sequence: int
    dtype: str = "float32"
    recompute: str = "none"
    layers: int = 1
    staged: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.config.family not in FAMILIES:
            raise ConfigError(f"The memory of {self.config.family} has no closed form here. Families: {', '.join(FAMILIES)}.")

    # -- sizes of this rank's blocks, in bytes -----------------------------------------------------------------------------

    @property
    def word(self) -> int:
        return BYTES[self.dtype]

    @property
    def master(self) -> int:
        """Bytes of a parameter's element."""
        return max(self.word, BYTES["float32"])

    def block(self, layout: Layout, *shape: int) -> int:
        """Elements of this rank's block."""
        return prod(layout.local_shape(shape, self.scheme.grid.shape, self.scheme.grid.coordinates))

    def activation(self, layout: Layout, n: int) -> int:
        """An activation [b, s, n]."""
        return self.word * self.block(layout, self.batch, self.sequence, n)

    def rows(self, layout: Layout) -> int:
        """Rows (b, s) of an activation, a count."""
        return self.block(Layout(*layout.dims[:2]), self.batch, self.sequence)

    @cached_property
    def stream(self) -> int:
        return self.activation(self.scheme.stream, self.config.hidden)

    @cached_property
    def inner(self) -> Layout:
        return self.scheme.after_linear(self.scheme.stream)

    # -- layers ------------------------------------------------------------------------------------------------------------

    def product(self, layout: Layout, form: str, k: int, n: int, rows: int = 0) -> Need:
        plan = self.scheme.plan(layout, form, rows or self.batch * self.sequence, n, k)
        return product_need(plan, self.scheme, self.word, self.staged)

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
        form : nt where its block of the weight is transposed for the product, and for dX's.
        """
        need = self.product(layout, form, k, n, rows)
        turned = need.b if form == "nt" else 0
        vector = self.block(self.scheme.vector(self.scheme.after_linear(layout)), n) if bias else 0
        weight = need.b if copied else 0
        saved = need.kept_a + need.kept_b
        saved += (weight if need.kept_b == 0 else 0) - (need.a if seen and need.kept_a == need.a else 0)
        held = self.master * (need.b // self.word + vector)
        copies = weight if need.gathers else 0  # one is made for the product as well
        forward, backward = need.forward + weight + turned, need.backward + turned
        return Step(saved, forward, backward, held, gathers=need.gathers, copies=copies, sends=need.sends)

    def norm(self, layout: Layout | None = None) -> Step:
        """x and, a row, mean and 1/σ (RMSNorm: 1/σ); of the stream, or of what lies as `layout` says."""
        layout = layout or self.scheme.stream
        s, layer = self.activation(layout, self.config.hidden), self.config.traits.norm == "layer"
        statistics = (2 if layer else 1) * self.rows(layout) * self.word
        vectors = (2 if layer else 1) * self.block(self.scheme.vector(layout), self.config.hidden)
        forward, backward = (3, 5) if layer else (2, 4)
        if layer and self.scheme.columns(layout).size == 1 and self.word > 2:  # torch's own layer norm
            forward, backward = 1, 2
        return Step(s + statistics, forward * s, backward * s, self.master * vectors)

    def residual(self) -> Step:
        """The sum, after dropout whose mask is a byte an element."""
        mask = self.stream // self.word if self.config.dropout else 0
        return Step(mask, 2 * self.stream + (self.stream + mask if self.config.dropout else 0), 2 * self.stream + mask)

    def activation_function(self) -> Step:
        """GELU keeps its input. SwiGLU: gate and up side by side."""
        f = self.activation(self.inner, self.config.width)
        return Step(2 * f, 3 * f, 3 * f) if self.config.traits.activation == "swiglu" else Step(f, 2 * f, 2 * f)

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
        """What the unfused core keeps: q (in qkv, where its rows can be seen as one dim), k, v, softmax, dropped, two masks."""
        plain = not self.grouped and (self.scheme.kind.sequence_first or 1 in self._sequences_and_heads)
        tables = self._tables if self.grouped else 0
        return (5 if plain else 3) * context + 2 * scores * self.word + scores + self.sequence**2 + tables

    @property
    def _sequences_and_heads(self) -> tuple[int, int]:
        """How many of each this rank's attention has."""
        return self.block(Layout(self.inner.dims[0]), self.batch), self.block(Layout(self.inner.dims[-1]), self.config.heads)

    def joined_columns(self) -> int:
        """q and kv as one product leaves them."""
        config = self.config
        return self.activation(self.inner, config.hidden) + self.activation(self.inner, 2 * config.groups * self._size)

    def _turned(self, context: int) -> int:
        """Turned q and k with their tables, and v where it lies: in the product's output, or gathered where ranks share heads."""
        ways = self.scheme.columns(self.inner).size
        kv = self.rows(self.inner) * self._size * max(1, self.config.groups // ways) * self.word
        return context + kv + (self.joined_columns() if self.config.groups >= ways else 2 * kv) + self._tables

    @property
    def _tables(self) -> int:
        """Cosines and sines of one layer's rotary positions."""
        return self.sequence * self._size * self.word

    @property
    def _qkv_columns(self) -> int:
        return self.config.hidden + 2 * self.config.groups * self._size

    @property
    def _size(self) -> int:
        return self.config.hidden // self.config.heads

    @property
    def grouped(self) -> bool:
        """Whether attention has rotary positions and may have fewer heads of k and v."""
        return "rotary_base" in self.config.traits.options

    def context_seen(self) -> bool:
        """Whether the context that the output linear takes is the tensor that attention saved, and no copy in stored order."""
        sequences, heads = self._sequences_and_heads
        in_order = heads == 1 and (sequences == 1 or not self.scheme.kind.sequence_first) if self.grouped else True
        return in_order and not self.config.attention_dropout and self.recompute != "selective"

    def attention(self) -> list[Step]:
        config, grouped = self.config, self.grouped
        enter = self.linear(self.scheme.stream, config.hidden, self._qkv_columns, bias=not grouped, copied=grouped)
        leave = self.linear(self.inner, config.hidden, config.hidden, bias=not grouped, seen=self.context_seen())
        return [enter, self.attention_core(), leave]

    def mlp(self) -> list[Step]:
        config, gated = self.config, self.config.traits.activation == "swiglu"
        columns = 2 * config.width if gated else config.width
        up = self.linear(self.scheme.stream, config.hidden, columns, bias=not gated, copied=gated)
        down = self.linear(self.inner, config.width, config.hidden, bias=not gated, form=self.scheme.down_form)
        return [up, self.activation_function(), down]

    def transformer_block(self) -> list[Step]:
        """Norms and branches. The stream's gradient waits beside each branch; the last linear's is that tensor, undropped."""
        steps, after = [], self.config.traits.post_norm
        for branch in (self.attention(), self.mlp()):
            inside = branch if after else [self.norm(), *branch]
            waiting = [self.stream] * (len(inside) - 1) + [self.stream if self.config.dropout else 0]
            steps += [replace(step, carried=size) for step, size in zip(inside, waiting, strict=True)]
            steps += [self.residual(), self.norm()] if after else [self.residual()]
        return steps

    def embedding(self) -> list[Step]:
        """The lookup: an index and a byte a token, and the gathered table; positions, where the family has them."""
        config, scheme = self.config, self.scheme
        lookup = scheme.lookup
        tokens = self.block(lookup.tokens, self.batch, self.sequence)
        table = scheme.table(scheme.stream)
        shard = self.word * self.block(table, config.vocabulary, config.hidden)
        part = self.word * self.block(Layout(lookup.part, table.dims[1]), config.vocabulary, config.hidden)
        found = tokens * self.stream // max(self.rows(scheme.stream), 1)
        summed = 2 * found if scheme.grid[lookup.part].size > 1 else 0
        gathered = part if scheme.grid[lookup.gathered].size > 1 else 0
        gradients = self.master * (shard // self.word) * (not config.tied)
        saved = tokens * (INDEX + 1)
        steps = [Step(saved, saved + gathered + 2 * found + summed, 2 * found + summed + 2 * part, gradients)]
        bert = config.family == "bert"
        if bert or config.family == "gpt2":
            position = self.master * self.block(scheme.vector(scheme.stream), config.hidden)
            positions = position * config.sequence
            steps.append(Step(0, 2 * self.stream, 2 * self.stream + positions, positions))
        if bert:
            steps += [Step(0, 3 * self.stream, 2 * self.stream, position * TYPES), self.norm()]
        if config.dropout:
            steps.append(self.residual())
        return steps

    def head(self) -> list[Step]:
        """The final norm (BERT: a transform), the head, and the loss, which keeps the softmax and a number a row."""
        config, bert = self.config, self.config.family == "bert"
        need = self.product(self.scheme.stream, "nt", config.hidden, config.vocabulary)
        logits, rows = self.activation(self.inner, config.vocabulary), self.rows(self.inner)
        labels = INDEX * rows if self.scheme.kind.sequence_first else 0
        bias = self.block(self.scheme.vector(self.inner), config.vocabulary) if bert else 0
        return [
            *(self._transform() if bert else [self.norm()]),
            Step(
                need.kept_a + need.kept_b,
                need.forward,
                need.backward,
                self.master * (need.b // self.word + bias),
                gathers=need.gathers,
                sends=need.sends,
            ),
            Step(logits + rows * self.word + labels, 2 * logits, logits),
        ]

    def _transform(self) -> list[Step]:
        """BERT's transform with GELU and norm, back to the stream's layout; and for each sequence, pooler and relation."""
        h, scheme = self.config.hidden, self.scheme
        inner = self.activation(self.inner, h)
        pooled = scheme.after_linear(scheme.pooled)
        sequences = self.block(Layout(pooled.dims[0]), self.batch)
        relations = sequences * (self.block(Layout(scheme.after_linear(pooled).dims[-1]), 2) + 1) * self.word
        return [
            self.linear(scheme.stream, h, h),
            Step(inner, 2 * inner, 2 * inner),
            self.norm(self.inner),
            self.linear(scheme.pooled, h, h, rows=self.batch),
            self.linear(pooled, h, 2, rows=self.batch),
            Step(relations, 2 * relations, relations),
        ]

    # -- the step ----------------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Every layer in the order of forward; blocks that are computed again as one."""
        blocks: list[Step] = []
        run = max(1, self.layers) if self.recompute == "full" else 1
        for first in range(0, self.config.layers, run):
            count = min(run, self.config.layers - first)
            group = self.transformer_block() * count
            blocks += [self._again(group)] if self.recompute == "full" else group
        return [*self.embedding(), *blocks, *self.head()]

    def _again(self, group: list[Step]) -> Step:
        """Blocks of which only the input is kept: backward runs them forward first."""
        gradients = sum(step.gradients for step in group)
        return Step(self.stream, 0, self.stream, gradients, inside=tuple(group))

    @property
    def saved(self) -> int:
        """What forward saves for backward, parameters and the caller's batch excluded."""
        return sum(step.saved for step in self.steps())

    def memory(self, accumulate: int = 1, training: bool = True) -> Memory:
        """The terms and the peak of a step of `accumulate` micro-batches; not training: of a forward and backward alone."""
        steps = self.steps()
        gradients = sum(step.gradients for step in steps)
        elements = gradients // self.master
        parameters = elements * (self.master + (self.word if self.word < self.master else 0))
        optimizer = MOMENTS * gradients if training else 0
        workspace = max(map(_alone, steps)) + self.kept_workspace
        most = peak_of(steps, gradients if accumulate > 1 else 0, self.overlap, self.scheme.regather)
        peak = parameters + optimizer + most.held + self.kept_workspace
        return Memory(parameters, gradients, optimizer, self.saved, workspace, most.in_flight, peak, self.node)

    @property
    def overlap(self) -> Overlap:
        """The scheme's. The next weight of those gathered ahead is still in its slot, where the node has slots."""
        overlap = self.scheme.overlap
        return replace(overlap, gather=max(0, overlap.gather - 1)) if "x" in self.staged else overlap

    @property
    def kept_workspace(self) -> int:
        """Buffers that the 2-D products share and keep from one call to the next."""
        return sum(largest(need.rooms for need in self._products()).values())

    @property
    def node(self) -> int:
        """Every axis has its slots, each as large as what the largest communication lays there."""
        return SLOTS * sum(largest(need.shares for need in self._products()).values())

    def _products(self) -> list[Need]:
        config, stream, inner = self.config, self.scheme.stream, self.inner
        gated = config.traits.activation == "swiglu"
        linears = (
            (stream, "nn", config.hidden, self._qkv_columns),
            (inner, "nn", config.hidden, config.hidden),
            (stream, "nn", config.hidden, config.width * (1 + gated)),
            (inner, self.scheme.down_form, config.width, config.hidden),
            (stream, "nt", config.hidden, config.vocabulary),
        )
        return [self.product(*linear) for linear in linears]


def _alone(step: Step) -> int:
    """What a layer, or a stretch that is computed again, holds at most by itself."""
    return step.backward + peak_of(step.inside).held if step.inside else max(step.forward, step.backward)
