"""Stages of a pipeline: their ranks and layers, and how many micro-batches a rank keeps between its ops."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...parallel.schedule import GRADIENT_SENDERS, held_stages, is_split, rule_of, split_layers
from ...parallel.schedule import SCHEDULES as SCHEDULE_RULES
from ...parallel.simulate import in_flight

balanced = cache(split_layers)
"""The number of layers of each stage."""


@cache
def homes_of(schedule: str, pp: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage of a pipeline."""
    return SCHEDULE_RULES[schedule].homes(pp, chunks)


@cache
def fullest(stages: tuple[tuple[int, ...], ...], layers: tuple[int, ...]) -> set[int]:
    """Ranks of a pipeline one of which is the fullest: of those whose stages are alike, the first and the last."""
    alike: dict[object, list[int]] = {}
    for rank, own in enumerate(stages):
        alike.setdefault((0 in own, len(layers) - 1 in own, *(layers[stage] for stage in own)), []).append(rank)
    return {rank for ranks in alike.values() for rank in (ranks[0], ranks[-1])}


def most_in_flight(schedule: str, p: int, m: int, chunks: int, rank: int) -> int:
    """The most inputs of stages that a rank keeps until the gradients of inputs are taken."""
    return _most_in_flight(schedule, p, min(m, 2 * p), chunks, rank)  # more change nothing


@cache
def _most_in_flight(schedule: str, p: int, many: int, chunks: int, rank: int) -> int:
    return max(in_flight(list(rule_of(schedule, p, many, chunks).order(p, many, chunks, rank)), GRADIENT_SENDERS))


def states(schedule: str, p: int, m: int, chunks: int, rank: int) -> tuple[Any, Any, Any]:
    """The different ops of a rank, and how many micro-batches of each chunk are then between F and X, and between X and W.

    The ops are places in PASSES and chunks.
    """
    return _states(schedule, p, min(m, 2 * p), chunks, rank)  # more change nothing


@cache
def _states(schedule: str, p: int, many: int, chunks: int, rank: int) -> tuple[Any, Any, Any]:
    flying, owed = [0] * chunks, [0] * chunks
    found: dict[tuple[int, ...], None] = {}
    for op in rule_of(schedule, p, many, chunks).order(p, many, chunks, rank):
        way = "FXW".index(op.kind)
        state = way, op.chunk, *flying, *owed
        found[state] = None
        flying[op.chunk] += (1, -1, 0)[way]
        owed[op.chunk] += (0, 1, -1)[way]
    table = np.array([*found])
    return table[:, :2], table[:, 2 : 2 + chunks], table[:, 2 + chunks :]


@cache
def heaviest(schedule: str, p: int, m: int, chunks: int, layers: int) -> tuple[tuple[int, int, int], ...]:
    """What ranks hold when they keep most: their layers; those of micro-batches between F and B or X, and between X and W."""
    many, stages = balanced(layers, p, chunks), held_stages(homes_of(schedule, p, chunks), p)
    if not is_split(schedule, p):
        own = [many[stage] for stage in stages[0]]
        return ((sum(own), most_in_flight(schedule, p, m, chunks, 0) * max(own), 0),)
    found = []
    for rank in (0, p - 1):
        each = np.array([many[stage] for stage in stages[rank]])
        _, flying, owed = states(schedule, p, m, chunks, rank)
        both = [*zip((flying @ each).tolist(), (owed @ each).tolist(), strict=True)]
        most = max(both), max(both, key=lambda one: one[::-1]), max(both, key=sum)
        found += [(int(each.sum()), *one) for one in most]
    return tuple(found)
