"""Bytes of a rank of a plan: what it keeps of parameters, what micro-batches in flight save, and the most of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...dry.record import ENTER, LEAVE
from ...dtypes import HALVES, dtype_of
from ...errors import ConfigError
from ...nn.overlap import BUCKETS_IN_FLIGHT
from ...train.config import master_dtype
from ..cells import BLOCK
from .cells import BEFORE, BEHIND, PASSES, Cells, PassOps, StageGrid, bucket_of
from .plans import Plan
from .stages import fullest, most_in_flight, states
from .timing import number_of

if TYPE_CHECKING:
    from ..muon import MuonStep

GIB = 2**30
CONTEXT = 1.2 * GIB
"""Bytes of a device that its context, NCCL and cuBLAS take: assumed."""
FRAGMENTED = 0.04
"""Of a device's memory that its allocator cannot use: assumed."""


class Memory(NamedTuple):
    """Bytes of the fullest rank, term by term; `stage` is its rank of the pipeline.

    buckets : of gradients that ZeRO 2 sums while a micro-batch makes them, which no other stage of ZeRO holds. prefetched : of
    weights on their way to the next layer
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    buckets: int
    prefetched: int
    stage: int

    @property
    def total(self) -> int:
        """All terms together."""
        return sum(self[:-1])


def reserve(memory: float) -> float:
    """Bytes of a device's memory that a plan may not use."""
    return CONTEXT + FRAGMENTED * memory


def usable(memory: float) -> float:
    """Bytes of a device's memory that a plan may use. Raises ConfigError where the reserve leaves none."""
    if memory <= reserve(memory):
        raise ConfigError(
            f"{memory / GIB:.3g} GiB of memory hold no model: {reserve(memory) / GIB:.3g} GiB of them are kept free for the "
            f"device's context ({CONTEXT / GIB:g} GiB) and for what its allocator cannot use ({FRAGMENTED:.0%})."
        )
    return memory - reserve(memory)


class DeviceFit(NamedTuple):
    """Whether so many bytes fit a device: those that are needed, of its memory, and of the reserve that is kept free of it."""

    fits: bool
    need: float
    memory: float
    reserve: float

    def __str__(self) -> str:
        need, memory, kept = (f"{size / GIB:,.2f} GiB" for size in self[1:])
        return f"{'fits' if self.fits else 'does not fit'} {memory}: {need} on a rank, and {kept} kept free"


def fitting(need: float, memory: float) -> DeviceFit:
    """Return whether a rank that needs so many bytes fits a device. Raises ConfigError where the reserve leaves none."""
    return DeviceFit(need <= usable(memory), need, memory, reserve(memory))


@cache
def kept_per_element(dtype: str, zero: int, dp: int, moments: int = 2) -> tuple[float, float, float]:
    """Bytes per element of parameters with their 16-bit copies, of gradients, and of moments: of AdamW two words."""
    size, shards = dtype_of(master_dtype(dtype)).nbytes, dp if zero else 1
    copied = (dtype_of(dtype).nbytes if dtype in HALVES else 0) / (dp if zero == 3 else 1)
    whole = size / shards + copied if copied or zero == 3 else size
    return whole, size / (dp if zero > 1 else 1), moments * size / shards


def memory(plan: Plan, cells: Cells, units: int, muon: MuonStep | None = None) -> Memory:
    """The bytes of the fullest rank. cells, units : as of `Store.cells`. muon : the step of its blocks, where that is Muon's."""
    early = {0, min(1, plan.pp - 1), plan.pp - 1}  # which keep more, where backward is one op
    ranks = fullest(plan.stages, plan.layers) if plan.inner.split else early
    result = (_of_rank(plan, cells, units, rank, muon) for rank in sorted(ranks))
    return max(result, key=lambda item: item.total)


