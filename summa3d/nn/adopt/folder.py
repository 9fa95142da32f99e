"""A model of a Transformers folder, of whose weights each rank reads its own blocks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...comm.health.agreement import agree_on_error
from ...errors import CheckpointError, Summa3dError
from ..context import Context
from .model import stored_part
from .parallelise import parallelise
from .source import CONFIG, transformers

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class _Empty(TorchFunctionMode):
    """Within it, ``torch.empty`` makes weights on the meta device; buffers and small vectors, which have values, are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def from_folder(folder: str | Path, scheme: Context, dtype: torch.dtype | None = None) -> nn.Module:
    """A causal language model of a Transformers folder on a grid, of which each rank reads its own blocks.

    Parameters
    ----------
    folder : config.json and safetensors files; nothing is downloaded
    scheme : what `nn.scheme` returns; any that keeps sequences whole
    dtype : of the weights; default that of config.json

    What `parallelise` makes of the model, by its own plan. No rank reads or holds more than its blocks of the split weights.
    ``model.save_pretrained(folder)`` writes whole tensors under the names that they had. Moves nothing but an error.

    Raises ConfigError without the package transformers, and as `parallelise`; CheckpointError, on all ranks, for a file that
    cannot be read, and for tensors that are missing or of another shape.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is no Transformers folder: it has no {CONFIG}.")
    config = transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    before = torch.get_default_dtype()
    module = empty_model(config, dtype or getattr(config, "dtype", None) or before)
    model = parallelise(module, scheme)
    problem: Summa3dError | None = None
    try:
        read_weights(model, folder)
    except Summa3dError as error:
        problem = error
    agree_on_error(scheme.whole.comm, problem)
    return model


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The causal language model of a Transformers config, whose weights have no values yet; vectors have their first ones."""
    with _Empty():
        module = transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    return module.eval()


def has_weights(folder: Path) -> bool:
    """Tell whether a folder has files of weights. Raises CheckpointError where there is no such folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder. model.folder names the Transformers folder that a run begins with.")
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


@torch.no_grad()
def read_weights(model: nn.Module, folder: Path) -> None:
    """Write this rank's blocks of every parameter from the folder's files."""
    safetensors = importlib.import_module("safetensors")
    try:
        text = (folder / INDEX).read_text(encoding="utf-8") if (folder / INDEX).is_file() else ""
        weight_map: dict[str, str] | None = json.loads(text)["weight_map"] if text else None
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safetensors.safe_open(folder / file, framework="pt"))
                for file in sorted(set(weight_map.values()) if weight_map else [SINGLE])
            }
            homes = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
            for name, p in model.named_parameters():
                _fill(name, p, model, homes, folder)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"Cannot read the weights of {folder}: {error}.") from error


def _fill(name: str, p: Any, model: nn.Module, homes: Mapping[str, Any], folder: Path) -> None:
    part = stored_part(model, name)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    stored = next((item for item in (part.name, part.name.removeprefix(prefix)) if item in homes), None)
    if stored is None:
        raise CheckpointError(f"{folder} has no tensor {part.name}; it has {', '.join(sorted(homes)[:3])}, ….")
    view = homes[stored].get_slice(stored)
    if tuple(view.get_shape()) != part.shape:
        raise CheckpointError(f"{stored} of {folder} has shape {view.get_shape()}; its config.json says {list(part.shape)}.")
    block: Tensor = view[part.slices] if part.slices else homes[stored].get_tensor(stored)
    p.data.copy_(block.t() if part.is_turned else block)
