"""A training step in a dry run: each distinct cell of blocks is traced once, and the whole step is composed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from ..nn.config import ModelConfig
from ..nn.models.registry import Model, build
from ..nn.overlap import DEFAULT, Overlap
from ..nn.parameter import ShardedParameter
from ..nn.schemes.scheme import Scheme, scheme
from .place import DryPlace
from .record import OPTIMIZER, Part, Segment, moved, net_of, peak_of, repeated, totals
from .trace import Tracer

META = torch.device("meta")
TRACED = 3
"""Cells of blocks that are traced of a deeper model: the first, one that stands for all between, and the last."""


@dataclass(frozen=True)
class Setting:
    """A model on one rank's place of a grid.

    model, batch : the model, and the rows of a micro-batch. scheme, axes, rank, order, tile, regather, vectors, overlap : how
    tensors are split, and on which place. dtype : of parameters. recompute : kind, and layers. accumulate : micro-batches a step.
    ranks_per_node : how many consecutive ranks share a node's memory. on_device : on CUDA devices, by NCCL and fused kernels.
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

    def place(self, tracer: Tracer | None = None) -> DryPlace:
        """The place, which counts in the tracer's ledger."""
        ledger = None if tracer is None else tracer.ledger
        return DryPlace(self.axes, self.rank, self.order, self.tile, self.ranks_per_node, self.on_device, ledger)

    def on(self, place: DryPlace) -> Scheme:
        """The scheme on that place."""
        return scheme(self.scheme, place, self.regather, self.vectors, self.overlap)


@dataclass(frozen=True)
class Training:
    """The parts of training beside forward and backward.

    weights : a context in which layers compute with other weights, for example 16-bit copies. optimizer : model → (the function
    that runs the optimizer's step, bytes of its moments).
    """

    weights: Callable[[Model], AbstractContextManager[None]] = lambda model: nullcontext()
    optimizer: Callable[[Model], tuple[Callable[[], None], int]] | None = None


@dataclass
class DryStep:
    """The operations and memory of one rank in a step. `first` is a micro-batch without earlier gradients, `later` with.

    parameters, copies, moments, kept, activations, node : bytes, as `bytes` has them; kept is what stays from step to step.
    elements : of the whole model's parameters, over all ranks.
    """

    accumulate: int
    first: list[Part]
    later: list[Part]
    optimizer: list[Part]
    parameters: int
    copies: int
    moments: int
    kept: int
    activations: int
    node: int
    elements: int = 0
    node_axes: tuple[str, ...] = ()
    parts: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        again = [Part(segment, times * (self.accumulate - 1)) for segment, times in self.later]
        self.parts = [*self.first, *again, *self.optimizer]

    def words(self) -> dict[str, dict[str, int]]:
        """Words received, by phase and axis."""
        return moved(self.parts, "words")

    def messages(self) -> dict[str, dict[str, int]]:
        """Messages received, by phase and axis."""
        return moved(self.parts, "messages")

    def operations(self) -> dict[str, dict[str, int]]:
        """Count, flops and bytes by kind of operation."""
        return totals(self.parts)

    @property
    def peak(self) -> int:
        """The most bytes held at any time of the step, the node's memory excluded."""
        base, held = self.parameters + self.moments + self.kept, net_of(self.first)
        optimizer = max((segment.top for segment, _ in self.optimizer), default=0)
        ended = self.copies if self.accumulate > 1 else 0  # with the last backward; of one micro-batch, with its own
        return base + max(peak_of(self.first), held + peak_of(self.later), held - ended + optimizer)

    @property
    def workspace(self) -> int:
        """Peak bytes that one layer holds beyond those held before it, and the buffers that executors keep."""
        segments = [segment for segment, _ in (*self.first, *self.later)]
        return self.kept + max((segment.top - max(0, segment.net) for segment in segments), default=0)

    @property
    def in_flight(self) -> int:
        """Peak bytes in flight to this rank, of communications that one layer issues and another layer waits for."""
        ops = [op for segment, _ in (*self.first, *self.later) for op in segment.ops]
        ends = {op.id: op.layer for op in ops if op.kind == "wait"}
        moves = {op.id: op.written for op in ops if op.kind == "move" and ends.get(op.id, op.layer) != op.layer}
        in_flight = most = 0
        for op in ops:
            if op.id in moves:
                in_flight += moves[op.id] if op.kind == "move" else -moves[op.id]
                most = max(most, in_flight)
        return most

    def bytes(self) -> dict[str, int]:
        """The terms, and their peak.

        parameters : with their 16-bit copies. gradients : of all parameters. optimizer : its moments. activations : what forward
        saves for backward. workspace : the most that a layer holds beyond what was there before it, and buffers that executors
        keep. in_flight : the most on its way between layers. peak : the most of all these at any time. node : this rank's share
        of the node's memory that axes communicate through, beside the peak.
        """
        return {
            "parameters": self.parameters + self.copies,
            "gradients": self.parameters,
            "optimizer": self.moments,
            "activations": self.activations,
            "workspace": self.workspace,
            "in_flight": self.in_flight,
            "peak": self.peak,
            "node": self.node,
        }


