# Process grids, collectives on their axes, and the ledger of what was moved. Imports numpy and mpi4py, and those only when a
# name is asked for: choice.py and probe.py are read without MPI.
# Next: grid.py, then collectives.py, transport.py.
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collectives import Axis
    from .grid import Grid
    from .ledger import Ledger

__all__ = ["Axis", "Grid", "Ledger"]
HOMES = {"Axis": "collectives", "Grid": "grid", "Ledger": "ledger"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
