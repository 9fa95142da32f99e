"""A model's pipeline on the job's grid: its stages on this rank, the channel between them, and the sum of a tied table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from ..comm.axis import Axis
from ..comm.channel import Channel
from ..comm.health.agreement import check_agreement
from ..layout.copies import Copies
from ..layout.layout import Layout
from ..nn.context import Context
from ..nn.models.base import Body, LanguageModel
from ..nn.parameter import ShardedParameter
from ..nn.stages import Stages
from .executor import Feed, PipelineExecutor, Program, Stage, Wire, program_of
from .replicas import Replicas
from .schedule import SCHEDULES, Schedule, ScheduleOp, build, split_layers
from .states import ParameterState, named_parameters

built = lru_cache(4)(build)
"""`build`, of which equal schedules are made and checked once: a dry run asks for one on each rank of a pipeline."""


def stages_of(schedule: str, p: int, v: int, layers: int, counts: Sequence[int] | None = None) -> Stages:
    """The stages of `layers` layers under a schedule of p ranks and v chunks. Raises ConfigError where they cannot be filled.

    >>> stages_of("1f1b", 2, 1, 5)
    Stages(homes=(0, 1), layers=(3, 2))
    """
    return Stages(SCHEDULES[schedule].homes(p, v), split_layers(layers, p, v, counts))


def stages_in(model: Body) -> Stages:
    """The stages of a model: one, where no axis pp holds it in several."""
    return model.context.stages or Stages((0,), (len(model.blocks),))


def held_stages(model: Body) -> list[Stage]:
    """The stages of a model that this rank holds, one a chunk."""
    stages = stages_in(model)
    rank, ends = model.context.whole.coordinates.get("pp", 0), len(stages.homes) - 1
    own = [stage for stage, home in enumerate(stages.homes) if home == rank]
    return [Stage(model, chunk, *stages.extents[k], enters=k == 0, leaves=k == ends) for chunk, k in enumerate(own)]


def chunks_of(model: Body) -> Callable[[str], int]:
    """Name of a parameter that this rank holds → the chunk whose last backward completes its gradient.

    What the first stage has before its layers is complete with that stage, and so is a table that the last one shares on the same
    rank: its backward is the last of all. What is behind the layers is complete with the last stage.
    """
    stages = held_stages(model)
    ends = 0 if stages[0].enters else len(stages) - 1
    layers = {str(layer): stage.chunk for stage in stages for layer in range(stage.first, stage.last)}

    def chunk_of(name: str) -> int:
        first, _, rest = name.partition(".")
        return layers[rest.partition(".")[0]] if first == "blocks" else ends

    return chunk_of


def replicas_in(model: Body, states: Sequence[ParameterState], zero: int, bucket: int) -> Replicas:
    """The replicas of a model, with buckets in the order of `forward`, which backward completes in reverse; collective over them.

    zero, bucket : as of `Replicas.of`
    """
    first = set(map(id, model.before_layers()))
    ordered = sorted(states, key=lambda state: id(state.parameter) not in first)
    return Replicas.of(ordered, model.context.whole, zero, bucket, chunks_of(model))


class Pipeline:
    """A model that is held in stages along axis pp of the job's grid; without that axis, one stage on one rank.

    Parameters
    ----------
    model : built on a scheme with `stages`
    schedule : the schedule's name
    rows : the rows of a micro-batch
    dtype : of the residual stream between layers
    replicas : what sums the gradients over the replicas of the job, in buckets of the chunks of `chunks_of`; None, nothing does
    overlap : whether the sums of a chunk start in its last backward, and behind it; else they start behind all backwards
    scatter : whether ranks that hold copies of the stream send a part each, and gather the whole where it arrives; else each
        sends the whole

    Making one is collective over the job. It has all communicators of a step, so that none is made inside an op: afterwards the
    grid may be sealed.
    """

    def __init__(
        self,
        model: Body,
        schedule: str,
        rows: int,
        dtype: torch.dtype,
        replicas: Replicas | None = None,
        overlap: bool = True,
        scatter: bool = True,
    ) -> None:
        context, job = model.context, model.context.whole
        self.stages = stages_in(model)
        self.model, self.name, self.homes, self.axis = model, schedule, self.stages.homes, None
        self.rows, self.dtype, self._device = rows, dtype, next(model.parameters()).device
        self._sequence = context.contexts.local(model.config.sequence)
        channel = None
        if context.stages is not None:
            self.axis = job["pp"]
            channel = Channel(self.axis, self.homes)
            channel.open_device(self.stream())
        self.rank = 0 if self.axis is None else self.axis.index
        self.replicas, self.overlap, self.scatter = replicas, overlap, scatter
        self.tied = self._tied_table()
        self._holders: Axis | None = None if self.tied is None else job.sub_axis("pp", (self.homes[0], self.homes[-1]))
        sums = {"T": self._sum_tied, "R": self._sum_replicas}
        stream = self.stream()
        wire = Wire(context.copies if scatter else Copies(job[()]), tuple(stream.shape), dtype, self._device)
        self.executor = PipelineExecutor(held_stages(model), job.ledger, channel, wire, sums)
        if replicas is not None:
            self.executor.announce = replicas.announce
            if overlap:
                self.executor.expect = replicas.expect
                replicas.gathers.overlap(context.state)
        self.program = lru_cache(4)(self._program)
        _open_axes(context)

    def check(self, micro_batches: int) -> None:
        """Raise AgreementError unless all ranks of the job have the same pipeline, and all replicas the same buckets. Collective.

        What differs is named: the schedule of so many micro-batches, the stages, the stream that they send, or the buckets.
        """
        model, schedule = self.model, self.schedule(micro_batches)
        facts = {
            "schedule": f"{schedule}, ops {crc32(repr(schedule.programs).encode()):08x}",
            "ranks of the stages": self.homes,
            "layers of the stages": self.stages.layers,
            "stream between stages": (self.rows, self._sequence, model.config.hidden, self.dtype, str(model.context.residual)),
            "overlap of the sums over replicas": self.overlap,
            "scatter of the stream": self.scatter,
        }
        check_agreement(model.context.whole.comm, "the pipeline", facts)
        if self.replicas is not None:
            self.replicas.check()

    def _program(self, micro_batches: int) -> Program:
        return program_of(self.schedule(micro_batches), self.rank, self.overlap)

    def schedule(self, micro_batches: int) -> Schedule:
        """The schedule of a step of so many micro-batches, checked."""
        p, summed = self.stages.ranks, self.replicas is not None and self.replicas.plane.size > 1
        return built(self.name, p, micro_batches, len(self.homes) // p, summed, self.tied is not None)

    def run(self, micro_batches: int, feed: Feed, **options: Any) -> list[Tensor]:
        """Run a step of so many micro-batches; the options and the result are those of `PipelineExecutor.run`."""
        return self.executor.run(self.program(micro_batches), feed, **options)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """The global logits [b, v] of the token that follows each row, on every rank of the job.

        tokens : global [b, s], equal on every rank. Words: those of the messages between stages, of b rows, and b·v along pp from
        the last stage on every rank that does not hold it.
        """
        model = cast(LanguageModel, self.model)
        inputs = model.padded(tokens)
        batch = model.batch_of(inputs)
        p, stages = self.stages.ranks, len(self.homes)
        forwards = tuple(ScheduleOp("F", chunk, 0) for chunk in range(stages // p))
        program = program_of(Schedule(self.name, p, 1, stages // p, tuple(self.homes), (forwards,) * p), self.rank)
        to_logits = [replace(stage, position=tokens.shape[1] - 1) for stage in self.executor.stages]
        wire = replace(self.executor.wire, shape=tuple(self.stream(batch.rows, batch.sequence).shape))
        executor = PipelineExecutor(to_logits, self.executor.ledger, self.executor.channel, wire)
        last = executor.run(program, lambda micro: (inputs, batch))
        if self.axis is None:
            return last[0]
        logits = last[0] if last else torch.empty(batch.rows, model.config.vocabulary, dtype=self.dtype, device=self._device)
        return self.axis.broadcast(logits, self.homes[-1])

    def stream(self, rows: int | None = None, sequence: int | None = None) -> Tensor:
        """An array for this rank's block of the residual stream, as stored; default of a micro-batch."""
        context = self.model.context
        shape = (rows or self.rows, sequence or self._sequence, self.model.config.hidden)
        block = context.residual.local_shape(shape, context.grid.shape, context.grid.coordinates)
        return context.as_stored(torch.empty(block, dtype=self.dtype, device=self._device))

    def _tied_table(self) -> ShardedParameter | None:
        """The table that the first and the last stage share, where they lie on two ranks."""
        held = (p for _, p in named_parameters(self.model) if len(dict(p.sharding.layout.at).get("pp", ())) > 1)
        return next(held, None)

    def _sum_tied(self, chunk: int) -> None:
        """Sum the complete gradient of the tied table over the two ranks that hold it."""
        assert self.tied is not None and self._holders is not None
        total = self.tied.grad if self.replicas is None else self.replicas.accumulated(self.tied)
        assert total is not None
        self._holders.all_reduce(total, into=total)

    def _sum_replicas(self, chunk: int) -> None:
        """Start the sums of a chunk's gradients over the replicas."""
        assert self.replicas is not None
        self.replicas.start_chunk(chunk)


def _open_axes(context: Context) -> list[Axis]:
    """Make and return the axes over which layers and gradient norm communicate, else made at first use; collective."""
    scheme, grid, job, lookup = context.scheme, context.grid, context.whole, context.scheme.lookup
    layouts = (scheme.residual, scheme.after_linear(scheme.residual), scheme.pooled, scheme.after_linear(scheme.pooled))
    planes = [grid[axes] for axes in (lookup.gathered, lookup.part, lookup.copies)]
    planes += [of(layout) for layout in (*layouts, Layout(scheme.residual.dims[1])) for of in (context.rows, context.columns)]
    if context.contexts.size > 1:
        planes += [job["cp"], context.head_axis, context.ring_axis]
    return [*planes, context.copies.axis, grid.world, grid.ranked, job.world, job[context.sharded]]
