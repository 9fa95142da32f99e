# Text from a model, token by token: the same on every grid, as the random numbers depend on the seed and the position alone.
# Imports comm and nn for their types, corpus, checkpoint, errors; numpy, torch.
# Next: cli/generate.py.
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..comm.grid import Grid
from ..errors import CheckpointError, ConfigError, GridError, LayoutError
from ..nn.body import LanguageModel
from ..nn.model import Model
from ..nn.schemes import Scheme, scheme
from . import checkpoint, corpus
from . import config as configuration
from .device import open_device
from .precision import torch_dtype
from .prepare import build_model, open_checkpoint, open_grid

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..nn.config import ModelConfig
    from .config import Config

STREAM = 0x6765_6E65_7261_7465
"""Keeps these random numbers apart from those of the same seed elsewhere."""


def sample(
    model: Model,
    plan: Scheme,
    config: ModelConfig,
    tokenizer: corpus.Tokenizer,
    prompt: str,
    count: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 1,
) -> str:
    """`prompt` continued by `count` tokens; collective, the same text on every rank.

    The model sees the last `sequence` tokens. Temperature 0 takes the likeliest token; `top_k` > 0 chooses among the k
    likeliest. On a grid, the batch holds as many copies of the text as the scheme needs rows. Raises ConfigError for a model
    that does not predict the next token.
    """
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"A model of the family {config.family} does not continue a text. Families that do: gpt2, llama.")
    known = [int(token) for token in tokenizer.encode(prompt.encode())]
    rows, device = smallest_batch(plan, config), next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        for position in range(count):
            context = torch.tensor(known[-config.sequence :], device=device).expand(rows, -1).contiguous()  # [b, s]
            logits = model.next_logits(context)[0].double().cpu().numpy()[: tokenizer.vocabulary]  # [v]
            known.append(choose(logits, temperature, top_k, uniform(seed, position)))
    model.train()
    return tokenizer.decode(known)


def smallest_batch(plan: Scheme, config: ModelConfig) -> int:
    """The fewest rows that the scheme can split."""
    for rows in range(1, plan.grid.size**2 + 1):
        try:
            plan.check(config, rows)
        except LayoutError:
            continue
        return rows
    plan.check(config, plan.grid.size)  # says what does not fit
    raise LayoutError(f"No batch fits the grid {plan.grid}.")


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that chooses the token at `position`."""
    philox = np.random.Philox(key=np.array([seed, STREAM], np.uint64), counter=np.array([0, position, 0, 0], np.uint64))
    return int(philox.random_raw()) / 2**64


def choose(logits: np.ndarray, temperature: float, top_k: int, random: float) -> int:
    """The token that the number `random` in [0, 1) picks from the distribution of `logits`."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits >= np.partition(logits, -top_k)[-top_k], logits, -np.inf)
    cumulative = np.exp((logits - logits.max()) / temperature).cumsum()
    return min(int(np.searchsorted(cumulative, random * cumulative[-1], side="right")), int(np.flatnonzero(logits > -np.inf)[-1]))


def load(folder: Path, comm: MPI.Intracomm, device: torch.device | None = None) -> tuple[Model, Scheme, Config, corpus.Tokenizer]:
    """The model of a run's newest checkpoint, in the dtype that it computed in: in serial on one rank, else on the run's grid.

    device : where it shall compute; default where the run's configuration says.

    Raises CheckpointError where the run has no checkpoint or a damaged one, GridError for another number of ranks.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.toml. Give the folder of --run.")
    config = configuration.load(str(folder / "config.toml"))
    device = open_device(config.device, comm, config.tf32) if device is None else device
    grid, plan = _open_grid(config, comm, device)
    saved = open_checkpoint(config, comm, folder)
    if saved is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint yet.")
    model = build_model(config, plan, device)
    saved.load(checkpoint.model_blocks(model), grid)
    model.to(torch_dtype(config.dtype))
    return model, plan, config, corpus.load_tokenizer(config.data, folder / "data")


def _open_grid(config: Config, comm: MPI.Intracomm, device: torch.device) -> tuple[Grid, Scheme]:
    size = int(np.prod(list(config.grid.axes.values())))
    if comm.size == 1:
        return (grid := Grid(comm, {"x": 1, "y": 1, "z": 1})), scheme("serial", grid)
    if comm.size != size:
        fits = "1 rank" if size == 1 else f"1 rank or on {size}"
        raise GridError(f"The run's grid {config.grid} has {size} places, but there are {comm.size} ranks. Generate on {fits}.")
    return open_grid(config, comm, device)
