"""Sharded safetensors files: each rank writes the blocks that it owns, and any rank reads any slice of a global tensor."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ...comm.device.arrays import dtype_name
from ...errors import CheckpointError
from ...files import check_no_link
from .open_files import OpenFiles, header
from .safetensors import save_file

if TYPE_CHECKING:
    from ...comm.grid import BaseGrid
    from ...layout.layout import Sharding

READ_BYTES = 1 << 22
"""Bytes that `checksum` reads at once."""


@dataclass(frozen=True)
class TensorBlock:
    """This rank's block of the global tensor `name`, and its sharding."""

    name: str
    tensor: torch.Tensor
    sharding: Sharding


def write(path: Path, blocks: Sequence[TensorBlock], grid: BaseGrid) -> dict[str, Any]:
    """Write this rank's blocks to `path`, whose folder is made, and return its index entry: size, SHA-256 and slices.

    blocks : those that this rank is to write: of a block that several ranks hold, one of them (`Sharding.is_primary`)

    Raises CheckpointError, and leaves no file, where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_no_link(path.parent)
        digest = save_file({block.name: block.tensor for block in blocks}, path)
        size = path.stat().st_size
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise CheckpointError(f"Cannot write the checkpoint file {path}: {error}.") from error
    pieces = {block.name: [[part.start, part.stop] for part in block.sharding.slices(grid)] for block in blocks}
    return {"file": path.name, "bytes": size, "sha256": digest, "pieces": pieces}


def files_and_tensors(blocks: Iterable[TensorBlock], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Entries of an index for all files, and for all global tensors: shape, dtype, and the slices that each file holds."""
    table: dict[str, Any] = {
        block.name: {"shape": list(block.sharding.shape), "dtype": dtype_name(block.tensor), "pieces": []} for block in blocks
    }
    for entry in entries:
        for name, slices in entry["pieces"].items():
            table[name]["pieces"].append({"file": entry["file"], "slices": slices})
    files = {entry["file"]: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for entry in entries}
    return {"files": files, "tensors": table}


class ShardReader(OpenFiles):
    """Reads slices of global tensors from the files of an index. A context manager, which keeps the files open."""

    def __init__(self, folder: Path, tensors: dict[str, Any]) -> None:
        super().__init__(folder)
        self.tensors = tensors

    def read(self, block: TensorBlock, grid: BaseGrid) -> None:
        """Fill `block` in place from all pieces that overlap it.

        Raises CheckpointError where the index has no such tensor, one of another shape or dtype, or pieces with gaps.
        """
        self._check(block)
        want = block.sharding.slices(grid)
        filled = 0
        for piece in self.tensors[block.name]["pieces"]:
            overlap = [(max(w.start, start), min(w.stop, stop)) for w, (start, stop) in zip(want, piece["slices"], strict=True)]
            if any(start >= stop for start, stop in overlap):
                continue
            source = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, piece["slices"], strict=True))
            target = tuple(slice(a - w.start, b - w.start) for (a, b), w in zip(overlap, want, strict=True))
            try:
                block.tensor[target].copy_(self.file(piece["file"]).get_slice(block.name)[source])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"Cannot read {block.name} of {self.folder / piece['file']}: {error}.") from error
            filled += prod(b - a for a, b in overlap)
        if filled != block.tensor.numel():
            raise CheckpointError(
                f"The pieces of {block.name} in {self.folder} cover {filled} of the {block.tensor.numel()} elements of a block."
            )

    def _check(self, block: TensorBlock) -> None:
        if block.name not in self.tensors:
            raise CheckpointError(f"The checkpoint {self.folder} has no tensor {block.name}.")
        entry = self.tensors[block.name]
        have = (tuple(entry["shape"]), entry["dtype"])
        want = (tuple(block.sharding.shape), dtype_name(block.tensor))
        if have != want:
            raise CheckpointError(f"{block.name} in {self.folder} is {have[1]} {have[0]}; this run's is {want[1]} {want[0]}.")


def check_header(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Raise CheckpointError unless a safetensors file holds exactly these tensors, by name → shape and dtype."""
    try:
        result = {name: (shape, dtype) for name, shape, dtype in header(path)}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint file {path} is no safetensors file: {error}.") from error
    for name in sorted(tensors.keys() | result.keys()):
        if tensors.get(name) != result.get(name):
            have, want = (
                " ".join(map(str, reversed(item))) if item else "nothing" for item in (result.get(name), tensors.get(name))
            )
            raise CheckpointError(f"The checkpoint file {path} has {have} under {name[:99]!r}; its index says {want}.")


def checksum(path: Path, start: int = 0, size: int | None = None) -> str:
    """The SHA-256 of a file, or of `size` bytes of it from `start` on, in hexadecimal digits."""
    digest, left = hashlib.sha256(), path.stat().st_size - start if size is None else size
    with open(path, "rb") as file:
        file.seek(start)
        while data := file.read(max(0, min(left, READ_BYTES))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
