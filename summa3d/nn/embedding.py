# Vocabulary-parallel token embedding, the tied head, and learned positions. Imports scheme, parameter, autograd.
# Next: gpt.py.
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..autograd.collectives import all_gather, reduce_scatter, sum_gradient
from ..autograd.matmul import Product, matmul
from ..layout.layout import Layout, split_sizes
from .parameter import new_parameter
from .scheme import Scheme


class Embedding(nn.Module):
    """A table [v, h] in layout v:(y,x) h:z: tokens → rows of the stream, and as the tied head, stream → logits.

    ``forward(tokens)`` takes the tokens of this rank's coarse rows ([b/X, s], the same on all y and z) and returns
    [b/(XY), s, h/Z]: the table is gathered along x, each y looks up the part of the vocabulary it holds, and the sum over y
    is scattered along b. Words [(X−1)vh + (Y−1)bsh]/P forward and backward.
    ``head(x)`` is the NT product X·Wᵀ: [b/(XY), s, h/Z] → logits [b/(XZ), s, v/Y].
    """

    def __init__(
        self, vocabulary: int, hidden: int, scheme: Scheme, std: float = 0.02, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.vocabulary, self.hidden, self.scheme = vocabulary, hidden, scheme
        x, y, _ = scheme.roles(scheme.stream)
        self.x, self.y = scheme.grid[x], scheme.grid[y]
        self.tokens_layout = Layout((x,), ())
        self.logits_layout = scheme.after_linear(scheme.stream)
        layout = scheme.table(scheme.stream)
        self.weight = new_parameter(scheme, layout, (vocabulary, hidden), ("normal", std), dtype, decay=True)
        self.part = Layout((y,)).slices((vocabulary,), scheme.grid.shape, scheme.grid.coordinates)[0]
        self._product = lru_cache(maxsize=8)(self._new_product)

    def _new_product(self, layout: Layout, rows: int) -> Product:
        return self.scheme.product(layout, "nt", rows, self.vocabulary, self.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        size = self.part.stop - self.part.start
        table = all_gather(self.weight, self.x, 0, split_sizes(size, self.x.size))  # [v/Y, h/Z]
        here = (tokens >= self.part.start) & (tokens < self.part.stop)
        if size == 0:
            rows = table.sum() * table.new_zeros(*tokens.shape, table.shape[1])
        else:
            rows = functional.embedding((tokens - self.part.start).clamp(0, size - 1), table) * here[..., None]
        return reduce_scatter(rows, self.y, 0, split_sizes(len(tokens), self.y.size))  # [b/(XY), s, h/Z]

    def head(self, x: Tensor, layout: Layout | None = None, bias: Tensor | None = None) -> Tensor:
        """Logits by the same table, of x in `layout` (default: the stream; or the scheme's `pooled`), and a bias over v."""
        layout = layout or self.scheme.stream
        rows = x.shape[:-1].numel() * self.scheme.rows(layout).size
        return matmul(x, self.weight, self._product(layout, rows), bias)


class Positions(nn.Module):
    """A small table [s, h], such as learned positions, added to the stream: h:z.

    It is equal on the axes that split rows, over which its gradient is summed.
    """

    def __init__(self, sequence: int, hidden: int, scheme: Scheme, std: float = 0.02, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scheme, self.rows = scheme, scheme.rows(scheme.stream)
        layout = Layout((), scheme.stream.dims[-1])
        self.weight = new_parameter(scheme, layout, (sequence, hidden), ("normal", std), dtype, decay=True)

    def forward(self, x: Tensor, sequence: int, indices: Tensor | None = None) -> Tensor:
        """x with rows 0 … sequence−1 added, of which this rank's block holds its own.

        indices : the rows to add instead, global [b, s]: the positions of packed documents, BERT's token types.
        """
        table = sum_gradient(self.weight, self.rows)
        if indices is None:
            mine = Layout(self.scheme.stream.dims[1]).slices((sequence,), self.scheme.grid.shape, self.scheme.grid.coordinates)
            rows = table[mine]
        else:
            rows = functional.embedding(self.scheme.block_of(indices, self.scheme.stream), table)
        return self.scheme.as_stored(self.scheme.batch_first(x) + rows)
