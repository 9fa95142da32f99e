"""Stages of a pipeline: their ranks and layers, and how many micro-batches a rank keeps between its ops."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

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


@cache
def most_in_flight(schedule: str, p: int, m: int, chunks: int, rank: int) -> int:
    """The most inputs of stages that a rank keeps until the gradients of inputs are taken."""
    many = min(m, 2 * p)  # more change nothing
    return max(in_flight(list(rule_of(schedule, p, many, chunks).order(p, many, chunks, rank)), GRADIENT_SENDERS))


@cache
def states(schedule: str, p: int, m: int, chunks: int, rank: int) -> tuple[Any, Any, Any, Any]:
    """The different ops of a rank, and how many micro-batches of each chunk are then between F and X, and between X and W.

    The ops are places in PASSES and chunks. The last is the most micro-batches of a chunk that W has seen by then.
    """
    many, flying, owed, done = min(m, 2 * p), [0] * chunks, [0] * chunks, [0] * chunks  # more micro-batches change nothing
    result: dict[tuple[int, ...], int] = {}
    for op in rule_of(schedule, p, many, chunks).order(p, many, chunks, rank):
        way = "FXW".index(op.kind)
        state = way, op.chunk, *flying, *owed
        result[state] = max(done)
        flying[op.chunk] += (1, -1, 0)[way]
        owed[op.chunk] += (0, 1, -1)[way]
        done[op.chunk] += way == 2
    table = np.array([*result])
    return table[:, :2], table[:, 2 : 2 + chunks], table[:, 2 + chunks :], np.array([*result.values()])


class HeavyRank(NamedTuple):
    """What a rank of a pipeline holds at a time when it keeps much.

    layers : its own. flying, owed : layers of micro-batches between F and B or X, and between X and W. heads : micro-batches
    between F and B or X of the last stage. first, last : whether it has the first and the last stage
    """

    layers: int
    flying: int
    owed: int
    heads: int
    first: int
    last: int


@cache
def heaviest(schedule: str, p: int, m: int, chunks: int, layers: int) -> tuple[HeavyRank, ...]:
    """Bytes of the first and the last rank when they keep most."""
    many, stages = balanced(layers, p, chunks), held_stages(homes_of(schedule, p, chunks), p)
    result, end = [], len(many) - 1
    for rank in (0, p - 1):
        own = stages[rank]
        each, ends = np.array([many[stage] for stage in own]), (int(0 in own), int(end in own))
        if not is_split(schedule, p):
            flying = most_in_flight(schedule, p, m, chunks, rank)
            item = many[end] if end in own else int(each.max())
            result.append(HeavyRank(int(each.sum()), flying * item, 0, flying * ends[1], *ends))
            continue
        _, flying, owed, _ = states(schedule, p, m, chunks, rank)
        heads = flying[:, own.index(end)] if end in own else 0 * flying[:, 0]
        kept = [*zip((flying @ each).tolist(), (owed @ each).tolist(), heads.tolist(), strict=True)]
        most = (
            max(kept),
            max(kept, key=lambda entry: (entry[1], entry[0], entry[2])),
            max(kept, key=lambda entry: entry[0] + entry[1]),
        )
        result += [HeavyRank(int(each.sum()), *entry, *ends) for entry in most]
    return tuple(result)
