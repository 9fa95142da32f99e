"""Seconds of one operation of a dry run, on a cluster and a placement of ranks."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from ..cluster import Cluster
from ..comm.topology import Topology
from ..dry.record import Op
from ..dtypes import dtype_of
from .links import Load, busy_ports, group_size, loads

ATTENTION = "attention"
LANES = 32
"""Fused attention computes with head sizes rounded up to a multiple of so many."""
CHAINS = ("broadcast", "reduce")
FUNCTIONS = frozenset(
    {"gelu", "gelu_backward", "silu", "silu_backward", "tanh", "tanh_backward", "exp", "_softmax", "_log_softmax"}
)
"""Element-wise operations that a core does not do as fast as its memory gives it their elements."""
OF_COLLECTIVES = ("copy_", "clone", "add")
"""Element-wise operations that collectives in a node's memory consist of, most of which no layer calls."""


def move(name: str, axis: str, words: int, dtype: str, phase: str = "forward") -> Op:
    """A communication outside the cells."""
    return Op("move", phase, "", name, axis=axis, words=words, dtype=dtype)


def alike(op: Op) -> Op:
    """Key of an operation's price, equal for those with the same price."""
    phase = op.phase if op.name == ATTENTION else ""
    return op._replace(layer="", phase=phase, messages=0, id=-1)


def pattern_of(op: Op) -> str:
    """Pattern of messages of a communication (`links.PATTERNS`)."""
    return "chain" if op.name in CHAINS else {"all_to_all": "pairs", "send": "next"}.get(op.name, "ring")


class Edge(NamedTuple):
    """What a level of links costs: seconds per byte one way, and both ways together, and of one hop."""

    one_way: float
    both_ways: float
    latency: float


class Chain(NamedTuple):
    """What a chain costs from so many roots: seconds per byte of its slowest port, and its edges.

    edges : of each level that has some, how many, the seconds of a hop, the most bytes on a port for one of an edge, at least 1,
    and seconds per byte
    """

    roots: int
    slowest: float
    edges: tuple[tuple[int, float, float, float], ...]


