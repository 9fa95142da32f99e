"""What an adopted Transformers model does in its own way: it is saved as the whole that it is a part of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.health.agreement import agree_on_error
from ...errors import CheckpointError, ConfigError
from ..state import full_state_dict
from .layers import FusedParts


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole tensors of an adopted model under the names that the unsplit one has, on rank 0; {} elsewhere. Collective."""
    state = full_state_dict(model, root_only=True)
    for name, item in model.named_modules() if state else ():
        if isinstance(item, FusedParts):
            for leaf in ("weight", "bias"):
                parts = [state.pop(f"{name}.parts.{place}.{leaf}", None) for place in range(len(item.parts))]
                if parts[0] is not None:
                    state[f"{name}.{leaf}"] = torch.cat([part for part in parts if part is not None])
    return state


class StoredPart(NamedTuple):
    """Which part of the unsplit module's tensor `name`, of `shape`, this rank's block of a parameter is, or its transpose."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    is_turned: bool


def stored_part(model: nn.Module, name: str) -> StoredPart:
    """Indices of a parameter's block in the tensor of the unsplit module."""
    owner, _, leaf = name.rpartition(".")
    p: Any = model.get_submodule(owner)._parameters[leaf]  # the attribute of one that stays is what layers use
    is_turned = leaf in getattr(model.get_submodule(owner), "transposed_in_torch", ())
    shape, slices = list(p.sharding.shape), list(p.sharding.slices(p.grid))
    if is_turned:
        shape, slices = shape[::-1], slices[::-1]
    stem, _, place = owner.rpartition(".parts.")
    fused = model.get_submodule(stem) if stem else None
    if isinstance(fused, FusedParts):
        widths = [part.n for part in fused.joined.linears]
        first = sum(widths[: int(place)])
        shape[0], slices[0] = sum(widths), slice(slices[0].start + first, slices[0].stop + first)
        name = f"{stem}.{leaf}"
    return StoredPart(name, tuple(shape), tuple(slices), is_turned)


class AdoptedModel:
    """The base that an adopted Transformers model gets beside its own: what would read a rank's block as the whole."""

    adoption: Any

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write a folder of whole tensors under the model's own names, by rank 0; collective. Options are Transformers'."""
        model: Any = self
        grid = next(model.parameters()).grid
        state, problem = whole_state(model), None
        if grid.rank == 0:
            try:
                super().save_pretrained(save_directory, state_dict=state, **options)  # type: ignore[misc]
            except OSError as error:
                problem = CheckpointError(f"Cannot write {save_directory}: {error}.")
        agree_on_error(grid.comm, problem)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Raise ConfigError: Transformers' loop reads logits of the whole vocabulary, of which a rank has a block."""
        raise ConfigError(
            "generate reads whole logits, of which a rank has a block. Save the model, and generate from its folder."
        )


def adopt_class(module: Any) -> None:
    """Let a Transformers model be an `AdoptedModel` too, under its class's name."""
    own = type(module)
    module.__class__ = type(own.__name__, (AdoptedModel, own), {"__module__": own.__module__})
