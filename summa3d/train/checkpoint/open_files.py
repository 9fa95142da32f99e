"""The header of a safetensors file, and a context manager that keeps the files of a folder open while tensors are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open

from .safetensors import CODES

T = TypeVar("T", bound="OpenFiles")


class OpenFiles:
    """Opens each file of a folder at its first use, and closes all files at the end of the context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.clear()
        self._stack.close()

    def file(self, name: str) -> Any:
        """The open file `name`. Raises OSError and SafetensorError as safetensors does."""
        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self._files[name]


def header(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor of a safetensors file. Raises OSError and SafetensorError as safetensors does."""
    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 — a safetensors file is no dict
            part = opened.get_slice(name)
            yield name, tuple(part.get_shape()), CODES.get(part.get_dtype(), part.get_dtype())
