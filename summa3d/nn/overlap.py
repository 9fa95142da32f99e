"""The switches of what communication overlaps with arithmetic, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError


@dataclass(frozen=True)
class Overlap:
    """What may be in flight while a layer computes. It changes memory, but no result, no words and no messages.

    gather : how many weights are prefetched: all-gathered ahead of the layers that use them, in forward, backward and
        recomputation. Each needs memory for one more gathered weight; in a node's shared memory a prefetched weight is copied
        instead of read in place. 0: no prefetch. Models prefetch in their forward; a module of your own does after
        ``scheme.ahead.follow(module)``.
    input_gradient : whether the sum of an input's gradient is in flight while the weight's gradient is computed.

    The first is about what moves along x: the weights of `cuboid` and `cuboid-sequence` with X > 1. Backward gathers none
    where `regather` is off. The second is about `cuboid`, `cuboid-sequence`, `oned-sp` and `oned`. In `summa`, `tesseract`,
    `summa-transposed` and `agarwal`, whose products sum as they go, and on one rank neither changes anything. The defaults are
    for ranks that outnumber the cores, where whoever waits leaves its core to another (`bench/overlap.py`).
    """

    REMOVED: ClassVar = {"weight_gradient": "every layer waits for the sum of its weight's gradient. Leave the key out."}
    """Keys that configurations once had."""

    gather: int = 0
    input_gradient: bool = True

    def __post_init__(self) -> None:
        if self.gather < 0:
            raise ConfigError(f"overlap.gather is {self.gather}; it counts what is in flight: 0 for nothing, 1 for one layer, …")


DEFAULT = Overlap()
