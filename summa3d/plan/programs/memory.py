"""Bytes that a rank of a program's step holds: its part of weights, gradients and moments, activations, and a reserve."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ...dry.record import ENTER, LEAVE
from ...dry.step import Setting, run
from ..cells import BLOCK, cells
from .programs import PROGRAMS
from .step import block_parameters, in_flight, on_of, owners_of, setting, stage_layers

RESERVE = 2.5 * 2**30
"""Bytes of a context, of NCCL's buffers and of kernels' workspace."""
FRAGMENTS = 1.06
"""What an allocator takes over what tensors hold."""


def bytes_of(given: Mapping[str, Any]) -> float:
    """The bytes of the first stage of a row, as `step.step` takes it: weights, sums of gradients, masters and moments.

    With shards (ZeRO-3, FSDP) all are cut, and one block is whole twice: its weights and the next's. With zero 1 masters and
    moments are cut over replicas and contexts. Activations are those that the dry run holds of a block, for the micro-batches in
    flight. RESERVE is what no allocator knows of, and printed gigabytes lack.
    """
    program = PROGRAMS[given["profile"]]
    tp, pp, chunks, shards = given["tp"], given["pp"], given.get("chunks", 1), given.get("shards", 1)
    layers = max(stage_layers(given["layers"], pp * chunks, given.get("slots", 0))) * chunks
    block = block_parameters(given) / tp
    held = block * layers + (2 if pp == 1 else 1) * given["vocabulary"] * given["hidden"] / tp
    states = held / shards * (program.kept + 12 / owners_of(given)) + (2 * 2 * 2 * block if shards > 1 else 0)
    held_by_block, of_enter, top_of_leave = _activations(setting(given))
    of_block = min(held_by_block, _kept(given))
    logits = given["micro_batch"] * given["sequence"] // given.get("cp", 1) * given["vocabulary"] // tp
    top_of_leave += logits * program.logits * (1 if on_of(given).get("compile") is not False else 2)
    flying = in_flight(pp, chunks, max(1, given["batch"] // (given["dp"] * shards * given["micro_batch"])))
    activations = flying * (layers * of_block + of_enter) + (top_of_leave if pp == 1 else 0)
    return float(FRAGMENTS * (states + activations) + RESERVE)


def _kept(given: Mapping[str, Any]) -> float:
    """Bytes that a block keeps where its program's "selective" computes all element-wise work and some products again.

    These are its input and the results of the other products.
    """
    edit = PROGRAMS[given["profile"]].selective
    if given.get("recompute", "full") != "selective" or edit is None:
        return inf
    block = cells(setting(given))[BLOCK]
    again = {op._replace(phase="forward") for op in edit(block).backward if op.phase == "recompute"}
    if not any(op.kind == "elements" for op in again):
        return inf
    kept = [op for op in block.forward if op.kind == "product" and op not in again]
    results = sum(op.m * op.batch * (op.k if op.name == "attention" else op.n) for op in kept)
    return 2.0 * (results + given["micro_batch"] * given["sequence"] // given.get("cp", 1) * given["hidden"])


_known: dict[str, tuple[int, int, int]] = {}
"""`_activations` of this process, by their setting."""


def _activations(setting: Setting) -> tuple[int, int, int]:
    """Bytes that the forward of a block, and of what comes before the blocks, leaves; and the most of what comes after them.

    Weights that the library joins for a product lie joined in other programs.
    """
    key = repr(setting)
    if key not in _known:
        parts = [segment for segment, _ in run(setting).parts]
        block, enter = (sum(part.net for part in parts if part.cell == cell and not part.backward) for cell in ("0", ENTER))
        joined = sum(
            op.written for part in parts if part.cell == "0" and not part.backward for op in part.ops if op.name == "cat"
        )
        _known[key] = block - joined, enter, max((part.top for part in parts if part.cell == LEAVE), default=0)
    return _known[key]
