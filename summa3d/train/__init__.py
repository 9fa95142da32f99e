"""Training: configuration, data, optimizer, checkpoints, metrics, and the loop that uses them.

Public are the names that train a module of one's own; they load on demand.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..parallel.replicas import replica_rows as replica_rows
    from .checkpoint.modules import load_checkpoint as load_checkpoint
    from .checkpoint.modules import save_checkpoint as save_checkpoint
    from .optimizer import ZeroAdamW as ZeroAdamW

HOME = {
    "ZeroAdamW": ".optimizer",
    "load_checkpoint": ".checkpoint.modules",
    "replica_rows": "..parallel.replicas",
    "save_checkpoint": ".checkpoint.modules",
}
__all__ = sorted(HOME)


def __getattr__(name: str) -> object:
    if name in HOME:
        return getattr(importlib.import_module(HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
