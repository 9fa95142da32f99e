"""Attention masks beyond causality: padding and packed documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..context import Context, inner_block


@dataclass(frozen=True)
class TokenMask:
    """Which keys queries may attend to beside causality, of this rank's rows of whole sequences, for any positions of them.

    documents : [b/(XZ), s] numbers of documents, or None. tokens : [b/(XZ), s], False at padding, or None. blind : [b/(XZ), s],
    True at queries that would see no key, and attend as if there were no masks; or None, where there is no padding
    """

    documents: Tensor | None
    tokens: Tensor | None
    blind: Tensor | None

    @property
    def device(self) -> torch.device | None:
        """Device of its tensors."""
        return next((item.device for item in (self.documents, self.tokens) if item is not None), None)

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where a query attends to a key, [b/(XZ), 1, queries, keys], for positions of queries and of keys."""
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=queries.device)
        if self.documents is not None:
            mask = self.documents[:, None, queries, None] == self.documents[:, None, None, keys]
        if self.tokens is not None and self.blind is not None:
            mask = mask & self.tokens[:, None, None, keys] | self.blind[:, None, queries, None]
        return mask.expand(-1, -1, len(queries), len(keys))


@dataclass(frozen=True)
class Visible:
    """Which keys each query of this rank may attend to.

    allowed : [b/(XZ), 1, s, s] of whole sequences, True where the query (row) attends to the key (column); None where causality
    alone decides. mask : the same beside causality, where attention meets sequences in blocks of the contexts; None, no mask
    """

    allowed: Tensor | None = None
    mask: TokenMask | None = None


def restarting_positions(documents: Tensor) -> Tensor:
    """Positions that restart at 0 where a document begins, for document ids [b, s]; a document is a run of equal ids.

    >>> restarting_positions(torch.tensor([[7, 7, 7, 4, 4]]))
    tensor([[0, 1, 2, 0, 1]])
    """
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return place - torch.where(_begins(documents), place, 0).cummax(1).values


def visible(context: Context, causal: bool, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Visible:
    """Build the attention mask of this rank's sequences.

    Parameters
    ----------
    causal : whether a query attends to no later key
    attention_mask : global [b, s], nonzero at tokens and 0 at padding, to which no query attends
    documents : global [b, s] ids; a token attends to its own document only, a run of equal ids

    A query without any key (padding before a sequence) attends as if there were no masks, so that its output is not NaN; no
    counted token attends to it. Moves nothing. Memory: b/(XZ)·s² bytes where a mask or documents are given; none of s² where
    contexts hold blocks of the sequences.
    """
    layout = context.scheme.after_linear(context.residual)
    given = [tensor for tensor in (attention_mask, documents) if tensor is not None]
    if not given:
        return Visible()
    s = given[0].shape[1]
    numbers = None if documents is None else inner_block(context.grid, _begins(documents).cumsum(1), layout)
    tokens = None if attention_mask is None else inner_block(context.grid, attention_mask != 0, layout)
    if context.contexts.rings > 1:
        return Visible(mask=TokenMask(numbers, tokens, None if tokens is None else _blind(tokens, numbers, causal)))
    unmasked = torch.ones(1, 1, s, s, dtype=torch.bool, device=given[0].device)
    allowed = unmasked = unmasked.tril_() if causal else unmasked
    if numbers is not None:
        allowed = allowed & (numbers[:, None, :, None] == numbers[:, None, None, :])
    if tokens is not None:
        allowed = allowed & tokens[:, None, None, :]
    return Visible(allowed | unmasked & ~allowed.any(-1, keepdim=True))


def _blind(tokens: Tensor, numbers: Tensor | None, causal: bool) -> Tensor:
    """True at queries that see no key: no token of their document, or of the sequence, that is not behind them."""
    numbers = torch.ones_like(tokens, dtype=torch.int64) if numbers is None else numbers
    if causal:
        so_far = tokens.cumsum(1)
        before = torch.zeros(len(tokens), numbers.shape[1] + 2, dtype=so_far.dtype, device=tokens.device)
        before.scatter_reduce_(1, numbers + 1, so_far, "amax")  # of each document the tokens up to its end, by the next one
        return so_far == before.gather(1, numbers)
    many = torch.zeros(len(tokens), numbers.shape[1] + 1, dtype=torch.int64, device=tokens.device)
    return many.scatter_add_(1, numbers, tokens.to(torch.int64)).gather(1, numbers) == 0


def _begins(documents: Tensor) -> Tensor:
    """True where a document begins."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat((first, documents[:, 1:] != documents[:, :-1]), 1)
