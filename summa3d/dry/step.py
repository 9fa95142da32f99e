"""A training step in a dry run: each distinct op of a rank's program is traced once, and the whole step is composed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..comm.topology import Topology, replica_axes
from ..nn.config import ModelConfig
from ..nn.context import Context, check_split, scheme
from ..nn.context_parallel.options import DEFAULT as GATHERED
from ..nn.context_parallel.options import ContextOptions
from ..nn.context_parallel.split import ContextSplit
from ..nn.experts.load import GivenLoad
from ..nn.experts.moe import MoE
from ..nn.layers.dropout import Batch
from ..nn.models.base import Inputs
from ..nn.models.registry import Model, build
from ..nn.overlap import BUCKETS_IN_FLIGHT, DEFAULT, Overlap
from ..nn.parameter import ShardedParameter
from ..nn.schemes.scheme import Scheme
from ..nn.stages import Stages
from ..parallel.executor import Program, ProgramStep, Stage, ops_of, program_of
from ..parallel.pipeline import Pipeline, replicas_in, stages_of
from ..parallel.schedule import ALL, GRADIENT_ENDS, ScheduleOp, in_two
from ..parallel.states import ParameterState, states_of
from .device import kernels
from .place import DryPlace
from .record import OPTIMIZER, RepeatedSegment, Segment, TracedOp, held_in, moved, net_of, peak_of, repeated, totals
from .storages import current_node
from .trace import Tracer

META = torch.device("meta")
TRACED = 3
"""Cells of blocks that are traced of a deeper stage: the first, one that stands for all between, and the last."""
PAUSE = ProgramStep(ScheduleOp("pause", 0), None, None)
"""An op that does nothing: two before each op that is traced, so that what it receives is posted in the second, by itself."""


@dataclass(frozen=True)
class Setting:
    """A model on one rank's place of a grid.

    model, batch : the model, and the rows of a micro-batch of one replica. scheme, axes, rank, order, tile, regather, vectors,
    overlap : how tensors are split, and on which place. dtype : of parameters. recompute : kind, and layers. accumulate :
    micro-batches a step. ranks_per_node : how many consecutive ranks share a node's memory. on_device : on CUDA devices, by NCCL
    and fused kernels. schedule, chunks, layers : of a pipeline (axis pp); layers of each stage, None for balanced ones.
    stream : dtype of the residual stream; that of parameters, if empty. scatter : whether copies of it travel in parts. zero,
    bucket, overlap_sums : of the replicas (axis dp). context : of the contexts (axis cp). load : of a mixture's experts; None,
    all take as many tokens.
    """

    model: ModelConfig
    batch: int
    scheme: str
    axes: dict[str, int]
    rank: int = 0
    order: Sequence[str] | None = None
    tile: dict[str, int] | None = None
    regather: bool = True
    vectors: str = "copied"
    overlap: Overlap = DEFAULT
    dtype: str = "float32"
    recompute: tuple[Any, ...] = ("none", 1)
    accumulate: int = 1
    ranks_per_node: int = 1
    on_device: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    layers: Sequence[int] | None = None
    stream: str = ""
    scatter: bool = True
    zero: int = 1
    bucket: int = 25 << 20
    overlap_sums: bool = True
    context: ContextOptions = GATHERED
    load: GivenLoad | None = None

    def check(self) -> None:
        """Raise GridError, LayoutError and ConfigError where a run could not split the sizes over the grid."""
        check_split(self.contexts, self.layouts, self.model, self.batch)

    @property
    def contexts(self) -> ContextSplit:
        """Positions of the sequence on the rank."""
        size = self.axes.get("cp", 1)
        return ContextSplit(size, self.topology.coordinates_of(self.rank)["cp"] if size > 1 else 0, self.context)

    def place(self, tracer: Tracer | None = None) -> DryPlace:
        """The place, which counts in the tracer's ledger."""
        ledger = None if tracer is None else tracer.ledger
        return DryPlace(self.axes, self.rank, self.order, self.tile, self.ranks_per_node, self.on_device, ledger)

    def on(self, place: DryPlace) -> Context:
        """The context of layers on that place."""
        context = scheme(self.scheme, place, self.regather, self.vectors, self.overlap, self.context)
        sharded = replica_axes(place.shape) if self.zero == 3 else ()  # layers gather their weights from the replicas
        return replace(context, stages=self.stages, sharded=sharded)

    @property
    def layouts(self) -> Scheme:
        """The layouts of activations and parameters on the inner grid."""
        return Scheme.of(self.scheme, self.axes, self.vectors)

    @property
    def topology(self) -> Topology:
        """Coordinates of ranks on the grid, which has every axis that the scheme needs."""
        return Topology.checked({**self.axes, **self.layouts.shape}, self.order, self.tile)

    @property
    def stages(self) -> Stages | None:
        """The stages of the pipeline; None without one."""
        p = self.axes.get("pp", 1)
        return None if p == 1 else stages_of(self.schedule, p, self.chunks, self.model.layers, self.layers)


