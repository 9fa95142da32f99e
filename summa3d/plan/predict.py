"""Seconds of a training step: stages made of cells, put together by the pipeline's schedule, then replicas and optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import mul
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..comm.topology import Topology
from ..dry.record import ENTER, LEAVE, Op
from ..parallel.schedule import rule_of, unchecked
from ..parallel.simulate import timeline
from .cells import BLOCK, Cell
from .price import Prices
from .replay import Work, replay

SEND, AFTER = "send", "after"


class Durations(NamedTuple):
    """Seconds of the parts of a step: of each cell's forward and backward, of what a stage sends, and of what comes last."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    send: float
    after: float


@dataclass(frozen=True)
class Step:
    """A training step.

    cells : ENTER, BLOCK and LEAVE on a stage's grid. topology : all ranks; pp is the axis of stages. layers : of each stage.
    micro_batches : of each replica. send : what one stage sends another for a micro-batch, in each direction. after : reductions
    over replicas and the optimizer, of the rank that has most. overlap : communications of a cell run behind arithmetic until
    they are waited for; what `send` and `after` hold is never overlapped.
    """

    cells: Mapping[str, Cell]
    topology: Topology
    schedule: str
    layers: tuple[int, ...]
    micro_batches: int
    send: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    overlap: bool = False
    _moved: dict[tuple[object, ...], list[float]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def _works(self) -> dict[tuple[str, bool], Work]:
        return {
            (name, backward): Work.of(self.topology, cell[backward])
            for name, cell in self.cells.items()
            for backward in (False, True)
        }

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        homes = rule_of(self.schedule, self.ranks, self.ranks, self.chunks).homes(self.ranks, self.chunks)
        return tuple(tuple(stage for stage, home in enumerate(homes) if home == rank) for rank in range(self.ranks))

    @cached_property
    def _alike(self) -> Mapping[tuple[int, int, int, int], int]:
        """(Layers, whether it has the first and the last stage, messages that it sends) of a rank → how many ranks."""
        last = len(self.layers) - 1
        return Counter(
            (
                sum(self.layers[stage] for stage in stages),
                int(0 in stages),
                int(last in stages),
                sum((stage != last) + (stage != 0) for stage in stages),
            )
            for stages in self._stages
        )

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
            of = {key: replay(self.cells[key[0]][key[1]], prices).seconds for key in self._works}
        else:
            of = {key: work.priced(prices) for key, work in self._works.items()}
        forward, backward = ({name: of[name, way] for name in self.cells} for way in (False, True))
        return Durations(forward, backward, *self._apart(prices))

    def _apart(self, prices: Prices) -> list[float]:
        """The seconds of `send` and of `after`; those of communications are kept, as `Work.moved` keeps them."""
        apart, links = (self.send, self.after), prices.links
        if links not in self._moved:
            self._moved.clear()
            self._moved[links] = [sum(prices.seconds(op) for op in ops if op.kind == "move") for ops in apart]
        moved = self._moved[links]
        return [one + sum(prices.seconds(op) for op in ops if op.kind != "move") for one, ops in zip(moved, apart, strict=True)]

    def of_stages(self, parts: Durations) -> dict[tuple[str, int], float]:
        """(F or B, stage) → its seconds, with the message that it sends."""
        last = len(self.layers) - 1
        found = {}
        for stage, layers in enumerate(self.layers):
            for kind, of in (("F", parts.forward), ("B", parts.backward)):
                ends = of[ENTER] * (stage == 0) + of[LEAVE] * (stage == last)
                sends = parts.send * (stage != (last if kind == "F" else 0))
                found[kind, stage] = layers * of[BLOCK] + ends + sends
        return found

    def pipeline(self, cluster: Cluster) -> float:
        """Seconds of all forwards and backwards, by simulation of the schedule."""
        parts = self.durations(cluster)
        many = min(self.micro_batches, self.ranks)  # every further one takes what the busiest rank computes for it
        of_stages = tuple(self.of_stages(parts).items())
        simulated = _simulated(self.schedule, self.ranks, many, self.chunks, of_stages)
        return simulated + (self.micro_batches - many) * max(self._work(parts))

    def closed(self, parts: Durations) -> float:
        """The same by the papers' closed form: m micro-batches of the busiest rank, and (p − 1)/v of the mean rank."""
        work = self._work(parts)
        mean = sum(map(mul, work, self._alike.values())) / self.ranks
        return self.micro_batches * max(work) + (self.ranks - 1) / self.chunks * mean

    def _work(self, parts: Durations) -> list[float]:
        """What ranks compute and send for one micro-batch; one number for ranks that are alike."""
        cells = [parts.forward[name] + parts.backward[name] for name in (BLOCK, ENTER, LEAVE)]
        return [sum(map(mul, kind, (*cells, parts.send))) for kind in self._alike]

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of the step."""
        return self.pipeline(cluster) + self.durations(cluster).after


@cache
def _simulated(name: str, ranks: int, micro_batches: int, chunks: int, of_stages: tuple[Any, ...]) -> float:
    """Seconds of a schedule, by its simulation."""
    return timeline(unchecked(name, ranks, micro_batches, chunks), of_stages=dict(of_stages)).time


class Fast:
    """`Step.seconds` for fits: the closed form, times what the simulation makes of it on the cluster of the paper."""

    def __init__(self, step: Step, cluster: Cluster) -> None:
        self.step = step
        self.ratio = step.pipeline(cluster) / step.closed(step.durations(cluster))

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of the step; exact on the cluster that it was made with."""
        parts = self.step.durations(cluster)
        return self.ratio * self.step.closed(parts) + parts.after


def even_layers(layers: int, stages: int) -> Sequence[int]:
    """The layers of each stage, the larger ones first."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]
