"""Writer of safetensors files, one tensor at a time, so that device tensors need one pinned buffer on the host only."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...comm.device.arrays import dtype_name
from ...dtypes import DTYPES
from .worker import Worker

CODES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
ITEM_BYTES = {name: DTYPES[name].nbytes for name in CODES.values()}
ALIGNMENT = 8
"""safetensors pads its header to a multiple of this many bytes."""
PIECE = 1 << 22
"""Bytes that are hashed and written at once."""
BEHIND = 16
"""Pieces that the thread which hashes may lag behind the writes: their tensors stay in memory."""
STAGING_BYTES = 1 << 26
"""Size of the pinned buffer for device-to-host (D2H) copies."""


def save_file(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write tensors by name to a safetensors file as `write_tensors` does, and return its SHA-256."""
    listed = [(name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors.items()]
    return write_tensors(path, listed, tensors.values())


def write_tensors(path: Path, listed: Sequence[tuple[str, tuple[int, ...], str]], tensors: Iterable[Tensor]) -> str:
    """Write a safetensors file to the disk, one tensor at a time, and return its SHA-256 in hexadecimal digits.

    Parameters
    ----------
    listed : name, shape and dtype of every tensor
    tensors : the tensors in the order of `listed`; an iterator may make each of them when it is written

    The file holds the header's length in 8 bytes, the header as JSON, then the tensors one after the other. Device tensors are
    copied to the host in pieces. A thread computes the SHA-256 beside the writes. Replaces a file of
    that name. Raises OSError.
    """
    codes = {name: code for code, name in CODES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in listed:
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest, hashed = hashlib.sha256(), deque[Future[None]]()
    path.unlink(missing_ok=True)  # a link would be followed
    with open(path, "xb", buffering=0) as file, Worker() as thread:

        def put(data: bytes | memoryview) -> None:
            hashed.append(thread.submit(partial(digest.update, data)))
            while data:
                data = data[file.write(data) :]
            wait(BEHIND)

        def wait(most: int) -> None:
            while len(hashed) > most:
                hashed.popleft().result()

        put(len(text).to_bytes(8, "little") + text)
        for _, tensor in zip(listed, tensors, strict=True):
            for part in _on_host(tensor.detach().contiguous().view(-1).view(torch.uint8)):
                whole = part.numpy().data
                for start in range(0, len(whole), PIECE):
                    put(whole[start : start + PIECE])
                if tensor.is_cuda:  # whose next part comes through the same buffer
                    wait(0)
        os.fsync(file.fileno())
        wait(0)
    return digest.hexdigest()


def _on_host(data: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor: a view of a host tensor, or D2H copies of a device tensor through one pinned buffer."""
    if not data.is_cuda:
        yield data
        return
    staging = torch.empty(min(STAGING_BYTES, len(data)), dtype=torch.uint8, device="cpu", pin_memory=True)
    for start in range(0, len(data), STAGING_BYTES):
        part = data[start : start + STAGING_BYTES]
        yield staging[: len(part)].copy_(part)
