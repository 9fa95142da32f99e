"""What contexts hold of tensors of whole sequences, and whole sequences of what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .split import ContextSplit


def part_of(whole: Tensor, split: ContextSplit, dim: int = 1) -> Tensor:
    """Part on a context of a tensor whose dim `dim` has all positions: a view, where they are consecutive."""
    return whole if split.size == 1 else taken(whole, split.runs(whole.shape[dim]), dim)


def taken(whole: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """The runs of positions of a tensor's dim `dim`, one after the other: a view where there is one run."""
    parts = [whole.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def indices(runs: Iterable[range], device: torch.device | None = None) -> Tensor:
    """The positions of runs as a tensor.

    >>> indices([range(0, 2), range(6, 8)])
    tensor([0, 1, 6, 7])
    """
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def order(split: ContextSplit, sequence: int, device: torch.device | None = None) -> Tensor:
    """Index of each global position in the concatenation of the contexts' blocks.

    >>> order(ContextSplit(2), 8)
    tensor([0, 1, 4, 5, 6, 7, 2, 3])
    """
    return indices((run for index in range(split.size) for run in replace(split, index=index).runs(sequence)), device).argsort()
