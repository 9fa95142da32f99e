# What one rank does for all, so that its failure is everybody's. Imports comm.failure and errors.
# Next: tokens.py and checkpoint.py, which prepare and publish files this way.
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..comm.failure import agree_on_error
from ..errors import Summa3dError

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")


def on_root(comm: MPI.Intracomm, action: Callable[[], Result], failure: type[Summa3dError]) -> Result:
    """Run `action` on rank 0; every rank gets its result, or raises its Summa3dError. An OSError is raised as `failure`."""
    result: Result | None = None
    error: Exception | None = None
    if comm.rank == 0:
        try:
            result = action()
        except Summa3dError as caught:
            error = caught
        except OSError as caught:
            error = failure(str(caught))
    agree_on_error(comm, error)
    return comm.bcast(result)
