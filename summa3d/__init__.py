"""Distributed matrix multiplication and transformer training: ``Grid``, ``Layout``, ``DistMatrix``, ``matmul`` and more.

``dry_run`` and ``find_plans`` say what a training step takes and which grid is the fastest, before any rank is started.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import waiting as _waiting

__version__ = "0.1.0"

_waiting.yield_cores()

if TYPE_CHECKING:
    from .comm.grid import Grid
    from .gemm.einsum import einsum
    from .gemm.matmul import matmul
    from .gemm.matrix import DistMatrix
    from .gemm.tensor import DistTensor
    from .launcher.call import launch
    from .layout.layout import Layout, Sharding
    from .plan.search.find import find_plans
    from .train.dry_run import dry_run

SUBPACKAGES = ("autograd", "cli", "comm", "errors", "gemm", "kernels", "layout", "nn", "train")
HOME = {
    "Grid": "comm.grid",
    "Layout": "layout.layout",
    "Sharding": "layout.layout",
    "DistMatrix": "gemm.matrix",
    "DistTensor": "gemm.tensor",
    "einsum": "gemm.einsum",
    "matmul": "gemm.matmul",
}
WITHOUT_MPI = {"dry_run": "train.dry_run", "find_plans": "plan.search.find", "launch": "launcher.call"}
"""Names whose modules need the names of MPI alone."""

__all__ = ["DistMatrix", "DistTensor", "Grid", "Layout", "Sharding", "dry_run", "einsum", "find_plans", "launch", "matmul"]


def __getattr__(name: str) -> object:
    if name in HOME:
        return getattr(importlib.import_module(f".{HOME[name]}", __name__), name)
    if name in WITHOUT_MPI:
        from .comm.health.processes import mpi_not_started

        with mpi_not_started():
            return getattr(importlib.import_module(f".{WITHOUT_MPI[name]}", __name__), name)
    if name in SUBPACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *SUBPACKAGES])
