"""Checkpoints: a folder step-N of safetensors shards and an index, published atomically by a rename.

Nothing in a checkpoint depends on the grid that wrote it, so that any other grid can load it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...blas_library import BlasRule
from ...comm.grid import BaseGrid, Place
from ...comm.health.agreement import agree_on_error
from ...dtypes import FLOATS
from ...errors import CheckpointError
from ...files import remove_files, rename_folder, replacing
from ...nn.config import ModelConfig
from ...nn.context import scheme
from ...nn.models.registry import build
from ...parallel.states import named_parameters
from .. import toml
from ..config import Config, master_dtype
from ..on_root import on_root
from ..optimizer import AdamW, moments_of
from . import index as contents
from . import shards

if TYPE_CHECKING:
    from mpi4py import MPI

    from ...comm.grid import BaseGrid
    from ...parallel.states import ParameterState

OLD = ".old-"
"""How the folder of a checkpoint begins that is being deleted."""
OWN_NAMES = re.compile(r"rank-\d+\.safetensors|(\.[0-9a-f]{12}-)?index\.json")
"""What the folder of a checkpoint holds; a user's files in it are left alone."""
FREE_KEYS = ("dropout", "attention_dropout", "balance", "folder")
"""Keys of a model that may change when a run is resumed: no weight depends on them."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its index."""

    path: Path
    index: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of optimizer steps that were taken before the checkpoint was written."""
        return self.index["step"]

    @property
    def config(self) -> dict[str, Any] | None:
        """The TOML table of the run that wrote the checkpoint; None where an earlier version wrote it."""
        return self.index.get("config")

    @property
    def blas(self) -> BlasRule | None:
        """Library that multiplied host tensors in the steps before; None where an earlier version wrote the checkpoint."""
        result = self.index["written_on"].get("blas")
        return None if result is None else BlasRule(**result)

    @property
    def has_moments(self) -> bool:
        """Return whether the checkpoint holds the optimizer's state; an imported checkpoint holds weights only."""
        return any(name.startswith("optimizer.") for name in self.index["tensors"])

    @property
    def optimizer(self) -> str:
        """The optimizer of the run that wrote the checkpoint."""
        train = (self.config or {}).get("train", {})
        result: str = train.get("optimizer", "adamw") if isinstance(train, dict) else "adamw"
        return result

    def check_model(self, config: Config) -> None:
        """Raise CheckpointError unless the checkpoint fits the model, dtype and optimizer of `config`, naming what differs."""
        model = toml.build(ModelConfig, self.index["model"], "model.")
        have = {**identity(model), "dtype": master_dtype(self.index["dtype"])}
        want = {**identity(config.model), "dtype": master_dtype(config.dtype)}
        keys = [key for key in {**want, **have} if have.get(key) != want.get(key)]
        differing = [f"{key}: checkpoint {have.get(key)}, this run {want.get(key)}" for key in keys]
        if keys == ["dtype"]:
            fitting = ", ".join(dtype for dtype in FLOATS if master_dtype(dtype) == have["dtype"])
            raise CheckpointError(
                f"{self.path} holds weights in {have['dtype']}, and a run with dtype = {config.dtype!r} has them in "
                f"{want['dtype']}. Values of dtype that fit it: {fitting}."
            )
        if differing:
            raise CheckpointError(f"{self.path} is a checkpoint of another model.\n  " + "\n  ".join(differing))
        if self.has_moments and self.optimizer != config.train.optimizer:
            raise CheckpointError(
                f"{self.path} has the moments of train.optimizer = {self.optimizer!r}, and this run has "
                f"{config.train.optimizer!r}, which cannot go on from them. Set train.optimizer to {self.optimizer!r}."
            )

    def verify(self, comm: MPI.Intracomm) -> None:
        """Compare every file with the index: size, checksum, and the tensors in it; each rank checks its share. Collective.

        Raises CheckpointError, on every rank alike, naming the file that is missing, truncated, altered or not in the index.
        """
        error: CheckpointError | None = None
        named, held = sorted(self.index["files"]), contents.tensors_in(self.index)
        try:
            for name in named[comm.rank :: comm.size]:
                self._verify_file(name, self.index["files"][name])
                shards.check_header(self.path / name, held[name])
            if comm.rank == 0 and (others := {path.name for path in self.path.glob("*.safetensors")} - set(named)):
                raise CheckpointError(f"{self.path} holds {min(others)}, which its index does not name. {self._advice()}")
        except CheckpointError as caught:
            error = caught
        except OSError as caught:
            error = CheckpointError(f"Cannot read the checkpoint {self.path}: {caught}.")
        agree_on_error(comm, error)

    def check_tensors(self) -> None:
        """Raise CheckpointError unless the tensors are those of the index's model, and of its optimizer's moments.

        Only a checkpoint before the first step, an imported one, may lack the moments.
        """
        with torch.device("meta"):
            model = build(
                toml.build(ModelConfig, self.index["model"], "model."), scheme("serial", Place(dict.fromkeys("xyz", 1)))
            )
        dtype = master_dtype(self.index["dtype"])
        shapes = {name: list(p.sharding.shape) for name, p in named_parameters(model)}
        want = {f"model.{name}": (shape, dtype) for name, shape in shapes.items()}
        for name, shape in shapes.items() if self.has_moments or self.step else ():
            moments = moments_of(name, len(shape), self.optimizer)
            want |= {f"optimizer.{moment}.{name}": (shape, dtype) for moment in moments}
        have = {name: (entry["shape"], entry["dtype"]) for name, entry in self.index["tensors"].items()}
        for name in (*want, *have):
            if have.get(name) != want.get(name):
                words = [" ".join(map(str, reversed(item))) if item else "none" for item in (have.get(name), want.get(name))]
                raise CheckpointError(f"{self.path}: {name[:99]!r} is {words[0]}; a run of its model has {words[1]}.")

    def load(self, blocks: Sequence[shards.TensorBlock], grid: BaseGrid) -> None:
        """Fill this rank's blocks in place; collective. Call `verify` first.

        Parameters
        ----------
        blocks : this rank's blocks of the tensors to load; the grid that wrote the checkpoint does not matter
        grid : the grid that the blocks are sharded over

        Raises CheckpointError, on every rank alike, where a tensor is missing or has another shape or dtype.
        """
        error = None
        try:
            with shards.ShardReader(self.path, self.index["tensors"]) as reader:
                for block in blocks:
                    reader.read(block, grid)
        except CheckpointError as caught:
            error = caught
        agree_on_error(grid.comm, error)

    def _verify_file(self, name: str, entry: dict[str, Any]) -> None:
        path = self.path / name
        if not path.is_file():
            raise CheckpointError(f"The checkpoint file {path} is missing. {self._advice()}")
        size = path.stat().st_size
        if size != entry["bytes"]:
            change = "truncated" if size < entry["bytes"] else "altered"
            raise CheckpointError(
                f"The checkpoint file {path} is {change}: {size} bytes instead of {entry['bytes']}. {self._advice()}"
            )
        if shards.checksum(path) != entry["sha256"]:
            raise CheckpointError(f"The checkpoint file {path} is altered: its checksum differs from the index. {self._advice()}")

    def _advice(self) -> str:
        return f"Delete {self.path} to resume from an older checkpoint."


