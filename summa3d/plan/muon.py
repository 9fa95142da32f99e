"""What Muon does behind the last backward: the step of a stage's blocks, run dry on the rank that computes most."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..dry.device import kernels
from ..dry.record import OPTIMIZER, Op, RepeatedSegment, peak_of
from ..dry.step import META, Setting
from ..dry.trace import Tracer
from ..nn.gradients import norm_and_votes
from ..nn.models.registry import build
from ..parallel.states import states_of
from ..train import toml
from ..train.config import GridConfig, ReplicasConfig, TrainConfig
from ..train.dry_run import CLIPPED, MatrixShares, setting_of
from ..train.optimizer import BLOCKS, new_optimizer
from ..train.precision import torch_dtype

if TYPE_CHECKING:
    from .search.cells import StageGrid


class MuonStep(NamedTuple):
    """Muon's step of the blocks of a stage on the rank that owns most.

    ops : what it computes and moves, the norm of gradients included. top : bytes beside weights, gradients and moments
    """

    ops: tuple[Op, ...]
    top: int

    @property
    def words(self) -> int:
        """Words that the rank receives."""
        return sum(op.words for op in self.ops if op.kind == "move")


def muon_step(inner: StageGrid, layers: int, dp: int, zero: int, train: TrainConfig) -> MuonStep:
    """The step, of a stage of so many layers on its grid, replicas included. Nothing is computed or moved.

    Raises LayoutError and GridError where a run of these sizes would.
    """
    config = inner.config(1)
    grid = toml.build(GridConfig, {**inner.shape, **dict(inner.outer), "dp": dp})
    train = replace(train, batch=config.train.accumulate * inner.unit * dp, accumulate=config.train.accumulate)
    model = replace(inner.model, layers=layers)
    config = replace(config, grid=grid, model=model, train=train, replicas=ReplicasConfig(zero=zero))
    on_device = inner.device == "cuda"
    setting = setting_of(config, 0, inner.shared, on_device)
    shares = MatrixShares(config)
    work = [shares.flops_of(setting, rank) for rank in range(setting.topology.size)]
    setting = replace(setting, rank=work.index(max(work)))
    tracer = Tracer()
    tracer.storages.on_host = not on_device
    with kernels(tracer.launched) if on_device else nullcontext():
        return _run(setting, train, tracer)


def _run(setting: Setting, train: TrainConfig, tracer: Tracer) -> MuonStep:
    place = setting.place(tracer)
    with META:
        model = build(setting.model, setting.on(place), getattr(torch, setting.dtype))
        states = states_of(model, place, setting.zero, torch_dtype(setting.stream or setting.dtype))
        blocks = [state for state in states if state.name.startswith(BLOCKS)]
        optimizer = new_optimizer(blocks, train, place)
        with tracer.storages:
            for state in blocks:
                if state.shardings.numel:
                    state.add(state.parameter.new_empty(state.shardings.gradient.local_shape(place)))
            with tracer.recording() as result, tracer.ledger.phase(OPTIMIZER):
                norm_and_votes(optimizer.counted_gradients(), place)
                optimizer.step(train.learning_rate, CLIPPED if train.clip else 1.0)
    ops = tuple(op for segment in result[0] for op in segment.ops)
    return MuonStep(ops, peak_of([RepeatedSegment(segment, 1) for segment in result[0]]))
