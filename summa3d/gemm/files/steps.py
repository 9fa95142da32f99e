"""Steps that every rank takes with a file, after each of which all know whether it failed on any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...comm.grid import BaseGrid
from ...comm.health.agreement import agree_on_error
from ...errors import DataError, Summa3dError
from ...layout.cyclic import Ownership
from ...layout.layout import Layout

Found = TypeVar("Found")
FAULTS = (OSError, ValueError, KeyError, TypeError, RuntimeError)
"""What numpy and h5py raise for files that they cannot read or write."""


def on_all_ranks(grid: BaseGrid, what: str, step: Callable[[], Found]) -> Found:
    """Take a step on every rank; raise its error on all, as a DataError, if it fails on any. No rank goes on before all have.

    what : begins the message, such as "a.npy cannot be written"
    """
    error: Exception | None = None
    try:
        result = step()
    except Summa3dError as caught:
        error = caught
    except FAULTS as caught:
        error = DataError(f"{what}: {caught}")
    agree_on_error(grid.everyone.comm, error)
    return result


def replace(grid: BaseGrid, path: Path, *steps: Callable[[Path], object]) -> None:
    """Write a file beside `path`, step by step on all ranks, which in the end takes its place; after an error it is removed.

    Raises DataError on all ranks.
    """
    part, first = path.with_name(path.name + ".part"), grid.rank == 0
    try:
        for step in steps:
            on_all_ranks(grid, f"{part} cannot be written", lambda step=step: step(part))  # type: ignore[misc]
        on_all_ranks(grid, f"{path} cannot be written", lambda: part.replace(path) if first else None)
    except Summa3dError:
        if first:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        raise


def new_file(path: Path) -> int:
    """Open a new file for writing, in place of one of that name; through no link. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)


def writes(grid: BaseGrid, layout: Ownership) -> bool:
    """True on one of the ranks that hold copies of a block."""
    if isinstance(layout, Layout):
        return layout.is_primary(grid.coordinates)
    return grid.inside and all(grid.coordinates[axis] == 0 for axis in grid.shape if axis not in layout.axes)
