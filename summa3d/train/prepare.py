"""Preparation of a run: all checks before the first step, on every rank alike, then model, optimizer and data."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from mpi4py import MPI

from ..blas_library import TORCH, VARIABLE, BlasRule, library_name
from ..comm.grid import BaseGrid, Grid
from ..comm.health.agreement import agree_on_error
from ..comm.topology import replica_axes
from ..errors import CheckpointError, ConfigError, DataError, Summa3dError
from ..files import check_no_link
from ..nn.adopt.body import AdoptedDecoder
from ..nn.adopt.folder import has_weights
from ..nn.context import Context, check_split, scheme
from ..nn.models.registry import Model, build
from ..parallel.expert_load import ExpertLoads
from ..parallel.pipeline import Pipeline, replicas_in, stages_of
from ..parallel.replicas import Replicas
from ..parallel.states import ParameterState, states_of
from . import config as configuration
from . import toml
from .checkpoint import folder as checkpoint
from .checkpoint import shards
from .checkpoint.writer import Writer
from .config import Config, master_dtype
from .data import tokens
from .data.objective import Objective, objective
from .device import HOST, open_device
from .lease import Lease
from .metrics import check_tensorboard
from .on_root import on_root
from .optimizer import AdamW, new_optimizer
from .precision import LossScale, torch_dtype, working_weights
from .progress import SILENT, Progress


class Votes(NamedTuple):
    """Ranks that were writing a checkpoint at a step, and ranks that had been asked to end."""

    writing: int
    asked: int


NO_VOTES = Votes(0, 0)


@dataclass
class Run:
    """A training run: its folder and grid, and its model and optimizer after `done` steps on this rank's device.

    votes : how many ranks were writing a checkpoint, and how many had been asked to end, at the last step's gradient norm
    """

    config: Config
    folder: Path
    grid: BaseGrid
    tokens: tokens.Tokens
    objective: Objective
    model: Model
    optimizer: AdamW
    replicas: Replicas
    loss_scale: LossScale
    pipeline: Pipeline
    done: int = 0
    device: torch.device = HOST
    writer: Writer | None = None
    votes: Votes = NO_VOTES

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints step-N."""
        return self.folder / "checkpoints"

    def working_weights(self) -> AbstractContextManager[None]:
        """A context in which layers compute with weights of the run's dtype."""
        return working_weights(self.model, self.optimizer.states.values(), torch_dtype(self.config.dtype))

    def blocks(self) -> list[shards.TensorBlock]:
        """This rank's share of all tensors of a checkpoint: the parts of parameters and optimizer moments that it owns."""
        return checkpoint.own_blocks(self.optimizer)


def prepare(
    config: Config,
    comm: MPI.Intracomm,
    folder: Path,
    resume: bool = False,
    overwrite: bool = False,
    lease: Lease | None = None,
    progress: Progress = SILENT,
) -> Run:
    """Check device, grid, sizes, folder, checkpoint and corpus, in this order, then build the model; collective.

    Parameters
    ----------
    resume : whether the newest complete checkpoint is loaded into model and optimizer
    overwrite : whether to delete the checkpoints in `folder`
    lease : taken on rank 0, as soon as `folder` is there; its owner gives it back
    progress : shows what is being done

    Raises the error of the first check that fails (GridError, LayoutError, ConfigError, CheckpointError or DataError), on every
    rank alike.
    """
    config.check_text()
    device = open_device(config.device, comm, config.tf32)
    grid, context = open_grid(config, comm, device)
    check_split(context.contexts, context.scheme, config.model, config.rows)
    if config.train.tensorboard:
        on_root(comm, check_tensorboard, ConfigError)
    on_root(comm, lambda: open_folder(folder, resume, overwrite, lease, progress), ConfigError, folder=folder)
    saved = open_checkpoint(config, comm, folder) if resume else None
    if saved is not None and saved.step > config.train.steps:
        raise ConfigError(
            f"train.steps is {config.train.steps}, but {saved.path} is after step {saved.step}. "
            f"Set train.steps to {saved.step} or more."
        )
    if saved is not None and saved.step:
        grid.job.blas = rule_before(saved.blas, grid, progress)
    corpus = tokens.prepare(config.data, config.model.sequence, folder / "data", comm, progress.doing)
    check_prompt(config, corpus)
    progress.doing("building the model")
    model = build_model(config, with_zero(context, config), device)
    if saved is None and isinstance(model, AdoptedDecoder):
        read_folder(model, comm, progress)
    loss_scale = LossScale.of(config, saved.index.get("loss_scale") if saved else None)
    task = objective(config.model, corpus)
    states = states_of(model, grid, config.replicas.zero, torch_dtype(config.dtype))
    optimizer = new_optimizer(states, config.train, grid)
    replicas, pipeline = open_pipeline(config, model, states)
    run = Run(config, folder, grid, corpus, task, model, optimizer, replicas, loss_scale, pipeline, device=device)
    if saved is not None:
        run.optimizer.start_at(saved.step - loss_scale.skipped)
        moments = checkpoint.moment_blocks(optimizer) if saved.has_moments else []
        saved.load([*checkpoint.weight_blocks(states), *moments], grid)
        if any(state.copy is not None for state in states):
            replicas.gathers.start()
        run.done = saved.step
    on_root(comm, lambda: write_config(config, folder, saved, progress), ConfigError, folder=folder)
    return run


