# What attention may see, beside causality: padding and packed documents. Imports schemes.
# Next: attention.py.
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .schemes import Scheme


@dataclass(frozen=True)
class Visible:
    """Which keys each query of this rank's sequences sees.

    allowed : [b/(XZ), 1, s, s], True where the query (row) sees the key (column); None where causality alone decides.
    """

    allowed: Tensor | None = None


def restarting_positions(documents: Tensor) -> Tensor:
    """Positions that restart where a document begins, from document ids [b, s]: a document is a run of equal ids."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return place - torch.where(_begins(documents), place, 0).cummax(1).values


def visible(scheme: Scheme, causal: bool, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Visible:
    """What this rank's sequences see.

    Parameters
    ----------
    attention_mask : global [b, s], nonzero at tokens and 0 at padding, which no query sees
    documents : global [b, s] ids; a token sees the run of equal ids that it belongs to

    A query that would see nothing (in a sequence of padding alone) sees everything, so that its output is a number; no
    token that counts sees it. Moves nothing; needs b/(XZ)·s² bytes where a mask or documents are given.
    """
    layout = scheme.after_linear(scheme.stream)
    given = [tensor for tensor in (attention_mask, documents) if tensor is not None]
    if not given:
        return Visible()
    s = given[0].shape[1]
    allowed = torch.ones(1, 1, s, s, dtype=torch.bool, device=given[0].device)
    if causal:
        allowed.tril_()
    if documents is not None:
        mine = scheme.block_of(_begins(documents).cumsum(1), layout)
        allowed = allowed & (mine[:, None, :, None] == mine[:, None, None, :])
    if attention_mask is not None:
        allowed = allowed & scheme.block_of(attention_mask != 0, layout)[:, None, None, :]
    return Visible(allowed | ~allowed.any(-1, keepdim=True))


def _begins(documents: Tensor) -> Tensor:
    """True where a document begins."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat((first, documents[:, 1:] != documents[:, :-1]), 1)
