"""The machine of a benchmark: nodes, ranks, threads, cores, processor, libraries and their versions."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from .. import __version__
from ..blas_library import BLAS_OVERRIDES, library
from ..comm.nodes import Nodes
from ..launcher.runtime import VENDOR_NAMES, vendor_of, version_of
from .clock import sleep_until_all_are_here

if TYPE_CHECKING:
    from mpi4py import MPI

PROBE = 1024  # side of the product that measures the speed of a core
PROBE_RUNS = 5
CPU_FACTS = Path("/proc/cpuinfo")
GPUS = Path("/proc/driver/nvidia/gpus")


def machine(world: MPI.Intracomm, probe: bool = True) -> dict[str, Any]:
    """The facts of a machine that stand in a result's JSON; collective, complete on rank 0, {} on the others.

    probe : whether rank 0 measures the Gflop/s of one core, while the other ranks sleep
    """
    from mpi4py import MPI

    nodes, threads, mpi = Nodes.of(world), world.allgather(threads_of_rank()), MPI.Get_library_version()
    result: dict[str, Any] = {}
    if world.rank == 0:
        blas: dict[str, Any] = next((info for info in threadpool_info() if info["user_api"] == "blas"), {})
        result = {
            "nodes": len(nodes.hosts),
            "hosts": nodes.hosts,
            "ranks_per_node": nodes.ranks,
            "threads_per_rank": sorted(set(threads)),
            "cores_per_node": nodes.cores,
            "cores": nodes.total_cores,
            "processor": _named(CPU_FACTS, "model name") or platform.processor() or platform.machine(),
            "gpu": next((name for card in sorted(GPUS.glob("*/information")) if (name := _named(card, "Model"))), None),
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "blas": " ".join(filter(None, (blas.get("internal_api"), blas.get("version")))) or None,
            "core_type": blas.get("architecture"),
            "products": str(library()),
            "gflops_per_core": {dtype: core_speed(dtype) for dtype in ("float64", "float32")} if probe else {},
            "overrides": sorted(name for name in BLAS_OVERRIDES if name in os.environ),
            "mpi": f"{VENDOR_NAMES[vendor_of(mpi)]} {version_of(mpi)}",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "summa3d": __version__,
            "commit": _commit(),
        }
    sleep_until_all_are_here(world)
    return result


def core_speed(dtype: str) -> float:
    """Gflop/s of one thread in a product of PROBE³, the best of PROBE_RUNS runs."""
    a = np.sin(np.arange(PROBE * PROBE)).astype(dtype).reshape(PROBE, PROBE)
    out, best = np.empty_like(a), float("inf")
    with threadpool_limits(limits=1, user_api="blas"):
        for _ in range(PROBE_RUNS):
            start = time.perf_counter()
            np.matmul(a, a, out=out)
            best = min(best, time.perf_counter() - start)
    return 2 * PROBE**3 / best / 1e9


def threads_of_rank() -> int:
    """The threads of this rank's products: the largest pool of a BLAS or of OpenMP."""
    return max((info["num_threads"] for info in threadpool_info()), default=1)


def _named(facts: Path, key: str) -> str | None:
    """The first value of a key in a file of lines `key : value`; None where there is no such file or key."""
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _commit() -> str | None:
    """The commit of the checkout that this package lies in; None where it is installed elsewhere. Starts no program."""
    folder = Path(__file__).parents[2] / ".git"
    if folder.is_file():  # a worktree names its folder
        folder = Path(folder.read_text().removeprefix("gitdir:").strip())
    head = folder / "HEAD"
    if not head.exists():
        return None
    name = head.read_text().strip().removeprefix("ref: ")
    shared = folder / (folder / "commondir").read_text().strip() if (folder / "commondir").exists() else folder
    loose = (place / name for place in (folder, shared))
    return next((ref.read_text().strip() for ref in loose if ref.is_file()), None if "/" in name else name)
