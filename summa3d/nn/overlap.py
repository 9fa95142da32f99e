"""The switches of what communication overlaps with arithmetic, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError

BUCKETS_IN_FLIGHT = 2
"""Buckets of gradients whose sums over replicas are in flight at once: as many as an axis has slots in a node's memory."""


AUTO = "auto"


@dataclass(frozen=True)
class Overlap:
    """What may be in flight while a layer computes. It changes memory, but no result and no words; `pieces` changes messages.

    Attributes
    ----------
    gather : how many weights are prefetched: all-gathered ahead of the layers that use them, in forward, backward and
        recomputation. Each needs memory for one more gathered weight; in a node's shared memory a prefetched weight is copied
        instead of read in place. 0: no prefetch; "auto": one in a training run on devices, else none. Models prefetch in their
        forward; a module of your own does after ``context.prefetcher.follow(module)``, where `context` is what `nn.scheme` has
        returned.
    input_gradient : whether the sum of an input's gradient is in flight while the weight's gradient is computed.
    pieces : in how many pieces what a product gathers or broadcasts, and sums, travels between nodes behind its arithmetic,
        forward and backward: the same words, pieces times the messages. In a node's memory nothing is cut. "auto" takes as many
        as make each product shortest by the description of an assumed server, in float32: the same number on all ranks.

    Beside `pieces`, on hosts, a prefetched weight comes in pieces behind the products before its own, which multiplies it as far
    as it has come; one piece of it is under way at a time, or, where its product moves nothing else, two, and behind attention
    (not that of adopted models, or of contexts) all. It needs memory for those, too. A weight's gradient comes before the input's
    where its sum alone moves between nodes, and is in flight behind that.

    `gather` applies to the weights that move along x, those of `cuboid` and `cuboid-sequence` with X > 1, and to those that
    replicas share; backward gathers none of the former without `regather`. `input_gradient` applies to `cuboid`,
    `cuboid-sequence`, `oned-sp` and `oned`; `pieces` to all schemes but `agarwal`. None applies to one rank. `summa`,
    `summa-transposed`, `tesseract` and `agarwal` sum as they go. On hosts the defaults suit ranks that outnumber the cores, where
    a waiting rank yields its core to another (`bench/overlap.py`).
    """

    REMOVED: ClassVar = {"weight_gradient": "every layer waits for the sum of its weight's gradient. Leave the key out."}
    """Former keys, with the message for a configuration that still has one."""

    gather: int | str = AUTO
    input_gradient: bool = True
    pieces: int | str = 1

    def __post_init__(self) -> None:
        if self.pieces != AUTO and (isinstance(self.pieces, str) or self.pieces < 1):
            raise ConfigError(
                f"overlap.pieces is {self.pieces!r}; it is {AUTO!r}, or into how many pieces messages are cut: 1, 2, …"
            )
        if self.gather != AUTO and (isinstance(self.gather, str) or self.gather < 0):
            raise ConfigError(
                f"overlap.gather is {self.gather!r}; it is {AUTO!r}, or counts prefetched weights: 0 for none, 1 for one layer, …"
            )

    @property
    def ahead(self) -> int:
        """Number of weights that are prefetched: none by "auto" of a context, which knows of no device."""
        return 0 if isinstance(self.gather, str) else self.gather


DEFAULT = Overlap()
