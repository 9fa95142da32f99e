"""Predicted seconds of a product on a described cluster: coarse, to compare algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from ...cluster import Cluster, load
from ...dtypes import Dtype

DEFAULT = "server"


@cache
def default_cluster() -> Cluster:
    """The cluster by which products are compared where none is named."""
    return load(DEFAULT)


@dataclass(frozen=True)
class Machine:
    """A cluster as one rank sees it while all ranks work.

    cluster : the description; by default one core of a server, and its share of a network
    node : the ranks share one node's memory (comm/transport/node.py), where the cuboid's gathered operands are read in place
    """

    cluster: Cluster = field(default_factory=default_cluster)
    node: bool = False

    def product(self, m: float, n: float, k: float, dtype: Dtype) -> float:
        """Seconds of one local product: its operations at the rate of its smallest side, or its operands' bytes."""
        side = min(m, n, k)
        if side <= 0:
            return 0.0
        moved = dtype.nbytes * (m * k + k * n + m * n) * self.cluster.byte_time()
        computed = dtype.flops * m * n * k * self.cluster.flop_time(dtype.name, side)
        return max(computed, moved) + self.cluster["product.launch"]

    def transfer(self, gathered: float, reduced: float, messages: float, dtype: Dtype, ranks: int) -> float:
        """Seconds to receive words: copied once where gathered; where reduced also read, added, and written."""
        byte_time, latency = self.cluster.link(ranks)
        passes = self.cluster.byte_time() * (3 * reduced + gathered)
        return dtype.nbytes * (byte_time * (gathered + reduced) + passes) + latency * messages

    def node_transfer(self, copied: float, reduced: float, messages: float, dtype: Dtype, ranks: int) -> float:
        """Seconds of `transfer` through a node buffer: own words are copied into a slot, summands are read, added and written."""
        passes = self.cluster.byte_time() * (2 * copied + 3 * reduced)
        return dtype.nbytes * passes + self.cluster.link(ranks)[1] * messages

    def waits(self, collectives: float) -> float:
        """Seconds in which ranks that share a node's memory are woken by those they wait for; 0 where they share none."""
        return self.cluster["collectives.launch"] * collectives if self.node else 0.0
