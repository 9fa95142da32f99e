"""Sizes of a row's model, stages and ranks, as `step.step` takes it: widths, parameters, layers, what is cut over whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...layout import split_sizes
from .programs import PROGRAMS

FULLY = 3
"""The stage of ZeRO that cuts weights, too."""


def shape_of(given: Mapping[str, Any]) -> tuple[int, int, int]:
    """(Experts of a layer, ranks that hold different ones, ranks that split each); (0, 1, tp) of a model without."""
    tp = int(given["tp"])
    return int(given.get("experts") or 0), int(given.get("ep") or 1), int(given.get("etp") or tp)


def ffn_of(given: Mapping[str, Any]) -> int:
    """Width of a feed-forward layer, of one expert where there are any."""
    return int(given.get("ffn") or 4 * given["hidden"])


def widths_of(given: Mapping[str, Any]) -> dict[str, int]:
    """Columns of what a block's products give for a token: Llama's with its heads of k and v and its gate, or GPT's.

    Of a layer of experts, those of all that the token goes to.
    """
    hidden, heads = int(given["hidden"]), int(given["heads"])
    ffn = ffn_of(given) * int(given["top_k"]) + int(given.get("shared") or 0) if given.get("experts") else ffn_of(given)
    q = heads * head_of(given)
    keys = q * (given.get("kv_heads") or heads) // heads
    gate = ffn if given.get("family") == "llama" else 0
    return {"q": q, "k": keys, "v": keys, "attention": q, "out": hidden, "gate": gate, "up": ffn, "down": hidden}


def head_of(given: Mapping[str, Any]) -> int:
    """Elements of a head."""
    return int(given.get("head_dim") or given["hidden"] // given["heads"])


def parts_of(given: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of a block: those that all tokens meet, and those of all experts."""
    widths, hidden, experts = widths_of(given), int(given["hidden"]), int(given.get("experts") or 0)
    attention = hidden * (widths["q"] + widths["k"] + widths["v"]) + widths["attention"] * hidden
    if experts:
        dense = attention + experts * hidden + 3 * hidden * int(given.get("shared") or 0)
        return dense, 3 * experts * hidden * ffn_of(given)
    return attention + hidden * (widths["gate"] + 2 * widths["up"]), 0


def block_parameters(given: Mapping[str, Any]) -> int:
    """Parameters of a block, with all of its experts."""
    return sum(parts_of(given))


def stages_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers of each stage of a row."""
    stages = given["pp"] * given.get("chunks", 1)
    if PROGRAMS[given["profile"]].balanced:
        return balanced_layers(given["layers"], stages, given["vocabulary"] * given["hidden"] / block_parameters(given))
    return stage_layers(given["layers"], stages, given.get("slots", 0))


def balanced_layers(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """The layers of each stage, where a stage ends with the layer that would reach its part of all, of which the head is some.

    >>> balanced_layers(16, 4, 3.9)
    (4, 5, 5, 2)
    """
    part, result = (layers + head) / stages, [0] * stages
    stage = 0
    for layer in range(1, layers + 1):
        stage += stage < stages - 1 and layer >= part * (stage + 1)
        result[stage] += 1
    return tuple(result)


def stage_layers(layers: int, stages: int, slots: int) -> tuple[int, ...]:
    """The layers of each stage; with two `slots`, the first and the last have one less."""
    result = split_sizes(layers + slots, stages)
    if slots:
        result[0], result[-1] = result[0] - 1, result[-1] - 1
    return tuple(result)


def in_flight(ranks: int, chunks: int, micro_batches: int, rank: int = 0) -> float:
    """Micro-batches whose inputs a rank of a pipeline keeps, a fraction where it has chunks."""
    after = ranks - 1 - rank
    return min(micro_batches, (2 * after + (chunks - 1) * ranks + 1) / chunks if chunks > 1 else after + 1)


def shards_of(given: Mapping[str, Any]) -> int:
    """The ranks over which weights are cut (ZeRO-3, FSDP): the shards of all contexts, which have the same weights; or 1."""
    shards = int(given.get("shards", 1))
    return shards * int(given.get("cp", 1)) if shards > 1 or given.get("zero") == FULLY else 1
