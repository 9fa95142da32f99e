"""Models whose memory is measured, and how: bytes saved for backward, and the peak of a forward and a backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from summa3d.bench.memory import peak_bytes, saved_bytes
from summa3d.nn import ModelConfig
from summa3d.train.device import HOST, on_device

# Odd sizes where no axis must divide them: v = 191, f = 4h or Llama's; large enough that rows of statistics are small change.
GPT2 = {"layers": 2, "hidden": 96, "heads": 4, "sequence": 32, "vocabulary": 191}
LLAMA = {**GPT2, "family": "llama", "kv_heads": 2}
BERT = {**GPT2, "family": "bert"}
VIT = {"layers": 2, "hidden": 96, "heads": 4, "family": "vit", "image": 20, "patch": 4, "channels": 3, "classes": 11}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT, "vit": VIT}
BATCH, SAVED, PEAK, IN_FLIGHT = 8, 0.001, 0.03, 0.05
SCHEMES = {
    1: [("serial", {"x": 1})],
    4: [
        ("oned", {"y": 4}),
        ("oned-sp", {"y": 4}),
        ("summa", {"x": 2, "y": 2}),
        ("summa-transposed", {"x": 2, "y": 2}),
        ("tesseract", {"d": 4}),
        ("cuboid", {"x": 2, "y": 2, "z": 1}),
        ("cuboid", {"x": 1, "y": 2, "z": 2}),
        ("cuboid-sequence", {"x": 1, "y": 2, "z": 2}),
    ],
}


def places(ranks: int, family: str, order: Sequence[str] | None) -> Iterator[tuple[int, str, dict[str, int]]]:
    """The schemes of so many ranks, their numbers and grids, at which it is this family's turn; without an order, all.

    One rank is every family's.
    """
    for turn, (name, axes) in enumerate(SCHEMES[ranks]):
        whose = order is None or ranks == 1 or order[turn % len(order)] == family
        if whose and (family, name) != ("vit", "oned-sp"):  # 1 + n² tokens are never divided by 4
            yield turn, name, axes


def inputs(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if config.family == "vit":
        side, _, channels, classes = config.image_sizes
        images = torch.randn(BATCH, channels, side, side, generator=generator)
        return {"images": images, "labels": torch.randint(0, classes, (BATCH,), generator=generator)}
    tokens = torch.randint(0, config.vocabulary, (BATCH, config.sequence), generator=generator)
    more = {"relation": torch.arange(BATCH) % 2, "types": tokens % 2} if config.family == "bert" else {}
    return {"tokens": tokens, "labels": tokens.roll(1, 1), **more}


def measured(model: Any, device: torch.device = HOST) -> tuple[int, int]:
    """Bytes that a forward saves, and the peak of a forward and a backward, workspace that was there before included."""
    given = on_device(inputs(model.config), device)
    with saved_bytes([*model.parameters(), *given.values()]) as saved:
        loss = model(**given)
    loss.backward()
    kept = saved.bytes
    del saved, loss
    model.zero_grad(set_to_none=True)
    gc.collect()
    before = model.context.grid.ledger.workspace_bytes
    return kept, before + peak_bytes(lambda: model(**given).backward())