def run(setting: Setting, training: Training = Training()) -> DryStep:
    """A step of `setting`, traced on tensors without memory: nothing is computed, allocated or moved.

    Of a model with more cells of blocks, only TRACED are traced; the middle one stands for all cells between.
    Raises LayoutError, GridError and ConfigError where the run itself would.
    """
    stretch = setting.recompute[1] if setting.recompute[0] == "full" else 1
    layers = setting.model.layers
    ends = 1 + setting.overlap.gather // 4  # blocks at either end that gather ahead of what others do
    traced = min(layers, (TRACED + 2 * (ends - 1)) * stretch + layers % stretch)
    tracer = Tracer()
    tracer.storages.converts = not setting.on_device
    with _kernels(setting, tracer):
        traced_run = _Run(setting, replace(setting.model, layers=traced), training, tracer, stretch)
        return traced_run.step(str(ends), 1 + (layers - traced) // stretch)


class _Run:
    """One trace of a model."""

    def __init__(self, setting: Setting, config: ModelConfig, training: Training, tracer: Tracer, stretch: int) -> None:
        self.setting, self.config, self.training, self.tracer = setting, config, training, tracer
        self.place = setting.place(tracer)
        with META:
            self.model = build(config, setting.on(self.place), getattr(torch, setting.dtype))
            self.given = inputs(config, setting.batch)
        self.model.recompute(*setting.recompute)
        tracer.owners.follow(self.model, stretch)
        self.counts = counts(config, setting.batch)

    def step(self, middle: str, times: int) -> DryStep:
        """The whole step: cells `middle` come `times` times."""
        tracer, setting = self.tracer, self.setting
        update, moments = self.training.optimizer(self.model) if self.training.optimizer else (lambda: None, 0)
        with tracer.storages:
            saved = self._saved(middle, times)
            self._drop()
            shared = self.place.ledger.workspace_bytes  # the rest that stays belongs to layers, such as rotary tables
            kept = shared + (tracer.storages.alive - shared) * setting.model.layers // self.config.layers
            with ExitStack() as weights:
                first = self._traced(lambda: self._pass(weights if setting.accumulate > 1 else None))
                later = self._traced(self._pass, goes_on=True) if setting.accumulate > 1 else []
            whole = self._traced(lambda: self._optimize(update))
            for name, parameter in self.model.named_parameters():
                if tracer.owners.cell_of(name) == middle:
                    parameter.grad = None
            rest = self._traced(lambda: self._optimize(update)) if times > 1 else []
        cell_of = tracer.owners.cell_of
        own = [(p.nbytes, times if cell_of(name) == middle else 1) for name, p in self.model.named_parameters()]
        parameters, traced = sum(size * many for size, many in own), max(1, sum(size for size, _ in own))
        moments, copies = moments * parameters // traced, self.copied * parameters // traced
        optimizer = [Part(one, times) for one in whole] + [Part(one, 1 - times) for one in rest]
        node, axes = self.place.node_bytes, self.place.node_axes
        whole_model = sum(
            int(prod(cast(ShardedParameter, p).sharding.shape)) * (times if cell_of(name) == middle else 1)
            for name, p in self.model.named_parameters()
        )
        composed = (repeated(first, middle, times), repeated(later, middle, times))
        return DryStep(
            setting.accumulate, *composed, optimizer, parameters, copies, moments, kept, saved, node, whole_model, axes
        )

    def _pass(self, weights: ExitStack | None = None) -> None:
        """A micro-batch's forward and backward; `weights` keeps those that it computes with for the micro-batches after it."""
        if weights is not None:
            with self.tracer.ledger.phase("forward"):
                weights.enter_context(self.training.weights(self.model))
        loss = self._forward()
        with self.tracer.ledger.phase("backward"):
            loss.backward()

    def _forward(self, outside: set[int] | None = None) -> Tensor:
        """The loss; `outside` is given the storages of the weights that layers compute with."""
        with self.tracer.ledger.phase("forward"), self.training.weights(self.model):
            weights = {id(weight): weight for module in self.model.modules() for weight in module._parameters.values()}
            found = [weight for weight in weights.values() if weight is not None]
            self.copied = sum(weight.nbytes for weight in found if not isinstance(weight, torch.nn.Parameter))
            if outside is not None:
                outside.update(weight.untyped_storage()._cdata for weight in found)
            loss: Tensor = self.model(**self.given, **self.counts)
        return loss

    def _optimize(self, update: Callable[[], None]) -> None:
        with self.tracer.ledger.phase(OPTIMIZER):
            update()

    def _traced(self, run: Callable[[], None], goes_on: bool = False) -> list[Segment]:
        with self.tracer.recording(goes_on) as segments:
            run()
        return segments

    def _drop(self) -> None:
        """Drop the gradients, and what only the collector frees."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()

    def _saved(self, middle: str, times: int) -> int:
        """Bytes that a forward saves for backward, each storage once, without parameters, their copies and the batch."""
        owners = self.tracer.owners
        outside = {one.untyped_storage()._cdata for one in (*self.model.parameters(), *self.given.values())}
        kept: dict[int, tuple[Any, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in outside and storage._cdata not in kept:
                kept[storage._cdata] = storage, times if owners.saving == middle else 1
            return tensor

        owners.begin()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self._forward(outside)
        saved = sum(storage.nbytes() * many for storage, many in kept.values())
        kept.clear()
        with self.tracer.ledger.phase("backward"):
            loss.backward()
        return saved


@contextmanager
def _kernels(setting: Setting, tracer: Tracer) -> Iterator[None]:
    """Within the block, tensors without memory are those of the host, or of a device with its fused kernels."""
    if not setting.on_device:
        yield
        return
    from .device import kernels

    with kernels(tracer.launched):
        yield


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
