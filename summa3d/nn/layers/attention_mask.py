"""Attention masks beyond causality: padding and packed documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..context import Context


@dataclass(frozen=True)
class Visible:
    """Which keys each query of this rank's sequences may attend to.

    allowed : [b/(XZ), 1, s, s], True where the query (row) attends to the key (column); None where causality alone decides
    """

    allowed: Tensor | None = None


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

    A query without any key (in a sequence of padding alone) attends to all keys, so that its output is not NaN; no counted
    token attends to it. Moves nothing. Memory: b/(XZ)·s² bytes where a mask or documents are given.
    """
    layout = context.scheme.after_linear(context.residual)
    given = [tensor for tensor in (attention_mask, documents) if tensor is not None]
    if not given:
        return Visible()
    s = given[0].shape[1]
    allowed = torch.ones(1, 1, s, s, dtype=torch.bool, device=given[0].device)
    if causal:
        allowed.tril_()
    if documents is not None:
        mine = context.block_of(_begins(documents).cumsum(1), layout)
        allowed = allowed & (mine[:, None, :, None] == mine[:, None, None, :])
    if attention_mask is not None:
        allowed = allowed & context.block_of(attention_mask != 0, layout)[:, None, None, :]
    return Visible(allowed | ~allowed.any(-1, keepdim=True))


def _begins(documents: Tensor) -> Tensor:
    """True where a document begins."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat((first, documents[:, 1:] != documents[:, :-1]), 1)
