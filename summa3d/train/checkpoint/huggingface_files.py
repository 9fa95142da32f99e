"""The safetensors files of a Transformers folder: listing, reading and writing, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ...errors import CheckpointError
from ...files import check_regular, read_json, replace_text
from .open_files import OpenFiles, header
from .safetensors import ITEM_BYTES, write_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WIDTH = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of weights by width: each holds all earlier ones exactly, except bfloat16 for float16 (both need float32)."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file. `name` is its name in the file, which may lack the prefix of the full model."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


def is_inside(name: object) -> bool:
    """Return whether a file's name in an index is that of one below the index's folder."""
    return isinstance(name, str) and "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def listing(folder: Path) -> dict[str, Entry]:
    """Name → entry of every tensor of a folder, which holds one file, or several with an index. Reads headers only.

    Raises CheckpointError where the index or a file cannot be read.
    """
    if (folder / INDEX).is_file():
        try:
            named = list(read_json(folder / INDEX)["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"Cannot read {folder / INDEX}: {error}.") from error
        if wrong := [name for name in named if not is_inside(name)]:
            raise CheckpointError(f"{folder / INDEX} names {wrong[0]!r:.99}, which is no file below its folder.")
        files = sorted(set(named))
    else:
        files = [SINGLE]
    result: dict[str, Entry] = {}
    for file in files:
        try:
            check_regular(folder / file)
            result.update((name, Entry(file, name, shape, dtype)) for name, shape, dtype in header(folder / file))
        except (OSError, ValueError, SafetensorError) as error:  # a half of a surrogate pair in a name is a ValueError
            raise CheckpointError(f"Cannot read {folder / file}: {error}.") from error
    return result


def widest(dtypes: set[str], folder: Path) -> str:
    """The narrowest dtype that holds all `dtypes` exactly. Raises CheckpointError, naming `folder`, for an unsupported dtype.

    >>> widest({"float16", "bfloat16"}, Path("model"))
    'float32'
    """
    if unknown := dtypes - set(WIDTH):
        raise CheckpointError(f"{folder} holds weights of dtype {min(unknown)}. Dtypes that can be imported: {', '.join(WIDTH)}.")
    return "float32" if dtypes == {"float16", "bfloat16"} else max(dtypes, key=WIDTH.index)


class HuggingFaceReader(OpenFiles):
    """Reads tensors by the names of a listing. A context manager, which keeps the files open."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        super().__init__(folder)
        self.entries = entries

    def read(self, name: str) -> Tensor:
        """The whole tensor `name`, on the host. Raises CheckpointError where the file cannot be read."""
        entry = self.entries[name]
        try:
            tensor: Tensor = self.file(entry.file).get_tensor(entry.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {entry.name} of {self.folder / entry.file}: {error}.") from error
        return tensor


def write(
    folder: Path, listed: Sequence[tuple[str, tuple[int, ...]]], dtype: str, tensors: Iterator[Tensor], file_bytes: int
) -> list[Path]:
    """Write a folder of safetensors files and return their paths; with more than one file, also their index.

    Parameters
    ----------
    listed : name and shape of every tensor
    dtype : dtype of every tensor
    tensors : the tensors in the order of `listed`; one at a time is in memory
    file_bytes : largest size of a file, in bytes of tensors; a larger tensor has a file of its own

    Raises CheckpointError where a file cannot be written.
    """
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in listed:
        tensor_bytes = prod(shape) * ITEM_BYTES[dtype]
        if groups[-1] and size + tensor_bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append((name, shape))
        size += tensor_bytes
    files = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    files = files if len(files) > 1 else [SINGLE]
    for file, group in zip(files, groups, strict=True):
        try:
            write_tensors(folder / file, [(name, shape, dtype) for name, shape in group], islice(tensors, len(group)))
        except OSError as error:
            raise CheckpointError(f"Cannot write {folder / file}: {error}.") from error
    if len(files) > 1:
        weight_map = {name: file for file, group in zip(files, groups, strict=True) for name, _ in group}
        total = sum(prod(shape) for _, shape in listed) * ITEM_BYTES[dtype]
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return [folder / file for file in files]
