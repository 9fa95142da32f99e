"""Layers of experts in a program's step: where a rank's experts and their replicas are, and the edit that groups their products.

A program that has them splits experts over `ep` ranks, and the weights of one over `etp` of those that split tensors. Tokens go
to them by an all-to-all, and come back by one. Each expert gets as many. A rank's experts are multiplied in one grouped product,
of gate and up together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

from ...cluster import Cluster
from ...dry.record import Op
from ...dtypes import dtype_of
from ..cells import Cell, OpTrace
from ..price import move
from .edits import Edit, of_each_trace
from .sizes import shape_of, shards_of

EXPERT = re.compile(r"\.experts\.(\d+)")
HALF = "bfloat16"
REPLICAS = "zero·dp"
"""The plane of replicas but for those that share out experts."""


class ExpertLayout(NamedTuple):
    """Where the experts of a layer are, of ranks in the order of `step.ORDER`.

    own : experts of a rank, whole or split by etp. among : neighbouring replicas of dp that share them out. exchange : the plane
    along which tokens go to them. shards : ranks that cut a rank's experts, as FSDP does, a plane's part. copies : of each of
    those. sums, whole : the planes of the copies, and of those that cut masters
    """

    own: int
    among: int
    exchange: str
    shards: int
    copies: int
    sums: str
    whole: str


def layout_of(given: Mapping[str, Any]) -> ExpertLayout:
    """The layout of a row's experts.

    Experts take the innermost ranks: those of the tensor ranks that do not split one, contexts, shards, then replicas. Where they
    take a part of a plane, messages are priced along all of it.
    """
    experts, ep, etp = shape_of(given)
    tp, cp, shards, dp = (int(given.get(key, 1)) for key in ("tp", "cp", "shards", "dp"))
    rest, left = divmod(ep * etp, tp * cp * shards)
    among = rest if experts and rest > 1 and not left and dp % rest == 0 else 1
    sizes = {"y": tp, "cp": cp, "shards": shards, "ep": among, REPLICAS: dp // among}
    inner = [name for name in sizes if sizes[name] > 1 and (name != "y" or etp < tp)]
    need = ep * (etp if etp < tp else 1)
    exchange = _enough(inner, sizes, need)
    ranks = tp * cp * shards * dp // (ep * etp) or 1
    cut = shards_of(given)
    parts = gcd(ranks, max(1, cut * tp // (ep * etp))) if cut > 1 else 1
    outer = _enough([REPLICAS, *(name for name in ("ep", "cp", "y") if sizes[name] > 1)], sizes, ranks // parts)
    sums = "·".join(name for name in sizes if name in outer)
    return ExpertLayout(-(-experts // ep), among, "·".join(exchange), parts, ranks // parts, sums, sums.removesuffix("·dp"))


def _enough(names: Sequence[str], sizes: Mapping[str, int], ranks: int) -> list[str]:
    """The first of some axes, one at least, that have so many ranks together; all where none are enough."""
    result, product = list[str](), 1
    for name in names:
        if result and product >= ranks:
            break
        result, product = [*result, name], product * sizes[name]
    return result or [REPLICAS]


def nodes_of_experts(given: Mapping[str, Any], cluster: Cluster) -> dict[str, int]:
    """Return what `travelling` reads: over how many of the largest groups of links the ranks of a layer's experts lie."""
    experts, ep, etp = shape_of(given)
    node = max(level.size for level in cluster.levels)
    return {"expert_nodes": -(-ep * etp // node) if node else 1} if experts else {}


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

    Tokens travel in 16 bits along the layout's plane. What the library multiplies to weigh a token's experts is element-wise
    work, and the router's product is of 16 bits and of all experts. An expert that all tokens go to is multiplied where they are.
    """
    experts, ep, etp = shape_of(given)
    layout, traced = layout_of(given), int(given.get("top_k") or 1)
    own, axis = layout.own, layout.exchange
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
            kept = [op for op in ops if _is_kept(op)]
            yield from (_joined(op, own, traced) for op in kept)
            yield from (exchange,) * (ep > 1)
            if given.get("shared"):
                yield from (_of_all(_joined(op, 1, 1), given["shared"], given["ffn"]) for op in kept)

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
    return _sized(op, m, n, k, own)


def _of_all(op: Op, width: int, of_one: int) -> Op:
    """An operation of an expert that as many tokens go to as there are, as that of another width, which all go to."""
    layer = op.layer.replace(".experts.0", ".shared")
    if op.kind != "product":
        return op._replace(layer=layer, read=op.read * width // of_one, written=op.written * width // of_one)
    down = op.layer.endswith(".down")
    wide = {"nn": "k" if down else "n", "nt": "n" if down else "k", "tn": "m" if down else "n"}[op.name]
    m, n, k = (getattr(op, name) * width // of_one if name == wide else getattr(op, name) for name in "mnk")
    return _sized(op._replace(layer=layer), m, n, k)


def _around(op: Op, experts: int, traced: int) -> Op:
    """An operation that is of no expert's layer."""
    if op.kind != "product" or ".moe" not in op.layer:
        return op
    if not op.layer.endswith(".router"):
        return Op("elements", op.phase, op.layer, "weigh", read=op.read, written=op.written, dtype=op.dtype)
    m, n, k = (experts if size == traced else size for size in (op.m, op.n, op.k))
    return _sized(op._replace(dtype=HALF), m, n, k)


def _sized(op: Op, m: int, n: int, k: int, batch: int = 1) -> Op:
    """A product of other sizes, with the bytes of its operands and of its result."""
    size = dtype_of(op.dtype).nbytes * batch
    return op._replace(m=m, n=n, k=k, batch=batch, read=size * (m * k + k * n), written=size * m * n)