def _of_rank(plan: Plan, cells: Cells, units: int, rank: int, muon: MuonStep | None = None) -> Memory:
    held, experts = number_of(plan, cells.elements, rank), plan.layers_of(rank) * cells.elements["experts"]
    each, of_experts = (kept_per_element(plan.inner.dtype, plan.zero, many) for many in (plan.copies, plan.expert_copies))
    each_kind = zip(each, of_experts, strict=True)
    parameters, gradients, optimizer = (round((held - experts) * item + experts * other) for item, other in each_kind)
    if muon is not None:  # whose moment of a matrix is one word
        matrices = plan.layers_of(rank) * plan.inner.model.block_elements // plan.inner.ranks
        optimizer -= round(matrices * kept_per_element(plan.inner.dtype, plan.zero, plan.copies, 1)[2])
    stages = plan.stages[rank]
    extents = {way: [_extent(plan, cells, units, way, stage) for stage in stages] for way in PASSES}
    nets, tops = ([[extent[of] for extent in extents[way]] for way in PASSES] for of in (0, 1))
    chunks = plan.chunks if plan.inner.split else 1  # of which one's gradients are made at a time
    kinds = [(held // chunks, plan.copies)]
    if plan.copies != plan.expert_copies:
        kinds = [((held - experts) // chunks, plan.copies), (experts // chunks, plan.expert_copies)]
    backwards = np.arange(min(plan.micro_batches, 1 + BUCKETS_IN_FLIGHT) if plan.zero == 2 else 0)
    sums, buckets = np.transpose(summed(plan.inner, kinds, plan.inner.ranks, backwards) if len(backwards) else ()), 0
    if plan.inner.split:
        activations, top, buckets = _peaks(plan, rank, *map(np.array, (nets, tops, sums)))
    else:
        many, saved = most_in_flight(plan.schedule, plan.pp, plan.micro_batches, plan.chunks, rank), max(nets[0])
        activations = many * saved
        top = max((many - 1) * saved + max(tops[0]), activations + max(tops[1]))
        for number, (first, last) in enumerate(sums):
            left = saved * (plan.micro_batches - number)  # of those that are to come, less than in flight at the end
            buckets = max(buckets, int(max(first, last - saved)) - max(0, activations - left))
    top = top if muon is None else max(top, muon.top)
    kept = cells.kept.at(units) + in_pipe(plan.inner, plan.rows, plan.inner.ranks * plan.inner.copies) * (plan.pp > 1)
    workspace = max(0, top - activations)
    ahead = min(workspace, cells.prefetched(units)) if plan.inner.ahead else 0
    return Memory(parameters, gradients, optimizer, activations, workspace - ahead + kept, buckets, ahead, rank)


def _extent(plan: Plan, cells: Cells, units: int, way: str, stage: int) -> tuple[int, int]:
    """Net and peak of the bytes of a pass over a stage."""
    key = way, plan.layers[stage], stage == 0, stage == len(plan.layers) - 1, units
    if key not in cells.extents:
        many = plan.layers[stage]
        blocks = {BLOCK: many}
        if plan.inner.ahead:  # the first and the last block are cells of their own
            ends = int(many > 1)
            blocks = {BLOCK: many - 2 * ends, BEFORE: ends, BEHIND: ends}
        times = {**blocks, ENTER: int(key[2]), LEAVE: int(key[3])}
        cells.extents[key] = extent(cells.passes[way], times, units)
    return cells.extents[key]


def _peaks(plan: Plan, rank: int, nets: Any, tops: Any, sums: Any) -> tuple[int, int, int]:
    """Bytes kept between the ops of a rank whose backward is split, the peak within them, and what ZeRO 2 sums beside the first.

    nets, tops : of PASSES and chunks. sums : of numbers of backwards. From F to X a micro-batch keeps what forward saved, from X
    to W what that has left.
    """
    ops, flying, owed, done = states(plan.schedule, plan.pp, plan.micro_batches, plan.chunks, rank)
    until = nets[0] + nets[1]
    between = held = flying @ nets[0] + owed @ until
    if len(sums):
        first, last = sums[np.minimum(done, len(sums) - 1)].T
        held = between + np.where(ops[:, 0] == 2, np.maximum(first, last - until[ops[:, 1]]), first * (done > 0))
    most = int(between.max())
    return most, int((between + tops[ops[:, 0], ops[:, 1]]).max()), max(0, int(held.max()) - most)


def in_pipe(inner: StageGrid, rows: Any, ranks: Any) -> Any:
    """Bytes of a micro-batch that a stage receives and sends."""
    return rows * inner.model.sequence * inner.model.hidden // ranks * 2 * dtype_of(inner.dtype).nbytes


def summed(inner: StageGrid, kinds: Sequence[tuple[Any, Any]], ranks: Any, number: Any) -> tuple[Any, Any]:
    """Bytes of gradients that zero 2 sums while a micro-batch makes them: when the backward `number` begins, and when it ends.

    kinds : (elements, copies) of weights that share buckets: those of experts have other replicas along ep than the others have;
    without replicas, none.

    While a bucket is packed, one less is in flight. A bucket of all weights of a kind is started once in a micro-batch, whose
    activations are gone by then.
    """
    size, bucket = dtype_of(master_dtype(inner.dtype)).nbytes, bucket_of(inner, ranks)
    held = [np.where(np.greater(copies, 1), elements * size, 0) for elements, copies in kinds]
    parts, many = [np.minimum(item, bucket) for item in held], np.maximum(1, sum(np.greater(item, 0) for item in held))
    together, others = sum(parts), np.minimum(BUCKETS_IN_FLIGHT / many, number)
    flying = sum(
        item * (1 + 1 / copies) for item, (_, copies) in zip(parts, kinds, strict=True)
    )  # messages, and what is left of them
    several, all_along = np.any([np.greater(item, bucket) for item in held], axis=0), BUCKETS_IN_FLIGHT * np.max(parts, axis=0)
    before = np.where(many == 1, np.minimum(BUCKETS_IN_FLIGHT - 1, others), 0) * flying
    return tuple(np.where(several, together + all_along, item) for item in (others * flying, 2 * together + before))


def extent(pieces: Iterable[PassOps], times: Mapping[str, int], units: int) -> tuple[int, int]:
    """Net and peak of the bytes of a pass over a stage: consecutive pieces of a block are repeated as one."""
    held = top = 0
    run: list[PassOps] = []

    def close() -> None:
        nonlocal held, top
        net = most = 0
        for piece in run:
            most = max(most, net + piece.top.at(units))
            net += piece.net.at(units)
        many = times[BLOCK]
        if run and many:
            top = max(top, held + most + max(0, (many - 1) * net))
            held += many * net
        run.clear()

    for piece in pieces:
        if piece.cell == BLOCK:
            run.append(piece)
            continue
        close()
        if times.get(piece.cell, 1):
            top = max(top, held + piece.top.at(units))
            held += piece.net.at(units)
    close()
    return held, top
