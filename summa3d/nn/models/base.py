"""What every model shares: its blocks, the checks of a batch, and the loss of a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from math import lcm, prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...autograd.collectives import all_reduce
from ...autograd.recompute import recompute
from ...comm.topology import describe, replica_axes
from ...errors import ConfigError, ShapeError
from ...layout.distribute import collect
from ...layout.layout import Layout
from ..config import ModelConfig
from ..context import Context, check_split
from ..context_parallel.positions import order
from ..layers.attention import AttentionCore
from ..layers.attention_mask import Visible, restarting_positions, visible
from ..layers.dropout import Batch, Dropout
from ..layers.embedding import Embedding, Positions
from ..layers.loss import cross_entropy
from ..layers.norm import new_norm
from ..parameter import ShardedModule, initialise
from .batch_check import check_ids, check_shapes, check_tensors
from .block import Block

Inputs = Mapping[str, Tensor]
"""The tensors of a micro-batch by name, as the family's `forward` takes them: global on the inner grid, equal on its ranks."""


def given(**tensors: Tensor | None) -> Inputs:
    """The tensors that are given, by name."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class Body(ShardedModule, ABC):
    """A stack of blocks on a residual stream, preceded by dropout; a family adds the embedding and the heads.

    A forward is made of cells: `enter` maps a batch to the residual stream, `through` takes the stream through some layers, and
    `leave` maps it to the loss. A pipeline runs them on the stages that hold their parameters; `forward` is their composition.

    Parameters
    ----------
    config : the sizes
    scheme : the context, which says how every tensor is split over the grid
    seed : keys the weights and the dropout masks, which depend on global indices only, so that every grid computes the same
        numbers

    A family's constructor takes (config, scheme, dtype, seed), with the dtype of parameters and activations, and ends with
    `initialise`. Raises LayoutError where the scheme cannot split the sizes, before any communication.
    """

    def __init__(self, config: ModelConfig, scheme: Context, seed: int) -> None:
        super().__init__()
        self.config, self.context, self.seed = config, scheme, seed
        self.recomputed_layers, self.distributed_inputs = 0, False
        if scheme.prefetcher is not None:
            scheme.prefetcher.follow(self)
        layouts = scheme.scheme
        shape, inner = layouts.shape, layouts.after_linear(layouts.residual)
        check_split(scheme.contexts, layouts, config, layouts.residual.num_shards(0, shape) * inner.num_shards(0, shape))

    def add_blocks(self, dtype: torch.dtype) -> None:
        """Create the embedding dropout and the blocks."""
        self.dropout = Dropout(self.config.dropout, "embedding", self.context, self.context.residual)
        config, dense = self.config, self.config.dense_layers
        self.blocks = nn.ModuleList(
            Block(config, self.context.on_layer(index), f"blocks.{index}", dtype, index not in dense)
            for index in range(config.layers)
        )

    def recompute(self, kind: str, layers: int = 1, distributed: bool = False) -> None:
        """Choose which activations backward recomputes instead of keeping.

        Parameters
        ----------
        kind : "none"; "full", which keeps the input of every `layers` blocks, each rank its own shard; "selective", which
            recomputes the attention core alone, from q, k and v: most of the memory for a small part of the arithmetic, and no
            words but those that contexts (axis cp) exchange in it
        layers : the number of blocks of one recomputed stretch (full)
        distributed : whether ranks that hold copies of the input keep a part of it each, and gather it before it is recomputed
        """
        self.recomputed_layers = layers if kind == "full" else 0
        self.distributed_inputs = distributed
        for module in self.modules():
            if isinstance(module, AttentionCore):
                module.recomputed = kind == "selective"
        if self.context.prefetcher is not None:
            self.context.prefetcher.forget()

    @abstractmethod
    def check(self, inputs: Inputs) -> None:
        """Raise an error where the model cannot take a batch: on every rank alike, and before any communication."""

    def batch_of(
        self,
        inputs: Inputs,
        step: int = 0,
        first_row: int = 0,
        count: int | None = None,
        pairs: int | None = None,
        step_rows: int | None = None,
    ) -> Batch:
        """Check a batch and return what its cells need to know of it; the arguments are those of `forward`."""
        self.check(inputs)
        sequence = inputs["tokens"].shape[-1] if "tokens" in inputs else self.config.sequence
        local = self.context.contexts.local(sequence)
        return Batch(len(next(iter(inputs.values()))), local, self.seed, step, first_row, count, pairs, step_rows)

    @abstractmethod
    def enter(self, inputs: Inputs, batch: Batch) -> Tensor:
        """The residual stream before the first layer, this rank's block of [b, s, h] as stored."""

    @abstractmethod
    def leave(self, x: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        """The loss of the residual stream x after the last layer: one number, the same on every rank of the inner grid."""

    def before_layers(self) -> list[Tensor]:
        """The weights that `enter` may use: those of what is made before the layers."""
        return [weight for _, weight in takewhile(lambda item: not item[0].startswith("blocks."), self.named_parameters())]

    def visible(self, inputs: Inputs) -> Visible:
        """Mask of the keys that each query of this rank's sequences may attend to, in every layer."""
        return visible(self.context, self.config.architecture.causal, inputs.get("attention_mask"), inputs.get("documents"))

    def through(self, x: Tensor, first: int, last: int, batch: Batch, visible: Visible) -> Tensor:
        """Run the residual stream x through the layers first … last−1, with recomputation where `recompute` chose it.

        Layers add router losses to the state of the pass (`PassState.add_term`).
        """

        def run(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
            for block in blocks:
                self.context.state.await_weights(block.parameters)
                x = block(x, batch, visible)
            return x

        def stretch(blocks: Iterable[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
            with self.context.state.collecting() as terms:
                x = run(blocks, x)
            return x, *([torch.stack(terms).sum()] if terms else [])

        if self.recomputed_layers:
            for start in range(first, last, self.recomputed_layers):
                blocks = list(islice(self.blocks, start, min(start + self.recomputed_layers, last)))
                kept = self.context.copies if self.distributed_inputs else None
                x, *term = recompute(partial(stretch, blocks), [x], blocks, kept)
                for item in term:
                    self.context.state.add_term(item)
        else:
            x = run(islice(self.blocks, first, last), x)
        if last == len(self.blocks):
            self.context.state.await_weights(self.parameters)  # those of the final norm and the head
        return x

    def encoded(self, inputs: Inputs, batch: Batch) -> Tensor:
        """The residual stream after the last layer."""
        self.context.state.await_weights(self.before_layers)
        return self.through(self.enter(inputs, batch), 0, len(self.blocks), batch, self.visible(inputs))

    def loss_of(self, inputs: Inputs, batch: Batch) -> Tensor:
        """The loss of a batch: all cells, one after the other, and the router losses of training."""
        if self.training and batch.step_rows is None and (self.config.balance_weight or self.config.z_weight):
            self._check_alone("A router loss", "step_rows", "rows")
        with self.context.state.collecting() as terms:
            loss = self.leave(self.encoded(inputs, batch), inputs, batch)
        term = summed_terms(self.context, terms)
        return loss if term is None else loss + term.to(loss.dtype)

    def _drop(self, x: Tensor, batch: Batch) -> Tensor:
        """The embedding dropout of the residual stream x."""
        return self.dropout(x, (batch.sequence, self.config.hidden), batch)

    def check_tokens(self, tokens: Tensor) -> None:
        """Check global tokens [b, s], on every rank alike and before any communication.

        Raises LayoutError where the scheme cannot split b or s, ShapeError for another number of dims or too long sequences,
        DataError for tokens of another dtype than int64 and int32, and outside the vocabulary (on the host only, `check_ids`).
        """
        check_split(self.context.contexts, self.context.scheme, self.config, len(tokens), tokens.shape[-1])
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.sequence:
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}; the model takes [batch, 1 … {self.config.sequence}].")
        check_ids("tokens", tokens, self.config.vocabulary, f"the vocabulary has {self.config.vocabulary}")

    def check_labels(self, labels: Tensor | None) -> None:
        """Raise DataError where a counted label (≥ 0) is outside the vocabulary (checked on the host only, `check_ids`)."""
        check_ids("labels", labels, self.config.vocabulary, f"the vocabulary has {self.config.vocabulary}", ignored=True)

    def whole_logits(self, logits: Tensor, layout: Layout, batch: Batch) -> Tensor:
        """All-gather the global logits [b, s, v] onto every rank, from this rank's block as stored in `layout`."""
        shape, contexts = (batch.rows, batch.sequence, self.config.vocabulary), self.context.contexts
        part = collect(self.context.batch_first(logits), self.context.grid, layout, shape)
        if contexts.size == 1:
            return part
        whole: Tensor = self.context.whole["cp"].all_gather(part.contiguous(), 1)
        return whole.index_select(1, order(contexts, whole.shape[1], whole.device))

    def loss(self, logits: Tensor, labels: Tensor, layout: Layout, classes: int, count: int | None) -> Tensor:
        """The cross entropy of the global batch: one number, the same on every rank.

        Parameters
        ----------
        logits : this rank's block of [b, s, n] or [b, n] in `layout`, n being `classes`
        labels : global [b, s] or [b]; labels < 0 are not counted
        count : the divisor of the sum; default the number of counted labels

        Raises ConfigError without `count` where replicas hold other rows of the step: each counts its own labels alone; and for
        a count that is no number.
        """
        if count is not None and not (hasattr(count, "__float__") and -(2**63) <= count < 2**63):
            raise ConfigError(f"A loss is divided by the number of counted labels; `count` is {count!r}.")
        if count is None:
            self._check_alone("A loss", "count", "counted labels")
        count = max(int((labels >= 0).sum()), 1) if count is None else count
        if labels.dim() == 1:
            grid = self.context.grid
            mine = labels[Layout(layout.dims[0]).slices(labels.shape, grid.shape, grid.coordinates)]
        else:
            mine = self.context.as_stored(self.context.block_of(labels, layout))
        return cross_entropy(logits, mine, self.context, layout, classes, count)

    def _check_alone(self, what: str, argument: str, number: str) -> None:
        """Raise ConfigError where replicas hold other rows of the step: each knows its own number alone."""
        shape = self.context.whole.shape
        replicas = {axis: shape[axis] for axis in replica_axes(shape)}
        if replicas:
            raise ConfigError(
                f"{what} on {prod(replicas.values())} replicas ({describe(replicas)}) needs `{argument}`, the number of {number} "
                "of the whole step."
            )


def summed_terms(context: Context, terms: Sequence[Tensor]) -> Tensor | None:
    """The sum of what layers add to the loss, the same on every rank of the inner grid; None where they add nothing."""
    return all_reduce(torch.stack(list(terms)).sum(), context.rows(context.residual)) if terms else None


class LanguageModel(Body):
    """A decoder that predicts the next token: embedding, learned positions or rotary ones, blocks, final norm, head.

    ``model(tokens, labels)`` takes the *global* batch [b, s] (int64, equal on every rank; each rank uses its rows) and
    returns the global mean loss on every rank. After ``loss.backward()`` each parameter's ``.grad`` is its block of the
    gradient of that loss. Raises LayoutError or ShapeError for a batch that the scheme cannot split or sequences too long;
    DataError for tokens or labels outside the vocabulary, which are checked on the host only.
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__(config, scheme, seed)
        first, last = scheme.on_ends(first=True), scheme.on_ends(last=True)
        self.embedding = Embedding(config.vocabulary, config.hidden, scheme.on_ends(True, config.tied), dtype=dtype)
        rotary = "rotary_base" in config.architecture.options
        self.positions = None if rotary else Positions(config.sequence, config.hidden, first, dtype=dtype)
        self.add_blocks(dtype)
        self.norm = new_norm(config, last, dtype=dtype)
        self.head = None if config.tied else Embedding(config.vocabulary, config.hidden, last, dtype=dtype)
        initialise(self, scheme, seed)

    def output(self) -> Embedding:
        """The table of the head, which maps the residual stream to logits: its own, or the embedding's where the head is tied."""
        return self.embedding if self.head is None else self.head

    def positioned(self, x: Tensor, sequence: int, positions: Tensor | None) -> Tensor:
        """Add the learned positions, if any, to the embedded tokens x.

        positions : global [b, s]; None for 0 … sequence−1
        """
        return x if self.positions is None else self.positions(x, sequence, positions)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        step: int = 0,
        first_row: int = 0,
        count: int | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        step_rows: int | None = None,
    ) -> Tensor:
        """The loss of a micro-batch.

        Parameters
        ----------
        tokens, labels : global [b, s]; labels < 0 are not counted
        step, first_row : the step of the run, and the index of row 0 in the step's whole batch; they key the dropout masks
        count : the number of labels that the loss is divided by; default the counted labels of this micro-batch. With gradient
            accumulation, pass the count of the whole step.
        attention_mask : global [b, s], 0 at padding
        documents : global [b, s] ids of packed documents, runs of equal ids: a token attends to its own document, and learned
            positions restart with each
        step_rows : the rows of the whole step, over which router losses are means; default those of this micro-batch
        """
        check_tensors(tokens=tokens, labels=labels)
        inputs = given(tokens=tokens, labels=labels, attention_mask=attention_mask, documents=documents)
        return self.loss_of(inputs, self.batch_of(inputs, step, first_row, count, step_rows=step_rows))

    def check(self, inputs: Inputs) -> None:
        """Raise LayoutError, ShapeError or DataError for tokens, labels or masks that the model cannot take (`check_tokens`)."""
        check_shapes(**inputs)
        self.check_labels(inputs.get("labels"))
        self.check_tokens(inputs["tokens"])

    def enter(self, inputs: Inputs, batch: Batch) -> Tensor:
        """The embedded tokens with their positions, after dropout, [b/(XY), s, h/Z]."""
        positions = restarting_positions(inputs["documents"]) if "documents" in inputs else None
        x = self.embedding(self.context.block_of(inputs["tokens"], self.embedding.tokens_layout))
        return self._drop(self.positioned(x, batch.sequence, positions), batch)

    def leave(self, x: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        """The loss of the next tokens: final norm, head, and cross entropy."""
        head = self.output()
        rows = self.context.scheme.rows(batch.rows, batch.sequence)
        logits = head.head(self.norm(x), rows=rows)
        return self.loss(logits, inputs["labels"], head.logits_layout, self.config.vocabulary, batch.count)

    @torch.no_grad()
    def logits(self, tokens: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """The global logits [b, s, v] of every position, on every rank. The arguments are those of `forward`."""
        inputs, head = given(tokens=tokens, attention_mask=attention_mask, documents=documents), self.output()
        batch = self.batch_of(inputs)
        rows = self.context.scheme.rows(batch.rows, batch.sequence)
        return self.whole_logits(head.head(self.norm(self.encoded(inputs, batch)), rows=rows), head.logits_layout, batch)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """The global logits [b, v] of the token that follows each row, on every rank. tokens : global [b, s]"""
        inputs = self.padded(tokens)
        batch = self.batch_of(inputs)
        return self.leave_at(self.encoded(inputs, batch), tokens.shape[1] - 1, batch)

    def padded(self, tokens: Tensor) -> Inputs:
        """The batch of global tokens [b, s], which may have any length: causal, padding changes no position before it."""
        contexts = self.context.contexts
        num_shards = contexts.size * self.context.residual.num_shards(1, self.context.scheme.shape)
        return {"tokens": functional.pad(tokens, (0, -tokens.shape[1] % lcm(num_shards, contexts.multiple)))}

    def leave_at(self, x: Tensor, position: int, batch: Batch) -> Tensor:
        """The global logits [b, v] of one position of the residual stream x after the last layer, on every rank of the stage.

        The context that holds the position broadcasts them along cp: b·v words on the others, which compute as many of their own.
        """
        layouts, head, contexts = self.context.scheme, self.output(), self.context.contexts
        owner, place = contexts.owner(position, batch.sequence * contexts.size)
        here = self.context.tokens_at(self.norm(x), place, batch.sequence)
        logits = head.head(here, layouts.pooled, rows=batch.rows)
        shape = (batch.rows, self.config.vocabulary)
        result = collect(logits, self.context.grid, layouts.after_linear(layouts.pooled), shape)
        return result if contexts.size == 1 else self.context.whole["cp"].broadcast(result.contiguous(), owner)
