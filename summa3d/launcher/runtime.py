"""The MPI library that this interpreter loads, the matching launcher, and settings for ranks that share cores."""

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

from .. import interpreter
from ..errors import LaunchError
from ..node_support import affinity, forbidden
from ..waiting import LIKE_OPEN_MPI, waiting_settings

MPIEXEC_VARIABLE = "SUMMA3D_MPIEXEC"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SHARE_VARIABLE = "SUMMA3D_THREADS"  # the value of THREAD_VARIABLES where summa3d has set them, and may lower them
SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how long the idle threads of OpenMP spin
LAUNCHER_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "orterun", "prterun", "jsrun")
JSRUN = ("jsm_pmix/bin", "jsrun")  # folder and name of Spectrum MPI's launcher, whose `--version` names no vendor
CORES_VARIABLE = "SUMMA3D_CORES"  # the cores of a process that has taken one of them
VENDOR_NAMES = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "spectrum": "IBM Spectrum MPI",
    "intel": "Intel MPI",
    "slurm": "Slurm",
    "unknown": "an unknown MPI",
}
# All libraries that are based on MPICH share the Hydra launcher.
FITTING_LAUNCHERS = {"mpich": ("mpich",), "intel": ("intel", "mpich"), "openmpi": ("openmpi",), "spectrum": ("spectrum",)}
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
    """An MPI library: its vendor, its version, and its file (None where the file is unknown).

    >>> Runtime("mpich", "4.2.1", None).name
    'MPICH 4.2.1'
    """

    vendor: str
    version: str
    library: Path | None

    @property
    def name(self) -> str:
        """The vendor's name and the version."""
        return f"{VENDOR_NAMES[self.vendor]} {self.version}"


@dataclass(frozen=True)
class Launcher:
    """A launcher: its command line (a program, or a program with arguments) and its vendor."""

    command: tuple[str, ...]
    vendor: str


def vendor_of(text: str) -> str:
    """The vendor in a library's version string, or in a launcher's answer to `--version`; "unknown" without one.

    >>> vendor_of("mpirun (Open MPI) 5.0.3"), vendor_of("HYDRA build details:")
    ('openmpi', 'mpich')
    """
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
    """The first dotted number in a version string.

    >>> version_of("Open MPI v5.0.3, package: Debian")
    '5.0.3'
    """
    match = re.search(r"\d+(\.\d+)+\w*", text)
    return match.group() if match else "of unknown version"


