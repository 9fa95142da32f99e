"""The schemes and grids that every family of models is tested on, the families, and the comparison with plain torch.

A family is one line of FAMILIES; a scheme one line of GRIDS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

import devices
import torch
from nn_parity import check_parity, global_weights
from plain_bert import PlainBERT, sentence_pairs
from plain_gpt import PlainGPT
from plain_llama import PlainLlama
from torch import Tensor

from summa3d.nn import ModelConfig, build
from summa3d.nn.context import Context

GRIDS: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [
        ("serial", {"x": 1}),
        ("oned", {"y": 1}),
        ("summa", {"x": 1, "y": 1}),
        ("tesseract", {"d": 1}),
        ("cuboid-sequence", {"z": 1}),
    ],
    2: [
        ("oned", {"y": 2}),
        ("oned-sp", {"y": 2}),
        ("summa", {"x": 1, "y": 2}),
        ("summa", {"x": 2, "y": 1, "z": 1}),
        ("tesseract", {"d": 2}),
        ("cuboid-sequence", {"z": 2}),
    ],
    3: [("oned", {"y": 3}), ("oned-sp", {"y": 3}), ("summa", {"x": 3}), ("summa", {"y": 3}), ("cuboid-sequence", {"y": 3})],
    4: [
        ("oned", {"y": 4}),
        ("oned-sp", {"y": 4}),
        ("summa", {"x": 2, "y": 2}),
        ("summa-transposed", {"x": 2, "y": 2}),
        ("tesseract", {"x": 2, "y": 2, "d": 1}),
        ("cuboid-sequence", {"x": 1, "y": 2, "z": 2}),
        ("cuboid-sequence", {"x": 2, "y": 1, "z": 2}),
    ],
    6: [
        ("summa", {"x": 2, "y": 3}),
        ("summa-transposed", {"x": 3, "y": 2}),
        ("oned", {"y": 6}),
        ("cuboid-sequence", {"y": 3, "z": 2}),
    ],
    8: [
        ("tesseract", {"x": 2, "y": 2, "d": 2}),
        ("summa", {"x": 2, "y": 4}),
        ("cuboid-sequence", {"x": 2, "y": 2, "z": 2}),
    ],
    9: [("summa", {"x": 3, "y": 3}), ("cuboid", {"x": 3, "y": 3, "z": 1}), ("tesseract", {"x": 3, "y": 3, "d": 1})],
    12: [
        ("tesseract", {"x": 2, "y": 2, "d": 3}),
        ("summa", {"x": 3, "y": 4}),
        ("cuboid-sequence", {"x": 2, "y": 3, "z": 2}),
        ("oned-sp", {"y": 12}),
    ],
}
"""World size → schemes and grids that are tested there; grids lack some axes of size 1, and have some that are not needed."""

STEP, FIRST_ROW = 4, 5


@dataclass(frozen=True)
class Family:
    """A family of models: its sizes on a scheme, the plain oracle, and a batch.

    ``plain(config, weights, seed=…)`` has ``.weights`` and ``.loss(**batch, step=…, first_row=…)``, as the model;
    ``batch(config, rows, sequence)`` → the arguments of both by name.
    """

    config: Callable[[Context], ModelConfig]
    plain: Callable[..., Any]
    batch: Callable[[ModelConfig, int, int], dict[str, Tensor]]


def tokens_and_labels(config: ModelConfig, rows: int, sequence: int) -> tuple[Tensor, ...]:
    """Random tokens and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = torch.randint(0, config.vocabulary, (2, rows, sequence), generator=generator)
    labels[0, :3] = -100
    return tokens, labels


def next_tokens(config: ModelConfig, rows: int, sequence: int) -> dict[str, Tensor]:
    return dict(zip(("tokens", "labels"), tokens_and_labels(config, rows, sequence), strict=True))


# 12 heads and h are divided by every axis here, s by those that split it; v and GPT-2's f are primes that none divides.
GPT2 = ModelConfig(layers=1, hidden=24, heads=12, ffn=29, sequence=12, vocabulary=37, dropout=0.1, attention_dropout=0.2)
LLAMA = replace(GPT2, family="llama", hidden=72, ffn=36, kv_heads=2, rotary_base=50.0, norm_eps=1e-3)


NEMOTRON = replace(GPT2, hidden=72, kv_heads=2, activation="relu2")


def grouped_on(whole: ModelConfig, context: Context) -> ModelConfig:
    """Two kv heads, whole or in pieces; six where three ranks split them."""
    num_shards = context.columns(context.scheme.after_linear(context.residual)).size
    return whole if num_shards % 2 == 0 or num_shards == 1 else replace(whole, kv_heads=6)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(lambda context: GPT2, PlainGPT, next_tokens),
    "llama": Family(partial(grouped_on, LLAMA), PlainLlama, next_tokens),
    "gpt2-grouped": Family(partial(grouped_on, NEMOTRON), PlainGPT, next_tokens),
    "bert": Family(lambda context: replace(GPT2, family="bert"), PlainBERT, sentence_pairs),
}


def rows_for(context: Context) -> int:
    """The smallest batch that the scheme can split."""
    shape, inner = context.grid.shape, context.scheme.after_linear(context.residual)
    return lcm(context.residual.num_shards(0, shape), inner.num_shards(0, shape))


def sequence_for(context: Context, longest: int) -> int:
    """The longest sequence, shorter than the model's where there is one, that the scheme can split."""
    num_shards = context.residual.num_shards(1, context.grid.shape)
    return (longest - 1) // num_shards * num_shards or longest


def check_against_plain_torch(family: Family, context: Context, tolerance: float = 1e-10) -> None:
    """Loss and every raw gradient, in float64 with dropout on, equal the plain model's of the same weights."""
    config = family.config(context)
    with devices.place():
        model = build(config, context, torch.float64, seed=3)
    plain = family.plain(config, global_weights(model), seed=3)
    rows = rows_for(context)
    batch = family.batch(config, rows * (2 if rows < 4 else 1), sequence_for(context, config.sequence))
    check_parity(
        model,
        plain,
        lambda model: model(**devices.on_device(batch), step=STEP, first_row=FIRST_ROW),
        lambda plain: plain.loss(**batch, step=STEP, first_row=FIRST_ROW),
        tolerance,
    )
