"""Variables that let ranks which wait inside MPI yield their core: MPI_Init reads them, and MPI polls without them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from .files import whole
from .node_support import affinity

VARIABLES = {
    "mpich": ("MPIR_CVAR_POLLS_BEFORE_YIELD", "MPIR_CVAR_ENABLE_HEAVY_YIELD"),
    "openmpi": ("OMPI_MCA_mpi_yield_when_idle",),
}
LIKE_OPEN_MPI = ("openmpi", "spectrum")  # Spectrum MPI is based on Open MPI: launcher and ranks read the same variables
POLLS_BEFORE_YIELD = "10"  # the fastest measured with 8 ranks on 2 quiet cores; MPICH's default is 1000
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
SLURM_RANKS = "SLURM_STEP_TASKS_PER_NODE"


def waiting_settings(vendor: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make waiting ranks yield their core, as MPI_Init reads them; {} where the user has set one of them.

    >>> waiting_settings("openmpi", {})
    {'OMPI_MCA_mpi_yield_when_idle': '1'}
    """
    kind = "openmpi" if vendor in LIKE_OPEN_MPI else "mpich"
    names, value = VARIABLES[kind], {"openmpi": "1", "mpich": POLLS_BEFORE_YIELD}[kind]
    return {} if any(name in environ for name in names) else {names[0]: value}


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """The ranks of this node, as the launcher says; of Slurm's nodes the most; 1 where none says so.

    >>> local_ranks({"MPI_LOCALNRANKS": "4"}), local_ranks({"SLURM_STEP_TASKS_PER_NODE": "4(x2),8"}), local_ranks({})
    (4, 8, 1)
    """
    for name in LOCAL_RANKS:
        count = whole(environ.get(name, ""))
        if count is not None:
            return count
    counts = re.findall(r"(?:^|,)(\d+)", environ.get(SLURM_RANKS, ""))
    return max(map(int, counts), default=1)


def yield_cores() -> None:
    """Set the variables of every MPI where the ranks of this node outnumber its cores, unless MPI has started."""
    started = sys.modules.get("mpi4py.MPI")
    if (started is None or not started.Is_initialized()) and local_ranks() > len(affinity()):
        for vendor in VARIABLES:
            os.environ.update(waiting_settings(vendor))


def cores_are_yielded() -> bool:
    """Return whether some variable was set when MPI started, by the user, a launcher or this package."""
    return any(name in os.environ for names in VARIABLES.values() for name in names)
