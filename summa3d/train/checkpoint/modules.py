"""Checkpoints of a module of one's own and its optimizers: whole tensors in pieces, which any grid loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...comm.device.arrays import dtype_name
from ...comm.grid import BaseGrid
from ...comm.health.agreement import agree_on_error, check_agreement
from ...dtypes import FLOATS
from ...errors import CheckpointError
from ...layout.layout import Layout, Sharding
from ...nn.copies import grid_of
from ...nn.parameter import ShardedParameter
from ..on_root import on_root
from ..optimizer import ZeroAdamW
from . import folder as folders
from . import index as contents
from . import shards

Optimizer = torch.optim.Optimizer
Numbers = dict[str, float]


def save_checkpoint(folder: str | Path, step: int, module: nn.Module, *optimizers: Optimizer, keep: int = 2) -> Path:
    """Write the checkpoint `folder`/step-N of a module and its optimizers, and return its path; collective over the grid.

    Parameters
    ----------
    folder : on a file system that all ranks share; made where there is none. Its checkpoints but the newest `keep` are deleted
    step : the number of steps taken
    optimizers : `ZeroAdamW`, `summa3d.nn.Muon`, or torch's that act on each element alone. What they keep of a parameter is
        saved, learning rates and schedulers are not: set them from the step

    Each rank writes the pieces that it owns; nothing moves between ranks but the index. An interrupted call leaves the older
    checkpoints. Raises CheckpointError, on every rank alike, where a file cannot be written, and for buffers of whole numbers;
    AgreementError where ranks save different things.
    """
    grid, path = grid_of("save_checkpoint", list(module.parameters())), Path(folder)
    if not isinstance(step, int) or step < 0 or keep < 1:
        raise CheckpointError(
            f"A checkpoint is that of a whole number of steps, 0 or more, and 1 or more are kept: {step!r}, {keep!r}."
        )
    blocks, numbers = [*_weights(module, optimizers, grid, own=True)], _plain_numbers(module)
    for optimizer in optimizers:
        blocks += (
            folders.moment_blocks(optimizer.adamw, own=True) if isinstance(optimizer, ZeroAdamW) else _moments(module, optimizer)
        )
        numbers |= _steps(module, optimizer)
    check_agreement(grid.comm, "the checkpoint", {"step": step, "tensors": tuple(sorted(block.name for block in blocks))})
    on_root(grid.comm, lambda: folders.clean(path), CheckpointError)
    entry, error = None, None
    try:
        own = [block for block in blocks if block.sharding.is_primary(grid) and block.tensor.numel()]
        entry = shards.write(folders.temporary(path, step) / f"rank-{grid.rank}.safetensors", own, grid)
    except CheckpointError as caught:
        error = caught
    agree_on_error(grid.comm, error)
    entries = grid.comm.gather(entry) or []

    def publish() -> None:
        head = {"format": contents.MODULE_FORMAT, "version": contents.VERSION, "step": step, "numbers": numbers}
        folders.publish(path, step, {**head, **shards.files_and_tensors(blocks, entries)}, keep)

    on_root(grid.comm, publish, CheckpointError)
    return path / f"step-{step}"


def load_checkpoint(folder: str | Path, module: nn.Module, *optimizers: Optimizer, must_exist: bool = True) -> int:
    """Load the newest checkpoint of a folder into a module and its optimizers; return its step. Collective over the grid.

    Parameters
    ----------
    folder : that of `save_checkpoint`; the grid that wrote it does not matter
    optimizers : new ones, made as those that were saved; without any, the weights alone are loaded
    must_exist : else 0 is returned, and nothing changed, where the folder holds no checkpoint

    Every file is compared with its checksum first. Each rank reads its parts alone; nothing moves between ranks. Raises
    CheckpointError, on every rank alike, for what is missing, damaged, or has another name, shape or dtype.
    """
    grid, path = grid_of("load_checkpoint", list(module.parameters())), Path(folder)
    newest = on_root(grid.comm, lambda: folders.newest(path), CheckpointError)
    if newest is None:
        if not must_exist:
            return 0
        raise CheckpointError(f"{path} holds no checkpoint. Without one, start at step 0: load_checkpoint(…, must_exist=False).")
    saved = folders.read(newest, grid.comm, contents.MODULE_FORMAT)
    saved.verify(grid.comm)
    blocks = [*_weights(module, optimizers, grid, own=False)]
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroAdamW):
            optimizer.adamw.start_at(saved.step)
            blocks += folders.moment_blocks(optimizer.adamw)
        else:
            blocks += _saved_moments(module, optimizer, saved.index)
    saved.load(blocks, grid)
    _restore_numbers(module, saved.index["numbers"])
    return saved.step


def _weights(module: nn.Module, optimizers: Sequence[Optimizer], grid: BaseGrid, own: bool) -> Iterator[shards.TensorBlock]:
    """Parameters and buffers. own : of what ZeroAdamW shares among replicas, the share that this rank writes."""
    shared = [optimizer.adamw for optimizer in optimizers if isinstance(optimizer, ZeroAdamW)]
    named = dict(module.named_parameters())
    for adamw in shared:
        result = folders.own_weights(adamw) if own else folders.weight_blocks(list(adamw.states.values()))
        named = {name: p for name, p in named.items() if name not in adamw.states}
        yield from result
    for name, p in named.items():
        yield shards.TensorBlock(f"model.{name}", p.data, _sharding(p))
    for name, buffer in module.named_buffers():
        if buffer.dim():
            if dtype_name(buffer) not in FLOATS:
                raise CheckpointError(
                    f"Checkpoints keep tensors of {', '.join(FLOATS)}; the buffer {name} is {dtype_name(buffer)}."
                )
            yield shards.TensorBlock(f"model.{name}", buffer, _sharding(buffer))


def _sharding(tensor: torch.Tensor) -> Sharding:
    """That of a parameter of a layer; of torch's own, of which all ranks hold copies."""
    if isinstance(tensor, ShardedParameter):
        return tensor.sharding
    return Sharding(Layout(*[()] * tensor.dim()), tuple(tensor.shape))


