"""The corpus: its files, the split into training and validation parts, and the encoding into token files."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...files import bytes_of, from_json, text_of, whole
from ..config import DataConfig

FOREIGN = ("site-packages", "dist-packages")
PARTS = ("train", "validation")
ENCODE_CHARACTERS = 1 << 20
"""Characters that are encoded at once, which bounds the memory of `PairTokenizer.encode`."""
JSON_LINES = (".jsonl", ".ndjson")
TOKENS = ".bin"
FORMS = "Give UTF-8 text, JSON lines (.jsonl), a folder of both, token numbers (.bin), or 'stdlib'."


@dataclass(frozen=True)
class Document:
    """A file of the corpus: its name relative to the corpus folder, and its path."""

    name: str
    path: Path


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
        self.vocabulary: int = 1 + max(model.get_vocab().values())

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
        return np.concatenate([np.asarray(item.ids, np.uint32) for item in encoded])

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens; token numbers beyond the vocabulary are left out."""
        return self.model.decode([token for token in tokens if token < self.vocabulary])


class NumberTokenizer:
    """A tokenizer of text that is token numbers already, for tokens whose meaning is not known here.

    >>> NumberTokenizer(50).decode(NumberTokenizer(50).encode(b"12 7"))
    '12 7'
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, text: bytes) -> np.ndarray:
        """The numbers in `text`. Raises DataError where there is something else, and for numbers outside the vocabulary."""
        numbers = [whole(word) for word in text.split()]
        if numbers and all(number is not None and number < self.vocabulary for number in numbers):
            return np.array(numbers, np.uint32)
        start = text[:20].decode(errors="replace")
        raise DataError(
            f"The tokenizer numbers:{self.vocabulary} reads numbers below {self.vocabulary}; {start!r} is not such text."
        )

    def decode(self, tokens: Iterable[int]) -> str:
        """The numbers, with a space between."""
        return " ".join(map(str, tokens))


Tokenizer = ByteTokenizer | PairTokenizer | NumberTokenizer
"""Converts UTF-8 text to token numbers below `vocabulary`, a 1-D array of unsigned integers, and back."""


def documents(path: str, key: str = "data.path") -> list[Document]:
    """The files of the corpus in the order of their names.

    Parameters
    ----------
    path : "stdlib", a file or a folder; hidden files are left out
    key : the configuration key of `path`, for messages

    Raises DataError where there is no file, or none with something in it, and for files of a form that is not read.
    """
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        result = [file for file in root.rglob("*.py") if not any(part in FOREIGN for part in file.relative_to(root).parts)]
    else:
        root = Path(path)
        if not root.exists():
            where = "" if root.is_absolute() else f" (looked in {Path.cwd()})"
            raise DataError(f"{key} {path!r} does not exist{where}. {FORMS}")
        try:
            result = (
                [root] if root.is_file() else [item for item in root.rglob("*") if item.is_file() and not _hidden(item, root)]
            )
        except OSError as error:
            raise DataError(f"{key} {path!r} cannot be read: {error.strerror}: {error.filename}. {FORMS}") from None
        root = root.parent if root.is_file() else root
    files = sorted((Document(file.relative_to(root).as_posix(), file) for file in result), key=lambda document: document.name)
    if not any(document.path.stat().st_size for document in files):
        found_instead = "is empty" if files else "holds no files"
        raise DataError(f"{key} {path!r} {found_instead}: there is nothing to train on. {FORMS}")
    named = result == [Path(path)]
    for document in files:
        if named and document.path.suffix == ".json":
            raise DataError(f"{key}: {document.path} is JSON, not JSON lines. {FORMS}")
        if not named and document.path.suffix == TOKENS:
            raise DataError(f"{key}: {document.path} holds token numbers, which cannot be part of a folder. {FORMS}")
    return files


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def sources(config: DataConfig) -> dict[str, list[Document]]:
    """Part → its files. Without "validation", the tail of the training part's tokens is held out.

    Of a folder, whole files are held out by name (`held_out`). Raises DataError as `documents` does.
    """
    files = documents(config.path)
    if config.validation is not None:
        return {"train": files, "validation": documents(config.validation, "data.validation")}
    return split(files, config.held_out) or {"train": files}


def fingerprint(parts: dict[str, list[Document]], config: DataConfig) -> str:
    """A SHA-256 digest of all inputs of the token files: names, sizes and modification times of files, and settings."""
    settings = (config.tokenizer, config.held_out, config.key, config.separator, config.token_dtype)
    digest = hashlib.sha256(repr(settings).encode())
    for part, files in parts.items():
        for document in files:
            status = document.path.stat()
            digest.update(repr((part, document.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def held_out(name: str, part: float) -> bool:
    """Return whether the file `name` belongs to the validation part, which is the fraction `part` of all names; a hash decides.

    >>> [held_out(name, 0.5) for name in ("a.py", "b.py", "c.py", "d.py")]
    [False, True, False, True]
    """
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") < part * 2**64


def split(files: list[Document], part: float) -> dict[str, list[Document]] | None:
    """The files of the training part and of the validation part; None where one part would have no text."""
    parts: dict[str, list[Document]] = {name: [] for name in PARTS}
    for document in files:
        parts["validation" if held_out(document.name, part) else "train"].append(document)
    has_text = [any(document.path.stat().st_size for document in group) for group in parts.values()]
    return parts if all(has_text) else None


def read(document: Document, config: DataConfig) -> Iterator[bytes]:
    """The text of a document, in pieces. Raises DataError where the file cannot be read, or holds something else than text."""
    try:
        if document.path.suffix in JSON_LINES:
            yield from _json_lines(document.path, config)
            return
        text = document.path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {document.path}: {error.strerror}.") from error
    if config.path != "stdlib":  # Python's sources may have other encodings
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{document.path} is not UTF-8 text: {error.reason} at byte {error.start}. {FORMS}") from error
        if b"\0" in text:
            raise DataError(f"{document.path} is not text: byte {text.index(0)} is 0. {FORMS}")
    yield text


def check(config: DataConfig) -> None:
    """Raise DataError where the corpus is missing, or the first of its JSON lines has no text: what is soon seen."""
    if config.path == "stdlib" and config.tokenizer.startswith("numbers:"):
        raise DataError(
            f"data.tokenizer = {config.tokenizer!r} reads token numbers, and data.path = 'stdlib' is text: this configuration "
            "has no corpus.\n  Set data.path and data.tokenizer, or data.path and data.token_dtype for token numbers (.bin), "
            "such as\n  --set data.path=train.txt --set data.tokenizer=bpe:32000"
        )
    parts = {} if config.path == "stdlib" else sources(config)
    for document in (document for files in parts.values() for document in files if document.path.suffix in JSON_LINES):
        with open(document.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _text_of(line, config.key, f"{document.path}, line {number}")
                    return


def _json_lines(path: Path, config: DataConfig) -> Iterator[bytes]:
    """The texts of JSON lines, each followed by the separator, many at once."""
    piece = bytearray()
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            piece += _text_of(line, config.key, f"{path}, line {number}") + config.separator.encode()
            if len(piece) >= ENCODE_CHARACTERS:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)


def _text_of(line: bytes, key: str, place: str) -> bytes:
    """The text under `key` in a JSON line, in UTF-8. Raises DataError, naming the `place` of the line, where there is none."""
    try:
        result = from_json(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}.") from error
    if not isinstance(result, dict):
        raise DataError(f"{place} is not a JSON object, but {line[:20].decode(errors='replace')!r}.")
    if key not in result:
        raise DataError(f"{place} has no key {key!r}; its keys are {', '.join(result)}. data.key names the key of the text.")
    if not isinstance(result[key], str):
        raise DataError(f"{place} has {result[key]!r:.40} under {key!r}, not a text. data.key names the key of the text.")
    try:
        return result[key].encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"{place} has {half!r} under {key!r}, half of a surrogate pair, which is no character.") from None


def train_tokenizer(files: list[Document], config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer that `config` names. For "bpe:N", a byte-pair encoding is trained on `files` and saved in `folder`."""
    if not config.tokenizer.startswith("bpe:") or config.tokenizer_file:
        return load_tokenizer(config, folder)
    if files[0].path.suffix == TOKENS:
        raise DataError(
            f"data.tokenizer = {config.tokenizer!r} is trained on text, but {files[0].path} holds token numbers. "
            "Name the folder of their tokenizer, or 'numbers:N'."
        )
    Model = _tokenizers().Tokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=config.vocabulary, initial_alphabet=alphabet, show_progress=False)
    texts = (text.decode("utf-8", errors="replace") for document in files for text in read(document, config))
    model.train_from_iterator(texts, trainer)
    model.save(str(folder / "tokenizer.json"))
    return PairTokenizer(model)


