"""Layers of experts in a program's step: where a rank's experts and their replicas are, and the edit that groups their products.

A program that has them splits experts over `ep` ranks, and the weights of one over `etp` of those that split tensors. Tokens go
to them by an all-to-all, and come back by one. Each expert gets as many. A rank's experts are multiplied in one grouped product,
of gate and up together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from ...dry.record import Op
from ...dtypes import dtype_of
from ..cells import Cell, OpTrace
from ..price import move
from .edits import Edit, of_each_trace

EXPERT = re.compile(r"\.experts\.(\d+)")
HALF = "bfloat16"


def shape_of(given: Mapping[str, Any]) -> tuple[int, int, int]:
    """(Experts of a layer, ranks that hold different ones, ranks that split each); (0, 1, tp) of a model without."""
    tp = int(given["tp"])
    return int(given.get("experts") or 0), int(given.get("ep") or 1), int(given.get("etp") or tp)


def own_experts(given: Mapping[str, Any]) -> int:
    """The experts of a layer whose weights a rank holds, or a part of them."""
    experts, ep, _ = shape_of(given)
    return -(-experts // ep)


def copies_of(given: Mapping[str, Any]) -> int:
    """The ranks of replicas and contexts that have the same experts."""
    _, ep, etp = shape_of(given)
    return max(1, int(given["tp"]) * int(given.get("cp", 1)) * int(given["dp"]) // (ep * etp))


def replicas_among(given: Mapping[str, Any]) -> int:
    """Of dp, the neighbouring replicas that share out experts among them; 1 where ranks of a replica do."""
    experts, ep, etp = shape_of(given)
    inner = int(given["tp"]) * int(given.get("cp", 1)) * int(given.get("shards", 1))
    among = ep * etp // inner
    return among if experts and among > 1 and given["dp"] % among == 0 else 1


def axis_of(given: Mapping[str, Any]) -> str:
    """The plane of ranks over which experts are split."""
    _, _, etp = shape_of(given)
    names = ("y",) * (etp < given["tp"]) + ("cp",) * (given.get("cp", 1) > 1)
    names += ("shards",) * (given.get("shards", 1) > 1) + ("ep",) * (replicas_among(given) > 1)
    return "·".join(names) or "zero"


def travelling(given: Mapping[str, Any]) -> float:
    """The part of a token's copies for its experts that travel, where one goes to each node, or to each rank of a single node.

    As many nodes or ranks as k of N equally likely ones are expected to be: N·(1 − (1 − 1/N)ᵏ).
    """
    if not given.get("switches", {}).get("tokens_once"):
        return 1.0
    many, chosen = int(given.get("expert_nodes", 1)), int(given["top_k"])
    many = many if many > 1 else shape_of(given)[1]
    return many * (1 - (1 - 1 / many) ** chosen) / chosen


def of_other_ranks(of_experts: Cell) -> Edit:
    """The edit that takes what a layer of experts does from another cell, whose ranks split an expert otherwise."""

    def with_it(cell: Cell) -> Cell:
        return Cell(*(tuple(_replaced(own, other)) for own, other in zip(cell, of_experts, strict=True)))

    return with_it


def _replaced(trace: OpTrace, other: OpTrace) -> Iterable[Op]:
    runs = {phase: list(ops) for (inside, phase), ops in _runs(other) if inside}
    for (inside, phase), ops in _runs(trace):
        yield from runs.get(phase, ()) if inside else ops


def _runs(trace: OpTrace) -> Iterable[tuple[tuple[bool, str], Iterable[Op]]]:
    return groupby(trace, key=lambda op: (".moe" in op.layer, op.phase))


def grouped(given: Mapping[str, Any]) -> Edit:
    """The edit of a block, traced with as many experts as a token goes to, which become a rank's own, in grouped products.

    Tokens travel in 16 bits along the plane of `axis_of`. What the library multiplies to weigh a token's experts is element-wise
    work, and the router's product is of 16 bits and of all experts.
    """
    experts, ep, etp = shape_of(given)
    own, traced, axis = own_experts(given), int(given.get("top_k") or 1), axis_of(given)
    parts = etp if given.get("scheme") == "oned-sp" else 1

    @of_each_trace
    def edit(trace: OpTrace) -> Iterable[Op]:
        for (inside, _), run in groupby(trace, key=lambda op: (EXPERT.search(op.layer) is not None, op.phase)):
            ops = list(run)
            if not inside:
                yield from (_around(op, experts, traced) for op in ops if op.name != "all_to_all")
                continue
            first = next(op for op in ops if op.kind == "product" and op.name != "tn")
            width = given["hidden"]
            words = round(first.m * traced * width * (ep - 1) / ep / parts * travelling(given))
            exchange = move("all_to_all", axis, words, HALF, ops[0].phase)
            yield from (exchange,) * (ep > 1)
            yield from (_joined(op, own, traced) for op in ops if _is_kept(op))
            yield from (exchange,) * (ep > 1)

    return edit


def _is_kept(op: Op) -> bool:
    """Return whether an operation is of the first expert, and not of what a joined product of gate and up does."""
    expert = EXPERT.search(op.layer)
    summed = op.kind == "elements" and op.layer.endswith(".gate")
    return expert is not None and expert[1] == "0" and not op.layer.endswith(".up") and not summed


def _joined(op: Op, own: int, traced: int) -> Op:
    """An operation of the first of the traced experts as that of all of a rank's own."""
    if op.kind != "product":
        return op._replace(read=op.read * traced, written=op.written * traced)
    m, n, k = op.m, op.n, op.k
    if op.layer.endswith(".gate"):
        n, k = (n, 2 * k) if op.name == "nt" else (2 * n, k)
    if op.name == "tn":
        k = -(-k * traced // own)
    else:
        m = -(-m * traced // own)
    size = dtype_of(op.dtype).nbytes * own
    return op._replace(m=m, n=n, k=k, batch=own, read=size * (m * k + k * n), written=size * m * n)


def _around(op: Op, experts: int, traced: int) -> Op:
    """An operation that is of no expert's layer."""
    if op.kind != "product" or ".moe" not in op.layer:
        return op
    if not op.layer.endswith(".router"):
        return Op("elements", op.phase, op.layer, "weigh", read=op.read, written=op.written, dtype=op.dtype)
    m, n, k = (experts if size == traced else size for size in (op.m, op.n, op.k))
    return op._replace(m=m, n=n, k=k, read=2 * (m * k + k * n), written=2 * m * n, dtype=HALF)
