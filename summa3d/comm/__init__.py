"""Process grids, collectives along their axes, and the ledger that counts them.

Names are imported on first use, so that transport/select.py and transport/probe.py can be read without MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .axis import Axis
    from .grid import Grid
    from .profile.ledger import Ledger

__all__ = ["Axis", "Grid", "Ledger"]
HOMES = {"Axis": "axis", "Grid": "grid", "Ledger": "profile.ledger"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
