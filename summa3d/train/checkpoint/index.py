"""The index of a checkpoint: what it must be, checked once when it is read, before anything relies on it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from ...dtypes import DTYPES, FLOATS
from ...errors import CheckpointError, ConfigError
from ...files import read_json
from ...nn.config import ModelConfig
from .. import toml

NAME = "index.json"
FORMAT = "summa3d-checkpoint"
MODULE_FORMAT = "summa3d-module"
"""That of a module of one's own (`modules`)."""
VERSION = 1
LARGEST = 1 << 30
"""Bytes of the largest index that is read."""
CELLS = 64
"""Cells of the finest partition that the bounds of a tensor's pieces make, for each piece: those of grids make a few."""
SHOWN = 60
"""Characters of a wrong value that a message shows."""

COUNT = range(1 << 63)
"""A whole number that is not negative."""
FILES: dict[str, Any] = {
    "files": {...: {"bytes": COUNT, "sha256": (str,)}},
    "tensors": {...: {"shape": [COUNT], "dtype": FLOATS, "pieces": [{"file": (str,), "slices": [[COUNT]]}]}},
}
SCHEMA: dict[str, Any] = {
    "format": (str,),
    "version": (int,),
    "step": COUNT,
    "random": {"seed": COUNT, "step": COUNT},
    "loss_scale?": (None, {"dynamic": (bool,), "value": (float, int), "good": COUNT, "skipped": COUNT}),
    "dtype": FLOATS,
    "model": (dict,),
    "config?": (None, {"data": (dict,), ...: (object,)}),
    "written_on": {
        "scheme": (str,),
        "grid": {...: COUNT},
        "blas?": (None, {"name": (str,), "reason": (str,), "worth": {...: COUNT}, "least?": COUNT}),
    },
    **FILES,
}
"""A tuple lists alternatives: types, values, tables; a table's key ending in "?" may be absent, and ... stands for any name."""
MODULE_SCHEMA: dict[str, Any] = {
    **{key: SCHEMA[key] for key in ("format", "version", "step")},
    "numbers": {...: (float, int, bool)},
    **FILES,
}
SCHEMAS = {FORMAT: SCHEMA, MODULE_FORMAT: MODULE_SCHEMA}


def read(path: Path, form: str = FORMAT) -> dict[str, Any]:
    """The index in the file `path`, without its checksum. Raises CheckpointError, in one line, where it is not one of `form`.

    Nothing in it can then lead out of the folder, and all pieces of a tensor are its disjoint and complete parts.
    """
    advice = f"Delete {path.parent} to resume from an older checkpoint."
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"it is no file of at most {LARGEST >> 20} MiB")
        index = read_json(path)
        altered = index.pop("sha256") != digest(index)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[: 4 * SHOWN]
        raise CheckpointError(f"Cannot read the checkpoint index {path}: it is damaged ({said}). {advice}") from error
    if altered:
        raise CheckpointError(f"The checkpoint index {path} is altered. {advice}")
    if (index.get("format"), index.get("version")) != (form, VERSION):
        version = _shown(f"{index.get('format')} {index.get('version')}")
        raise CheckpointError(f"{path} has format {version}; what is wanted here is {form} {VERSION}.")
    try:
        _conform(index, SCHEMAS[form], "")
        if (named := re.fullmatch(r"step-(\d+)", path.parent.name)) and int(named[1]) != index["step"]:
            raise CheckpointError(f"it is that of step {index['step']}, and its folder is {path.parent.name}.")
        if form == FORMAT:
            _check_values(index)
        _check_files(index)
        for name, entry in index["tensors"].items():
            _check_pieces(name, entry)
        _check_sizes(index)
    except (ConfigError, CheckpointError) as error:
        said = str(error).splitlines()[0][: 8 * SHOWN]
        raise CheckpointError(f"The checkpoint index {path} is not valid: {said} {advice}") from error
    return index