class Ending(NamedTuple):
    """The end of a step: what runs it; bytes of the moments, of this rank's file of a checkpoint, and of what it is copied to."""

    run: Callable[[], None] = lambda: None
    moments: int = 0
    checkpoint: int = 0
    copy: int = 0


@dataclass(frozen=True)
class Training:
    """The parts of training beside forward and backward.

    weights : (model, states of its parameters) → a context in which layers compute with other weights, such as 16-bit copies.
    optimizer : the pipeline, and the states of the parameters that its rank holds → the end of a step. Without one, gradients are
    not summed over replicas. shares : (setting, rank) → what else ranks may differ by behind the last backward, such as the
    matrices that a rank alone orthogonalises.
    """

    weights: Callable[[Model, Sequence[ParameterState]], AbstractContextManager[None]] = lambda model, states: nullcontext()
    optimizer: Callable[[Pipeline, Sequence[ParameterState]], Ending] | None = None
    shares: Callable[[Setting, int], object] = lambda setting, rank: None


class OpKey(NamedTuple):
    """What is traced once of a rank's ops: `chunk` stands for all that are like it, `micro` for those between first and last."""

    kind: str
    chunk: int
    micro: int


@dataclass
class DryStep:
    """The operations and memory of one rank in a step.

    copies, optimizer : what is made before the first op, and done behind the last. traced : the distinct ops. program : all ops,
    in order. saved : what a forward of a chunk saves for backward. message : bytes of what is sent to another stage.
    parameters, gradients, copied, moments, kept, node : bytes, as `bytes` has them; kept is what stays from step to step.
    elements : of the whole model's parameters, over all ranks. checkpoint : bytes of this rank's file of a checkpoint.
    """

    copies: Sequence[RepeatedSegment]
    traced: Mapping[OpKey, TracedOp]
    program: Sequence[OpKey]
    optimizer: Sequence[RepeatedSegment]
    saved: Mapping[int, int]
    message: int
    parameters: int
    gradients: int
    copied: int
    moments: int
    kept: int
    node: int
    elements: int = 0
    node_axes: tuple[str, ...] = ()
    checkpoint: int = 0

    @cached_property
    def parts(self) -> list[RepeatedSegment]:
        """Work of the rank, in no order beyond that of the ops that are traced."""
        times = Counter(self.program)
        ops = [RepeatedSegment(segment, many * times[key]) for key in times for segment, many in self.traced[key].parts]
        return [*self.copies, *ops, *self.optimizer]

    def words(self) -> dict[str, dict[str, int]]:
        """Words received, by phase and axis."""
        return moved(self.parts, "words")

    def messages(self) -> dict[str, dict[str, int]]:
        """Messages received, by phase and axis."""
        return moved(self.parts, "messages")

    def received(self) -> dict[str, dict[str, int]]:
        """Bytes received, by phase and axis."""
        return moved(self.parts, "bytes")

    def operations(self) -> dict[str, dict[str, int]]:
        """Count, flops and bytes by kind of operation."""
        return totals(self.parts)

    @property
    def peak(self) -> int:
        """The most bytes held at any time of the step, the node's memory excluded."""
        most, behind = held_in([self.traced[key] for key in self.program], net_of(self.copies), self.message)
        most = max(peak_of(self.copies), most, behind + peak_of(self.optimizer))
        return self.parameters + self.moments + self.kept + most

    @property
    def activations(self) -> int:
        """The most that forwards have saved for backwards that are still to come."""
        held = most = 0
        for kind, chunk, _ in self.program:
            held += self.saved[chunk] * ((kind == "F") - (kind in GRADIENT_ENDS))
            most = max(most, held)
        return most

    @property
    def workspace(self) -> int:
        """Peak bytes that one layer holds beyond those held before it, and the buffers that executors keep."""
        tops = (segment.top - max(0, segment.net) for op in self.traced.values() for segment, _ in op.parts)
        return self.kept + max(tops, default=0)

    @property
    def in_flight(self) -> int:
        """Peak bytes in flight to this rank, of communications that one layer issues and another layer waits for."""
        pieces = [*(item.parts for item in self.traced.values()), self.optimizer]
        ops = [((place, op.layer), op) for place, parts in enumerate(pieces) for segment, _ in parts for op in segment.ops]
        ends = {op.id: where for where, op in ops if op.kind == "wait"}
        moves = {op.id: op.written for where, op in ops if op.kind == "move" and ends.get(op.id, where) != where}
        in_flight = most = 0
        for _, op in ops:
            if op.id in moves:
                in_flight += moves[op.id] if op.kind == "move" else -moves[op.id]
                most = max(most, in_flight)
        return most

    def bytes(self) -> dict[str, int]:
        """The terms, and their peak.

        parameters : with their 16-bit copies. gradients : of all parameters. optimizer : its moments. activations : what
        forward saves for backward, of all micro-batches in flight. workspace : the most that a layer holds beyond what was
        there before it, buffers that executors keep, and the copy that a checkpoint is written from. in_flight : the most on
        its way between layers. peak : the most of all these at any time. node : this rank's share of the node's memory that
        axes communicate through, beside the peak.
        """
        return {
            "parameters": self.parameters + self.copied,
            "gradients": self.gradients,
            "optimizer": self.moments,
            "activations": self.activations,
            "workspace": self.workspace,
            "in_flight": self.in_flight,
            "peak": self.peak,
            "node": self.node,
        }


