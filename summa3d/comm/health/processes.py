"""What the system says of the processes of a job: stopped, asleep or at work. This file needs neither MPI nor numpy.

Linux alone tells; elsewhere nothing is known of any process.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ...files import whole

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
STATE, PROCESSOR, STARTED = 0, slice(11, 13), 19
"""Places in a process's `stat`, after its name: state, ticks in user and in system mode, and when it started."""
STOPPED, ASLEEP, ON_DISK, DEAD = "T", "S", "D", "ZX"


class State(NamedTuple):
    """A process: its kernel state (R, S, D, T, …) and the processor seconds of all its threads."""

    letter: str
    seconds: float


def _stat(file: Path) -> list[str]:
    """The words of a `stat` file after the process's name; none where the process is gone."""
    return _text(file).rpartition(")")[2].split()


def state_of(process: int) -> State | None:
    """The state of a process; None where it has ended."""
    words = _stat(PROC / f"{process}/stat")
    return State(words[STATE], sum(map(int, words[PROCESSOR])) / TICKS) if words and words[STATE] not in DEAD else None


def reads_or_writes(process: int) -> bool:
    """Return whether some thread of a process waits for a disk or a file system."""
    return any(_stat(thread / "stat")[:1] == [ON_DISK] for thread in _threads(process))


def _threads(process: int) -> list[Path]:
    """The folders of a process's threads; none where the process is gone."""
    with suppress(OSError):
        return list((PROC / f"{process}/task").iterdir())
    return []


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for thread in _threads(process) for word in _text(thread / "children").split()]


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    result, new = [], [process]
    while new:
        started = children(new.pop())
        result += started
        new += started
    return result


def environment_of(process: int) -> dict[str, str]:
    """The environment that a process was started with; {} where it cannot be read."""
    return dict(word.partition("=")[::2] for word in _text(PROC / f"{process}/environ").split("\0"))


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def this_node() -> int:
    """A number of the running system and of its processes' name space: where it is equal, process ids mean the same."""
    try:
        space = os.stat(PROC / "self/ns/pid").st_ino
    except OSError:
        space = 0
    return zlib.crc32(f"{_text(PROC / 'sys/kernel/random/boot_id') or os.uname().nodename} {space}".encode())


def job_name() -> str:
    """Name the job as all its ranks on this node would: by the launcher's own identifier, or by the launcher itself."""
    if "PMIX_NAMESPACE" in os.environ:
        return f"{os.environ['PMIX_NAMESPACE']}.{_start_of(os.getppid())}"
    if "SLURM_STEP_ID" in os.environ and "SLURM_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}.{os.getppid()}"
    return f"{os.getppid()}.{_start_of(os.getppid())}"


def _start_of(process: int) -> str:
    """Start time of a process in clock ticks since boot, so that a number used again is not taken for the same process."""
    words = _stat(PROC / f"{process}/stat")
    return words[STARTED] if words else "0"


def described(process: int) -> str:
    """A process in words: with its rank, if a launcher has started it as one."""
    launched = launched_as(environment_of(process))
    return f"process {process}" if launched is None else f"rank {launched[1]} of {launched[0]} (process {process})"


def launched_as(environ: Mapping[str, str] = os.environ) -> tuple[int, int, str] | None:
    """(number of ranks, this rank, name of the launcher) from the environment; None where no launcher started this process.

    The count of a Slurm step is read instead of SLURM_NTASKS, which is also set for a serial process in an allocation.

    >>> launched_as({"PMI_SIZE": "4", "PMI_RANK": "1"})[:2]
    (4, 1)
    """
    hints = (
        ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun (IBM Spectrum MPI)"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's or Spectrum MPI's launcher"),
        ("PMI_SIZE", "PMI_RANK", "a PMI launcher (MPICH's or Intel MPI's mpiexec, or srun)"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    )
    for size, rank, launcher in hints:
        ranks, place = (whole(environ.get(name, "")) for name in (size, rank))
        if ranks is not None and place is not None:
            return ranks, place, launcher
    return None


@contextmanager
def mpi_not_started() -> Iterator[None]:
    """A context in which importing mpi4py.MPI does not call MPI_Init; a grid that is made later does.

    Where MPI is imported already, or a launcher has started this process, everything stays as it is.
    """
    import mpi4py

    if "mpi4py.MPI" in sys.modules or launched_as() is not None:
        yield
        return
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = (
        False,
        True,
    )  # mpi4py calls MPI_Finalize at exit, also where other code called MPI_Init
    try:
        yield
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
