"""`summa3d doctor`: a report on this installation, with warnings of what may fail or be slow. MPI is not initialized."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import interpreter
from ..blas_library import BLAS_OVERRIDES, library, numpys_core_type, rule_for_tensors
from ..comm.health import flight, flight_files
from ..errors import ConfigError, DataError, LaunchError
from ..files import whole
from ..launcher import segments, slurm
from ..launcher.runtime import Runtime, find_launcher, loaded_runtime, usable_cores
from ..node_support import why_no_node_memory

PACKAGES = ("numpy", "mpi4py", "torch", "safetensors", "tokenizers", "matplotlib", "cupy")
SHM_RANKS = 27  # the largest number of ranks in the tests
NODE_VARIABLES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "OMPI_MCA_orte_num_nodes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d doctor` to `parser`."""
    parser.add_argument("--json", action="store_true", help="Print the report as one JSON line.")
    parser.add_argument(
        "--flight", type=Path, metavar="DIR", help="Show who waited for whom, by the flight recorders of a job in DIR."
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; returns the exit status 1 where MPI jobs cannot be started, else 0. In a Slurm job, srun starts them."""
    if args.flight is not None:
        return show_flight(args.flight)
    facts = examine()
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            if name != "warnings":
                print(f"{name:<10} {_in_words(value)}")
        for warning in facts["warnings"]:  # type: ignore[attr-defined]
            print(f"warning: {warning}")
    return 0 if facts["launcher"] or "slurm" in facts else 1


def show_flight(folder: Path) -> int:
    """Print the table of who waited for whom; raises DataError where the folder has no records."""
    flights = flight.read_folder(folder)
    if not flights:
        raise DataError(f"{folder} has no flight records (files *{flight_files.SUFFIX}, which a job that failed leaves).")
    print("\n".join(flight.table(flights, flight.ended(folder)) or ["no rank waited for another one"]))
    return 0


def examine() -> dict[str, object]:
    """The report as a dictionary; `warnings` is a list of sentences."""
    warnings: list[str] = []
    runtime = launcher = None
    try:
        runtime = loaded_runtime()
        launcher = find_launcher(runtime)
    except LaunchError as error:
        warnings.append(" ".join(str(error).split()))
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": {name: _package_version(name) for name in PACKAGES},
        "blas": _blas(),
        "products": _products(warnings),
        "tensors": _tensors(),
        "mpi": runtime and {"library": runtime.name, "file": str(runtime.library) if runtime.library else None},
        "launcher": launcher and list(launcher.command),
        **_slurm(runtime, warnings),
        "cores": usable_cores(),
        "nodes": next(filter(None, (whole(os.environ.get(name, "")) for name in NODE_VARIABLES)), 1),
        "transport": _transport(),
        "gpu": _gpu(),
        "device": _device_transport(),
        "warnings": warnings + _warnings(runtime),
    }


def _slurm(runtime: Runtime | None, warnings: list[str]) -> dict[str, str]:
    """Report how srun starts ranks, in a Slurm job."""
    if slurm.JOB_VARIABLE not in os.environ:
        return {}
    kind = slurm.default_type()
    if runtime is not None and not slurm.starts(runtime.vendor, kind):
        fact = f"without --mpi, srun starts ranks by {kind}, each of which would be a job of its own with {runtime.name}"
        warnings.append(f"{fact}. {slurm.advice(runtime.vendor, kind, slurm.offered_types())}")
    return {"slurm": f"job {os.environ[slurm.JOB_VARIABLE]}, where srun starts ranks by {kind}"}


def _package_version(name: str) -> str | None:
    names = [name] if name != "cupy" else [f"cupy-cuda{major}x" for major in (13, 12, 11)] + [name]
    for item in names:
        try:
            return importlib.metadata.version(item)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _blas() -> dict[str, str | None]:
    """numpy's BLAS, and the core type that OpenBLAS chose at run time, on which the last bits of its results depend."""
    import numpy

    build = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {"name": build.get("name"), "version": build.get("version"), "core_type": numpys_core_type()}


def _products(warnings: list[str]) -> str | None:
    """The BLAS that multiplies the blocks of numpy arrays, and why it was chosen."""
    try:
        return f"by {library()}"
    except ConfigError as error:
        warnings.append(" ".join(str(error).split()))
        return None


def _tensors() -> str | None:
    """Report what multiplies torch's host tensors, and why."""
    if _package_version("torch") is None:
        return None
    try:
        rule = rule_for_tensors()
    except ConfigError:  # `_products` warns of it
        return None
    return f"by {rule.name} ({rule.reason})"


def _transport() -> str:
    """The transport between ranks, and why it was chosen."""
    missing = why_no_node_memory()
    if missing is not None:
        return f"MPI only; no node memory: {missing}"
    return (
        "node memory within a node (all-gathers return views, waiting ranks sleep; SUMMA3D_NODE_MEMORY=no selects MPI), "
        "MPI across nodes"
    )


def _cards() -> list[Path]:
    folder = Path("/proc/driver/nvidia/gpus")
    return sorted(folder.glob("*")) if folder.is_dir() else []


def _gpu() -> str:
    cards = _cards()
    if cards:
        return f"{len(cards)} NVIDIA GPU{'s' if len(cards) > 1 else ''}"
    return "no GPU: everything runs on the CPU"


def _device_transport() -> str:
    """The transport of device arrays between ranks with a GPU each, and between ranks that share a GPU, and why."""
    from ..comm.transport import select
    from ..comm.transport.probe import cuda_aware

    if not _cards():
        return "no GPU: no transport of device arrays is needed"
    nccl, probe = _nccl(), cuda_aware()
    wanted = select.requested()
    exclusive, shared = (
        _chosen(select.Facts(devices, nccl is None, probe.works), wanted) for devices in (("0", "1"), ("0", "0"))
    )
    seen = f"CUDA-aware MPI: {'yes' if probe.works else 'no'}, {probe.reason}; NCCL: {'yes' if nccl is None else nccl}"
    return f"a GPU for each rank: {exclusive}; ranks that share one: {shared}. {seen}"


def _chosen(facts: Any, wanted: str) -> str:
    from ..comm.transport import select

    try:
        chosen = select.choose(facts, wanted)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return f"{chosen.name} ({chosen.reason})"


def _nccl() -> str | None:
    """Reason why NCCL cannot be used; None where it can. A child process asks, because CuPy loads CUDA."""
    done = subprocess.run(
        [sys.executable, *interpreter.program("from cupy.cuda import nccl; print(nccl.available)")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.stdout.strip() == "True":
        return None
    return (done.stderr.strip().splitlines() or ["CuPy was built without NCCL"])[-1]


def _warnings(runtime: Runtime | None) -> list[str]:
    facts = [
        f"{name}={os.environ[name]} is set: OpenBLAS does not choose its kernels by this processor, and may be slow. Unset {name}"
        for name in BLAS_OVERRIDES
        if name in os.environ
    ]
    return facts + _load_warnings() + segments.warnings(SHM_RANKS) + (_shadow_warnings(runtime) if runtime else [])


def _load_warnings() -> list[str]:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return []
    return [
        f"the load is {load:.1f} on {cores} core{'s' if cores > 1 else ''}: other work shares them, and times will vary. "
        "OMP_NUM_THREADS=1 keeps a rank from waiting for threads that have no core"
    ]


def _shadow_warnings(runtime: Runtime) -> list[str]:
    """Warnings of MPI libraries that shadow the installed one: LD_LIBRARY_PATH takes precedence over a wheel's own paths."""
    own = Path(sys.prefix) / "lib"
    installed = sorted(own.glob("libmpi.so*"))
    warnings = []
    if installed and runtime.library is not None and own not in runtime.library.parents and "MPI4PY_LIBMPI" not in os.environ:
        warnings.append(f"this environment holds {installed[0]}, but mpi4py loads {runtime.library} ({runtime.name})")
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        hides = sorted(
            {
                path.name.split(".so")[0]
                for pattern in ("libmpi.so*", "libfabric.so*", "libuc[pst].so*")
                for path in Path(folder).glob(pattern)
            }
        )
        if hides and (runtime.library is None or Path(folder).resolve() != runtime.library.resolve().parent):
            warnings.append(f"LD_LIBRARY_PATH names {folder}, whose {', '.join(hides)} shadow those of {runtime.name}")
    return warnings


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
