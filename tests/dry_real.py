"""A case run for real on this rank of a grid, and the same case run dry: what both have to agree on."""

from __future__ import annotations

import gc
from typing import Any

import torch
from golden_cases import Case

from summa3d.bench.memory import peak_bytes, saved_bytes
from summa3d.comm.grid import Grid
from summa3d.comm.profile.ledger import Watched
from summa3d.dry.step import DryStep, Setting, run
from summa3d.nn import ModelConfig, build, scheme
from summa3d.nn.models.registry import Model
from summa3d.nn.overlap import DEFAULT, Overlap
from summa3d.parallel.pipeline import Pipeline
from summa3d.parallel.replicas import Replicas
from summa3d.parallel.states import states_of
from summa3d.train import config as configuration
from summa3d.train.dry_run import training_of

Lines = dict[tuple[str, str, str], tuple[int, int]]
"""Phase, axis and collective → words and messages."""


def config_of(case: Case) -> configuration.Config:
    """As much of a run's configuration as training takes."""
    return configuration.Config(dtype=case.dtype, train=configuration.TrainConfig(checkpoint_every=0))


def setting_of(
    case: Case, rank: int = 0, ranks_per_node: int = 1, on_device: bool = False, overlap: Overlap = DEFAULT
) -> Setting:
    """The case on one rank's place."""
    return Setting(
        ModelConfig(**case.sizes),
        case.batch,
        case.scheme,
        case.axes,
        rank,
        regather=case.regather,
        vectors=case.vectors,
        recompute=case.recompute,
        ranks_per_node=ranks_per_node,
        on_device=on_device,
        overlap=overlap,
    )


def run_dry(case: Case, rank: int = 0, ranks_per_node: int = 1, on_device: bool = False, overlap: Overlap = DEFAULT) -> DryStep:
    """A dry step of the case."""
    return run(setting_of(case, rank, ranks_per_node, on_device, overlap), training_of(config_of(case)))


def lines_of(step: DryStep) -> Lines:
    """Return what a dry step moves, line by line."""
    lines: Lines = {}
    for segment, times in step.parts:
        for op in segment.ops:
            if op.kind == "move":
                key = ("backward" if op.phase == "recompute" else op.phase, op.axis, op.name)
                words, messages = lines.get(key, (0, 0))
                lines[key] = words + times * op.words, messages + times * op.messages
    return lines


def lines_moved(moved: Watched) -> Lines:
    """Return what a real step moved, line by line, whatever the dtypes."""
    lines: Lines = {}
    for row in moved.rows:
        words, messages = lines.get((row.phase, row.axis, row.collective), (0, 0))
        lines[row.phase, row.axis, row.collective] = words + row.amounts.words, messages + row.amounts.messages
    return lines


def batch_of(config: ModelConfig, rows: int) -> dict[str, Any]:
    """A batch of zeros and what its losses are divided by."""
    if config.family == "vit":
        side, _, channels, _ = config.image_sizes
        return {"images": torch.zeros(rows, channels, side, side), "labels": torch.zeros(rows, dtype=torch.int64), "count": rows}
    tokens = torch.zeros(rows, config.sequence, dtype=torch.int64)
    given: dict[str, Any] = {"tokens": tokens, "labels": tokens.clone(), "count": tokens.numel()}
    more = {"types": tokens.clone(), "relation": tokens[:, 0].clone(), "pairs": rows}
    return given | (more if config.family == "bert" else {})


class Real:
    """The case on `grid`: a whole step, its ledger's lines, what forward saves, and the most that torch held."""

    def __init__(self, case: Case, grid: Grid, overlap: Overlap = DEFAULT) -> None:
        self.config, self.grid = ModelConfig(**case.sizes), grid
        on_grid = scheme(case.scheme, grid, case.regather, case.vectors, overlap)
        self.model: Model = build(self.config, on_grid)
        self.model.recompute(*case.recompute)
        self.training = training_of(config_of(case))
        assert self.training.optimizer is not None
        self.states = states = states_of(self.model, grid)
        replicas = Replicas.of(states, grid, 0, 1)
        pipeline = Pipeline(self.model, "1f1b", case.batch, torch.float32, replicas)
        self.update, self.moments, *_ = self.training.optimizer(pipeline, states)
        self.batch = batch_of(self.config, case.batch)
        self.held = sum(weight.nbytes for weight in self.model.parameters())

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self.model.zero_grad(set_to_none=True)
        with self.grid.ledger.phase("forward"), self.training.weights(self.model, self.states):
            loss = self.model(**self.batch)
        with self.grid.ledger.phase("backward"):
            loss.backward()
        with self.grid.ledger.phase("optimizer"):
            self.update()

    def measured(self) -> tuple[Lines, int]:
        """Return what a step moves, and the most held in it: of one that is not the first."""
        with self.grid.ledger.watch() as moved:
            peak = self.peak()
        return lines_moved(moved), peak

    def saved(self) -> int:
        """Bytes that a forward saves for backward, without parameters, their copies and the batch."""
        with self.training.weights(self.model, self.states):
            weights = [weight for module in self.model.modules() for weight in module._parameters.values() if weight is not None]
            tensors = [value for value in self.batch.values() if isinstance(value, torch.Tensor)]
            with saved_bytes([*self.model.parameters(), *weights, *tensors]) as saved:
                loss = self.model(**self.batch)
        kept = saved.bytes
        del saved, weights
        loss.backward()
        return kept

    def peak(self) -> int:
        """The most held in a step, without the scratch memory of torch's products of 16 bits, which depends on the processor."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        kept = self.grid.ledger.workspace_bytes
        with torch.autograd.set_multithreading_enabled(False):
            return self.held + self.moments + kept + peak_bytes(self.step, scratch=False)
