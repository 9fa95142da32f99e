"""Text generation, token by token: the text is the same on every grid.

Each random number depends on the seed and the position of the token only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..comm.grid import Grid
from ..errors import CheckpointError, ConfigError, GridError
from ..nn.context import Context, scheme
from ..nn.models.base import LanguageModel
from ..nn.models.registry import Model
from ..parallel.pipeline import Pipeline
from ..parallel.states import states_of
from . import config as configuration
from .checkpoint import folder as checkpoint
from .data import corpus, tokens
from .device import open_device
from .precision import torch_dtype
from .prepare import build_model, open_checkpoint, open_grid

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..nn.config import ModelConfig
    from .config import Config

STREAM = 0x6765_6E65_7261_7465
"""Philox key word that separates the random numbers of generation from other random numbers of the same seed."""


def sample(
    model: Model,
    context: Context,
    config: ModelConfig,
    tokenizer: corpus.Tokenizer,
    prompt: str,
    count: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 1,
    show: Callable[[str], None] | None = None,
    pipeline: Pipeline | None = None,
) -> str:
    """Continue `prompt` by `count` tokens and return the whole text; collective, the same text on every rank.

    Parameters
    ----------
    model : a causal model on its grid
    context : that of the model's layers; the batch holds the text once, of models that need rows alike on all ranks as often
    config : the model's configuration; the model sees the last `config.sequence` tokens
    temperature : divides the logits; 0 takes the likeliest token
    top_k : samples from the k likeliest tokens; 0 samples from all tokens
    seed : the text is a function of the weights, the prompt and the seed
    show : called with the pieces of the whole text as they come
    pipeline : that of a model in stages; default a new one, for which communicators are made

    Raises ConfigError for a model that does not predict the next token.
    """
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"A {config.family} model does not continue text. Families that do: gpt2, llama.")
    known = [int(token) for token in tokenizer.encode(prompt.encode())]
    rows = context.scheme.fewest_rows if config.num_experts or config.family == "hf" else 1
    device = next(model.parameters()).device
    shown = TextStream(show) if show is not None else None
    if pipeline is None and context.stages is not None:
        pipeline = Pipeline(model, "1f1b", rows, next(model.parameters()).dtype)
    next_logits = model.next_logits if pipeline is None else pipeline.next_logits
    model.eval()
    with torch.no_grad():
        for position in range(count):
            window = torch.tensor(known[-config.sequence :], device=device).expand(rows, -1).contiguous()  # [b, s]
            logits = next_logits(window)[0].double().cpu().numpy()[: tokenizer.vocabulary]  # [v]
            known.append(choose(logits, temperature, top_k, uniform(seed, position)))
            if shown is not None:
                shown.update(tokenizer.decode(known), last=position + 1 == count)
    model.train()
    return tokenizer.decode(known)


class TextStream:
    """Hands on what a growing text has more than before, without the end of a character whose bytes are not all there.

    >>> shown = TextStream(print)
    >>> shown.update("de"), shown.update("de\ufffd"), shown.update("de\u00e9f", last=True)
    de
    éf
    (None, None, None)
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._length = show, 0

    def update(self, text: str, last: bool = False) -> None:
        """Hand on what is new in `text`; all of it, if it is the last."""
        end = len(text) if last else len(text.rstrip("\ufffd"))
        if end > self._length:
            self._show(text[self._length : end])
            self._length = end


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`: a function of seed and position.

    >>> uniform(1, 0) == uniform(1, 0) != uniform(1, 1)
    True
    """
    philox = np.random.Philox(key=np.array([seed, STREAM], np.uint64), counter=np.array([0, position, 0, 0], np.uint64))
    return int(philox.random_raw()) / 2**64


def choose(logits: np.ndarray, temperature: float, top_k: int, random: float) -> int:
    """Sample a token from softmax(logits / temperature) by inversion of the distribution function at `random`.

    Parameters
    ----------
    logits : [v]; −∞ excludes a token
    temperature : 0 takes the likeliest token
    top_k : restricts the choice to the k likeliest tokens; 0 does not
    random : a number in [0, 1)

    >>> logits = np.log([0.1, 0.2, 0.7])
    >>> [choose(logits, 1.0, 0, random) for random in (0.05, 0.25, 0.9)]
    [0, 1, 2]
    >>> choose(logits, 0, 0, 0.05)
    2
    """
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits >= np.partition(logits, -top_k)[-top_k], logits, -np.inf)
    cumulative = np.exp((logits - logits.max()) / temperature).cumsum()
    return min(int(np.searchsorted(cumulative, random * cumulative[-1], side="right")), int(np.flatnonzero(logits > -np.inf)[-1]))


def load(
    folder: Path, comm: MPI.Intracomm, device: torch.device | None = None, choose: configuration.Choose | None = None
) -> tuple[Model, Context, Config, corpus.Tokenizer]:
    """Load the model of a run's newest checkpoint; collective. Returns model, context, configuration and tokenizer.

    Parameters
    ----------
    folder : the run folder
    comm : one rank, which holds the whole model, or as many ranks as the run's grid has
    device : the device to compute on; default: the device of the run's configuration
    choose : chooses a grid of other numbers of ranks, where the run's own was chosen

    The weights have the dtype that the run computed in. Raises ConfigError where `folder` is not a run folder, CheckpointError
    where the run has no complete checkpoint or a damaged one, and GridError for another number of ranks.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.toml. Give the --run folder of `summa3d train`.")
    source = str(folder / "config.toml")
    config = configuration.load(source) if choose is None else configuration.load_for(comm.size, source, (), choose)
    device = open_device(config.device, comm, config.tf32) if device is None else device
    grid, context = _open_grid(config, comm, device)
    saved = open_checkpoint(config, comm, folder)
    if saved is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint yet.")
    model = build_model(config, context, device)
    saved.load(checkpoint.weight_blocks(states_of(model, grid)), grid)
    model.to(torch_dtype(config.dtype))
    data = folder / "data"
    if (data / "tokens.json").is_file():  # an imported run has none
        tokens.check_files(config.data, data, comm, [tokens.TOKENIZER])
    return model, context, config, corpus.load_tokenizer(config.data, data)


def _open_grid(config: Config, comm: MPI.Intracomm, device: torch.device) -> tuple[Grid, Context]:
    size = int(np.prod(list(config.grid.axes.values())))
    if comm.size == 1:
        return (grid := Grid(comm, {"x": 1, "y": 1, "z": 1})), scheme("serial", grid)
    if comm.size != size:
        fits = "1 rank" if size == 1 else f"1 rank or on {size}"
        places = "1 place" if size == 1 else f"{size} places"
        raise GridError(f"The run's grid {config.grid} has {places}, but there are {comm.size} ranks. Generate on {fits}.")
    return open_grid(config, comm, device)
