"""BERT: a bidirectional encoder with token types and its two training losses, on any scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from ...autograd.relayout import relayout
from ...errors import ShapeError
from ...layout.distribute import collect
from ..config import ModelConfig
from ..context import Context
from ..layers.attention_mask import restarting_positions
from ..layers.bias_fusion import bias_activation
from ..layers.dropout import Batch
from ..layers.embedding import Embedding, Positions
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ..parameter import initialise, new_parameter
from .base import Body, Inputs, given
from .batch_check import check_ids, check_shapes

TYPES = 2
"""The number of token types: tokens of the first sentence, and tokens of the second."""


class BERT(Body):
    """An encoder with post-norm blocks, trained on masked tokens and next-sentence prediction.

    ``model(tokens, labels, types=…, relation=…)`` takes the *global* batch and returns, on every rank, the mean loss over the
    labelled tokens plus the mean loss over the sequences with a relation. The masked-token head is a linear layer (h→h), GELU,
    a norm, and the embedding's table with a bias over v. After its one linear layer the activation is redistributed to the
    residual stream's layout: b·s·h/P words per rank, less those that stay in place. The pooler reads the first token of each
    sequence.
    Raises LayoutError or ShapeError for a batch that the scheme cannot split or tensors of shapes that do not match; DataError
    for tokens, types or labels out of range, which are checked on the host only.
    """

    def __init__(self, config: ModelConfig, scheme: Context, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__(config, scheme, seed)
        h, v, eps = config.hidden, config.vocabulary, config.eps
        first, last = scheme.on_ends(first=True), scheme.on_ends(last=True)
        self.embedding = Embedding(v, h, scheme.on_ends(True, True), dtype=dtype)
        self.positions = Positions(config.sequence, h, first, dtype=dtype)
        self.token_types = Positions(TYPES, h, first, dtype=dtype)
        self.embedding_norm = LayerNorm(h, first, eps=eps, dtype=dtype)
        self.add_blocks(dtype)
        self.pooler = Linear(h, h, last, scheme.scheme.pooled, dtype=dtype)
        self.relation = Linear(h, 2, last, self.pooler.output_layout, dtype=dtype)
        self.transform = Linear(h, h, last, dtype=dtype)
        self.transform_norm = LayerNorm(h, last, self.transform.output_layout, eps, dtype)
        bias = scheme.scheme.vector(self.embedding.logits_layout)
        self.head_bias = new_parameter(last, bias, (v,), ("constant", 0.0), dtype, decay=False)
        initialise(self, scheme, seed)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        step: int = 0,
        first_row: int = 0,
        count: int | None = None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        relation: Tensor | None = None,
        pairs: int | None = None,
    ) -> Tensor:
        """The loss of a micro-batch.

        Parameters
        ----------
        tokens, labels : global [b, s]; labels are the true tokens where they are masked, < 0 elsewhere
        step, first_row : the step of the run, and the index of row 0 in the step's whole batch; they key the dropout masks
        count, pairs : the divisors of the two sums; default the counted labels and relations of this micro-batch. With
            gradient accumulation, pass those of the whole step.
        types : global [b, s], 0 or 1; default 0
        attention_mask : global [b, s], 0 at padding
        documents : global [b, s] ids of packed documents, runs of equal ids: a token attends to its own document, and
            positions restart with each
        relation : global [b], 0 where the second sentence follows the first, 1 where it does not, < 0 where it is not counted;
            None: no second loss
        """
        masks = given(attention_mask=attention_mask, documents=documents)
        inputs = {**given(tokens=tokens, labels=labels, types=types, relation=relation), **masks}
        return self.loss_of(inputs, self.batch_of(inputs, step, first_row, count, pairs))

    def check(self, inputs: Inputs) -> None:
        """Raise LayoutError, ShapeError or DataError for tensors that the model cannot take (`check_tokens`)."""
        tokens, relation = inputs["tokens"], inputs.get("relation")
        check_shapes(**{name: tensor for name, tensor in inputs.items() if name != "relation"})
        if relation is not None and relation.shape != tokens.shape[:1]:
            raise ShapeError(f"relation has shape {tuple(relation.shape)}; {len(tokens)} rows need shape ({len(tokens)},).")
        self.check_labels(inputs.get("labels"))
        check_ids("relation", relation, 2, "there are 2 classes", ignored=True)
        self.check_tokens(tokens)
        check_ids("types", inputs.get("types"), TYPES, f"there are {TYPES}")

    def enter(self, inputs: Inputs, batch: Batch) -> Tensor:
        """The embedded tokens with their positions and types, after norm and dropout, [b/(XY), s, h/Z]."""
        tokens = inputs["tokens"]
        positions = restarting_positions(inputs["documents"]) if "documents" in inputs else None
        x = self.embedding(self.context.block_of(tokens, self.embedding.tokens_layout))
        x = self.positions(x, batch.sequence, positions)
        x = self.token_types(x, batch.sequence, inputs["types"] if "types" in inputs else torch.zeros_like(tokens))
        return self._drop(self.embedding_norm(x), batch)

    def leave(self, x: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        """The loss of the masked tokens, plus that of the relations, if there are any."""
        logits = self._token_logits(x, batch)
        loss = self.loss(logits, inputs["labels"], self.embedding.logits_layout, self.config.vocabulary, batch.count)
        if "relation" not in inputs:
            return loss
        return loss + self.loss(self._relation_logits(x, batch), inputs["relation"], self.relation.output_layout, 2, batch.pairs)

    @torch.no_grad()
    def logits(self, tokens: Tensor, types: Tensor | None = None, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The global logits of every token [b, s, v] and of every sequence's relation [b, 2], on every rank."""
        inputs = given(tokens=tokens, types=types, attention_mask=attention_mask)
        batch = self.batch_of(inputs)
        x = self.encoded(inputs, batch)
        relation = collect(self._relation_logits(x, batch), self.context.grid, self.relation.output_layout, (len(tokens), 2))
        return self.whole_logits(self._token_logits(x, batch), self.embedding.logits_layout, batch), relation

    def _token_logits(self, x: Tensor, batch: Batch) -> Tensor:
        """[b/(XY), s, h/Z] → [b/(XZ), s, v/Y]."""
        context, inner = self.context, self.transform.output_layout
        rows = context.scheme.rows(batch.rows, batch.sequence)
        x = self.transform_norm(bias_activation(*self.transform(x, rows, skip_bias_add=True), form="gelu"))
        shape = (batch.rows, batch.sequence, self.config.hidden)
        x = context.as_stored(relayout(context.batch_first(x), shape, context.grid, inner, context.residual))
        return self.embedding.head(x, bias=self.head_bias, rows=rows)

    def _relation_logits(self, x: Tensor, batch: Batch) -> Tensor:
        """[b/(XY), s, h/Z] → this rank's block of [b, 2]."""
        pooled = torch.tanh(self.pooler(self.context.tokens_at(x), batch.rows))
        return self.relation(pooled, batch.rows)
