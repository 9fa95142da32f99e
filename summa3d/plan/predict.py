"""Seconds of a training step: stages made of cells, put together by the pipeline's schedule, then replicas and optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import log, sqrt
from operator import mul
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..comm.topology import Topology
from ..dry.record import ENTER, LEAVE, Op
from ..parallel.schedule import is_split, rule_of, unchecked
from ..parallel.simulate import Events, in_order, time_of
from .cells import BLOCK, Cell, OpTrace
from .price import Prices
from .replay import UnorderedWork, replay

SEND, AFTER = "send", "after"
FILLED = 2
"""Micro-batches for each rank that are simulated of a schedule whose backward is split; one fills the others."""
NOTHING = {ENTER: 0.0, BLOCK: 0.0, LEAVE: 0.0}


class Durations(NamedTuple):
    """Seconds of the parts of a step: of each cell's forward and backward, of what a stage sends, and of what comes last.

    weights : of each cell's gradients of weights, where backward is split, and `backward` has those of inputs alone.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    send: float
    after: float
    weights: Mapping[str, float] = NOTHING


@dataclass(frozen=True)
class PredictedStep:
    """A training step.

    cells : ENTER, BLOCK and LEAVE on a stage's grid. topology : all ranks; pp is the axis of stages. layers : of each stage.
    micro_batches : of each replica. send : what one stage sends another for a micro-batch, in each direction. after :
    reductions over replicas and the optimizer, of the rank that has most. overlap : communications of a cell run behind
    arithmetic until they are waited for; what `send` and `after` hold is never overlapped. behind : (cell, whether backward)
    → communications that run behind its arithmetic, along each axis at once. late, early : those that run behind the last
    backward of a rank's layers, and behind their first forward. contention : how much those behind arithmetic slow it down,
    of the time in which what they bring passes a node's links; stalls : of their whole time. host : seconds that a host takes
    to start a block's passes, of which its forward has a third, and again where it is computed again: they take no less.
    """

    cells: Mapping[str, Cell]
    topology: Topology
    schedule: str
    layers: tuple[int, ...]
    micro_batches: int
    send: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    overlap: bool = False
    behind: Mapping[tuple[str, bool], tuple[Op, ...]] = field(default_factory=dict)
    late: tuple[Op, ...] = ()
    early: tuple[Op, ...] = ()
    contention: float = 0.0
    stalls: float = 0.0
    host: float = 0.0

    @cached_property
    def _works(self) -> dict[tuple[str, bool], UnorderedWork]:
        return {
            (name, backward): UnorderedWork.of(self.topology, cell[backward])
            for name, cell in self.cells.items()
            for backward in (False, True)
        }

    @cached_property
    def _behind(self) -> dict[tuple[str, bool], list[UnorderedWork]]:
        """`behind`, by axis."""
        return {
            key: [UnorderedWork.of(self.topology, [op for op in ops if op.axis == axis]) for axis in {op.axis for op in ops}]
            for key, ops in self.behind.items()
        }

    @cached_property
    def _homes(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return rule_of(self.schedule, self.ranks, self.ranks, self.chunks).homes(self.ranks, self.chunks)

    @cached_property
    def split(self) -> bool:
        """Return whether backward is split into gradients of inputs and of weights."""
        return is_split(self.schedule, self.ranks)

    @cached_property
    def messages(self) -> tuple[tuple[int, int], ...]:
        """Of each stage, 1 for a message that it sends onwards, and for one back: neighbours that lie on another rank get one."""
        homes, last = self._homes, len(self.layers) - 1
        onwards = [int(stage < last and homes[stage + 1] != homes[stage]) for stage in range(len(homes))]
        return tuple(zip(onwards, [0, *onwards[:-1]], strict=True))

    @cached_property
    def works(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of each rank, its layers, whether it has the first and the last stage, and the messages that it sends."""
        last, of_ranks = len(self.layers) - 1, [[0, 0, 0, 0] for _ in range(self.ranks)]
        for stage, (home, messages) in enumerate(zip(self._homes, self.messages, strict=True)):
            for place, many in enumerate((self.layers[stage], stage == 0, stage == last, sum(messages))):
                of_ranks[home][place] += many
        return tuple((layers, first, end, sent) for layers, first, end, sent in of_ranks)

    @cached_property
    def _alike(self) -> Mapping[tuple[int, int, int, int], int]:
        """`works` → how many ranks have the same."""
        return Counter(self.works)

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.topology.shape.get("pp", 1)

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return len(self.layers) // self.ranks

    def durations(self, cluster: Cluster) -> Durations:
        """The seconds of the parts on a cluster."""
        prices = Prices(cluster, self.topology)
        if self.overlap:
            of = {key: self._replayed(self.cells[key[0]][key[1]], prices) for key in self._works}
        else:
            of = {key: work.priced(prices) for key, work in self._works.items()}
        for key, hidden in self._behind.items():
            moved, computed = [item.moved(prices) for item in hidden], self._works[key].computed(prices)
            copied = sum(item.copied(prices) for item in hidden)
            of[key] += self._added(max(moved), sum(moved), copied, computed)
        if self.host:
            again = any(op.phase == "recompute" and op.kind == "elements" for op in self.cells[BLOCK].backward)
            for way, parts in ((False, 1), (True, 2 + again)):
                of[BLOCK, way] = max(of[BLOCK, way], self.host * parts / 3)
        forward, backward = ({name: of[name, way] for name in self.cells} for way in (False, True))
        around = (self.send, self.after, self.late, self.early)
        send, after, *apart = (sum(map(prices.seconds, ops), 0.0) for ops in around)
        layers = max(map(sum, zip(*[iter(self.layers)] * self.chunks, strict=True))) if self.late or self.early else 0
        for ops, seconds, of_layers in zip((self.late, self.early), apart, (backward[BLOCK], forward[BLOCK]), strict=True):
            computed = layers * of_layers
            after += self._added(seconds, seconds, sum(map(prices.copied, ops)), computed)
        return Durations(forward, backward, send, after)

    def _replayed(self, trace: OpTrace, prices: Prices) -> float:
        """Seconds of a cell's pass; communications that nothing waits for later are waited for at once."""
        later = {op.id for op in trace if op.kind == "wait"}
        at_once = sum(prices.seconds(op) for op in trace if op.kind == "move" and op.id not in later)
        return at_once + replay((op for op in trace if op.kind != "move" or op.id in later), prices).seconds

    def _added(self, longest: float, moved: float, copied: float, computed: float) -> float:
        """Seconds that communications behind arithmetic add to it: what they slow it down, or are longer than it, and stalls."""
        return max(self.contention * min(copied, computed), longest - computed) + self.stalls * min(moved, computed)

    def of_stages(self, parts: Durations) -> dict[tuple[str, int], float]:
        """(Kind of op, stage) → its seconds, with the message that it sends."""
        last = len(self.layers) - 1
        kinds = ("F", parts.forward), ("X" if self.split else "B", parts.backward), ("W", parts.weights)
        result = {}
        for stage, layers in enumerate(self.layers):
            for (kind, of), sent in zip(kinds, (*self.messages[stage], 0), strict=True):
                ends = of[ENTER] * (stage == 0) + of[LEAVE] * (stage == last)
                result[kind, stage] = layers * of[BLOCK] + ends + sent * parts.send
        return result

    def pipeline(self, cluster: Cluster) -> float:
        """Seconds of all forwards and backwards, by simulation of the schedule."""
        parts = self.durations(cluster)
        return self._simulated(self.micro_batches, parts) if self.split else self.few(parts)

    def few(self, parts: Durations) -> float:
        """The same, of which a few micro-batches are simulated: every further one takes what the busiest rank computes for it.

        That is exact, but where backward is split: 1.5 % too long, or 4 % where stages of a layer and of two are in one pipeline.
        """
        few = FILLED * self.ranks if self.split else self.ranks
        many = min(self.micro_batches, few)
        return self._simulated(many, parts) + (self.micro_batches - many) * max(self._work(parts))

    def _simulated(self, micro_batches: int, parts: Durations) -> float:
        return _simulated(self.schedule, self.ranks, micro_batches, self.chunks, tuple(self.of_stages(parts).items()))

    def closed(self, parts: Durations) -> float:
        """The same by the papers' closed form: m micro-batches of the busiest rank, and (p − 1)/v of the mean rank.

        Where backward is split, there is none for stages that differ: it is `few`.
        """
        if self.split:
            return self.few(parts)
        work = self._work(parts)
        mean = sum(map(mul, work, self._alike.values())) / self.ranks
        return self.micro_batches * max(work) + (self.ranks - 1) / self.chunks * mean

    def least(self, parts: Durations) -> float:
        """A lower bound of `few`: what a rank does, behind the stages before its first one.

        Those pass their first forward on before it begins, and their last backward when it has ended; where backward is split,
        only forwards are sure to.
        """
        of, before, bound = self.of_stages(parts), 0.0, 0.0
        for rank, work in enumerate(self.works):
            bound = max(bound, before + self.micro_batches * self._of(parts, work))
            before += of["F", rank] + (0.0 if self.split else of["B", rank])
        return max(bound, self._of_one_chunk(of)) if self.split and self.chunks == 1 else bound

    def _of_one_chunk(self, of: Mapping[tuple[str, int], float]) -> float:
        """A lower bound of ZB-H1. A rank's first X is behind all forwards of one micro-batch, and the X of the ranks after it.

        Before it, the p-th rank from the end does p forwards. Behind its last X are those of the ranks before it; and of its own
        W one more than these are.
        """
        many, p, bound = self.micro_batches, self.ranks, 0.0
        forward, inputs, weights = ([of[kind, rank] for rank in range(p)] for kind in "FXW")
        filled, drained = 0.0, sum(forward) + sum(inputs)
        for rank, (item, back, own) in enumerate(zip(forward, inputs, weights, strict=True)):
            drained -= back
            behind = drained + many * (back + own) + max(0, many - p + rank) * item
            ahead = filled + many * (item + back) + max(0, many - 1 - rank) * own + weights[0]
            bound, filled = max(bound, behind, ahead), filled + item + back
        return bound

    def _work(self, parts: Durations) -> list[float]:
        """Work and messages of ranks for one micro-batch; one number for ranks that are alike."""
        return [self._of(parts, kind) for kind in self._alike]

    @staticmethod
    def _of(parts: Durations, kind: tuple[int, int, int, int]) -> float:
        cells = [parts.forward[name] + parts.backward[name] + parts.weights[name] for name in (BLOCK, ENTER, LEAVE)]
        return sum(map(mul, kind, (*cells, parts.send)))

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of the step."""
        return (self.pipeline(cluster) + self.durations(cluster).after) * self.slowest(cluster)

    def nearly(self, cluster: Cluster) -> float:
        """The same by the closed form of the pipeline, without its simulation."""
        parts = self.durations(cluster)
        return (self.closed(parts) + parts.after) * self.slowest(cluster)

    def slowest(self, cluster: Cluster) -> float:
        """Seconds of the slowest of all nodes as a multiple of the mean: the expectation of the largest of so many (Gumbel)."""
        nodes = self.topology.size / max(1, max(level.size for level in cluster.levels))
        return 1 + cluster["nodes.spread"] * sqrt(2 * log(nodes)) if nodes > 1 else 1.0


@cache
def _simulated(name: str, ranks: int, micro_batches: int, chunks: int, of_stages: tuple[Any, ...]) -> float:
    """Seconds of a schedule, by its simulation."""
    return time_of(_events(name, ranks, micro_batches, chunks), dict(of_stages))


@lru_cache(32)
def _events(name: str, ranks: int, micro_batches: int, chunks: int) -> Events:
    return in_order(unchecked(name, ranks, micro_batches, chunks))
