"""How Slurm's srun starts the ranks of an MPI library: by a process management interface (PMI) that both must have."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

JOB_VARIABLE = "SLURM_JOB_ID"
TYPE_VARIABLE = "SLURM_MPI_TYPE"  # srun reads it where there is no --mpi, and sets it for the ranks
# The values of --mpi that start ranks of a library, the usual one first. Open MPI 5 has PMIx only.
STARTING = {"mpich": ("pmi2", "pmix", "cray_shasta"), "intel": ("pmi2", "pmix"), "openmpi": ("pmix",), "spectrum": ("pmix",)}


def offered_types() -> list[str]:
    """Types that `srun --mpi=list` names; nothing where srun does not answer."""
    return sorted(set(re.findall(r"^(?:srun:|\s)\s*(\w+)\s*$", _answer("srun", "--mpi=list"), re.MULTILINE)))


def default_type(environ: Mapping[str, str] = os.environ) -> str:
    """Type by which srun starts ranks without --mpi: SLURM_MPI_TYPE, else MpiDefault of the cluster, else "unknown"."""
    line = re.search(r"^MpiDefault\s*=\s*(\S+)", _answer("scontrol", "show", "config"), re.MULTILINE)
    return environ.get(TYPE_VARIABLE) or (line.group(1) if line else "unknown")


def starts(vendor: str, kind: str) -> bool:
    """Return whether srun --mpi=`kind` may start ranks of the MPI library of `vendor` as one job.

    >>> starts("openmpi", "pmix_v4"), starts("openmpi", "pmi2"), starts("mpich", "none")
    (True, False, False)
    """
    return vendor not in STARTING or re.sub(r"_v\d+$", "", kind) in (*STARTING[vendor], "unknown")


def advice(vendor: str, used: str, offered: list[str] | None = None) -> str:
    """The sentence that names the option of srun to try, where --mpi=`used` has not started the ranks of `vendor` as one job.

    >>> advice("openmpi", "pmi2")
    'Try srun --mpi=pmix (SLURM_MPI_TYPE=pmix in the environment does the same; `srun --mpi=list` names what there is).'
    """
    kinds = [kind for kind in STARTING.get(vendor, ()) if kind != used and (offered is None or kind in offered)]
    known = "`srun --mpi=list` names what there is"
    listed = known if offered is None else f"srun --mpi=list: {', '.join(offered) or 'no answer'}"
    if not kinds:
        return f"srun has no other option for this MPI ({listed}): use the MPI's own mpiexec."
    return f"Try srun --mpi={kinds[0]} ({TYPE_VARIABLE}={kinds[0]} in the environment does the same; {listed})."


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
