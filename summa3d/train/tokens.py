# Memory-mapped token files, prepared once per run folder, and the windows of a step: a pure function of (seed, step, row).
# Imports corpus, config, together, errors. No torch.
# Next: loop.py, which feeds the windows to the model.
from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from . import corpus
from .config import DataConfig
from .together import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = 1
TRAIN_STREAM = 0x7472_6169_6E00_0001
"""Keeps the windows' random numbers apart from those of weights and dropout of the same seed."""


@dataclass(frozen=True)
class Tokens:
    """The two parts of an encoded corpus, memory-mapped, and the length of a window."""

    train: np.ndarray
    validation: np.ndarray
    sequence: int
    tokenizer: corpus.Tokenizer

    def batch(self, seed: int, step: int, first_row: int, rows: int, stream: int = TRAIN_STREAM) -> np.ndarray:
        """Training windows of `step`, rows first_row…first_row+rows of the global batch: int64 [rows, sequence + 1]."""
        return windows(self.train, self.sequence, starts(seed, step, first_row, rows, len(self.train) - self.sequence, stream))

    def held_out(self, count: int) -> np.ndarray:
        """`count` validation windows, evenly spread and always the same: int64 [count, sequence + 1]."""
        last = len(self.validation) - self.sequence - 1
        return windows(self.validation, self.sequence, [index * last // max(count - 1, 1) for index in range(count)])


def starts(seed: int, step: int, first_row: int, rows: int, places: int, stream: int = TRAIN_STREAM) -> list[int]:
    """Where the windows of these rows begin, each one of `places`: depends on seed, step and the row's number alone.

    Row r takes word r of the Philox stream whose key is the seed and `stream`, and whose counter holds the step.
    """
    philox = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array([0, step, 0, 0], np.uint64))
    words = philox.random_raw(first_row + rows)[first_row:]
    return [int(word) * places >> 64 for word in words]


def windows(tokens: np.ndarray, sequence: int, begins: list[int]) -> np.ndarray:
    """The windows of sequence + 1 tokens that begin at `begins`: inputs are all but the last, labels all but the first."""
    return np.stack([tokens[begin : begin + sequence + 1] for begin in begins]).astype(np.int64)


def prepare(config: DataConfig, sequence: int, folder: Path, comm: MPI.Intracomm) -> Tokens:
    """Encode the corpus into `folder` on rank 0, unless it is there already, and memory-map it on every rank.

    Raises DataError, on every rank alike, where the corpus is missing, empty or shorter than one window per part.
    """
    on_root(comm, lambda: _encode_once(config, folder), DataError)
    return open_tokens(config, sequence, folder)


def open_tokens(config: DataConfig, sequence: int, folder: Path) -> Tokens:
    """Memory-map the token files in `folder`. Raises DataError where they are damaged or too short for a window."""
    try:
        counts = json.loads((folder / "tokens.json").read_text())["tokens"]
        parts = {part: _memory_map(folder / f"{part}.bin", counts[part], config) for part in corpus.PARTS}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"Cannot read the token files in {folder}: {error}. Delete it to have them made again.") from error
    for part, tokens in parts.items():
        if len(tokens) <= sequence:
            raise DataError(
                f"The {part} part of data.path {config.path!r} has {len(tokens)} tokens; one window needs "
                f"model.sequence + 1 = {sequence + 1}.\n"
                f"  Use a longer corpus, a shorter model.sequence, or another data.held_out (now {config.held_out})."
            )
    return Tokens(parts["train"], parts["validation"], sequence, corpus.load_tokenizer(config, folder))


def _memory_map(path: Path, count: int, config: DataConfig) -> np.ndarray:
    if count == 0:
        return np.zeros(0, np.uint8)
    tokens = np.memmap(path, corpus.token_dtype(config.vocabulary), mode="r")
    if len(tokens) != count:
        raise ValueError(f"{path.name} holds {len(tokens)} tokens instead of {count}")
    return tokens


def _encode_once(config: DataConfig, folder: Path) -> None:
    """Encode into a temporary folder, then rename: what has the final name is complete."""
    files = corpus.documents(config.path)
    label = {"format": FORMAT, "fingerprint": corpus.fingerprint(files, config)}
    if _labelled(folder, label):
        return
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    counts = corpus.encode(config, files, temporary)
    (temporary / "tokens.json").write_text(json.dumps({**label, "tokens": counts}))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _labelled(folder: Path, label: dict[str, object]) -> bool:
    """Whether `folder` holds the token files of this very corpus."""
    try:
        found = json.loads((folder / "tokens.json").read_text())
    except (OSError, ValueError):
        return False
    return {key: found.get(key) for key in label} == label