def digest(index: Mapping[str, Any]) -> str:
    """The checksum that an index carries: it shows damage, and is no signature."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def tensors_in(index: Mapping[str, Any]) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    """File → tensor in it → shape of its piece and dtype."""
    result: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {file: {} for file in index["files"]}
    for name, entry in index["tensors"].items():
        for piece in entry["pieces"]:
            shape = tuple(stop - start for start, stop in piece["slices"])
            result[piece["file"]][name] = (shape, entry["dtype"])
    return result


def _conform(value: Any, schema: Any, key: str) -> None:
    """Raise CheckpointError, naming the key, unless `value` is what `schema` says."""
    if isinstance(schema, range):
        if type(value) is not int or value not in schema:
            raise _wrong(key, value, "a whole number")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise _wrong(key, value, "a list")
        for place, item in enumerate(value):
            _conform(item, schema[0], f"{key}[{place}]")
    elif isinstance(schema, dict):
        _conform_table(value, schema, key)
    else:
        tables = [entry for entry in schema if isinstance(entry, dict)]
        if isinstance(value, dict) and tables:
            return _conform_table(value, tables[0], key)
        types = [entry for entry in schema if isinstance(entry, type)]
        if object not in types and type(value) not in types and not any(value is entry or value == entry for entry in schema):
            raise _wrong(key, value, " or ".join(getattr(entry, "__name__", str(entry)) for entry in schema))


def _conform_table(value: Any, schema: Mapping[Any, Any], key: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(key, value, "a table")
    known = {str(name).removesuffix("?"): entry for name, entry in schema.items() if name is not ...}
    missing = [name for name in schema if name is not ... and not name.endswith("?") and name not in value]
    if missing:
        raise CheckpointError(f"{key or 'it'} lacks {missing[0]}.")
    for name, item in value.items():
        if name not in known and ... not in schema:
            raise CheckpointError(f"{key or 'it'} has the unknown key {_shown(name)}.")
        _conform(item, known.get(name, schema.get(...)), f"{key}.{name}".removeprefix("."))


def _check_values(index: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a model, a random state, a loss scale or a tokenizer that no run has after the index's step."""
    random, own = index["random"], (index.get("config") or {}).get("train", {})
    if random["step"] != index["step"]:
        raise _wrong("random.step", random["step"], f"step = {index['step']}")
    if isinstance(own, dict) and own.get("seed", random["seed"]) != random["seed"]:
        raise _wrong("random.seed", random["seed"], f"config.train.seed = {_shown(own['seed'])}")
    model = toml.build(ModelConfig, index["model"], "model.")
    if model.layers > len(index["tensors"]):
        raise CheckpointError(f"it has {len(index['tensors'])} tensors for model.layers = {model.layers}.")
    scale = index.get("loss_scale")
    if scale is not None and not (isfinite(scale["value"]) and scale["value"] > 0 and scale["skipped"] <= index["step"]):
        raise _wrong("loss_scale", scale, "that of a run")
    data = index["config"]["data"] if index.get("config") else {"tokenizer": ""}
    if not isinstance(data.get("tokenizer"), str):
        raise _wrong("config.data.tokenizer", data.get("tokenizer"), "a text")


def _check_files(index: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a file with a path, and for a piece in none of the files."""
    for file in index["files"]:
        if Path(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise _wrong("files", file, "the name of a .safetensors file, without a path")
    for name, entry in index["tensors"].items():
        files = [piece["file"] for piece in entry["pieces"]]
        if absent := set(files) - index["files"].keys():
            raise CheckpointError(f"a piece of {_shown(name)} is in {_shown(min(absent))}, which is none of its files.")
        if len(set(files)) < len(files):
            raise CheckpointError(f"two pieces of {_shown(name)} are in one file.")


def _check_pieces(name: str, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the pieces of a tensor are inside it, disjoint and complete."""
    shape, boxes = entry["shape"], [piece["slices"] for piece in entry["pieces"]]
    for box in boxes:
        if any(len(part) != 2 for part in box) or len(box) != len(shape):
            raise CheckpointError(f"the slices of a piece of {_shown(name)} are not those of {len(shape)} dims.")
        for (start, stop), size in zip(box, shape, strict=True):
            if not start < stop <= size:
                raise CheckpointError(f"a piece of {_shown(name)} has [{start}, {stop}] of a dim of {size}.")
    volume = sum(map(_volume, boxes))
    if volume != prod(shape):
        raise CheckpointError(f"the pieces of {_shown(name)} have {volume} of its {prod(shape)} elements.")
    cuts = [sorted({bound for box in boxes for bound in box[dim]}) for dim in range(len(shape))]
    if prod(len(bounds) for bounds in cuts) > CELLS * (len(boxes) + 1):
        raise CheckpointError(f"the pieces of {_shown(name)} are not those of a grid.")
    at = [{bound: place for place, bound in enumerate(bounds)} for bounds in cuts]
    cells = np.zeros([max(len(bounds) - 1, 0) for bounds in cuts], np.int64)
    for box in boxes:
        cells[tuple(slice(at[dim][start], at[dim][stop]) for dim, (start, stop) in enumerate(box))] += 1
    if cells.size and cells.max() > 1:
        raise CheckpointError(f"pieces of {_shown(name)} overlap.")


def _check_sizes(index: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a file that holds more than it has bytes."""
    held: Counter[str] = Counter()
    for entry in index["tensors"].values():
        for piece in entry["pieces"]:
            held[piece["file"]] += _volume(piece["slices"]) * DTYPES[entry["dtype"]].nbytes
    for file, size in held.items():
        if size > index["files"][file]["bytes"]:
            raise CheckpointError(f"the pieces in {file} take {size} bytes; the file has {index['files'][file]['bytes']}.")


def _volume(box: Sequence[Sequence[int]]) -> int:
    return prod(stop - start for start, stop in box)


def _wrong(key: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(f"{_shown(key)} = {_shown(value)} is not {wanted}.")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
