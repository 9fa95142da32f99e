"""Seconds of a training step of a configuration: the dry run of its program, replayed, and its stages, simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING

from ..cluster import Cluster
from ..comm.topology import Topology
from ..dry.record import RepeatedSegment
from ..parallel.simulate import timeline
from .cells import with_messages
from .price import Prices
from .replay import replay

if TYPE_CHECKING:
    from ..dry.step import DryStep, OpKey
    from ..parallel.schedule import Schedule
    from ..train.config import Config


def seconds(config: Config, cluster: Cluster) -> float:
    """The predicted seconds of a step of a configuration on a cluster.

    The first rank of each stage is traced, with all that the configuration switches. What its ops take is replayed; a pipeline's
    schedule is simulated. Where stages share cores, a stage that waits leaves them to the others: the step takes at least what
    all ranks compute, divided among the cores. Raises as the run itself would.
    """
    grid = config.grid
    topology = Topology.checked(grid.axes, grid.rank_order, grid.tile)
    steps, schedule = _traced(config, cluster.ranks_per_node(topology.size))
    alone, inner = cluster, topology.size // grid.pp
    if cluster["host.slots"]:
        beside = max(1, min(topology.size, cluster.node or topology.size) // inner)  # stages of a node
        alone = cluster.replaced({"host.slots": cluster["host.slots"] * beside}, "assumed")
    prices = Prices(alone, topology)
    spans = [{key: span(item.parts, prices) for key, item in step.traced.items()} for step in steps]
    ends = max(span([*step.copies, *step.optimizer], prices) for step in steps)
    busy = [sum(result[key] for key in step.program) for result, step in zip(spans, steps, strict=True)]
    if grid.pp == 1:
        return busy[0] + ends
    simulated = timeline(schedule, of_stages=of_stages(schedule, steps, spans, config.replicas.overlap)).time
    shared = cluster.crowding(topology.size) / alone.crowding(topology.size)
    return max(simulated, mean(busy) * shared) + ends * shared


def _traced(config: Config, ranks_per_node: int) -> tuple[list[DryStep], Schedule]:
    """The step of the first rank of each stage; stages that do the same are traced once."""
    from ..dry.rank_classes import kinds_of
    from ..dry.step import Rank
    from ..train.dry_run import setting_of, training_of

    first = setting_of(config, 0, ranks_per_node, config.device == "cuda")
    topology = first.topology
    first.check()
    known: dict[object, Rank] = {}
    steps = []
    for index in range(config.grid.pp):
        kinds = tuple(kinds_of(index, first.stages))
        if kinds not in known:
            at = topology.rank_of({**dict.fromkeys(topology.shape, 0), "pp": index}) if config.grid.pp > 1 else 0
            known[kinds] = Rank.traced(replace(first, rank=at), training_of(config))
        steps.append(known[kinds].step(known[kinds].keys(index)))
    return steps, next(iter(known.values())).pipeline.schedule(config.train.accumulate)


def span(parts: Sequence[RepeatedSegment], prices: Prices) -> float:
    """The seconds of consecutive parts; the repetitions of one are each replayed as if by itself."""
    ops = with_messages(tuple(op for segment, _ in parts for op in segment.ops))
    again = sum((times - 1) * replay(with_messages(tuple(part.ops)), prices).seconds for part, times in parts if times > 1)
    return replay(ops, prices).seconds + again


def of_stages(
    schedule: Schedule, steps: Sequence[DryStep], spans: Sequence[Mapping[OpKey, float]], overlap: bool
) -> dict[tuple[str, int], float]:
    """(Kind of op, stage) → the mean of its seconds over micro-batches."""
    from ..parallel.executor import ops_of

    result: dict[tuple[str, int], list[float]] = {}
    for index, (step, taken) in enumerate(zip(steps, spans, strict=True)):
        for op, key in zip(ops_of(schedule, index, overlap), step.program, strict=True):
            result.setdefault((op.kind, schedule.stages[index][op.chunk]), []).append(taken[key])
    return {key: mean(all_of) for key, all_of in result.items()}
