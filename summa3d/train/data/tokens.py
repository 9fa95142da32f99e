"""Memory-mapped token files, prepared once per run folder, and the windows of a training step.

A window is a function of the seed, the step and the row's number in the global batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...comm.health.agreement import agree_on_error
from ...errors import DataError
from ...files import read_json, remove_files, rename_folder
from ..checkpoint.shards import checksum
from ..config import DataConfig
from ..on_root import on_root
from . import corpus

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = 2
PIECE = 1 << 26
"""Bytes under one checksum: the ranks of a run compare some pieces of its token files each."""
TOKENIZER = "tokenizer"
"""The name in tokens.json under which the checksums of a trained tokenizer are, beside those of the corpus's parts."""
NAMES = (*corpus.PARTS, TOKENIZER)
LABEL = "tokens.json"
OWN_NAMES = re.compile(r"tokens\.json|tokenizer\.json|(train|validation)\.bin")
"""What the folder holds; a user's files in it are left alone."""
TRAIN_STREAM = 0x7472_6169_6E00_0001
"""Philox key word that separates the random numbers of windows from those of weights and dropout of the same seed."""


@dataclass(frozen=True)
class Tokens:
    """An encoded corpus: the memory-mapped tokens of its training and validation parts, and the length of a window."""

    train: np.ndarray
    validation: np.ndarray
    sequence: int
    tokenizer: corpus.Tokenizer

    def batch(self, seed: int, step: int, first_row: int, rows: int, stream: int = TRAIN_STREAM) -> np.ndarray:
        """Rows first_row … first_row + rows − 1 of the global batch of `step`: training windows, int64 [rows, sequence + 1]."""
        return windows(self.train, self.sequence, starts(seed, step, first_row, rows, len(self.train) - self.sequence, stream))

    def held_out(self, count: int) -> np.ndarray:
        """`count` evenly spaced validation windows, the same in every call: int64 [count, sequence + 1]."""
        last = len(self.validation) - self.sequence - 1
        return windows(self.validation, self.sequence, [index * last // max(count - 1, 1) for index in range(count)])


def starts(seed: int, step: int, first_row: int, rows: int, places: int, stream: int = TRAIN_STREAM) -> list[int]:
    """The first positions of the windows of `rows` rows, each in [0, places): a function of seed, step and row number.

    Row r uses word r of the Philox sequence whose key is (seed, stream) and whose counter holds the step, so that a window does
    not depend on the number of ranks.

    >>> starts(1, 0, 0, 4, 1000)[2:] == starts(1, 0, 2, 2, 1000)
    True
    """
    philox = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array([0, step, 0, 0], np.uint64))
    words = philox.random_raw(first_row + rows)[first_row:]
    return [int(word) * places >> 64 for word in words]


def windows(tokens: np.ndarray, sequence: int, begins: list[int]) -> np.ndarray:
    """The windows of sequence + 1 tokens that start at `begins`: int64 [len(begins), sequence + 1].

    A model's inputs are all tokens of a window but the last, its labels all tokens but the first.

    >>> windows(np.arange(10), 3, [0, 5])
    array([[0, 1, 2, 3],
           [5, 6, 7, 8]])
    """
    return np.stack([tokens[begin : begin + sequence + 1] for begin in begins]).astype(np.int64)


def prepare(
    config: DataConfig, sequence: int, folder: Path, comm: MPI.Intracomm, say: Callable[[str], None] = lambda text: None
) -> Tokens:
    """Encode the corpus into `folder` on rank 0, unless `folder` holds it already, and memory-map it on every rank; collective.

    say : told on rank 0 that the corpus is being encoded

    Raises DataError, on every rank alike, where the corpus is missing, empty or shorter than one window per part, and where a
    file is not what was encoded.
    """
    on_root(comm, lambda: _encode_once(config, folder, say), DataError, folder=folder)
    result = open_tokens(config, sequence, folder)
    check_files(config, folder, comm)
    return result


def check_files(config: DataConfig, folder: Path, comm: MPI.Intracomm, names: Sequence[str] = NAMES) -> None:
    """Compare the token files in `folder` of these names with their checksums; each rank some pieces. Collective.

    Those of earlier versions have none. Raises DataError, on every rank alike, where a file is damaged; it names the bytes.
    """
    error: DataError | None = None
    try:
        sums = read_json(folder / LABEL).get("sha256", {})
        if not set(sums) <= set(NAMES):
            raise ValueError("tokens.json has checksums of other files")
        pieces = [(name, number) for name in names for number in range(len(sums.get(name, ())))]
        for name, number in pieces[comm.rank :: comm.size]:
            path, start = _file_of(name, config, folder), number * PIECE
            if checksum(path, start, PIECE) != sums[name][number]:
                end = min(start + PIECE, path.stat().st_size)
                raise ValueError(f"bytes {start} to {end} of {path} are not those of its checksum in tokens.json")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as caught:
        error = DataError(f"The token files in {folder} are damaged: {caught}. Delete it; the next run makes it again.")
    agree_on_error(comm, error)


def open_tokens(config: DataConfig, sequence: int, folder: Path) -> Tokens:
    """Memory-map the token files in `folder`. Raises DataError where they are damaged or too short for a window."""
    try:
        counts = read_json(folder / LABEL)["tokens"]
        if set(counts) not in ({"train"}, {"train", "validation"}):
            raise ValueError("tokens.json does not name the parts of a corpus")
        parts = {part: _memory_map(part, count, config, folder) for part, count in counts.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"Cannot read the token files in {folder}: {error}. Delete it; the next run makes it again.") from error
    if "validation" not in parts:
        cut = len(parts["train"]) - int(len(parts["train"]) * config.held_out)
        parts = {"train": parts["train"][:cut], "validation": parts["train"][cut:]}
    for part, tokens in parts.items():
        if len(tokens) <= sequence:
            own = config.validation if part == "validation" else None
            what = f"data.validation {own!r}" if own is not None else f"The {part} part of data.path {config.path!r}"
            parted = "" if config.validation is not None else f", or another data.held_out (now {config.held_out})"
            raise DataError(
                f"{what} has {len(tokens)} tokens; one window needs model.sequence + 1 = {sequence + 1}.\n"
                f"  Use a longer corpus or a shorter model.sequence{parted}."
            )
    return Tokens(parts["train"], parts["validation"], sequence, corpus.load_tokenizer(config, folder))


def _file_of(name: str, config: DataConfig, folder: Path) -> Path:
    """The file of a part's tokens, which may be the user's own, or that of the trained tokenizer."""
    if name == TOKENIZER:
        return folder / "tokenizer.json"
    own = Path(config.validation if name == "validation" and config.validation is not None else config.path)
    return own if own.suffix == corpus.TOKENS else folder / f"{name}{corpus.TOKENS}"


def _memory_map(part: str, count: int, config: DataConfig, folder: Path) -> np.ndarray:
    path = _file_of(part, config, folder)
    if count == 0:
        return np.zeros(0, np.uint8)
    dtype = corpus.token_dtype(config.vocabulary)
    tokens = np.memmap(path, dtype, mode="r") if path.parent == folder else corpus.read_tokens(path, config)
    if len(tokens) != count:
        raise ValueError(f"{path} holds {len(tokens)} tokens instead of {count}")
    return tokens


def _encode_once(config: DataConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Encode into a temporary folder, then rename it, so that a folder with the final name is complete."""
    parts = corpus.sources(config)
    label = {"format": FORMAT, "fingerprint": corpus.fingerprint(parts, config)}
    if _labelled(folder, label):
        return
    say(f"encoding the corpus {config.path}")
    temporary = folder.with_name(f".tmp-{folder.name}")
    if temporary.exists() or temporary.is_symlink():
        remove_files(temporary, OWN_NAMES)
    temporary.mkdir(parents=True, exist_ok=True)
    counts = corpus.encode(config, parts, temporary)
    files = {name: _file_of(name, config, temporary) for name in (*counts, TOKENIZER)}
    sums = {
        name: [checksum(file, start, PIECE) for start in range(0, file.stat().st_size, PIECE)]
        for name, file in files.items()
        if file.is_file()
    }
    (temporary / LABEL).write_text(json.dumps({**label, "tokens": counts, "sha256": sums}))
    if folder.exists() or folder.is_symlink():
        remove_files(folder, OWN_NAMES)
    rename_folder(temporary, folder, last=LABEL)


def _labelled(folder: Path, label: dict[str, object]) -> bool:
    """Return whether `folder` holds the token files of the corpus with this format and fingerprint."""
    try:
        result = read_json(folder / LABEL)
    except (OSError, ValueError):
        return False
    return {key: result.get(key) for key in label} == label