def load_tokenizer(config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer of a prepared corpus. Raises DataError where its file is missing or damaged, or has too many tokens."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer.startswith("numbers:"):
        return NumberTokenizer(config.vocabulary)
    Model = _tokenizers().Tokenizer
    path = Path(config.tokenizer_file) if config.tokenizer_file else folder / "tokenizer.json"
    try:
        result = PairTokenizer(Model.from_str(text_of(path)))
    except Exception as error:
        advice = "data.tokenizer names it." if config.tokenizer_file else f"Delete {folder}; the next run makes it again."
        raise DataError(f"Cannot read the tokenizer {path}: {error}. {advice}") from error
    if result.vocabulary > config.vocabulary:
        raise DataError(f"The tokenizer {path} has {result.vocabulary} tokens; data.tokenizer says at most {config.vocabulary}.")
    return result


def tokenizer_bytes(path: Path) -> bytes:
    """Contents of a tokenizer.json. Raises DataError where it is none that the tokenizers library can read."""
    try:
        data = bytes_of(path)
        _tokenizers().Tokenizer.from_str(data.decode())
    except DataError:
        raise
    except Exception as error:  # the library raises this class alone
        raise DataError(f"{path} is not a tokenizer.json of the tokenizers library ({error}).") from error
    return data


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"data.tokenizer needs the package tokenizers ({error}). Install summa3d[bpe].") from error
    return tokenizers


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer dtype that holds every token number.

    >>> token_dtype(256), token_dtype(50257)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.min_scalar_type(vocabulary - 1)


