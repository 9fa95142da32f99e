# Global tensors as pieces in safetensors files: each rank writes the blocks it owns, any rank reads any slice.
# Imports tensor_file, open_files, layout and comm for their types, errors, torch.
# Next: checkpoint.py, which joins the files to a checkpoint that is complete or absent.
from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError
from .open_files import OpenFiles
from .tensor_file import save_file

if TYPE_CHECKING:
    from ..comm.grid import Grid
    from ..layout.layout import Sharding

READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Block:
    """This rank's block of a global tensor."""

    name: str
    tensor: torch.Tensor
    sharding: Sharding


def write(path: Path, blocks: Sequence[Block], grid: Grid) -> dict[str, Any]:
    """Write the blocks that this rank owns to `path`; returns the file's index entry: size, checksum and pieces."""
    owned = [block for block in blocks if block.sharding.owned(grid) and block.tensor.numel()]
    try:
        save_file({block.name: block.tensor for block in owned}, path)
        sync(path)
        size, digest = path.stat().st_size, checksum(path)
    except OSError as error:
        raise CheckpointError(f"Cannot write the checkpoint file {path}: {error}.") from error
    pieces = {block.name: [[part.start, part.stop] for part in block.sharding.slices(grid)] for block in owned}
    return {"file": path.name, "bytes": size, "sha256": digest, "pieces": pieces}


def tensor_table(blocks: Iterable[Block], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The index of all global tensors: shape, dtype, and which file holds which slices."""
    table: dict[str, Any] = {
        block.name: {"shape": list(block.sharding.shape), "dtype": dtype_name(block.tensor), "pieces": []} for block in blocks
    }
    for entry in entries:
        for name, slices in entry["pieces"].items():
            table[name]["pieces"].append({"file": entry["file"], "slices": slices})
    return table


class Reader(OpenFiles):
    """Reads slices of global tensors out of the pieces that an index lists; a context, which keeps its files open."""

    def __init__(self, folder: Path, tensors: dict[str, Any]) -> None:
        super().__init__(folder)
        self.tensors = tensors

    def read(self, block: Block, grid: Grid) -> None:
        """Fill `block` from the pieces that overlap it, in place. Raises CheckpointError where the tensor differs."""
        self._check(block)
        want = block.sharding.slices(grid)
        filled = 0
        for piece in self.tensors[block.name]["pieces"]:
            overlap = [(max(w.start, start), min(w.stop, stop)) for w, (start, stop) in zip(want, piece["slices"], strict=True)]
            if any(start >= stop for start, stop in overlap):
                continue
            source = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, piece["slices"], strict=True))
            target = tuple(slice(a - w.start, b - w.start) for (a, b), w in zip(overlap, want, strict=True))
            block.tensor[target].copy_(self.file(piece["file"]).get_slice(block.name)[source])
            filled += prod(b - a for a, b in overlap)
        if filled != block.tensor.numel():
            raise CheckpointError(
                f"The pieces of {block.name} in {self.folder} cover {filled} of the {block.tensor.numel()} elements wanted."
            )

    def _check(self, block: Block) -> None:
        if block.name not in self.tensors:
            raise CheckpointError(f"The checkpoint {self.folder} has no tensor {block.name}.")
        entry = self.tensors[block.name]
        have = (tuple(entry["shape"]), entry["dtype"])
        want = (tuple(block.sharding.shape), dtype_name(block.tensor))
        if have != want:
            raise CheckpointError(f"{block.name} in {self.folder} is {have[1]} {have[0]}; this run's is {want[1]} {want[0]}.")


def dtype_name(tensor: torch.Tensor) -> str:
    """float32, not torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