def open_pipeline(config: Config, model: Model, states: Sequence[ParameterState]) -> tuple[Replicas, Pipeline]:
    """The replicas and the pipeline of a run's model, the same on all ranks; then the grid is sealed. Collective."""
    grid, how = model.context.whole, config.pipeline
    replicas = replicas_in(model, states, config.replicas.zero, config.replicas.bucket)
    dtype, overlap = torch_dtype(config.dtype), config.replicas.overlap
    pipeline = Pipeline(model, how.schedule, config.rows, dtype, replicas, overlap, how.scatter)
    pipeline.check(config.train.accumulate)
    ExpertLoads.of(model, states)  # makes its communicator
    grid.seal()
    return replicas, pipeline


def check_prompt(config: Config, corpus: tokens.Tokens) -> None:
    """Raise DataError for a sample prompt that the tokenizer cannot read: now, and not when it is continued."""
    for number, prompt in enumerate(config.prompts):
        try:
            corpus.tokenizer.encode(prompt.encode())
        except DataError as error:
            name = "sample_prompts" if number else "sample_prompt"
            raise DataError(f"train.{name}: {error} With train.sample_tokens=0 none is read.") from error


def rule_before(before: BlasRule | None, grid: BaseGrid, progress: Progress) -> BlasRule:
    """Library that multiplied in the steps before, so that resuming changes no bit; else, and that is said, the rule of `grid`.

    The latter where SUMMA3D_BLAS says so, or where some rank does not have that library. Collective.
    """
    if before is None or before.name == grid.job.blas.name:
        return grid.job.blas if before is None else before._replace(reason=grid.job.blas.reason)
    able = VARIABLE not in os.environ and before.name in (TORCH, library_name())
    if grid.comm.allreduce(able, MPI.MIN):
        return before._replace(reason="as in the steps before")
    progress.say(f"products by {grid.job.blas.name}, before by {before.name}: results may differ in their last bits")
    return grid.job.blas


def write_config(config: Config, folder: Path, saved: checkpoint.Checkpoint | None, progress: Progress) -> None:
    """Write config.toml. Settings that differ from those of the steps before are named, and kept in config-N.toml."""
    before = saved.config if saved is not None and saved.step else None
    if saved is not None and before is not None:
        with_defaults = before
        with suppress(Summa3dError):  # keys that are newer than the checkpoint have their defaults there
            with_defaults = configuration.to_table(configuration.from_table(before))
        changed = toml.changes(with_defaults, configuration.to_table(config))
        if changed:
            progress.say(f"changed since step {saved.step}: {', '.join(changed)}")
            configuration.write(before, folder / f"config-{saved.step}.toml")
    configuration.write(configuration.to_table(config), folder / "config.toml")