def loaded_runtime() -> Runtime:
    """The MPI library that mpi4py loads. A child process asks, so that this process loads no MPI library.

    Raises LaunchError where mpi4py cannot load one.
    """
    child = subprocess.run(
        [sys.executable, *interpreter.program(PROBE)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if child.returncode != 0:
        raise no_library((child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1])
    facts = json.loads(child.stdout.splitlines()[-1])
    libraries = [Path(file) for file in facts["files"] if re.match(r"lib(mpi|mpich|mpi_ibm)\b[^/]*\.so", Path(file).name)]
    return Runtime(vendor_of(facts["version"]), version_of(facts["version"]), libraries[0] if libraries else None)


def no_library(reason: str) -> LaunchError:
    """The error where mpi4py finds no MPI library."""
    return LaunchError(
        f"mpi4py cannot load an MPI library: {reason}\n"
        "  Install one into this environment (pip install 'summa3d[mpi]'; in a checkout: pip install -e '.[mpi]'), load your\n"
        "  cluster's MPI module, or point MPI4PY_LIBMPI at its libmpi.so."
    )


def find_launcher(runtime: Runtime, environ: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher that belongs to `runtime`: beside its library, then in this environment, then on PATH.

    The `--version` of the program must name the library's vendor, since another MPI's launcher would start N jobs of one rank
    each. SUMMA3D_MPIEXEC overrides the search and may contain arguments ("srun --mpi=pmi2"). Raises LaunchError where no
    launcher fits.
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
    """The vendor that a launcher's `--version` names, or "unknown"; jsrun names none and is Spectrum MPI's."""
    if Path(command[0]).name == JSRUN[1]:
        return "spectrum"
    try:
        answer = subprocess.run([*command, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return vendor_of(answer.stdout + answer.stderr)


def _candidates(runtime: Runtime, environ: Mapping[str, str]) -> list[Path]:
    """All programs with the name of a launcher, those nearest to the library first."""
    above = [] if runtime.library is None else [*runtime.library.parents, *runtime.library.resolve().parents]
    folders = [folder / place for folder in above for place in ("bin", JSRUN[0])] + [Path(sys.prefix) / "bin"]
    folders += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    programs = (folder / name for folder in dict.fromkeys(folders) for name in LAUNCHER_NAMES)
    return [program for program in programs if shutil.which(program)]


def usable_cores() -> int:
    """The number of cores that this process may run on, as of before `take_core` bound it to one of them."""
    return len(_cores())


def _cores() -> list[int]:
    listed = os.environ.get(CORES_VARIABLE)
    if listed:
        return [int(core) for core in listed.split(",")]
    return affinity()


def take_core(place: int) -> None:
    """Bind this process to one of its cores; `place` is its number among the ranks of its node. SUMMA3D_BIND=no turns it off.

    The kernel does not spread ranks evenly that outnumber the cores and wait in turn: three of four ranks on one core are common,
    which made a product of 4 ranks on 2 cores 1.6 times slower. The process also becomes batch work (SCHED_BATCH), so that a
    rank that wakes up does not preempt a product and evict its caches.
    """
    cores = _cores()
    if hasattr(os, "sched_setaffinity") and len(cores) > 1 and not forbidden("SUMMA3D_BIND"):
        os.environ[CORES_VARIABLE] = ",".join(map(str, cores))
        os.sched_setaffinity(0, {cores[place % len(cores)]})
        if hasattr(os, "SCHED_BATCH"):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def leave_core() -> None:
    """Let this process run on all cores that were available before `take_core`: where ranks are not busy all at once.

    Stages of a pipeline wait for one another at its beginning and end, and the last has the most to do.
    """
    if CORES_VARIABLE in os.environ:
        os.sched_setaffinity(0, _cores())


@contextmanager
def on_all_cores() -> Iterator[None]:
    """A context in which this thread, and threads that it starts, may run on all cores that were available before `take_core`."""
    if CORES_VARIABLE not in os.environ:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _cores())
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads_are_free(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user has left the number of BLAS threads to summa3d, which may have set it already."""
    settings = {environ.get(name) for name in THREAD_VARIABLES}
    return settings == {None} or settings == {environ.get(SHARE_VARIABLE)}


def share_threads(share: int) -> None:
    """Set the number of BLAS threads of this process, unless the user has set it."""
    if threads_are_free():
        os.environ.update(dict.fromkeys((*THREAD_VARIABLES, SHARE_VARIABLE), str(share)))


def let_idle_threads_sleep() -> None:
    """Let OpenMP's idle threads sleep at once, where the user has not said how long they spin; before torch is loaded.

    A thread that spins for one whose core is taken by other work keeps both waiting: one rank of a small model took 50 times as
    long with two threads as with one on a machine of load 20.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def rank_environment(vendor: str, ranks: int, cores: int, environ: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str]:
    """Environment variables for `ranks` ranks on `cores` cores of one node, and a summary. Variables that are set stay.

    Ranks that outnumber the cores must yield while they wait: a busy wait takes the core from the rank that is waited for, and
    costs milliseconds in every collective.

    >>> settings, words = rank_environment("mpich", ranks=2, cores=4, environ={})
    >>> settings["OMP_NUM_THREADS"], words
    ('2', '2 BLAS threads per rank')
    """
    settings: dict[str, str] = {}
    words = []
    if threads_are_free(environ):
        share = max(1, cores // ranks)
        settings |= dict.fromkeys((*THREAD_VARIABLES, SHARE_VARIABLE), str(share))
        words.append(f"{share} BLAS thread{'s' if share > 1 else ''} per rank")
    if vendor in LIKE_OPEN_MPI:
        settings |= _openmpi_settings(ranks > cores)
    if ranks > cores:
        waiting = waiting_settings(vendor, environ)
        settings |= waiting
        words += ["ranks that wait in MPI yield"] if waiting else []
    return {name: value for name, value in settings.items() if name not in environ}, ", ".join(words)


def _openmpi_settings(oversubscribed: bool) -> dict[str, str]:
    """Variables of Open MPI's launcher (4.x reads OMPI_*, 5.x PRTE_*): more ranks than cores, no binding, running as root."""
    settings = {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    if oversubscribed:
        settings |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return settings