def identity(model: ModelConfig) -> dict[str, Any]:
    """The keys that decide a model's weights, with the family's defaults filled in: two models are one if these agree."""
    filled: dict[str, Any] = {
        "kv_heads": model.num_kv_heads,
        "ffn": model.ffn_dim,
        "norm_eps": model.eps,
        "rotary_base": model.theta,
        "activation": model.activation_function,
    }
    filled |= {"rotary_scaling": model.scaling, "tied_head": model.tied, "qkv_bias": model.has_qkv_bias}
    filled["head_dim"] = None if model.head_size * model.heads == model.hidden else model.head_size
    if model.num_experts:
        filled |= {"experts": model.num_experts, "experts_per_token": model.num_chosen}
        widths = {"width": model.expert_width, "shared": model.shared_width}
        filled["moe"] = {**widths, "renormalise": model.renormalised, "dense": sorted(model.dense_layers)}
        filled["moe"] |= {"scores": model.moe.scored_by, "groups": model.moe.competing, "bias": model.moe.bias_rate is not None}
    table = {**toml.dump(model), **filled}
    return {f"model.{key}": table[key] for key in sorted(table) if key not in FREE_KEYS}


def weight_blocks(states: Sequence[ParameterState]) -> list[shards.TensorBlock]:
    """The stored weights as blocks of global tensors."""
    return [shards.TensorBlock(f"model.{state.name}", state.parameter.data, state.shardings.stored) for state in states]


def own_blocks(optimizer: AdamW) -> list[shards.TensorBlock]:
    """The parts of weights and moments that this rank owns as blocks of global tensors: its share of a checkpoint."""
    return own_weights(optimizer) + moment_blocks(optimizer, own=True)


