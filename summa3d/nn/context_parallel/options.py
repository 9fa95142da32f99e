"""How contexts attend to each other's keys, as data: the table `context` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError

KINDS = ("gather", "ring", "heads", "mesh")


@dataclass(frozen=True)
class ContextOptions:
    """The table `context`: how the ranks of axis cp, each of which holds a part of every sequence, attend to all of it.

    Attributes
    ----------
    kind : "gather", keys and values are all-gathered, and whole on each rank; "ring", they travel from rank to rank, the next
        part while one is attended to, in memory for two of them; "heads", parts of sequences are exchanged for parts of the
        heads; "mesh", so among `heads` ranks, and a ring of such groups
    fold : whether each rank of "gather", "ring" and "mesh" holds one part from the front of the sequence and one from the back,
        so that causal attention is as much work on each; else consecutive positions
    heads : of "mesh", the ranks of a group that exchanges heads; it divides grid.cp

    >>> ContextOptions("ring").heads
    1
    """

    kind: str = "gather"
    fold: bool = True
    heads: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"context.kind is {self.kind!r}; it must be one of {', '.join(KINDS)}.")
        if self.heads < 1:
            raise ConfigError(f"context.heads is {self.heads}; it must be at least 1.")
        if self.heads > 1 and self.kind != "mesh":
            raise ConfigError(
                f'context.heads is {self.heads}, the ranks that exchange heads, which context.kind = "{self.kind}" does not '
                'read. Set context.kind to "mesh", or leave context.heads at 1.'
            )


DEFAULT = ContextOptions()
