"""An imported model beside the one that transformers makes of the same folder: their logits on the same tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from ...errors import CheckpointError, ConfigError
from ..generate import load
from .huggingface_names import FAMILIES

LIMIT = 1e-4
"""The largest difference of logits, of the largest of them: transformers computes parts of a float64 model in float32."""
ROWS, POSITIONS = 2, 64
"""Of the random tokens; a shorter model sees as many as it has positions."""


def check_installed() -> None:
    """Raise ConfigError unless the package transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("--verify compares with the package transformers, which is not installed: pip install transformers.")


def logits(source: Path, run: Path) -> float:
    """The largest difference of the logits of a run's model and of the folder that it was imported from; on one rank.

    Both compute in float64, and the difference is of the largest logit. Raises CheckpointError where it is above LIMIT.
    """
    model, _, config, _ = load(run, MPI.COMM_SELF, torch.device("cpu"))
    shape = (ROWS, min(POSITIONS, config.model.sequence))
    tokens = torch.randint(config.model.vocabulary, shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model.double().eval().logits(tokens)
        theirs = _theirs(source, FAMILIES[config.model.family].architecture, tokens)
    result = [ours] if isinstance(ours, torch.Tensor) else [*ours]
    largest = max(float((item - other).abs().max() / other.abs().max()) for item, other in zip(result, theirs, strict=True))
    if not largest <= LIMIT:
        raise CheckpointError(
            f"The logits of {run} differ from those of {source} by {largest:.1e} of the largest; {LIMIT:.0e} would be rounding."
        )
    return largest


def _theirs(source: Path, architecture: str, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The logits of transformers' model, of each of its heads."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        kind = getattr(transformers, architecture)
        model: Any = kind.from_pretrained(source, local_files_only=True, use_safetensors=True, dtype=torch.float64)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot read {source}: {next(iter(str(error).splitlines()), '')}") from error
    return list(model.eval()(tokens, return_dict=False)[: 2 if architecture.startswith("Bert") else 1])