def own_weights(optimizer: AdamW) -> list[shards.TensorBlock]:
    """The parts of weights that this rank owns."""
    states = optimizer.states.values()
    return [shards.TensorBlock(f"model.{state.name}", state.own_part(state.weight), state.shardings.share) for state in states]


def moment_blocks(optimizer: AdamW, own: bool = False) -> list[shards.TensorBlock]:
    """The optimizer's moments on this rank as blocks of global tensors; own: the parts of them that it owns."""
    result = []
    for moment, tensors in optimizer.moments.items():
        for name, tensor in tensors.items():
            state = optimizer.states[name]
            part = (state.own_part(tensor), state.shardings.share) if own else (tensor, state.shardings.moments)
            result.append(shards.TensorBlock(f"optimizer.{moment}.{name}", *part))
    return result


def index_of(
    step: int,
    blocks: Sequence[shards.TensorBlock],
    entries: Sequence[dict[str, Any]],
    config: Config,
    blas: BlasRule,
    loss_scale: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The index of a checkpoint: the run's configuration, and the file of every slice of every global tensor.

    `blas` is what multiplied, on which the last bits of a step depend. The random state is the seed and the step, because
    weights, windows and dropout masks are functions of both. `loss_scale` is `LossScale.state()`.
    """
    return {
        "format": contents.FORMAT,
        "version": contents.VERSION,
        "step": step,
        "random": {"seed": config.train.seed, "step": step},
        "loss_scale": loss_scale,
        "dtype": config.dtype,
        "model": toml.dump(config.model),
        "config": toml.dump(config),
        "written_on": {"scheme": config.scheme, "grid": config.grid.axes, "blas": blas._asdict()},
        **shards.files_and_tensors(blocks, entries),
    }


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None. A folder without a final name or an index is incomplete."""
    complete = steps(folder)
    return complete[max(complete)] if complete else None


def steps(folder: Path) -> dict[int, Path]:
    """Step → folder of every complete checkpoint."""
    result = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / contents.NAME).is_file():
            result[int(match[1])] = path
    return result


def read(path: Path, comm: MPI.Intracomm, form: str = contents.FORMAT) -> Checkpoint:
    """Read and check the index of the checkpoint at `path`; collective. Raises CheckpointError where the index is damaged."""
    return Checkpoint(path, on_root(comm, lambda: contents.read(path / contents.NAME, form), CheckpointError))


def temporary(folder: Path, step: int) -> Path:
    """Temporary folder of the files of checkpoint step-N until it is published."""
    return folder / f".tmp-step-{step}"


def publish(folder: Path, step: int, index: dict[str, Any], keep: int) -> None:
    """Write the index of the checkpoint step-N beside its files, rename their folder, and delete all but the newest `keep`.

    Where it is interrupted, the folder has its name or not, and another call goes on. Raises OSError.
    """
    written, final = temporary(folder, step), folder / f"step-{step}"
    if written.is_dir():
        path = written / contents.NAME
        with replacing(path) as new:
            new.write_text(json.dumps({**index, "sha256": contents.digest(index)}), encoding="utf-8")
            shards.sync(new)
        shards.sync(written)
        if final.exists():
            _delete(final)
        rename_folder(written, final, last=contents.NAME)
    shards.sync(folder)
    for old in sorted(steps(folder).items())[:-keep]:
        _delete(old[1])


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a folder, complete or not. Raises OSError."""
    clean(folder)
    for path in folder.glob("step-*"):
        if re.fullmatch(r"step-\d+", path.name):
            _delete(path)


def clean(folder: Path) -> None:
    """Remove the folders that an interrupted writer or deletion left behind."""
    for path in folder.glob(".tmp-step-*"):
        with contextlib.suppress(OSError):
            remove_files(path, OWN_NAMES)
    for path in folder.glob(f"{OLD}step-*"):
        with contextlib.suppress(OSError):
            _finish_deletion(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint. The folder is renamed first, so that a half-deleted checkpoint never has a final name."""
    old = path.with_name(f"{OLD}{path.name}")
    os.rename(path, old)
    _finish_deletion(old)


def _finish_deletion(old: Path) -> None:
    """Delete a checkpoint that was renamed to be deleted; where a user keeps files in it, these get their folder back."""
    if not remove_files(old, OWN_NAMES):
        os.rename(old, old.with_name(old.name.removeprefix(OLD)))