class Prices:
    """Prices of operations where the ranks of `topology` are consecutive ranks of `cluster`.

    A product takes 2mnk/(peak·efficiency·d/(d + half)), d its smallest side, or the time to read and write its operands where
    that is more. Element-wise work takes its bytes over the memory's bandwidth, and what its function takes. Both take the Python
    of a layer. A communication takes its volume over the slowest port that it loads (`links.loads`), and its hops. All groups of
    its axis communicate at once. Inside a host whose ranks share memory it takes its hops alone, since the trace has the copies;
    a message between two ranks takes them, too. All take a launch, and longer where ranks share cores.
    """

    def __init__(self, cluster: Cluster, topology: Topology) -> None:
        self.cluster, self.topology = cluster, topology
        self._half = cluster["product.half"]
        self._crowding = cluster.crowding(topology.size)
        self._byte = cluster.byte_time() * self._crowding
        self._layer = cluster["layers.launch"] * self._crowding
        self._launches = {key: cluster[f"{key}.launch"] * self._crowding for key in ("product", "elements", "collectives")}
        self._edges = [Edge(1 / level.bandwidth, 1 / (level.bandwidth * level.duplex), level.latency) for level in cluster.levels]
        inner = self._edges[0]  # what cores do themselves; the ports of other levels do not depend on cores
        self._edges[0] = Edge(inner.one_way * self._crowding, inner.both_ways * self._crowding, inner.latency * self._crowding)
        if cluster["host.shared"]:
            self._edges[0] = Edge(0.0, 0.0, self._edges[0].latency)
        self._chunk = cluster["collectives.chunk"]
        self._members: dict[str, int] = {}
        self._chains: dict[str, list[Chain]] = {}
        self._flop: dict[str, float] = {}
        self._speeds: dict[tuple[tuple[str, str], ...], tuple[float, ...]] = {}
        self._rates: dict[tuple[str, str], tuple[float, float]] = {}

    def seconds(self, op: Op) -> float:
        """The seconds of an operation by itself; 0 of a wait."""
        return sum(self.parts(op))

    def parts(self, op: Op) -> tuple[float, float]:
        """The seconds of an operation by itself, without and with the ports of links in use."""
        if op.kind == "move":
            return self.move(op)
        if op.kind == "wait":
            return 0.0, 0.0
        own = self.product(op) if op.kind == "product" else self.elements(op.read + op.written) + self._functions(op)
        return own + (0.0 if op.name in OF_COLLECTIVES else self._layer), 0.0

    def _functions(self, op: Op) -> float:
        """Seconds of an element-wise operation beside its bytes."""
        if op.name not in FUNCTIONS or not op.dtype:
            return 0.0
        return op.written / dtype_of(op.dtype).nbytes * self.cluster["elements.function"] * self._crowding

    def copied(self, op: Op) -> float:
        """Seconds in which what a communication brings passes the innermost links, as if there were no others."""
        return op.words * dtype_of(op.dtype).nbytes * self._edges[0].one_way

    def elements(self, size: float, launches: float = 1.0) -> float:
        """Seconds of element-wise work on so many bytes."""
        return size * self._byte + launches * self._launches["elements"]

    def product(self, op: Op) -> float:
        """Seconds of a local product."""
        side = min(op.m, op.n, op.k)
        if side == 0:
            return 0.0
        dtype = op.dtype or "float32"
        if op.name == ATTENTION and self.cluster["attention.forward"]:
            return self._attention(op, dtype)
        if dtype not in self._flop:
            self._flop[dtype] = self._crowding / (self.cluster.peak(dtype) * self.cluster["product.efficiency"])
        computed = op.flops * self._flop[dtype] * (side + self._half) / side
        return max(computed, (op.read + op.written) * self._byte) + self._launches["product"]

    def _attention(self, op: Op, dtype: str) -> float:
        """Seconds of fused attention, by its own part of the peak, at half of which `attention.half` keys are."""
        part = self.cluster["attention.backward" if op.phase == "backward" else "attention.forward"]
        padded = -(-op.k // LANES) * LANES / op.k
        computed = op.flops * padded * (op.n + self.cluster["attention.half"]) / op.n / (self.cluster.peak(dtype) * part)
        return computed * self._crowding + self._launches["product"]

    def members(self, axis: str) -> int:
        """The ranks of each group of an axis or a plane."""
        if axis not in self._members:
            self._members[axis] = group_size(self.topology.shape, axis)
        return self._members[axis]

    def move(self, op: Op) -> tuple[float, float]:
        """Seconds of a communication's hops and launch, and of its volume: the words received, of a broadcast the message."""
        members = self.members(op.axis)
        if members == 1 or op.words == 0:
            return 0.0, 0.0
        volume = float(op.words * dtype_of(op.dtype).nbytes)
        if op.name in CHAINS:
            fill, moved = self._chain(op.axis, volume * members / (members - 1) if op.name == "reduce" else volume)
            return fill + self._launches["collectives"], moved
        along = op.axis, op.name
        if along not in self._rates:
            self._rates[along] = self._rate(op, members)
        fixed, byte = self._rates[along]
        return fixed + (self._copied(op.axis, volume) if op.name == "send" else 0.0), volume * byte

    def _copied(self, axis: str, size: float) -> float:
        """Seconds in which cores copy a message of so many bytes inside a node: a trace has none of its copies.

        It is copied into the node's memory and out of it, or, where MPI carries it, once.
        """
        from ..comm.lanes import LARGEST  # which needs MPI's names

        ((load, _),) = self._loads_of(axis, "next")
        if not self.cluster["host.shared"] or any(load.one_way[1:]):
            return 0.0
        copies = 2 if size <= LARGEST else 1
        return self.elements(2 * copies * size, copies)

    def _rate(self, op: Op, members: int) -> tuple[float, float]:
        """Seconds of the hops and launch of a communication that is no chain, and of a byte of its volume."""
        launch, pattern = self._launches["collectives"], pattern_of(op)
        ((load, _),) = self._loads_of(op.axis, pattern)
        if pattern == "next":
            return max(self._latencies(load)) + launch, self._slowest(load)
        steps = 2 if op.name == "all_reduce" else 1
        latency = steps * sum(self._latencies(load)) * (members - 1) / max(1, sum(load.hops))
        if op.name == "all_reduce":
            latency = min(latency, self._tree(load, members))
        return latency + launch, self._slowest(load)

    def speeds(self, flights: tuple[tuple[str, str], ...]) -> tuple[float, ...]:
        """The parts of their speed alone that flights, each an axis and a pattern, have together: max-min fair by edge.

        All edges go at the same rate until a port is full; those that use it stay there, and the others go on.
        """
        if flights not in self._speeds:
            self._speeds[flights] = self._max_min(flights)
        return self._speeds[flights]

    def _max_min(self, flights: tuple[tuple[str, str], ...]) -> tuple[float, ...]:
        used = []
        for use in busy_ports(self.topology, flights, self.cluster.levels):
            edge = self._edges[use.level]
            used.append([load * (edge.both_ways if use.both_ways else edge.one_way) for load in use.loads])
        alone = [max((port[flight] for port in used), default=0.0) for flight in range(len(flights))]
        rates = [0.0] * len(flights)  # bytes per second of an edge
        growing = {flight for flight, slowest in enumerate(alone) if slowest > 0}
        while growing:
            rest = {}
            for number, port in enumerate(used):
                each = sum(port[flight] for flight in growing)
                if each > 0:
                    rest[number] = (1 - sum(rate * load for rate, load in zip(rates, port, strict=True))) / each
            more = max(0.0, min(rest.values()))
            for flight in growing:
                rates[flight] += more
            full = [number for number, left in rest.items() if left <= more * (1 + 1e-9)]
            growing -= {flight for number in full for flight in growing if used[number][flight] > 0}
        return tuple(rate * slowest if slowest else 1.0 for rate, slowest in zip(rates, alone, strict=True))

    def _loads_of(self, axis: str, pattern: str) -> tuple[tuple[Load, int], ...]:
        """`links.loads` on this topology."""
        return loads(self.topology, axis, self.cluster.levels, pattern)

    def _slowest(self, load: Load) -> float:
        """Seconds per byte of an edge, by the slowest port."""
        ports = zip(load.one_way, load.both_ways, self._edges, strict=True)
        return max(max(port * edge.one_way, both * edge.both_ways) for port, both, edge in ports)

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

    def _chain(self, axis: str, message: float) -> tuple[float, float]:
        """Seconds until a chain is filled and of its message, which it forwards chunk after chunk; the mean over all roots."""
        if axis not in self._chains:
            self._chains[axis] = [self._chain_of(load, roots) for load, roots in self._loads_of(axis, "chain")]
        chunk = min(self._chunk, message)
        filled = moved = 0.0
        count = 0
        for roots, slowest, edges in self._chains[axis]:
            filled += roots * sum(hops * (latency + chunk * wide * rate) for hops, latency, wide, rate in edges)
            moved += roots * message * slowest
            count += roots
        return filled / count, moved / count

    def _chain_of(self, load: Load, roots: int) -> Chain:
        edges = zip(load.hops, load.one_way, self._edges, strict=True)
        used = tuple((hops, edge.latency, max(1.0, port), edge.one_way) for hops, port, edge in edges if hops)
        return Chain(roots, self._slowest(load), used)
