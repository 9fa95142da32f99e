"""Distributed matrix multiplication and transformer training: ``Grid``, ``Layout``, ``DistMatrix``, ``matmul`` and more."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .comm.grid import Grid
    from .gemm.matmul import matmul
    from .gemm.matrix import DistMatrix
    from .layout.layout import Layout, Sharding

SUBPACKAGES = ("autograd", "cli", "comm", "errors", "gemm", "kernels", "layout", "nn", "train")
HOME = {
    "Grid": "comm.grid",
    "Layout": "layout.layout",
    "Sharding": "layout.layout",
    "DistMatrix": "gemm.matrix",
    "matmul": "gemm.matmul",
}

__all__ = ["DistMatrix", "Grid", "Layout", "Sharding", "matmul"]


def __getattr__(name: str) -> object:
    if name in HOME:
        return getattr(importlib.import_module(f".{HOME[name]}", __name__), name)
    if name in SUBPACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *SUBPACKAGES])
