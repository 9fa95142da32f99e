# From text files to token files: which files, which of them are held out, and how they are encoded.
# Imports errors and config; runs on one rank (tokens.py makes the others wait for it).
# Next: tokens.py, which prepares the files once per run folder and samples windows from them.
from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import DataError
from .config import DataConfig

FOREIGN = ("site-packages", "dist-packages")
PARTS = ("train", "validation")
ENCODE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text file: its name relative to the corpus, and where it lies."""

    name: str
    path: Path


class Tokenizer(Protocol):
    """Text as token numbers and back."""

    vocabulary: int

    def encode(self, text: bytes) -> np.ndarray: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Each byte is a token."""

    vocabulary = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class PairTokenizer:
    """A byte-pair encoding of the `tokenizers` library."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary: int = model.get_vocab_size()

    def encode(self, text: bytes) -> np.ndarray:
        """Tokens of a document, encoded in runs of whole lines so that memory stays bounded."""
        lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
        runs, run, size = [], [], 0
        for line in lines:
            run.append(line)
            size += len(line)
            if size >= ENCODE_CHARACTERS:
                runs.append("".join(run))
                run, size = [], 0
        encoded = self.model.encode_batch([*runs, "".join(run)])
        return np.concatenate([np.asarray(one.ids, np.uint32) for one in encoded])

    def decode(self, tokens: Iterable[int]) -> str:
        return self.model.decode([token for token in tokens if token < self.vocabulary])


def documents(path: str) -> list[Document]:
    """The corpus's files in the order of their names. Raises DataError where there is none, or none with text in it."""
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [file for file in root.rglob("*.py") if not any(part in FOREIGN for part in file.relative_to(root).parts)]
    else:
        root = Path(path)
        if not root.exists():
            raise DataError(f"data.path {path!r} does not exist. Give a text file, a folder of text files, or 'stdlib'.")
        found = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file() and not _hidden(file, root)]
        root = root.parent if root.is_file() else root
    files = sorted((Document(file.relative_to(root).as_posix(), file) for file in found), key=lambda document: document.name)
    if not any(document.path.stat().st_size for document in files):
        what = "is empty" if files else "holds no files"
        raise DataError(
            f"data.path {path!r} {what}: there is no text to train on. Give a text file, a folder of text files, or 'stdlib'."
        )
    return files


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def fingerprint(files: list[Document], config: DataConfig) -> str:
    """A digest of everything that decides the token files: names, sizes, times, tokenizer and the held-out part."""
    digest = hashlib.sha256(repr((config.tokenizer, config.held_out)).encode())
    for document in files:
        status = document.path.stat()
        digest.update(repr((document.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def held_out(name: str, part: float) -> bool:
    """Whether the file `name` belongs to the validation part: decided by a hash of its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < part * 2**64


def split(files: list[Document], part: float) -> dict[str, list[Document]] | None:
    """The files of the training and of the validation part; None where the names leave one of them without text."""
    parts: dict[str, list[Document]] = {name: [] for name in PARTS}
    for document in files:
        parts["validation" if held_out(document.name, part) else "train"].append(document)
    has_text = [any(document.path.stat().st_size for document in group) for group in parts.values()]
    return parts if all(has_text) else None


def read(document: Document) -> bytes:
    """The bytes of one file."""
    try:
        return document.path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {document.path}: {error.strerror}.") from error


def train_tokenizer(files: list[Document], config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer that `config` names; a byte-pair encoding without a file is trained on `files` and saved in `folder`."""
    if config.tokenizer == "bytes" or config.tokenizer_file:
        return load_tokenizer(config, folder)
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=config.vocabulary, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator((read(document).decode("utf-8", errors="replace") for document in files), trainer)
    model.save(str(folder / "tokenizer.json"))
    return PairTokenizer(model)


def load_tokenizer(config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer of a prepared corpus. Raises DataError where its file is missing, damaged or of too many tokens."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Model

    path = Path(config.tokenizer_file) if config.tokenizer_file else folder / "tokenizer.json"
    try:
        found = PairTokenizer(Model.from_file(str(path)))
    except Exception as error:
        advice = "data.tokenizer names it." if config.tokenizer_file else f"Delete {folder} to have it made again."
        raise DataError(f"Cannot read the tokenizer {path}: {error}. {advice}") from error
    if found.vocabulary > config.vocabulary:
        raise DataError(f"The tokenizer {path} has {found.vocabulary} tokens; data.tokenizer says at most {config.vocabulary}.")
    return found


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer that holds every token number."""
    return np.min_scalar_type(vocabulary - 1)


def encode(config: DataConfig, files: list[Document], folder: Path) -> dict[str, int]:
    """Write train.bin and validation.bin into `folder`; returns how many tokens each holds.

    Whole files are held out by name; where that leaves a part without text (one file, or a few), the tail of the text is.
    """
    parts = split(files, config.held_out)
    tokenizer = train_tokenizer(parts["train"] if parts else files, config, folder)
    dtype = token_dtype(config.vocabulary)
    counts = {}
    for part in PARTS:
        with open(folder / f"{part}.bin", "wb") as out:
            counts[part] = sum(
                _append(out, tokens.astype(dtype)) for tokens in _tokens(part, files, parts, tokenizer, config.held_out)
            )
    return counts


def _tokens(
    part: str, files: list[Document], parts: dict[str, list[Document]] | None, tokenizer: Tokenizer, held: float
) -> Iterator[np.ndarray]:
    if parts:
        yield from (tokenizer.encode(read(document)) for document in parts[part])
        return
    whole = np.concatenate([tokenizer.encode(read(document)) for document in files])
    cut = len(whole) - int(len(whole) * held)
    yield whole[:cut] if part == "train" else whole[cut:]


def _append(out: Any, tokens: np.ndarray) -> int:
    out.write(tokens.tobytes())
    return len(tokens)