def run(setting: Setting, training: Training = Training()) -> DryStep:
    """A step of `setting`, traced on tensors without memory: nothing is computed, allocated or moved.

    Of a stage with more cells of blocks, only TRACED are traced; the middle one stands for all cells between.
    Raises LayoutError, GridError and ConfigError where the run itself would.
    """
    rank = Rank.traced(setting, training)
    return rank.step(rank.keys(rank.pipeline.rank))


class TracedStage(NamedTuple):
    """The part of a stage that is traced: its cell `middle` comes `times` times."""

    stage: Stage
    middle: str
    times: int


class Rank:
    """What one rank holds, and the trace of the ops of its program."""

    @classmethod
    def traced(
        cls, setting: Setting, training: Training, like: Rank | None = None, between: bool = False, split: bool = False
    ) -> Rank:
        """The rank of `setting`, all of whose ops have been traced.

        like : a rank that differs in its parts of what replicas share alone: its forwards and backwards are not traced again.
        between : whether of the micro-batches only those between first and last are traced; then it has no whole step, and with
        `split` its backwards are two ops, X and W.
        """
        tracer = Tracer()
        tracer.storages.on_host = not setting.on_device
        with kernels(tracer.launched) if setting.on_device else nullcontext(), _older_garbage_left():
            rank = cls(setting, training, tracer)
            rank.trace(like, between, split)
        return rank

    def __init__(self, setting: Setting, training: Training, tracer: Tracer) -> None:
        self.setting, self.training, self.tracer = setting, training, tracer
        self.place = setting.place(tracer)
        with META:
            self.model = self._held()
            self._give_load()
            self._given = inputs(setting.model, setting.batch)
            self.model.recompute(*setting.recompute)
            dtype, sums, replicas = getattr(torch, setting.stream or setting.dtype), setting.overlap_sums, None
            self.states = states_of(self.model, self.place, setting.zero, dtype)
            if training.optimizer is not None:
                replicas = replicas_in(self.model, self.states, setting.zero, setting.bucket)
            self.pipeline = Pipeline(self.model, setting.schedule, setting.batch, dtype, replicas, sums, setting.scatter)
            self._ending = training.optimizer(self.pipeline, self.states) if training.optimizer else Ending()
        self.stretches = self._stretches()
        self.like = self._alike()
        self.saved: dict[int, int] = {}
        self.kept = self.copied = 0
        self.copies: Sequence[RepeatedSegment] = ()
        self.ops: dict[OpKey, TracedOp] = {}
        executor = self.pipeline.executor
        executor.stages = [stretch.stage for stretch in self.stretches]
        executor.sums = {**executor.sums, PAUSE.op.kind: lambda chunk: None}

    def _held(self) -> Model:
        """The model with this rank's layers alone."""
        plan, config = self.setting.on(self.place), self.setting.model
        if plan.stages is not None:
            own = self._own_layers()
            dense = ",".join(str(place) for place, layer in enumerate(own) if layer in config.dense_layers)
            config = replace(config, moe=replace(config.moe, dense=dense or None)) if config.num_experts else config
            homes, index = plan.stages.homes, self.place.coordinates["pp"]
            layers = [many * (home == index) for many, home in zip(plan.stages.layers, homes, strict=True)]
            if not any(layers):  # it has the embedding or the head alone; a model has at least one layer
                layers[next(stage for stage, home in enumerate(homes) if home != index)] = 1
            plan, config = replace(plan, stages=Stages(homes, layers)), replace(config, layers=sum(layers))
        return build(config, plan, getattr(torch, self.setting.dtype))

    def _own_layers(self) -> list[int]:
        """The numbers of this rank's layers in the whole model."""
        stages, every = self.setting.stages, range(self.setting.model.layers)
        if stages is None:
            return [*every]
        homes = [home for home, many in zip(stages.homes, stages.layers, strict=True) for _ in range(many)]
        return [layer for layer in every if homes[layer] == self.place.coordinates["pp"]]

    def _give_load(self) -> None:
        """Tell the layers of experts how many tokens come, where that is given."""
        load, setting = self.setting.load, self.setting
        if load is None:
            return
        mixed = [layer for layer in range(setting.model.layers) if layer not in setting.model.dense_layers]
        for layer, block in zip(self._own_layers(), self.model.blocks, strict=False):
            moe = getattr(block, "moe", None)
            if isinstance(moe, MoE):
                plane, place = tuple(moe.axis.names), mixed.index(layer)
                moe.load = lambda micro, plane=plane, place=place: load.members(
                    setting.topology, setting.rank, plane, setting.accumulate, (micro, place)
                )

    def _stretches(self) -> list[TracedStage]:
        """Traces to make of each stage; makes the cells of all blocks known."""
        setting, cells, result = self.setting, [""] * len(self.model.blocks), []
        stretch = setting.recompute[1] if setting.recompute[0] == "full" else 1
        ends = 1 + setting.overlap.ahead // 4  # blocks at either end that gather ahead of what others do
        number = 0
        whole = self._sums_in_backward or self.setting.load is not None  # which belong to no cell, or layers are not alike
        for stage in self.pipeline.executor.stages:
            layers = stage.last - stage.first
            traced = layers if whole else min(layers, (TRACED + 2 * (ends - 1)) * stretch + layers % stretch)
            middle = str(number + ends) if layers > traced else ""
            result.append(TracedStage(replace(stage, last=stage.first + traced), middle, 1 + (layers - traced) // stretch))
            for layer in range(layers):
                cells[stage.first + layer] = str(number + layer // stretch)
            number += -(-layers // stretch)
        self.tracer.owners.follow(self.model, cells)
        return result

    @property
    def _sums_in_backward(self) -> bool:
        """Return whether backwards sum buckets of gradients over replicas, of which some are in flight from one to the next."""
        return self.setting.zero == 2 and bool(replica_axes(self.place.shape))

    def _alike(self) -> dict[int, int]:
        """Each chunk of the rank → the first that does the same: as many layers, the same ends and neighbours on this rank."""
        first: dict[object, int] = {}
        kinds: Sequence[object] = kinds_of(self.place.coordinates.get("pp", 0), self.setting.stages)
        kinds = range(len(kinds)) if self.setting.load is not None else kinds
        return {chunk: first.setdefault(kind, chunk) for chunk, kind in enumerate(kinds)}

    def key(self, op: ScheduleOp) -> OpKey:
        """Key of the trace for an op. The first micro-batch makes the gradients, the last one frees 16-bit copies of weights.

        Where backwards sum buckets, as many as may be in flight add to those; the next one ends a sum, which makes the gradients.
        """
        freed = (self.copied and op.micro == self.setting.accumulate - 1) or self.setting.load is not None
        between = op.micro if freed else min(op.micro, 1 + BUCKETS_IN_FLIGHT * self._sums_in_backward)
        return OpKey(op.kind, op.chunk if op.micro == ALL else self.like[op.chunk], between)

    def trace(self, like: Rank | None = None, between: bool = False, split: bool = False) -> None:
        """Trace each op of the program that is a key, and what is before and behind them; `between`, `split` as of `traced`."""
        tracer, weights = self.tracer, self.training.weights
        program = self._program(split)
        with tracer.storages:
            if like is None:
                self.saved = self._saved(self._first(program, between))
                self._drop()
                self.kept = self._kept()
            else:
                self.saved, self.kept, self.copied, weights = like.saved, like.kept, like.copied, Training().weights
            untraced = [self.model] if between or like is not None else self._untraced()
            self._give_gradients(untraced)
            wanted = self._wanted(program, like is not None, between)
            with tracer.recording() as ops, ExitStack() as copies:
                with tracer.ledger.phase("forward"):
                    copies.enter_context(weights(self.model, self.states))
                used = [_weights(block) for block in untraced]  # by graphs of the whole step, which the trace has not
                paused = [item for step in wanted for item in (PAUSE, PAUSE, step)] + [PAUSE]
                self.pipeline.executor.run(paused, self._feed, forwarded=copies.close)
            del used
            if like is None:
                self.kept += self.place.ledger.workspace_bytes
            with tracer.recording() as behind, tracer.ledger.phase(OPTIMIZER):
                self._ending.run()
        self.copies = like.copies if like is not None else [RepeatedSegment(segment, 1) for segment in ops[0]]
        self.optimizer = [RepeatedSegment(segment, 1) for segment in behind[0]]
        self.ops = {} if like is None else {**like.ops}
        for place, step in enumerate(wanted):
            (_, posted, op, left), key = ops[3 * place + 1 : 3 * place + 5], self.key(step.op)
            self.ops[key] = TracedOp(_net(posted), self._composed(op, key), _net(left))

    def _program(self, split: bool) -> Program:
        """The program of this rank; `split`, with the gradients of weights as ops of their own."""
        schedule = self.pipeline.schedule(self.setting.accumulate)
        return program_of(in_two(schedule), self.pipeline.rank) if split else self.pipeline.program(self.setting.accumulate)

    def _first(self, program: Program, between: bool) -> Program:
        """The steps after which all that layers keep is there, and the order of prefetches: those of a first micro-batch.

        `between`, where nothing is prefetched, forwards alone, and none of a model whose layers keep no rotary tables.
        """
        first = [step for step in program if step.op.micro == 0]
        if not between or self.setting.overlap.ahead:
            return first
        return [step for step in first if step.op.kind == "F" and "rotary_base" in self.setting.model.architecture.options]

    def _wanted(self, program: Program, like: bool, between: bool) -> list[ProgramStep]:
        """The steps whose ops are keys; `between`, of the second micro-batch and of all; `like`, of all micro-batches alone."""
        wanted = [step for step in program if self._is_traced(step.op) and (not like or step.op.micro == ALL)]
        wanted = [step for step in wanted if step.op.micro in (ALL, 1)] if between else wanted
        if self._sums_in_backward and any(step.op.kind == "X" for step in wanted):
            wanted.sort(key=_in_turn)
        return wanted

    def _give_gradients(self, untraced: Sequence[torch.nn.Module]) -> None:
        """Give parameters that no traced op is of something to sum and to update with."""
        given = {id(parameter) for module in untraced for parameter in module.parameters()}
        for state in (state for state in self.states if state.shardings.numel and id(state.parameter) in given):
            shape = state.shardings.gradient.local_shape(self.place)
            state.add(state.parameter.new_empty(shape))

    def keys(self, index: int) -> list[OpKey]:
        """The program of a rank of the pipeline whose chunks are of the kinds of this one's."""
        schedule = self.pipeline.schedule(self.setting.accumulate)
        return [self.key(op) for op in ops_of(schedule, index, self.pipeline.overlap)]

    def step(self, program: Sequence[OpKey]) -> DryStep:
        """The whole step of a program, composed of what is traced."""
        return DryStep(
            self.copies,
            self.ops,
            program,
            self.optimizer,
            {chunk: self.saved[like] for chunk, like in self.like.items()},
            0 if self.pipeline.axis is None else self.pipeline.executor.wire.buffer().nbytes,
            sum(state.parameter.nbytes + (0 if state.copy is None else state.copy.nbytes) for state in self.states),
            sum(
                prod(state.shardings.gradient.local_shape(self.place)) * state.parameter.itemsize
                for state in self.states
                if state.shardings.numel
            ),
            self.copied,
            self._ending.moments,
            self.kept + self._ending.copy,
            self.place.node_bytes(),
            self._elements(),
            self.place.staged,
            self._ending.checkpoint,
        )

    def _is_traced(self, op: ScheduleOp) -> bool:
        """Return whether the op is that of its key."""
        return op.micro == ALL or (self.like[op.chunk] == op.chunk and self.key(op).micro == op.micro)

    def _composed(self, segments: Sequence[Segment], key: OpKey) -> list[RepeatedSegment]:
        stretch = self.stretches[key.chunk]
        return repeated(
            [segment for segment in segments if segment.ops or segment.net or segment.top], stretch.middle, stretch.times
        )

    def _feed(self, micro: int) -> tuple[Inputs, Batch]:
        setting = self.setting
        return self._given, self.model.batch_of(self._given, **counts(setting.model, setting.batch), step_rows=setting.batch)

    def _drop(self) -> None:
        """Drop the gradients, those in flight too, and what only the collector frees."""
        if self.pipeline.replicas is not None:
            self.pipeline.replicas.finish()
        for state in self.states:
            state.clear()
        gc.collect()

    def _kept(self) -> int:
        """Bytes that stay of what belongs to layers, such as rotary tables."""
        shared, storages = self.place.ledger.workspace_bytes, self.tracer.storages
        layers, traced = len(self.model.blocks), sum(stage.last - stage.first for stage, _, _ in self.stretches)
        return (storages.alive + storages.apart - shared) * layers // max(1, traced)

    def _untraced(self) -> list[torch.nn.Module]:
        """The blocks of no stretch."""
        traced = {layer for stage, _, _ in self.stretches for layer in range(stage.first, stage.last)}
        return [block for layer, block in enumerate(self.model.blocks) if layer not in traced]

    def _elements(self) -> int:
        """Elements of the whole model's parameters."""
        sizes = {name: prod(cast(ShardedParameter, p).sharding.shape) for name, p in self.model.named_parameters()}
        blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
        return sum(sizes.values()) - blocks + blocks * self.setting.model.layers // len(self.model.blocks)

    def _saved(self, program: Program) -> dict[int, int]:
        """Bytes that a forward of each chunk saves for backward, each storage once, without parameters, copies and the batch.

        program : of a first micro-batch (`_first`); forwards alone save nothing
        """
        owners = self.tracer.owners
        outside = {parameter.untyped_storage()._cdata for parameter in (*self.model.parameters(), *self._given.values())}
        program = [step for step in program if self.like[step.op.chunk] == step.op.chunk]
        saved, chunks = dict.fromkeys(self.like.values(), 0), [step.op.chunk for step in program if step.op.kind == "F"]
        kept: dict[int, Any] = {}

        def feed(micro: int) -> tuple[Inputs, Batch]:
            self._forwarding = chunks.pop(0)
            return self._feed(micro)

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if current_node() is None and storage._cdata not in outside and storage._cdata not in kept:
                kept[storage._cdata] = storage  # backward, in which layers may be computed again, keeps nothing
                stretch = self.stretches[self._forwarding]
                saved[self._forwarding] += storage.nbytes() * (stretch.times if owners.saving == stretch.middle else 1)
            return tensor

        owners.begin()
        with ExitStack() as copies:
            copies.enter_context(self.training.weights(self.model, self.states))
            weights = _weights(self.model)
            stay = {id(state.copy) for state in self.states}
            self.copied = sum(
                weight.nbytes for weight in weights if not isinstance(weight, torch.nn.Parameter) and id(weight) not in stay
            )
            outside.update(weight.untyped_storage()._cdata for weight in weights)
            del weights
            trains = torch.set_grad_enabled(any(step.op.kind != "F" for step in program))
            with trains, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                self.pipeline.executor.run(program, feed, forwarded=copies.close)
        return saved


def kinds_of(rank: int, stages: Stages | None) -> list[tuple[object, ...]]:
    """Kind of each chunk of a rank of the pipeline: its layers, whether it is at an end, which neighbours are other ranks."""
    if stages is None:
        return [()]
    homes = [None, *stages.homes, None]
    return [
        (many, before if before is None else before == home, after if after is None else after == home)
        for many, before, home, after in zip(stages.layers, homes, homes[1:], homes[2:], strict=False)
        if home == rank
    ]


def _in_turn(step: ProgramStep) -> tuple[int, int]:
    """Forwards first, and each micro-batch's W before the next one's X, as in the middle of a program of any rank."""
    op = step.op
    return (2, 0) if op.micro == ALL else (0, 0) if op.kind == "F" else (1, op.micro)


def _weights(module: torch.nn.Module) -> list[Tensor]:
    """The weights that its layers compute with, parameters or copies of them, each once."""
    weights = {
        id(parameter): parameter for part in module.modules() for parameter in part._parameters.values() if parameter is not None
    }
    return list(weights.values())


def _net(segments: Sequence[Segment]) -> int:
    return sum(segment.net for segment in segments)


@contextmanager
def _older_garbage_left() -> Iterator[None]:
    """Within the block, the collector looks at what is made in it alone: a search has millions of older objects."""
    frozen = gc.get_freeze_count()  # by the caller
    try:
        if not frozen:
            gc.freeze()
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def inputs(config: ModelConfig, batch: int) -> dict[str, Tensor]:
    """A batch without memory, as the model's forward takes it."""
    if config.family == "vit":
        side, _, channels, _ = config.image_sizes
        return {"images": torch.empty(batch, channels, side, side), "labels": torch.empty(batch, dtype=torch.int64)}
    names = ("tokens", "labels", "types") if config.family == "bert" else ("tokens", "labels")
    given = {name: torch.empty(batch, config.sequence, dtype=torch.int64) for name in names}
    return given | ({"relation": torch.empty(batch, dtype=torch.int64)} if config.family == "bert" else {})


def counts(config: ModelConfig, batch: int) -> dict[str, int]:
    """The divisors of the losses, given as arguments, since a dry run has no labels to count."""
    if config.family == "vit":
        return {"count": batch}
    return {"count": batch * config.sequence} | ({"pairs": batch} if config.family == "bert" else {})
