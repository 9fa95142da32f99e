"""Seconds of one operation of a dry run, on a cluster and a placement of ranks."""

from __future__ import annotations

from math import log2, prod
from typing import NamedTuple

from ..comm.topology import Topology
from ..dry.record import Op
from ..dtypes import dtype_of
from .cluster import Cluster
from .links import Load, loads

CHAINS = ("broadcast", "reduce")


def alike(op: Op) -> Op:
    """What the price of an operation depends on, equal for those with the same price."""
    return op._replace(layer="", phase="", messages=0, id=-1)


class Edge(NamedTuple):
    """What a level of links costs: seconds per byte one way, and both ways together, and of one hop."""

    one_way: float
    both_ways: float
    latency: float


class Prices:
    """Prices of operations where the ranks of `topology` are consecutive ranks of `cluster`.

    A product takes 2mnk/(peak·efficiency·d/(d + half)), d its smallest side, or the time to read and write its operands where
    that is more. Element-wise work takes its bytes over the memory's bandwidth, and a launch. A communication takes its volume
    over the slowest port that it loads (`links.loads`), its hops, and a launch. All groups of its axis communicate at once.
    """

    def __init__(self, cluster: Cluster, topology: Topology) -> None:
        self.cluster, self.topology = cluster, topology
        self._half = cluster["product.half"]
        self._byte = 1 / (cluster["device.memory_bandwidth"] * cluster["elements.efficiency"])
        self._edges = [Edge(1 / one.bandwidth, 1 / (one.bandwidth * one.duplex), one.latency) for one in cluster.levels]
        self._flop: dict[str, float] = {}
        self._known: dict[Op, float] = {}

    def seconds(self, op: Op) -> float:
        """The seconds of an operation; 0 of a wait."""
        key = alike(op)
        if key not in self._known:
            self._known[key] = self.price(key)
        return self._known[key]

    @property
    def links(self) -> tuple[object, ...]:
        """What prices of communications depend on, of the cluster's numbers."""
        return (*self.cluster.levels, self.cluster["collectives.launch"], self.cluster["collectives.chunk"])

    def price(self, op: Op) -> float:
        """`seconds`, worked out anew."""
        if op.kind == "product":
            return self.product(op)
        if op.kind == "elements":
            return self.elements(op.read + op.written)
        return self.move(op) if op.kind == "move" else 0.0

    def elements(self, size: float, launches: float = 1.0) -> float:
        """Seconds of element-wise work on so many bytes."""
        return size * self._byte + launches * self.cluster["elements.launch"]

    def product(self, op: Op) -> float:
        """Seconds of a local product."""
        side = min(op.m, op.n, op.k)
        if side == 0:
            return 0.0
        dtype = op.dtype or "float32"
        if dtype not in self._flop:
            self._flop[dtype] = 1 / (self.cluster.peak(dtype) * self.cluster["product.efficiency"])
        return max(op.flops * self._flop[dtype] * (side + self._half) / side, (op.read + op.written) * self._byte)

    def move(self, op: Op) -> float:
        """Seconds of a communication by itself; `op.words` are those that a member receives, of a broadcast the message."""
        members = prod(self.topology.shape.get(name, 1) for name in op.axis.split("·"))
        if members == 1 or op.words == 0:
            return 0.0
        volume = float(op.words * dtype_of(op.dtype).nbytes)
        if op.name in CHAINS:
            message = volume * members / (members - 1) if op.name == "reduce" else volume
            return self._chain(op.axis, message)
        pattern = {"all_to_all": "pairs", "send": "next"}.get(op.name, "ring")
        ((load, _),) = loads(self.topology, op.axis, self.cluster.levels, pattern)
        if pattern == "next":
            return volume * self._slowest(load) + max(self._latencies(load)) + self.cluster["collectives.launch"]
        steps = 2 if op.name == "all_reduce" else 1
        latency = steps * sum(self._latencies(load)) * (members - 1) / max(1, sum(load.hops))
        if op.name == "all_reduce":
            latency = min(latency, self._tree(load, members))
        return volume * self._slowest(load) + latency + self.cluster["collectives.launch"]

    def _slowest(self, load: Load) -> float:
        """Seconds per byte of an edge, by the slowest port."""
        ports = zip(load.one_way, load.both_ways, self._edges, strict=True)
        return max(max(one * edge.one_way, both * edge.both_ways) for one, both, edge in ports)

    def _latencies(self, load: Load) -> list[float]:
        return [hops * edge.latency for hops, edge in zip(load.hops, self._edges, strict=True)]

    def _tree(self, load: Load, members: int) -> float:
        """Latency of an all-reduce by NCCL's trees between nodes and chains inside them."""
        outer = [(hops, edge.latency) for hops, edge in zip(load.hops[1:], self._edges[1:], strict=True) if hops]
        if not outer:
            return float("inf")
        nodes = max(2, sum(hops for hops, _ in outer))
        between = max(latency for _, latency in outer)
        return 2 * (log2(nodes) * between + max(0, members // nodes - 1) * self._edges[0].latency)

    def _chain(self, axis: str, message: float) -> float:
        """Seconds of a broadcast or a sum through a chain, that forwards chunk after chunk; the mean over all roots."""
        found = loads(self.topology, axis, self.cluster.levels, "chain")
        chunk = min(self.cluster["collectives.chunk"], message)
        total = 0.0
        for load, roots in found:
            ports = zip(load.hops, load.one_way, self._edges, strict=True)
            fill = sum(hops * (edge.latency + chunk * max(1.0, one) * edge.one_way) for hops, one, edge in ports)
            total += roots * (message * self._slowest(load) + fill)
        return total / sum(roots for _, roots in found) + self.cluster["collectives.launch"]
