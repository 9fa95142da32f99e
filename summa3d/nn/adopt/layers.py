"""The layers that take the places of another library's: their parameters have the names and the values that they had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...autograd.collectives import all_gather, sum_gradient
from ...errors import ConfigError
from ...layout.layout import Layout
from ..context import Context
from ..layers.embedding import Embedding
from ..layers.fused_linear import FusedLinear
from ..layers.linear import Linear
from ..layers.loss import cross_entropy
from ..layers.norm import LayerNorm, RMSNorm
from ..parameter import ShardedModule, new_parameter
from .norms import Norm
from .sizes import SharedHeads


class TokenTable(Embedding):
    """A vocabulary-parallel table of global ids [b, s]; the residual stream of this rank, times `scale`.

    padding : the id whose row has no gradient; None, each has
    scale : the module's own factor, a tensor
    """

    def __init__(
        self, vocabulary: int, hidden: int, scheme: Context, dtype: torch.dtype, padding: int | None, scale: Tensor | None
    ) -> None:
        super().__init__(vocabulary, hidden, scheme, dtype=dtype)
        self.padding = padding
        self.register_buffer("embed_scale", scale, persistent=False)
        self.embed_scale: Tensor | None

    def forward(self, tokens: Tensor) -> Tensor:
        """This rank's block of the residual stream [b/(XY), s, h/Z] for global ids."""
        context = self.context
        x = super().forward(context.block_of(tokens, self.tokens_layout))
        if self.padding is not None:
            x = torch.where((context.block_of(tokens, context.residual) == self.padding)[..., None], x.detach(), x)
        return x if self.embed_scale is None else x * self.embed_scale.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.vocabulary} × {self.hidden} in {self.layout} → {self.context.residual}"


class PositionTable(ShardedModule):
    """A table [n, h] of positions, split as the residual stream's columns, whose gradient is summed over the axes of rows."""

    def __init__(self, n: int, hidden: int, scheme: Context, dtype: torch.dtype) -> None:
        super().__init__()
        self.context, self.rows, self.shape = scheme, scheme.rows(scheme.residual), (n, hidden)
        self.layout = Layout((), scheme.residual.dims[-1])
        self.weight = new_parameter(scheme, self.layout, self.shape, ("normal", 0.02), dtype, decay=True)

    def forward(self, positions: Tensor) -> Tensor:
        """Rows of the table, [s, h/Z] or [1, s, h/Z]."""
        table = self.context.gathered(self.weight, self.layout, self.shape)
        return functional.embedding(positions, sum_gradient(table, self.rows))

    def extra_repr(self) -> str:
        return f"{' × '.join(map(str, self.weight.sharding.shape))} in {self.weight.sharding.layout}"


class VocabularyHead(Embedding):
    """The linear layer that maps the residual stream to logits [b/(XZ), s, v/Y], in the layout of its table [v, h]."""

    def __init__(self, vocabulary: int, hidden: int, scheme: Context, dtype: torch.dtype, bias: bool) -> None:
        super().__init__(vocabulary, hidden, scheme, dtype=dtype)
        vector = scheme.scheme.vector(self.logits_layout)
        self.bias = new_parameter(scheme, vector, (vocabulary,), ("constant", 0.0), dtype, decay=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's block of the logits."""
        return self.head(x, bias=self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden} → {self.vocabulary}, {self.context.residual} → {self.logits_layout}, bias={self.bias is not None}"


class WholeHeads:
    """Makes heads of which ranks hold pieces whole, [.., d/g] → [.., d] on each of the g consecutive ranks that share one.

    Words: (g−1)·d/g a row in an all-gather; backward reduce-scatters the gradients of the ranks' query heads, as many.

    outputs : how many a layer makes whole, side by side
    """

    def __init__(self, scheme: Context, layout: Layout, heads: SharedHeads, outputs: int) -> None:
        self.outputs = outputs
        self.heads, self.run = heads, scheme.grid.contiguous_sub_axis(layout.dims[-1], heads.sharing)
        self._pieces = [heads.size // heads.sharing] * heads.sharing
        self._row_shards = layout.num_shards(0, scheme.scheme.shape)

    def words(self, rows: int) -> int:
        """The words that a rank receives in the forward of so many rows (batch · sequence)."""
        return self.outputs * rows // self._row_shards * sum(self._pieces[1:])

    def __call__(self, pieces: Tensor) -> Tensor:
        """This rank's head, of which `pieces` has a part of the last dim."""
        return all_gather(pieces, self.run, pieces.dim() - 1, self._pieces)

    def follow(self, layer: nn.Module) -> None:
        """Do so with all that a layer returns."""
        layer.register_forward_hook(lambda module, given, out: self(out))


class FusedParts(nn.Module):
    """A linear layer whose output is several side by side, such as q, k and v: each is split by itself, all are one product.

    Attributes
    ----------
    whole : makes those of a rank's heads whole that it shares; None of none
    """

    def __init__(self, k: int, widths: Sequence[int], scheme: Context, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.whole: WholeHeads | None = None
        self.parts = nn.ModuleList(Linear(k, n, scheme, bias=bias, dtype=dtype) for n in widths)
        linears: list[Any] = list(self.parts)
        self.joined = FusedLinear(*linears)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's blocks of all parts, side by side."""
        blocks = list(self.joined(x))
        if self.whole is not None:
            pairs = zip(blocks, self.joined.linears, strict=True)
            blocks = [self.whole(block) if part.n == self.whole.heads.columns else block for block, part in pairs]
        return torch.cat(blocks, -1)

    def extra_repr(self) -> str:
        parts: list[Any] = list(self.parts)
        return f"{' + '.join(str(part.n) for part in parts)}: {parts[0].extra_repr()}"


def new_norm(kind: Norm, n: int, vectors: Sequence[str], scheme: Context, layout: Layout, dtype: torch.dtype) -> nn.Module:
    """The norm of n elements in `layout`."""
    make = LayerNorm if kind.centred else RMSNorm
    return make(n, scheme, layout, kind.eps, dtype, kind.offset, vectors)


def loss_of(scheme: Context, layout: Layout, alone: Callable[[], None]) -> Callable[..., Tensor]:
    """The loss that a Transformers model calls on its logits: the mean over global labels, from blocks of the logits.

    layout : of the logits
    alone : raises where replicas hold other rows, whose number of labels this one does not know
    """

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        if ignore_index >= 0:
            raise ConfigError(f"labels that are not counted are negative; ignore_index is {ignore_index}.")
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if num_items_in_batch is None:
            alone()
            num_items_in_batch = max(int((shift_labels >= 0).sum()), 1)
        mine = scheme.block_of(shift_labels, layout)
        return cross_entropy(logits, mine.contiguous(), scheme, layout, vocab_size, int(num_items_in_batch))

    return loss
