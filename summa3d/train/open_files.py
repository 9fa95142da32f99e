# A folder of safetensors files that stay open while they are read from. Imports safetensors.
# Next: pieces.py and hf_files.py, whose readers these are.
from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open

T = TypeVar("T", bound="OpenFiles")


class OpenFiles:
    """A context that opens each file of a folder when it is first asked for, and closes all at its end."""

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
        """The open file; raises what safetensors raises."""
        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self._files[name]
