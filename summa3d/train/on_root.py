"""Work that rank 0 does for all ranks: every rank gets the result or raises the error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..errors import Summa3dError

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")


def on_root(
    comm: MPI.Intracomm,
    action: Callable[[], Result],
    failure: type[Summa3dError],
    meet: Callable[[MPI.Intracomm], None] = lambda comm: None,
    folder: Path | None = None,
) -> Result:
    """Run `action` on rank 0 only and broadcast its result; collective.

    meet : is called on all ranks when rank 0 is done: a barrier in which the others sleep and leave it their cores
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
    meet(comm)
    result, error = comm.bcast((result, error))
    if error is not None:
        raise error
    return result
