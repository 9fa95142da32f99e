"""Replay of a trace in time: one stream of arithmetic, and one stream for each axis."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..cluster import Cluster
from ..comm.topology import Topology
from ..dry.record import Op
from .price import Prices, alike, pattern_of


@dataclass
class ReplayTimes:
    """Seconds of a replayed trace.

    compute : of products and element-wise work. exposed : axis → for how long arithmetic waited for it. moved : axis → how long
    its communications take by themselves, those behind arithmetic too. seconds : of all.
    """

    seconds: float = 0.0
    compute: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    def plus(self, other: ReplayTimes, times: float = 1.0) -> ReplayTimes:
        """These seconds and, so many times, those of another trace."""
        axes = [
            {axis: item.get(axis, 0.0) + times * more.get(axis, 0.0) for axis in {**item, **more}}
            for item, more in ((self.exposed, other.exposed), (self.moved, other.moved))
        ]
        return ReplayTimes(self.seconds + times * other.seconds, self.compute + times * other.compute, *axes)

    @property
    def hidden(self) -> dict[str, float]:
        """Axis → seconds of communication that arithmetic did not wait for."""
        return {axis: seconds - self.exposed.get(axis, 0.0) for axis, seconds in self.moved.items()}


@dataclass
class Transfer:
    """A communication on its way: what it still takes by itself before it uses ports, and on them."""

    number: int
    key: tuple[str, str]
    fixed: float
    moving: float


class TransfersInFlight:
    """Communications in flight: one after the other along an axis, and those of different axes at once, sharing ports."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.now = prices, 0.0
        self.queues: dict[str, deque[Transfer]] = {}
        self.ends: dict[int, float] = {}

    def issue(self, op: Op, now: float, parts: tuple[float, float]) -> None:
        """Begin a communication at `now`, or once its axis is free; `parts` are its seconds without and with ports in use."""
        self.advance(until=now)
        self.now = now
        self.queues.setdefault(op.axis, deque()).append(Transfer(op.id, (op.axis, pattern_of(op)), *parts))

    def advance(self, number: int | None = None, until: float = float("inf")) -> None:
        """Go on until a communication has ended, or until a time."""
        while number not in self.ends:
            heads = [queue[0] for queue in self.queues.values() if queue]
            if not heads:
                return
            moving = sorted((item for item in heads if item.fixed <= 0 < item.moving), key=lambda item: item.key)
            speeds = self.prices.speeds(tuple(item.key for item in moving)) if len(moving) > 1 else [1.0] * len(moving)
            left = [(item.fixed, 1.0, item) for item in heads if item.fixed > 0 or item.moving <= 0]
            left += [(item.moving, speed, item) for item, speed in zip(moving, speeds, strict=True)]
            step = min(rest / speed for rest, speed, _ in left)
            if self.now + step > until:
                step = until - self.now
            for rest, speed, head in left:
                remaining = 0.0 if rest / speed <= step else rest - speed * step
                if head.fixed > 0:
                    head.fixed = remaining
                else:
                    head.moving = remaining
            self.now += step
            for head in heads:
                if head.fixed <= 0 and head.moving <= 0:
                    self.ends[self.queues[head.key[0]].popleft().number] = self.now
            if self.now >= until:
                return


def replay(trace: Iterable[Op], prices: Prices) -> ReplayTimes:
    """Run a trace: a communication starts when it is issued and its axis is free, a wait blocks arithmetic until it has ended.

    Communications of different axes that move at once share the ports that both use, and slow each other down.

    What is still in flight at the end is waited for.
    """
    (span,) = replay_in_turn([trace], prices)
    return span


def replay_in_turn(traces: Sequence[Iterable[Op]], prices: Prices) -> list[ReplayTimes]:
    """`replay` of a trace that is in parts: the times of each, where one may wait for what another has begun."""
    result, now, network = [], 0.0, TransfersInFlight(prices)
    flying: dict[int, str] = {}
    for number, trace in enumerate(traces, 1):
        span, began = ReplayTimes(), now

        def wait(number: int, span: ReplayTimes = span) -> None:
            nonlocal now
            axis = flying.pop(number)
            network.advance(number)
            end = network.ends[number]
            if end > now:
                span.exposed[axis] = span.exposed.get(axis, 0.0) + end - now
                now = end

        for op in trace:
            if op.kind == "move":
                parts = prices.parts(op)
                span.moved[op.axis] = span.moved.get(op.axis, 0.0) + sum(parts)
                network.issue(op, now, parts)
                flying[op.id] = op.axis
            elif op.kind == "wait":
                if op.id in flying:
                    wait(op.id)
            else:
                seconds = prices.seconds(op)
                now += seconds
                span.compute += seconds
        if number == len(traces):
            network.advance()
            for item in sorted(flying, key=lambda entry: network.ends[entry]):
                wait(item)
        span.seconds = now - began
        result.append(span)
    return result


@dataclass(frozen=True)
class UnorderedWork:
    """Operations of a program that overlaps nothing, whose order is therefore of no account.

    ops : products and communications, each with how often it is run. size, launches : bytes and number of element-wise ones.
    """

    topology: Topology
    ops: tuple[tuple[Op, float], ...]
    size: float = 0.0
    launches: float = 0.0

    @classmethod
    def of(cls, topology: Topology, trace: Iterable[Op], times: float = 1.0) -> UnorderedWork:
        """The operations of a trace, run `times` times."""
        counts = Counter(alike(op) for op in trace if op.kind != "wait")
        elements = {op: many for op, many in counts.items() if op.kind == "elements"}
        size = sum(many * (op.read + op.written) for op, many in elements.items())
        others = tuple((op, many * times) for op, many in counts.items() if op not in elements)
        return cls(topology, others, size * times, sum(elements.values()) * times)

    def seconds(self, cluster: Cluster) -> float:
        """Their seconds on a cluster: those of `replay` where each communication is waited for at once."""
        return self.priced(Prices(cluster, self.topology))

    def priced(self, prices: Prices) -> float:
        """Their seconds by these prices."""
        return self.computed(prices) + self.moved(prices)

    def computed(self, prices: Prices) -> float:
        """The seconds of products and element-wise work."""
        products = sum(times * prices.product(op) for op, times in self.ops if op.kind == "product")
        return products + prices.elements(self.size, self.launches)

    def moved(self, prices: Prices) -> float:
        """The seconds of communications."""
        return sum(times * sum(prices.move(op)) for op, times in self.ops if op.kind == "move")

    def copied(self, prices: Prices) -> float:
        """The seconds in which what communications bring passes the innermost links."""
        return sum(times * prices.copied(op) for op, times in self.ops if op.kind == "move")
