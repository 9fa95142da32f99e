"""Probe in a child process whether this MPI reads device pointers; a crash of the probe is an answer too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from ... import interpreter

TIMEOUT = 60
"""Seconds after which a probe that hangs is taken for one that failed."""
LAUNCHERS = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIR_CVAR_CH4_ROOTS", "SLURM_", "PALS_", "FLUX_")
"""Prefixes of the variables by which a launcher marks its ranks; the probe runs without them."""
PROGRAM = """
import cupy
from mpi4py import MPI
source, target = cupy.arange(1 << 16, dtype="float32"), cupy.zeros(1 << 16, "float32")
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv([source, MPI.FLOAT], 0, 0, [target, MPI.FLOAT], 0, 0)
total = cupy.empty_like(source)
MPI.COMM_SELF.Allreduce([source, MPI.FLOAT], [total, MPI.FLOAT])
print("yes" if bool((source == target).all()) and bool((source == total).all()) else "wrong")
"""


class Probe(NamedTuple):
    """Whether it works, and what the process said."""

    works: bool
    reason: str


@cache
def cuda_aware() -> Probe:
    """Return whether MPI moved and reduced device memory right, in a child of this process; asked once."""
    return probe([sys.executable, *interpreter.program(PROGRAM)], alone(os.environ), TIMEOUT)


def probe(command: list[str], environ: Mapping[str, str], timeout: float) -> Probe:
    """Run `command`, which prints `yes` where it worked; whatever else happens is a reason why it did not."""
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Probe(False, f"the probe did not end within {timeout:g} s")
    if done.returncode < 0:
        return Probe(False, f"the probe was ended by signal {-done.returncode}")
    if done.returncode > 0:
        said = done.stderr.strip().splitlines()
        return Probe(False, f"the probe failed: {said[-1] if said else f'exit status {done.returncode}'}")
    works = done.stdout.split() == ["yes"]
    return Probe(works, "a probe moved and added device memory" if works else "a probe got wrong values back")


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what makes a process one of a launcher's."""
    return {name: value for name, value in environ.items() if not name.startswith(LAUNCHERS)}
