"""Seconds of communications that MPI carries between hosts, where it goes other ways than NCCL."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np

from ..dry.record import Op
from ..dtypes import dtype_of
from .links import level_of, members
from .price import CHAINS, Prices


class HostPrices(Prices):
    """Prices of what the library's host transport moves.

    A reduce-scatter is an all-to-all and a local sum. Broadcasts and sums onto a root go along a binomial tree, round after
    round, as MPICH sends whole messages in groups of less than eight.
    """

    def move(self, op: Op) -> tuple[float, float]:
        """Seconds of a communication's hops and launch, and of its volume; of a broadcast and a sum the mean over all roots."""
        if op.name == "reduce_scatter":
            return super().move(op._replace(name="all_to_all"))
        count = prod(self.topology.shape.get(name, 1) for name in op.axis.split("·"))
        if op.name not in CHAINS or count == 1 or op.words == 0:
            return super().move(op)
        message = op.words * dtype_of(op.dtype).nbytes * (count / (count - 1) if op.name == "reduce" else 1)
        rounds = [item for root in range(count) for item in self._rounds(op.axis, root)]
        volume, hops = (sum(part) / count for part in zip(*rounds, strict=True))
        return hops + self.cluster["collectives.launch"], message * volume

    def _rounds(self, axis: str, root: int) -> list[tuple[float, float]]:
        """Of each round of a tree from a root, in all groups of an axis at once: seconds per byte, and latency."""
        levels = self.cluster.levels
        ports = tuple((level.size, level.ports) for level in levels)
        units = np.array([1, *(size for size, _ in ports[:-1])])
        groups = np.roll(members(self.topology, axis), -root, axis=1)
        many = groups.shape[1]
        result, reach = [], 1 << (many - 1).bit_length() - 1
        while reach:
            places = np.arange(0, many - reach, 2 * reach)
            ends = groups[:, places], groups[:, places + reach]
            level = level_of(*ends, ports)
            load = Counter(
                (at, side, unit)
                for side, end in enumerate(ends)
                for at, unit in zip(level.flat, (end // units[level]).flat, strict=True)
            )
            per_byte = max(count / (levels[at].bandwidth * levels[at].ports) for (at, _, _), count in load.items())
            result.append((per_byte, max(levels[at].latency for at, _, _ in load)))
            reach //= 2
        return result
