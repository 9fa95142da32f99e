"""The capacity of experts: which of the experts that a token chose take it, alike on every grid."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np
import torch
from torch import Tensor

from ...layout.layout import Layout
from ..config import ModelConfig
from ..context import Context
from ..layers.dropout import Batch

RUNS = 2
"""The most stretches of consecutive positions that a context holds of a sequence."""


class Capacity:
    """At most C = ⌈factor·k·s/E⌉ tokens of each sequence go to an expert: those at the first positions of the whole sequence.

    Words: where axes split the sequence, (g−1)·b·r·E whole numbers of a plane of g ranks, all axes that split it and cp, with b
    its sequences and r the stretches of positions of a rank, 2 where contexts fold the sequence and else 1; none where nothing
    splits it.
    """

    def __init__(self, config: ModelConfig, context: Context, factor: float) -> None:
        self.config, self.context, self.factor = config, context, factor
        split = context.residual.dims[1]
        self.axis = context.whole[("cp", *split) if context.contexts.size > 1 else split]
        self.stretches = RUNS if context.contexts.folded else 1

    def of(self, sequence: int) -> int:
        """The most tokens of a sequence of so many positions, whole, that an expert takes."""
        return ceil(self.factor * self.config.num_chosen * sequence / self.config.num_experts)

    def taken(self, choices: Tensor, batch: Batch) -> tuple[Tensor, np.ndarray]:
        """Return whether each of this rank's choices [b, s, k], in the order of positions, is taken; and the counts of them.

        These are, for each of its sequences, whole, how many tokens chose each expert, [b, E].
        """
        sequences, positions, _ = choices.shape
        experts, whole = self.config.num_experts, batch.sequence * self.context.contexts.size
        chosen = choices.new_zeros((sequences, positions, experts)).scatter_(2, choices, 1)
        before = chosen.cumsum(1) - chosen  # of the same expert, among this rank's tokens of the sequence
        if self.axis.size == 1:
            return before.gather(2, choices) < self.of(whole), chosen.sum(1).cpu().numpy()
        stretches = [*pairwise(np.cumsum([0, *map(len, self._runs(self.axis.index, whole))]))]
        counts = np.zeros((self.stretches, sequences, experts), np.int64)
        for run, (first, last) in enumerate(stretches):
            counts[run] = chosen[:, first:last].sum(1).cpu().numpy()
        gathered = self.axis.all_gather(counts).reshape(-1, sequences, experts)
        for run, earlier in enumerate(self._earlier(gathered, whole)[: len(stretches)]):
            first, last = stretches[run]
            others = earlier - counts[:run].sum(0)  # `before` counts those of this rank's earlier stretches
            before[:, first:last] += torch.from_numpy(others).to(before)[:, None]
        return before.gather(2, choices) < self.of(whole), gathered.sum(0)

    def exchange(self, sequences: int) -> None:
        """Move what `taken` does, in a dry run."""
        if self.axis.size > 1:
            self.axis.all_gather(np.zeros((self.stretches, sequences, self.config.num_experts), np.int64))

    def _runs(self, member: int, whole: int) -> tuple[range, ...]:
        """The global positions of a member's tokens, in their order: stretches that ascend."""
        context, sizes = self.context, [self.context.whole.shape[name] for name in self.axis.names]
        at = dict(zip(self.axis.names, map(int, np.unravel_index(member, sizes)), strict=True))
        split = replace(context.contexts, index=at.get("cp", 0))
        (part,) = Layout(context.residual.dims[1]).slices((split.local(whole),), context.grid.shape, at)
        return split.runs_of(part, whole)

    def _earlier(self, gathered: np.ndarray, whole: int) -> np.ndarray:
        """The tokens of each expert at earlier positions than each of this rank's stretches, [stretches, b, E]."""
        starts = np.full((self.axis.size, self.stretches), whole)
        for member in range(self.axis.size):
            for run, positions in enumerate(self._runs(member, whole)):
                starts[member, run] = positions.start
        own = starts[self.axis.index]
        return np.stack([gathered[starts.ravel() < start].sum(0) for start in own])
