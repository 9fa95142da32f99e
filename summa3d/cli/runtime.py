"""Which MPI library this interpreter loads, which launcher belongs to it, and the settings that fit ranks to cores.

Used by launch, main, doctor and by the tests' plugin.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..capability import forbidden
from ..errors import LaunchError

MPIEXEC_VARIABLE = "SUMMA3D_MPIEXEC"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LAUNCHER_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "orterun", "prterun", "jsrun")
JSRUN = ("jsm_pmix/bin", "jsrun")  # where Spectrum MPI keeps it, and its name: its `--version` names nobody
CORES_VARIABLE = "SUMMA3D_CORES"  # the cores of a process that has taken one of them
VENDOR_NAMES = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "spectrum": "IBM Spectrum MPI",
    "intel": "Intel MPI",
    "slurm": "Slurm",
    "unknown": "an unknown MPI",
}
LIKE_OPEN_MPI = ("openmpi", "spectrum")  # Spectrum MPI is made of Open MPI: the same variables tell its launcher and its ranks
# The Hydra launcher is shared by everything built on MPICH.
FITTING_LAUNCHERS = {"mpich": ("mpich",), "intel": ("intel", "mpich"), "openmpi": ("openmpi",), "spectrum": ("spectrum",)}
WAITING_VARIABLES = {
    "mpich": ("MPIR_CVAR_POLLS_BEFORE_YIELD", "MPIR_CVAR_ENABLE_HEAVY_YIELD"),
    "openmpi": ("OMPI_MCA_mpi_yield_when_idle",),
}
POLLS_BEFORE_YIELD = "10"  # the fastest measured with 8 ranks on 2 quiet cores; MPICH's default is 1000
PROBE = """
import json, pathlib, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = pathlib.Path("/proc/self/maps")
files = [line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/" in line] if maps.exists() else []
print(json.dumps({"version": MPI.Get_library_version(), "files": sorted(set(files))}))
"""


@dataclass(frozen=True)
class Runtime:
    """An MPI library: who made it, what it calls itself, and the file it was loaded from (None where that is unknown)."""

    vendor: str
    version: str
    library: Path | None

    @property
    def name(self) -> str:
        return f"{VENDOR_NAMES[self.vendor]} {self.version}"


@dataclass(frozen=True)
class Launcher:
    """A launcher as a command line (one program, or a program with arguments) and who made it."""

    command: tuple[str, ...]
    vendor: str


def vendor_of(text: str) -> str:
    """Read the vendor from a library's version string or from what a launcher prints for `--version`."""
    lower = text.lower()
    if "intel(r) mpi" in lower:
        return "intel"
    if "spectrum mpi" in lower:  # before Open MPI, which its library names first
        return "spectrum"
    if any(mark in lower for mark in ("open mpi", "openrte", "prrte", "prterun", "open-mpi")):
        return "openmpi"
    if any(mark in lower for mark in ("mpich", "hydra", "mvapich")):
        return "mpich"
    return "slurm" if lower.startswith("slurm") else "unknown"


def version_of(text: str) -> str:
    """Return the first dotted number in a version string."""
    found = re.search(r"\d+(\.\d+)+\w*", text)
    return found.group() if found else "of unknown version"


def loaded_runtime() -> Runtime:
    """Ask a child process which MPI library mpi4py loads; this process loads nothing and stays free of MPI_Init."""
    child = subprocess.run([sys.executable, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        raise LaunchError(
            f"mpi4py cannot load an MPI library: {reason[0]}\n"
            "  Install one into this environment (pip install 'summa3d[mpi]'), load your cluster's MPI module,\n"
            "  or point MPI4PY_LIBMPI at its libmpi.so."
        )
    facts = json.loads(child.stdout.splitlines()[-1])
    libraries = [Path(file) for file in facts["files"] if re.match(r"lib(mpi|mpich|mpi_ibm)\b[^/]*\.so", Path(file).name)]
    return Runtime(vendor_of(facts["version"]), version_of(facts["version"]), libraries[0] if libraries else None)


def find_launcher(runtime: Runtime, environ: Mapping[str, str] = os.environ) -> Launcher:
    """Find the launcher that belongs to `runtime`: next to its library, then in this environment, then on PATH.

    A program counts only if its own `--version` names the library's vendor: another MPI's launcher would start
    N jobs of one rank each. SUMMA3D_MPIEXEC overrides the search and may carry arguments ("srun --mpi=pmi2").
    """
    if environ.get(MPIEXEC_VARIABLE):
        return _chosen_launcher(runtime, tuple(shlex.split(environ[MPIEXEC_VARIABLE])))
    refused = []
    for path in _candidates(runtime, environ):
        vendor = launcher_vendor((str(path),))
        if vendor in FITTING_LAUNCHERS.get(runtime.vendor, (runtime.vendor,)):
            return Launcher((str(path),), vendor)
        refused.append(f"{path} ({VENDOR_NAMES[vendor]})")
    raise LaunchError(
        f"no launcher found that belongs to {runtime.name}" + (f" ({runtime.library})" if runtime.library else "") + ".\n"
        f"  Looked at: {', '.join(refused) or 'nothing: no mpiexec beside the library, in this environment or on PATH'}.\n"
        f"  Name the right one in {MPIEXEC_VARIABLE}, for example {MPIEXEC_VARIABLE}='srun --mpi=pmi2'."
    )


def _chosen_launcher(runtime: Runtime, command: tuple[str, ...]) -> Launcher:
    vendor = launcher_vendor(command[:1])
    if vendor not in ("slurm", "unknown", *FITTING_LAUNCHERS.get(runtime.vendor, (runtime.vendor,))):
        raise LaunchError(
            f"{MPIEXEC_VARIABLE}={shlex.join(command)} is the launcher of {VENDOR_NAMES[vendor]}, "
            f"but this interpreter's mpi4py loads {runtime.name}.\n  Unset it, or name the launcher of {runtime.name}."
        )
    return Launcher(command, vendor)


def launcher_vendor(command: tuple[str, ...]) -> str:
    """Return the vendor that a launcher's `--version` names, or "unknown"; jsrun, which names nobody, is Spectrum MPI's."""
    if Path(command[0]).name == JSRUN[1]:
        return "spectrum"
    try:
        answer = subprocess.run([*command, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return vendor_of(answer.stdout + answer.stderr)


def _candidates(runtime: Runtime, environ: Mapping[str, str]) -> list[Path]:
    """Every launcher-like program, nearest to the library first."""
    above = [] if runtime.library is None else [*runtime.library.parents, *runtime.library.resolve().parents]
    folders = [folder / place for folder in above for place in ("bin", JSRUN[0])] + [Path(sys.prefix) / "bin"]
    folders += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    programs = (folder / name for folder in dict.fromkeys(folders) for name in LAUNCHER_NAMES)
    return [program for program in programs if shutil.which(program)]


def usable_cores() -> int:
    """Return how many cores this process may run on, or might before it was given one of them (`take_core`)."""
    return len(_cores())


def _cores() -> list[int]:
    listed = os.environ.get(CORES_VARIABLE)
    if listed:
        return [int(core) for core in listed.split(",")]
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def take_core(place: int) -> None:
    """Keep this process to one of its cores, in turn by its place among the ranks of its node.

    Ranks that outnumber the cores and wait in turn are not spread evenly by the kernel: three of four on one core is common,
    and made a product of 4 ranks on 2 cores 1.6 times slower. As batch work they are not preempted by each wake-up either, which
    takes caches away from a product. SUMMA3D_BIND=no leaves them to the kernel.
    """
    cores = _cores()
    if hasattr(os, "sched_setaffinity") and len(cores) > 1 and not forbidden("SUMMA3D_BIND"):
        os.environ[CORES_VARIABLE] = ",".join(map(str, cores))
        os.sched_setaffinity(0, {cores[place % len(cores)]})
        if hasattr(os, "SCHED_BATCH"):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Let this thread, and those it starts, run on all the cores that the process had before `take_core`."""
    if CORES_VARIABLE not in os.environ:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _cores())
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def shared_memory_free(folder: str = "/dev/shm") -> int:
    """Return the bytes that processes of this node may still share; 0 where that cannot be told."""
    return shutil.disk_usage(folder).free if os.path.isdir(folder) else 0


def rank_environment(vendor: str, ranks: int, cores: int, environ: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str]:
    """Settings for `ranks` ranks on `cores` cores of one node, and the same in words. What the user has set stays.

    Ranks that outnumber the cores must yield while they wait: the default busy wait takes the core from the rank
    that is waited for, and costs milliseconds in every collective.
    """
    settings: dict[str, str] = {}
    words = []
    if not any(name in environ for name in THREAD_VARIABLES):
        share = max(1, cores // ranks)
        settings |= dict.fromkeys(THREAD_VARIABLES, str(share))
        words.append(f"{share} BLAS thread{'s' if share > 1 else ''} per rank")
    if vendor in LIKE_OPEN_MPI:
        settings |= _openmpi_settings(ranks > cores)
    if ranks > cores:
        waiting = waiting_settings(vendor, environ)
        settings |= waiting
        words += ["waiting ranks yield"] if waiting else []
    return {name: value for name, value in settings.items() if name not in environ}, ", ".join(words)


def waiting_settings(vendor: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """How ranks that wait leave their core to others, as variables that MPI_Init reads; {} where the user has said how."""
    kind = "openmpi" if vendor in LIKE_OPEN_MPI else "mpich"
    names, value = WAITING_VARIABLES[kind], {"openmpi": "1", "mpich": POLLS_BEFORE_YIELD}[kind]
    return {} if any(name in environ for name in names) else {names[0]: value}


def _openmpi_settings(oversubscribed: bool) -> dict[str, str]:
    """Open MPI's launcher needs telling (4.x reads OMPI_*, 5.x PRTE_*): free placement, no binding of threads, root."""
    settings = {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    if oversubscribed:
        settings |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return settings


def launched_as(environ: Mapping[str, str] = os.environ) -> tuple[int, int, str] | None:
    """What a launcher says about this process: (ranks, this rank, the launcher in words); None if none started it.

    SLURM_NTASKS is not asked: it is also set for a serial process inside an allocation. A step's own count is.
    """
    hints = (
        ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun (IBM Spectrum MPI)"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's or Spectrum MPI's launcher"),
        ("PMI_SIZE", "PMI_RANK", "a PMI launcher (MPICH's or Intel MPI's mpiexec, or srun)"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    )
    for size, rank, launcher in hints:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            return int(environ[size]), int(environ[rank]), launcher
    return None
