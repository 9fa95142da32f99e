"""Work that rank 0 does for all ranks: every rank gets the result or raises the error."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..comm.health import flight
from ..errors import Summa3dError

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")
REST, AGAIN = 0.001, 1.0
"""Seconds that a rank sleeps at a time while rank 0 works, and after which it records its wait anew."""


def on_root(
    comm: MPI.Intracomm,
    action: Callable[[], Result],
    failure: type[Summa3dError],
    folder: Path | None = None,
) -> Result:
    """Run `action` on rank 0 only and broadcast its result; collective. The others sleep meanwhile, and leave it their cores.

    folder : where the action writes; an error that names no file, as that of a full disk, names it

    Raises the Summa3dError of `action` on every rank alike; an OSError is raised as the type `failure`.
    """
    result: Result | None = None
    error: Exception | None = None
    if comm.rank == 0:
        try:
            result = action()
        except Summa3dError as caught:
            error = caught
        except OSError as caught:
            error = failure(str(caught) if folder is None or caught.filename else f"Cannot write to {folder}: {caught.strerror}.")
    _meet(comm)
    result, error = comm.bcast((result, error))
    if error is not None:
        raise error
    return result


def _meet(comm: MPI.Intracomm) -> None:
    """Return once rank 0 is done, however long it works.

    The ranks of its own node watch it. Those of another node, who all wait here, record it anew each second: none has hung.
    """
    done = comm.Ibarrier()
    if comm.rank == 0:
        done.Wait()
    while not done.Test():
        with flight.waiting_in("the work of rank 0", f"{comm.size} ranks"):
            again = time.monotonic() + AGAIN
            while not done.Test() and time.monotonic() < again:
                time.sleep(REST)
