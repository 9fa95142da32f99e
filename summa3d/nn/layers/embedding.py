"""Vocabulary-parallel token embedding with the tied head, and learned positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...autograd.collectives import all_gather, all_reduce, reduce_scatter, sum_gradient
from ...autograd.differentiable import Product
from ...autograd.matmul import matmul
from ...autograd.prefetch import PrefetchSource
from ...layout.layout import Layout, split_sizes
from ..context import Context
from ..context_parallel.positions import taken
from ..parameter import ShardedModule, ShardedParameter, new_parameter
from ..schemes.scheme import UnevenRows
from .product_cache import ProductCache


class Embedding(ShardedModule):
    """A table [v, h] in the scheme's layout: it embeds tokens, and as the tied head maps the residual stream to logits.

    ``forward(tokens)`` takes this rank's block of the tokens [b, s] in `tokens_layout`, returns its block of the residual stream.
    The table is all-gathered along one axis (the scheme's `lookup`), each rank looks up the part of the vocabulary that it then
    holds, and the found rows are summed over the ranks that hold the other parts. Words forward and backward, mean per rank:
    cuboid [(X−1)vh + (Y−1)bsh]/P; summa (R−1)vh/P; oned 2(P−1)/P·bsh forward and none backward.
    A token outside the vocabulary is embedded as zeros; models check tokens first.
    ``head(x)`` is the product X·Wᵀ (form nt): the residual stream → logits, in `logits_layout`.
    """

    def __init__(
        self, vocabulary: int, hidden: int, scheme: Context, std: float = 0.02, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.vocabulary, self.hidden, self.context = vocabulary, hidden, scheme
        layouts = scheme.scheme
        self.lookup = layouts.lookup
        self.tokens_layout = self.lookup.tokens
        self.logits_layout = layouts.after_linear(layouts.residual)
        self.layout = layouts.table(layouts.residual)
        self.weight = new_parameter(scheme, self.layout, (vocabulary, hidden), ("normal", std), dtype, decay=True)
        grid = scheme.grid
        self.part = Layout(self.lookup.part).slices((vocabulary,), grid.shape, grid.coordinates)[0]
        self._source = ProductCache(self._new_source, None)
        self._product = ProductCache(self._new_product, 8)

    def _weights(self) -> tuple[Tensor]:
        return (self.weight,)

    def _new_source(self, layout: Layout) -> PrefetchSource | None:
        return self.context.prefetch_source(self._weights)

    def _new_product(self, layout: Layout, rows: int | UnevenRows) -> Product:
        return self.context.product(layout, "nt", rows, self.vocabulary, self.hidden, self._source(layout))

    def forward(self, tokens: Tensor) -> Tensor:
        """This rank's block of the residual stream, [b/(XY), s, h/Z] in the cuboid, for its block of tokens [b, s].

        tokens : in `tokens_layout`, which may differ from the residual stream's rows
        """
        tokens = self.context.as_stored(tokens)
        grid, size = self.context.grid, self.part.stop - self.part.start
        gathered = grid[self.lookup.gathered]
        whole = self.context.gathered(self.weight, self.layout, (self.vocabulary, self.hidden))
        weight = sum_gradient(whole, grid[self.lookup.copies])
        table = all_gather(weight, gathered, 0, split_sizes(size, gathered.size))  # [v/part, h/Z]
        here = (tokens >= self.part.start) & (tokens < self.part.stop)
        if size == 0:
            rows = table.sum() * table.new_zeros(*tokens.shape, table.shape[1])
        else:
            rows = functional.embedding((tokens - self.part.start).clamp(0, size - 1), table) * here[..., None]
        part = grid[self.lookup.part]
        if self.tokens_layout == Layout(*self.context.residual.dims[:2]):
            return all_reduce(rows, part)
        return reduce_scatter(rows, part, 0, split_sizes(len(tokens), part.size))

    def head(
        self,
        x: Tensor,
        layout: Layout | None = None,
        bias: ShardedParameter | None = None,
        rows: int | UnevenRows | None = None,
    ) -> Tensor:
        """This rank's block of the logits x·Wᵀ + bias.

        Parameters
        ----------
        x : this rank's block of an activation in `layout`
        layout : default the residual stream's; or the scheme's `pooled`
        bias : a vector over v, or None
        rows : as in `Linear.forward`
        """
        context, layout = self.context, layout or self.context.residual
        rows = x.shape[:-1].numel() * context.rows(layout).size if rows is None else rows
        added = None if bias is None else context.broadcast_vector(bias, context.scheme.after_linear(layout), self.vocabulary)
        return matmul(x, self.weight, self._product(layout, rows), added)


class Positions(ShardedModule):
    """A small table [s, h], such as learned positions, whose rows are added to the residual stream.

    It is split as the residual stream's columns and replicated on the axes that split rows; backward all-reduces its
    gradient over them.
    """

    def __init__(
        self, sequence: int, hidden: int, scheme: Context, std: float = 0.02, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.context, self.rows, self.shape = scheme, scheme.rows(scheme.residual), (sequence, hidden)
        self.layout = Layout((), scheme.residual.dims[-1])
        self.weight = new_parameter(scheme, self.layout, self.shape, ("normal", std), dtype, decay=True)

    def forward(self, x: Tensor, sequence: int, indices: Tensor | None = None) -> Tensor:
        """Add rows of the table to x, this rank's block of the residual stream.

        Parameters
        ----------
        sequence : s of this rank's context; the rows of its positions are added
        indices : the rows to add instead, global [b, s], such as the positions of packed documents or BERT's token types
        """
        context, grid = self.context, self.context.grid
        table = sum_gradient(context.gathered(self.weight, self.layout, self.shape), self.rows)
        if indices is None:
            (mine,) = Layout(context.residual.dims[1]).slices((sequence,), grid.shape, grid.coordinates)
            rows = taken(table, context.contexts.runs_of(mine, sequence * context.contexts.size), 0)
        else:
            rows = functional.embedding(context.block_of(indices, context.residual), table)
        return context.as_stored(context.batch_first(x) + rows)