def encode(config: DataConfig, parts: dict[str, list[Document]], folder: Path) -> dict[str, int]:
    """Write PART.bin of every part that is text into `folder`; returns the number of tokens of each part.

    Raises DataError as `read` does, and for token numbers outside the vocabulary.
    """
    tokenizer, dtype = train_tokenizer(parts["train"], config, folder), token_dtype(config.vocabulary)
    counts = {}
    for part, files in parts.items():
        if files[0].path.suffix == TOKENS:
            counts[part] = len(read_tokens(files[0].path, config, check=True))
            continue
        counts[part] = 0
        with open(folder / f"{part}{TOKENS}", "wb") as out:
            for text in (text for document in files for text in read(document, config)):
                tokens = tokenizer.encode(text).astype(dtype)
                out.write(tokens.tobytes())
                counts[part] += len(tokens)
    return counts


def read_tokens(path: Path, config: DataConfig, check: bool = False) -> np.ndarray:
    """The memory-mapped token numbers of a .bin file of the user's. Raises DataError where they cannot be what was said.

    check : whether all of them are compared with the vocabulary
    """
    if config.token_dtype is None:
        raise DataError(f"{path} holds token numbers; say of which dtype, as data.token_dtype=uint16 or uint32.")
    dtype, size = np.dtype(config.token_dtype), path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(f"{path} has {size} bytes, not a whole number of {dtype} tokens. Is data.token_dtype another?")
    tokens = np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
    if check and size and not (tokens.min() >= 0 and tokens.max() < config.vocabulary):
        raise DataError(
            f"{path} holds the {dtype} tokens {tokens.min()} to {tokens.max()}, but data.tokenizer = {config.tokenizer!r} has "
            f"{config.vocabulary}. Set data.tokenizer to 'numbers:N' or to the tokenizer's folder, or another data.token_dtype."
        )
    return tokens
