"""Which positions of a sequence each context holds, and which blocks of queries and keys meet: plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from ...comm.topology import divisors
from ...errors import ConfigError, GridError, LayoutError
from .options import DEFAULT, ContextOptions

SPLIT_FAMILIES = ("gpt2", "llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Model families whose sequences contexts may split."""
WITH_DROPOUT = ("gather", "heads")
"""Kinds that can drop attention probabilities."""


class Tile(NamedTuple):
    """A block of queries that attends to a block of keys, local positions each; diagonal: causal, of equal positions."""

    queries: slice
    keys: slice
    diagonal: bool


@dataclass(frozen=True)
class ContextSplit:
    """How sequences of s positions are split over the `size` contexts of axis cp, seen from the one at `index`.

    Groups of `heads` consecutive contexts exchange heads; the size / heads groups, `rings`, hold blocks of the sequence: a folded
    one part i of 2·rings equal parts and part 2·rings−1−i, another one consecutive positions. A context holds a part of its
    group's block. Source: the zig-zag split of Zhu's ring-flash-attention, 2024; Jacobs et al., DeepSpeed-Ulysses, 2023.

    >>> [[*map(list, ContextSplit(2, index).runs(8))] for index in range(2)]
    [[[0, 1], [6, 7]], [[2, 3, 4, 5]]]
    """

    size: int = 1
    index: int = 0
    options: ContextOptions = DEFAULT

    def __post_init__(self) -> None:
        if self.size % self.heads:
            raise GridError(
                f"context.heads {self.heads} does not divide cp = {self.size}. "
                f"Values that do: {', '.join(map(str, divisors(self.size)))}."
            )

    @property
    def heads(self) -> int:
        """Number of consecutive contexts that exchange heads among themselves."""
        return self.size if self.options.kind == "heads" or self.size == 1 else self.options.heads

    @property
    def rings(self) -> int:
        """Number of blocks of a sequence that attend to each other."""
        return self.size // self.heads

    @property
    def folded(self) -> bool:
        """Return whether a block is two parts of the sequence."""
        return self.options.fold and self.rings > 1

    @property
    def turn(self) -> int:
        """Number of the block of a sequence on this context's group."""
        return self.index // self.heads

    def role(self, index: int) -> tuple[bool, bool]:
        """Return whether the group of context `index` holds the first block of a sequence, and whether it holds the last."""
        return index < self.heads, index >= self.size - self.heads

    @property
    def multiple(self) -> int:
        """Number that must divide the length of a sequence."""
        return lcm(self.size, self.rings * (1 + self.folded))

    @property
    def group(self) -> ContextSplit:
        """The split of whole groups: what a context holds while it has its part of the heads alone."""
        return replace(self, size=self.rings, index=self.turn, options=ContextOptions(fold=self.options.fold))

    def local(self, sequence: int) -> int:
        """Number of `sequence` positions on a context."""
        return sequence // self.size

    def runs(self, sequence: int) -> tuple[range, ...]:
        """The global positions that this context holds of sequences of `sequence` positions, in their order."""
        block, own = sequence // self.rings, sequence // self.size
        half = block // 2 if self.folded else block
        starts = [self.turn * half, (2 * self.rings - 1 - self.turn) * half][: 1 + self.folded]
        first = self.index % self.heads * own
        result: list[range] = []
        for place, start in enumerate(starts):
            low, high = max(first, place * half), min(first + own, (place + 1) * half)
            if low < high:
                run = range(start + low - place * half, start + high - place * half)
                follows = bool(result) and result[-1].stop == run.start
                result[-1:] = [range(result[-1].start, run.stop)] if follows else [*result[-1:], run]
        return tuple(result)

    def runs_of(self, part: slice, sequence: int) -> tuple[range, ...]:
        """The global positions of the local positions `part`, where the whole sequence has `sequence` positions."""
        result, before = [], 0
        for run in self.runs(sequence):
            low, high = max(part.start - before, 0), min(part.stop - before, len(run))
            if low < high:
                result.append(run[low:high])
            before += len(run)
        return tuple(result)

    def owner(self, position: int, sequence: int) -> tuple[int, int]:
        """The context that holds a global position, and its local position there."""
        for index in range(self.size):
            before = 0
            for run in replace(self, index=index).runs(sequence):
                if position in run:
                    return index, before + run.index(position)
                before += len(run)
        raise GridError(f"A sequence has the positions 0 to {sequence - 1}; position {position} is asked for.")

    def tiles(self, source: int, length: int, causal: bool = True) -> list[Tile]:
        """Tiles of queries of this group's block and keys of block `source` that they attend to, of `length` positions both."""
        whole, half = slice(0, length), length // 2
        if not causal or source == self.turn:
            return [Tile(whole, whole, causal)]
        if not self.folded:
            return [Tile(whole, whole, False)] if source < self.turn else []
        if source < self.turn:
            return [Tile(whole, slice(0, half), False)]
        return [Tile(slice(half, length), whole, False)]

    def check_family(self, family: str, attention_dropout: float) -> None:
        """Raise ConfigError for a family whose sequences cannot be split, and for dropout that this kind cannot draw."""
        if family not in SPLIT_FAMILIES:
            raise ConfigError(
                f"A {family} model cannot split its sequences over cp = {self.size} contexts. "
                f"Families that can: {', '.join(SPLIT_FAMILIES)}; {family} takes grid.dp in its place."
            )
        if attention_dropout and self.options.kind not in WITH_DROPOUT:
            raise ConfigError(
                f"model.attention_dropout is {attention_dropout}, which context.kind = {self.options.kind!r} cannot apply: it "
                f"never has the probabilities of a whole row. Kinds that can: {', '.join(WITH_DROPOUT)}; or set it to 0."
            )

    def check(self, sequence: int, heads: int, num_shards: int = 1) -> None:
        """Raise LayoutError where sequences of `sequence` positions, or `heads` heads in `num_shards` shards, cannot be split."""
        multiple, below = self.multiple, sequence - sequence % self.multiple
        if sequence % multiple:
            fits = ", ".join(str(below + step * multiple) for step in (-1, 0, 1, 2) if below + step * multiple > 0)
            parts = f"2·{self.rings} equal parts, two for each" if self.folded else f"{self.size} equal parts"
            alone = " Unfolded (context.fold = false) it can." if self.folded and sequence % self.size == 0 else ""
            raise LayoutError(
                f"sequence {sequence} cannot be split over cp = {self.size}: contexts ({self.options.kind}) take {parts}.\n"
                f"  Values of sequence that fit: {fits}.{alone}"
            )
        if heads % (num_shards * self.heads):
            each = num_shards * self.heads
            values = ", ".join(str(value) for value in (heads - heads % each, heads - heads % each + each) if value)
            groups = [size for size in divisors(self.size) if size > 1 and heads % (num_shards * size) == 0]
            raise LayoutError(
                f"heads {heads} cannot be split over {num_shards} shards of heads and {self.heads} contexts that exchange heads "
                f"(context.kind {self.options.kind!r}, cp = {self.size}).\n"
                f'  Values of heads that fit: {values}. Or context.kind = "gather" or "ring", which leave heads where they are'
                + (f'; or "mesh" with context.heads of {", ".join(map(str, groups))}.' if groups else ".")
            )


WHOLE = ContextSplit()
"""Sequences that nothing splits."""
