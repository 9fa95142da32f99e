"""Bytes that a rank of a program's step holds: its part of weights, gradients and moments, activations, and a reserve."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from ...dry.record import ENTER, LEAVE
from ...dry.step import Setting, run
from ...dtypes import dtype_of
from .programs import PROGRAMS
from .step import block_parameters, in_flight, on_of, owners_of, setting, shards_of, stage_layers

RESERVE = 2.5 * 2**30
"""Bytes of a context, of NCCL's buffers and of kernels' workspace."""
FRAGMENTS = 1.06
"""What an allocator takes over what tensors hold."""
EAGER = 4
"""Bytes of a logit more where no compiler joins the loss's kernels: its logarithms in 32 bits."""


def bytes_of(given: Mapping[str, Any]) -> float:
    """The bytes of the rank that holds most of a row, as `step.step` takes it: weights, sums of gradients, masters and moments.

    With shards (ZeRO-3, FSDP) all are cut, but what is gathered of them. With zero 1 masters and moments are cut over replicas
    and contexts. Activations are those that the dry run holds of a block, for the micro-batches in flight in the first stage or
    in the last, which has the logits; and those of one block that is computed again. RESERVE is what no allocator knows of, and
    printed gigabytes lack.
    """
    program = PROGRAMS[given["profile"]]
    tp, pp, chunks = given["tp"], given["pp"], given.get("chunks", 1)
    layers = max(stage_layers(given["layers"], pp * chunks, given.get("slots", 0))) * chunks
    block = block_parameters(given) / tp
    held = block * layers + (2 if pp == 1 else 1) * given["vocabulary"] * given["hidden"] / tp
    states = held / shards_of(given) * (program.kept + 12 / owners_of(given)) + _gathered(given, block, held)
    parts = _activations(setting(given))
    rows = given["micro_batch"] * given["sequence"] // given.get("cp", 1)
    of_block = min(parts.block - _halved(given, rows), _kept(given, rows))
    logits = rows * given["vocabulary"] // tp
    eager = program.logits and on_of(given).get("compile") is False
    leave = parts.leave + logits * (program.logits + (EAGER if eager else 0))
    micro_batches = max(1, given["batch"] // (given["dp"] * given.get("shards", 1) * given["micro_batch"]))
    first, last = (in_flight(pp, chunks, micro_batches, rank) for rank in (0, pp - 1))
    at_ends = first * (layers * of_block + parts.enter) + parts.again, last * layers * of_block + max(leave, parts.again)
    activations = max(at_ends) if pp > 1 else sum(at_ends) - parts.again - last * layers * of_block
    return float(FRAGMENTS * (states + activations) + RESERVE)


def _gathered(given: Mapping[str, Any], block: float, held: float) -> float:
    """Bytes of weights that are cut, where they are whole, and of their gradients.

    Without a pipeline those of two blocks: of one, and of that which is gathered ahead. In a pipeline all that a rank holds stay
    gathered during a step, and gradients are added up whole, in the dtype of their sums, and are cut at its end.
    """
    if shards_of(given) == 1:
        return 0.0
    return held * (2 + dtype_of(PROGRAMS[given["profile"]].sums).nbytes) if given["pp"] > 1 else 8 * block


def _halved(given: Mapping[str, Any], rows: int) -> float:
    """Bytes less of a block that keeps operands of products in 8 bits: both norms, attention beside its own, down's."""
    width = given["hidden"] + (given.get("ffn") or 4 * given["hidden"])
    return rows * width / given["tp"] if given.get("eight_bits") and given.get("recompute", "full") != "full" else 0.0


def _kept(given: Mapping[str, Any], rows: int) -> float:
    """Bytes that a block keeps where its program's "selective" computes all else again: its input, and results that it names."""
    names = PROGRAMS[given["profile"]].results
    if given.get("recompute", "full") != "selective" or not names:
        return inf
    hidden, ffn, gated = given["hidden"], given.get("ffn") or 4 * given["hidden"], given.get("family") == "llama"
    keys = hidden * (given.get("kv_heads") or given["heads"]) // given["heads"]
    widths = {**dict.fromkeys(("q", "attention", "out", "down"), hidden), **dict.fromkeys(("k", "v"), keys)}
    widths |= {"gate": gated * ffn, "up": ffn}
    return 2.0 * rows * (hidden + sum(widths[name] for name in names)) / given["tp"]


class Activations(NamedTuple):
    """Bytes that forwards leave, of a block and of what is before the blocks, and the most that passes hold meanwhile.

    That is of what is behind the blocks, and of a block's backward.
    """

    block: int
    enter: int
    leave: int
    again: int


_known: dict[str, Activations] = {}
"""`_activations` of this process, by their setting."""


def _activations(setting: Setting) -> Activations:
    """Those of a dry run. Weights that the library joins for a product lie joined in other programs."""
    key = repr(setting)
    if key not in _known:
        parts = [segment for segment, _ in run(setting).parts]
        block, enter = (sum(part.net for part in parts if part.cell == cell and not part.backward) for cell in ("0", ENTER))
        joined = sum(
            op.written for part in parts if part.cell == "0" and not part.backward for op in part.ops if op.name == "cat"
        )
        kept, again = setting.recompute[0] != "full", max(part.top for part in parts if part.cell == "0" and part.backward)
        leave = max((part.top for part in parts if part.cell == LEAVE), default=0)
        _known[key] = Activations(block - kept * joined, enter, leave, max(0, again - joined))
    return _known[key]