def build_model(config: Config, context: Context, device: torch.device = HOST) -> Model:
    """The model of a configuration on `device`, with the initial weights of its seed, in the dtype of master weights."""
    with device:
        model = build(config.model, context, torch_dtype(master_dtype(config.dtype)), config.train.seed)
    model.recompute(config.recompute, config.recompute_layers, config.distribute_saved_activations)
    return model


def read_folder(model: AdoptedDecoder, comm: MPI.Intracomm, progress: Progress) -> None:
    """Begin with the weights of the Transformers folder of a model; without any in it, with those that were drawn. Collective."""
    folder = Path(model.config.folder) if model.config.folder else None
    if folder is None or not on_root(comm, lambda: has_weights(folder), CheckpointError):
        progress.say(f"no weights in {folder}: the first ones are drawn" if folder else "no folder of weights: they are drawn")
        return
    progress.doing(f"reading {folder}")
    problem: Summa3dError | None = None
    try:
        model.read(folder)
    except Summa3dError as error:
        problem = error
    agree_on_error(comm, problem)


def with_zero(context: Context, config: Config) -> Context:
    """The context of a training run, whose layers gather their weights from the replicas where those share them (zero 3)."""
    return replace(context, sharded=replica_axes(context.whole.shape)) if config.replicas.zero == 3 else context


def open_grid(config: Config, comm: MPI.Intracomm, device: torch.device = HOST) -> tuple[Grid, Context]:
    """The grid, and the context of the layers, of a configuration on the ranks of `comm`; collective.

    Ranks with devices do not use the node's shared memory. Raises GridError where the sizes do not fit the number of ranks.
    """
    order, tile = config.grid.rank_order, config.grid.tile
    shared = None if device.type == "cpu" else False
    grid = Grid(comm, config.grid.axes, order, tile, config.grid.check, shared, transport=config.transport)
    overlap = config.overlap_on(device.type != "cpu")
    context = scheme(config.scheme, grid, config.regather, config.vectors, overlap, config.context)
    if config.grid.pp > 1:
        how = config.pipeline
        stages = stages_of(how.schedule, config.grid.pp, how.chunks, config.model.layers, how.counts)
        context = replace(context, stages=stages)
    return grid, context


def open_checkpoint(config: Config, comm: MPI.Intracomm, folder: Path) -> checkpoint.Checkpoint | None:
    """The newest complete checkpoint of a run folder, verified and of the model of `config`; None if there is none. Collective.

    Raises CheckpointError, on every rank alike, for a damaged checkpoint, one that lacks moments, and one of another model.
    """
    path = on_root(comm, lambda: checkpoint.newest(folder / "checkpoints"), CheckpointError)
    if path is None:
        return None
    saved = checkpoint.read(path, comm)
    saved.check_model(config)
    saved.check_tensors()
    saved.verify(comm)
    return saved


def open_folder(folder: Path, resume: bool, overwrite: bool, lease: Lease | None = None, progress: Progress = SILENT) -> None:
    """Make the run folder, and take its lease. `resume` accepts the checkpoints in it, `overwrite` deletes them.

    Raises ConfigError where the folder cannot be made, where another job holds it, and where it holds checkpoints of another run.
    """
    checkpoints = folder / "checkpoints"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        for name in (checkpoints, folder / "tensorboard"):
            check_no_link(name)
    except OSError as error:
        raise ConfigError(f"--run {folder} cannot be made a run folder: {error.strerror}.") from error
    if lease is not None:
        lease.take(folder, progress.doing)
    if overwrite:
        checkpoint.remove_all(checkpoints)
        for older in folder.glob("config-*.toml"):
            if re.fullmatch(r"config-\d+\.toml", older.name):
                older.unlink()
    elif not resume:
        check_new(folder)


def check_new(folder: Path) -> None:
    """Raise ConfigError where a folder holds checkpoints."""
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is not None:
        raise ConfigError(
            f"--run {folder} already holds a run, with {newest.name} as its newest checkpoint.\n"
            "  Continue that run with --resume, start again with --overwrite, or choose another folder."
        )
