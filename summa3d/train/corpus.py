"""The corpus: its text files, the split into training and validation parts, and the encoding into token files."""

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
"""Characters that are encoded at once, which bounds the memory of `PairTokenizer.encode`."""


@dataclass(frozen=True)
class Document:
    """A text file of the corpus: its name relative to the corpus folder, and its path."""

    name: str
    path: Path


class Tokenizer(Protocol):
    """Converts UTF-8 text to token numbers below `vocabulary`, and back."""

    vocabulary: int

    def encode(self, text: bytes) -> np.ndarray:
        """The token numbers of a UTF-8 text, as a 1-D array of unsigned integers."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token numbers; numbers that the tokenizer does not know are left out."""
        ...


class ByteTokenizer:
    """A tokenizer whose tokens are the 256 bytes.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode(b"def")
    array([100, 101, 102], dtype=uint8)
    >>> tokenizer.decode([100, 101, 102])
    'def'
    """

    vocabulary = 256

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes of `text` as uint8, without a copy."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """The UTF-8 text of the bytes; invalid sequences become U+FFFD, tokens above 255 are left out."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class PairTokenizer:
    """A byte-pair encoding (BPE) of the `tokenizers` library."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary: int = model.get_vocab_size()

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a document as uint32, encoded in runs of whole lines so that memory stays bounded."""
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
        """The text of the tokens; token numbers beyond the vocabulary are left out."""
        return self.model.decode([token for token in tokens if token < self.vocabulary])


def documents(path: str) -> list[Document]:
    """The files of the corpus in the order of their names.

    `path` is "stdlib", a file or a folder; hidden files are left out. Raises DataError where there is no file, or no file with
    text in it.
    """
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
        found_instead = "is empty" if files else "holds no files"
        raise DataError(
            f"data.path {path!r} {found_instead}: there is no text to train on. "
            "Give a text file, a folder of text files, or 'stdlib'."
        )
    return files


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def fingerprint(files: list[Document], config: DataConfig) -> str:
    """A SHA-256 digest of all inputs of the token files: file names, sizes, modification times, tokenizer, held-out fraction."""
    digest = hashlib.sha256(repr((config.tokenizer, config.held_out)).encode())
    for document in files:
        status = document.path.stat()
        digest.update(repr((document.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def held_out(name: str, part: float) -> bool:
    """Whether the file `name` belongs to the validation part, which is the fraction `part` of all names; a hash decides.

    >>> [held_out(name, 0.5) for name in ("a.py", "b.py", "c.py", "d.py")]
    [False, True, False, True]
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < part * 2**64


def split(files: list[Document], part: float) -> dict[str, list[Document]] | None:
    """The files of the training part and of the validation part; None where one part would have no text."""
    parts: dict[str, list[Document]] = {name: [] for name in PARTS}
    for document in files:
        parts["validation" if held_out(document.name, part) else "train"].append(document)
    has_text = [any(document.path.stat().st_size for document in group) for group in parts.values()]
    return parts if all(has_text) else None


def read(document: Document) -> bytes:
    """The bytes of a document. Raises DataError where the file cannot be read."""
    try:
        return document.path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {document.path}: {error.strerror}.") from error


def train_tokenizer(files: list[Document], config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer that `config` names. For "bpe:N", a byte-pair encoding is trained on `files` and saved in `folder`."""
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
    """The tokenizer of a prepared corpus. Raises DataError where its file is missing or damaged, or has too many tokens."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Model

    path = Path(config.tokenizer_file) if config.tokenizer_file else folder / "tokenizer.json"
    try:
        found = PairTokenizer(Model.from_file(str(path)))
    except Exception as error:
        advice = "data.tokenizer names it." if config.tokenizer_file else f"Delete {folder}; the next run makes it again."
        raise DataError(f"Cannot read the tokenizer {path}: {error}. {advice}") from error
    if found.vocabulary > config.vocabulary:
        raise DataError(f"The tokenizer {path} has {found.vocabulary} tokens; data.tokenizer says at most {config.vocabulary}.")
    return found


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer dtype that holds every token number.

    >>> token_dtype(256), token_dtype(50257)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.min_scalar_type(vocabulary - 1)


def encode(config: DataConfig, files: list[Document], folder: Path) -> dict[str, int]:
    """Write train.bin and validation.bin into `folder` and return the number of tokens of each.

    Whole files are held out by name (`held_out`). Where that leaves a part without text, as for a corpus of one file, the tail
    of the whole text is held out instead.
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
