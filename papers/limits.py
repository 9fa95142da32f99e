"""Largest batches that fit: by the buffers of Optimus' and Megatron's released programs, and by dry runs of our schemes."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from summa3d.dry.step import Setting, run
from summa3d.nn.config import ModelConfig

LAYERS, SEQUENCE, FLOAT = 24, 512, 4
GIB = 2**30
USABLE = 0.97 * 16 * GIB - 0.9 * GIB
"""Bytes of a card of 16 GiB beside the context, the libraries, and a reserve: assumed."""
VOCABULARY = 576
"""As small as all ranks can cut: the paper's runs have no embedding and no head."""
SIZES = {4: (2048, 32), 16: (4096, 64), 36: (6120, 72), 64: (8192, 128)}
"""GPUs → hidden size and heads, of Optimus' table 2."""


def optimus(batch: int, hidden: int, heads: int, ranks: int) -> float:
    """Bytes of a rank in Optimus: its buffers, as the released code makes them, and what torch holds beside them."""
    unit = FLOAT * batch * SEQUENCE * hidden / ranks
    scores = FLOAT * batch * heads * SEQUENCE**2 / ranks
    block = 12 * hidden**2 / ranks * FLOAT
    buffers = LAYERS + 4 + 3 + 1 + 4 + 1 + 7 + 1  # checkpoints, workspace, qkv, dense, up, down, backward, conjunction
    held = 2 + 2 + 1 + 2 + 4 + 0.5 + 1 + 4 + 2  # two norms and their gradients, context, residual, GELU, masks, output
    return LAYERS * block * 2 + (buffers + held) * unit + 4 * hidden**2 / ranks * FLOAT + (3 + 0.25 + 2) * scores


def megatron(batch: int, hidden: int, heads: int, ranks: int) -> float:
    """Bytes of a rank in Megatron of 2020, whose checkpoints are cut over the ranks."""
    unit = FLOAT * batch * SEQUENCE * hidden
    scores = FLOAT * batch * heads * SEQUENCE**2 / ranks
    block = 12 * hidden**2 / ranks * FLOAT
    whole = 1 + 1 + 1 + 1.25 + 1 + 1 + 0.25 + 1 + 3  # of a layer, not cut; three of them are gradients
    part = 3 + 2 + 1 + 8 + 4
    return LAYERS * block * 2 + (LAYERS / ranks + whole + part / ranks) * unit + (3 + 0.25 + 2) * scores


def largest_batches(ranks: int) -> dict[str, int]:
    """The largest batch that fits in USABLE, of Optimus and Megatron, on so many ranks of Optimus' table 2."""
    hidden, heads = SIZES[ranks]
    found = {}
    for name, held, multiple in (("optimus", optimus, isqrt(ranks)), ("megatron", megatron, 1)):
        batch = multiple
        while held(batch + multiple, hidden, heads, ranks) <= USABLE:
            batch += multiple
        found[name] = batch
    return found


def own_largest(ranks: int) -> dict[str, int]:
    """The same of this library's schemes."""
    return {name: _largest(name, ranks, *SIZES[ranks]) for name in ("oned", "oned-sp", "summa")}


def _largest(scheme: str, ranks: int, hidden: int, heads: int) -> int:
    """By the dry run's peak, which is affine in the batch: from the peaks of two batches."""
    side = isqrt(ranks)
    axes, multiple = ({"x": side, "y": side}, side) if scheme == "summa" else ({"y": ranks}, 1)
    sequence = -(-SEQUENCE // ranks) * ranks if scheme == "oned-sp" else SEQUENCE
    model = _model(LAYERS, hidden, heads, sequence, VOCABULARY)
    few, many = 8 * side, 16 * side
    peaks = [run(Setting(model, batch, scheme, axes, recompute=("full", 1), on_device=True)).peak for batch in (few, many)]
    each = (peaks[1] - peaks[0]) / (many - few)
    return int((few + (USABLE - peaks[0]) / each) // multiple) * multiple


def _model(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> ModelConfig:
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary, dropout=0.1)


def recomputed_peaks() -> dict[int, float]:
    """GB of a stage of PTD-P's 145B, 10 layers on 8 ranks, micro-batch 2, by how many layers are computed again at a time."""
    model = replace(_model(10, 12288, 96, 2048, 51200), attention_dropout=0.1)
    settings = {
        every: Setting(model, 2, "oned", {"y": 8}, dtype="bfloat16", recompute=("full", every), on_device=True)
        for every in (1, 2, 5, 10)
    }
    return {every: run(setting).peak / 1e9 for every, setting in settings.items()}
