"""Bytes that a rank of a program's step holds: its part of weights, gradients and moments, activations, and a reserve."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from ...dry.record import ENTER, LEAVE
from ...dry.step import Setting, run
from ...dtypes import NARROW, dtype_of
from .edits import inputs_kept
from .experts import layout_of
from .programs import PROGRAMS
from .sizes import in_flight, shards_of, stages_of, widths_of
from .step import on_of, rank_parameters, replicas_of, setting

RESERVE = 2.5 * 2**30
"""Bytes of a context, of NCCL's buffers and of kernels' workspace."""
FRAGMENTS = 1.06
"""What an allocator takes over what tensors hold."""
LOGARITHMS = 4
"""Bytes of a logit more where no compiler joins the loss's kernels: its logarithms in 32 bits."""


class Activations(NamedTuple):
    """Bytes that forwards leave, of a block and of what is before the blocks, and the most that passes hold meanwhile.

    That is of what is behind the blocks, and of a block's backward.
    """

    block: int
    enter: int
    leave: int
    again: int


def bytes_of(given: Mapping[str, Any]) -> float:
    """The bytes of the rank that holds most of a row, as `step.step` takes it: weights, sums of gradients, masters and moments.

    With shards (ZeRO-3, FSDP) all are cut, but what is gathered of them. With zero 1 masters and moments are cut over replicas
    and contexts. Activations are those that the dry run holds of a block, for the micro-batches in flight in each stage, of which
    the last has the logits; and those of one block that is computed again. RESERVE is what no allocator knows of, and printed
    gigabytes lack.
    """
    pp, chunks = given["pp"], given.get("chunks", 1)
    parts = _activations(setting(given))
    rows = given["micro_batch"] * given["sequence"] // given.get("cp", 1)
    apart = _apart(given, rows) + _inputs(given, rows) - _narrowed(given, rows)
    of_block = min(parts.block + apart, _kept(given, rows))
    micro_batches = max(1, given["batch"] // (given["dp"] * given.get("shards", 1) * given["micro_batch"]))
    sizes = []
    stages, leave = stages_of(given), _leave(given, parts, rows)
    for rank in range(pp):
        layers, flying, first, last = sum(stages[rank::pp]), in_flight(pp, chunks, micro_batches, rank), rank == 0, rank == pp - 1
        activations = flying * (layers * of_block + first * parts.enter) + max(parts.again, last * leave)
        sizes.append(_states(given, layers, first or last) + activations)
    return float(FRAGMENTS * max(sizes) + RESERVE)


def _states(given: Mapping[str, Any], layers: int, at_end: bool) -> float:
    """Bytes of weights, sums of gradients, masters and moments of so many layers, and of the table of the first or last stage."""
    program, tables = PROGRAMS[given["profile"]], at_end * (1 if given["pp"] > 1 or given.get("tied") else 2)
    dense, of_experts = rank_parameters(given)
    held = dense * layers + tables * given["vocabulary"] * given["hidden"] / given["tp"]
    shards, replicas = shards_of(given), replicas_of(given)
    kept = held / shards * (program.kept + program.masters / replicas[0].owners)
    kept += of_experts * layers / layout_of(given).shards * (program.kept + program.masters / replicas[1].owners)
    return kept + _gathered(given, dense + of_experts, held + of_experts * layers)


def _leave(given: Mapping[str, Any], parts: Activations, rows: int) -> float:
    """The most bytes that what is behind the blocks holds."""
    of_logit = PROGRAMS[given["profile"]].logits
    eager = of_logit and on_of(given).get("compile") is False
    return parts.leave + rows * given["vocabulary"] // given["tp"] * (of_logit + (LOGARITHMS if eager else 0))


def _gathered(given: Mapping[str, Any], block: float, held: float) -> float:
    """Bytes of weights that are cut, where they are whole, and of their gradients.

    Without a pipeline those of two blocks: of one, and of that which is gathered ahead. In a pipeline all that a rank holds stay
    gathered during a step, and gradients are added up whole, in the dtype of their sums, and are cut at its end.
    """
    if shards_of(given) == 1:
        return 0.0
    return held * (2 + dtype_of(PROGRAMS[given["profile"]].sums).nbytes) if given["pp"] > 1 else 8 * block


def _narrowed(given: Mapping[str, Any], rows: int) -> float:
    """Bytes less of a block that keeps operands of products in 8 or 4 bits: both norms, attention beside its own, down's."""
    if not given.get("narrow") or given.get("recompute", "full") == "full":
        return 0.0
    width = widths_of(given)["up"] - given["hidden"]
    return (2 - NARROW[given["narrow"]] / 8) * rows * (width / given["tp"] + 2 * given["hidden"] / _owners_of_rows(given))


def _owners_of_rows(given: Mapping[str, Any]) -> int:
    """The tensor-parallel ranks over which rows between products are cut: all with sequence parallelism."""
    return int(given["tp"]) if given.get("scheme") == "oned-sp" else 1


def _apart(given: Mapping[str, Any], rows: int) -> float:
    """Bytes more of a block that no compiler joins: what attention reads, and the activation beside its product."""
    if on_of(given).get("compile") is not False or given.get("recompute", "full") == "full":
        return 0.0
    widths = widths_of(given)
    return 2.0 * rows * sum(widths[name] for name in ("q", "k", "v", "up")) / given["tp"]


def _inputs(given: Mapping[str, Any], rows: int) -> float:
    """Bytes more of a block whose two gathered inputs are kept."""
    if inputs_kept not in PROGRAMS[given["profile"]].edits or given.get("recompute", "full") == "full":
        return 0.0
    own = _owners_of_rows(given)
    return 2.0 * 2 * rows * given["hidden"] * (1 - 1 / own)


def _kept(given: Mapping[str, Any], rows: int) -> float:
    """Bytes that a block keeps where its program's "selective" computes all else again: its input, and results that it names."""
    names = PROGRAMS[given["profile"]].results
    if given.get("recompute", "full") != "selective" or not names:
        return inf
    widths = widths_of(given)
    return 2.0 * rows * (given["hidden"] / _owners_of_rows(given) + sum(widths[name] for name in names) / given["tp"])


_known: dict[str, Activations] = {}
"""`_activations` of this process, by their setting."""


def _activations(setting: Setting) -> Activations:
    """Those of a dry run. Weights that the library joins for a product lie joined in other programs."""
    key = repr(setting)
    if key not in _known:
        parts = [segment for segment, _ in run(setting).parts]
        block, enter = (sum(part.net for part in parts if part.cell == cell and not part.backward) for cell in ("0", ENTER))
        joined = sum(
            op.written
            for part in parts
            if part.cell == "0" and not part.backward
            for op in part.ops
            if op.name == "cat" and not op.layer.endswith(".moe")
        )
        kept, again = setting.recompute[0] != "full", max(part.top for part in parts if part.cell == "0" and part.backward)
        leave = max((part.top for part in parts if part.cell == LEAVE), default=0)
        _known[key] = Activations(block - kept * joined, enter, leave, max(0, again - joined))
    return _known[key]