def _moments(module: nn.Module, optimizer: Optimizer) -> list[shards.TensorBlock]:
    """State of an optimizer that has its parameter's shape, for each parameter."""
    return [
        shards.TensorBlock(f"optimizer.{key}.{name}", value, _sharding(p))
        for name, p in module.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor) and value.dim()
    ]


def _steps(module: nn.Module, optimizer: Optimizer) -> Numbers:
    """The numbers that an optimizer keeps of each parameter, such as its steps."""
    return {
        f"optimizer.{key}.{name}": float(value)
        for name, p in module.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if not isinstance(value, torch.Tensor) or not value.dim()
    }


def _saved_moments(module: nn.Module, optimizer: Optimizer, index: dict[str, Any]) -> list[shards.TensorBlock]:
    """Give an optimizer the state that an index has of its parameters: numbers, and tensors that are to be filled."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {name: p for name, p in module.named_parameters() if id(p) in mine}
    result = []
    for entry in (*index["tensors"], *index["numbers"]):
        kind, _, rest = entry.partition(".")
        key, _, name = rest.partition(".")
        if kind != "optimizer" or name not in names:
            continue
        p = names[name]
        if entry in index["numbers"]:
            optimizer.state[p][key] = torch.tensor(float(index["numbers"][entry]))
        else:
            optimizer.state[p][key] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
            result.append(shards.TensorBlock(entry, optimizer.state[p][key], _sharding(p)))
    if not result and index["step"] and any(name.startswith("optimizer.") for name in index["tensors"]):
        raise CheckpointError(
            f"The checkpoint of step {index['step']} has no state of this {type(optimizer).__name__}'s parameters."
        )
    return result


def _plain_numbers(module: nn.Module) -> Numbers:
    """Buffers without dims, such as counters."""
    return {f"model.{name}": buffer.item() for name, buffer in module.named_buffers() if not buffer.dim()}


def _restore_numbers(module: nn.Module, numbers: Numbers) -> None:
    for name, buffer in module.named_buffers():
        if f"model.{name}" in numbers:
            buffer.fill_(numbers[f"model.{name}"])
