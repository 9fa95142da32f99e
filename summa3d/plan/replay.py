"""Replay of a trace in time: one stream of arithmetic, and one stream for each axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..comm.topology import Topology
from ..dry.record import Op
from .cluster import Cluster
from .price import Prices, alike


@dataclass
class Span:
    """Seconds of a replayed trace.

    compute : of products and element-wise work. exposed : axis → for how long arithmetic waited for it. moved : axis → how long
    its communications took, those behind arithmetic too. seconds : of all.
    """

    seconds: float = 0.0
    compute: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> dict[str, float]:
        """Axis → seconds of communication that arithmetic did not wait for."""
        return {axis: seconds - self.exposed.get(axis, 0.0) for axis, seconds in self.moved.items()}


def replay(trace: Iterable[Op], prices: Prices, overlap: bool = True) -> Span:
    """Run a trace: a communication starts when it is issued and its axis is free, a wait blocks arithmetic until it has ended.

    overlap : False waits for every communication as soon as it is issued. What is still in flight at the end is waited for.
    Axes do not slow each other down.
    """
    span, now = Span(), 0.0
    free: dict[str, float] = {}
    flying: dict[int, tuple[str, float]] = {}

    def wait(number: int) -> None:
        nonlocal now
        axis, end = flying.pop(number)
        if end > now:
            span.exposed[axis] = span.exposed.get(axis, 0.0) + end - now
            now = end

    for op in trace:
        seconds = prices.seconds(op)
        if op.kind == "move":
            free[op.axis] = max(now, free.get(op.axis, 0.0)) + seconds
            span.moved[op.axis] = span.moved.get(op.axis, 0.0) + seconds
            flying[op.id] = op.axis, free[op.axis]
            if not overlap:
                wait(op.id)
        elif op.kind == "wait":
            if op.id in flying:
                wait(op.id)
        else:
            now += seconds
            span.compute += seconds
    for number in sorted(flying, key=lambda one: flying[one][1]):
        wait(number)
    span.seconds = now
    return span


@dataclass(frozen=True)
class Work:
    """Operations of a program that overlaps nothing, whose order is therefore of no account.

    ops : products and communications, each with how often it is run. size, launches : bytes and number of element-wise ones.
    """

    topology: Topology
    ops: tuple[tuple[Op, float], ...]
    size: float = 0.0
    launches: float = 0.0
    _moved: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, topology: Topology, trace: Iterable[Op], times: float = 1.0) -> Work:
        """The operations of a trace, run `times` times."""
        counts = Counter(alike(op) for op in trace if op.kind != "wait")
        elements = {op: many for op, many in counts.items() if op.kind == "elements"}
        size = sum(many * (op.read + op.written) for op, many in elements.items())
        others = tuple((op, many * times) for op, many in counts.items() if op not in elements)
        return cls(topology, others, size * times, sum(elements.values()) * times)

    def seconds(self, cluster: Cluster) -> float:
        """Their seconds on a cluster: those of `replay` without overlap."""
        return self.priced(Prices(cluster, self.topology))

    def priced(self, prices: Prices) -> float:
        """Their seconds by these prices."""
        return self.computed(prices) + self.moved(prices)

    def computed(self, prices: Prices) -> float:
        """The seconds of products and element-wise work."""
        products = sum(times * prices.product(op) for op, times in self.ops if op.kind == "product")
        return products + prices.elements(self.size, self.launches)

    def moved(self, prices: Prices) -> float:
        """The seconds of communications; those of the last links are kept, since fits seldom change links."""
        links = prices.links
        if links not in self._moved:
            self._moved.clear()
            self._moved[links] = sum(times * prices.move(op) for op, times in self.ops if op.kind == "move")
        return self._moved[links]
