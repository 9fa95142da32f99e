"""The files through which MPICH's ranks share memory: whether there is room for them, and that an ended job leaves none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = Path("/dev/shm")
NAMES = "mpich_shm_*"
BYTES_PER_RANK = 5 << 20
"""What a start of MPICH takes: 8 ranks were measured to need 40 MiB, 64 ranks 330 MB."""
FATAL_PER_RANK = 9 << 19
"""Free bytes a rank with which MPICH ends in a signal: 8 ranks in 36 MiB do, 16 in 64 MiB too."""
SPREAD = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "HYDRA_HOST_FILE")
"""Variables of jobs whose ranks may lie on other nodes."""


def unname(node: MPI.Comm) -> None:
    """Remove the names of the segments that the ranks of a node have mapped; collective over the node.

    The ranks keep the memory, and the system frees it with the last of them, however they end. MPICH removes the names in
    MPI_Finalize alone, so that the segments of a job that is killed would stay.
    """
    node.Barrier()
    if node.rank == 0:
        for segment in mapped(Path("/proc/self/maps")):
            segment.unlink(missing_ok=True)
    node.Barrier()


def mapped(maps: Path) -> set[Path]:
    """The segments that a process has mapped, by its file `maps`; none where that cannot be read."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = (Path(line.split(None, 5)[-1]) for line in lines if str(FOLDER) in line)
    return {path for path in paths if path.parent == FOLDER and path.match(NAMES)}


def stale(folder: Path = FOLDER) -> list[Path]:
    """The segments of this user in a folder that no process has mapped: what jobs left that were killed."""
    own = [path for path in folder.glob(NAMES) if path.stat().st_uid == os.getuid()]
    used = set().union(*(mapped(maps) for maps in Path("/proc").glob("[0-9]*/maps"))) if own else set()
    return sorted(path for path in own if path not in used)


def free_bytes(folder: Path = FOLDER) -> int:
    """The free bytes of the folder; 0 where it does not exist."""
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def warnings(ranks: int, folder: Path = FOLDER) -> list[str]:
    """A line where the folder has too little room for so many ranks of MPICH; it names what ended jobs have left there."""
    free = free_bytes(folder)
    if not folder.is_dir() or free >= ranks * BYTES_PER_RANK:
        return []
    left = stale(folder)
    size = sum(path.stat().st_size for path in left)
    remedy = (
        f"remove what ended jobs left there, {size >> 20} MiB: rm {' '.join(map(str, left))}"
        if left
        else ("a container gets more by docker run --shm-size=1g")
    )
    fits, then = free // BYTES_PER_RANK, "cannot start" if cannot_start(ranks, folder) else "may end in a bus error"
    return [
        f"{folder} has {free >> 20} MiB free, enough for about {fits} rank{'s' if fits != 1 else ''} of MPICH "
        f"({BYTES_PER_RANK >> 20} MiB each), and {ranks} {then}: {remedy}"
    ]


def cannot_start(ranks: int, folder: Path = FOLDER) -> bool:
    """Whether so many ranks of MPICH on this node would end in a signal for want of room. False where they may lie on others."""
    return folder.is_dir() and free_bytes(folder) < ranks * FATAL_PER_RANK and not any(name in os.environ for name in SPREAD)
