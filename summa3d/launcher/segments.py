"""The files through which MPICH's ranks share memory: whether there is room for them, and that an ended job leaves none."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = Path("/dev/shm")
OF_MPICH, OF_UCX = "mpich_shm_*", "ucx_shm_posix_*"
NAMES = (OF_MPICH, OF_UCX)
BYTES_PER_RANK, BYTES = 6 << 20, 8 << 20
"""With so much free for each rank and beside them MPICH starts. It takes 5.14 MiB a rank, of which UCX takes 4.1 (1 to 16 ranks
measured); where UCX finds too little, it may end in a signal: 4 ranks in 24 MiB, 8 in 36, 16 in 64."""
LEAST_PER_RANK = 3 << 19
"""Free bytes a rank with which MPICH starts where UCX leaves the folder alone: 1.0 MiB a rank measured."""
WITHOUT = {"UCX_TLS": "^posix"}
"""UCX then shares memory by System V, which is not in the folder."""
PATIENCE = 2.0
"""Seconds in which the ranks of a failed job end."""
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
            if segment.match(OF_MPICH):  # UCX opens its own by their names, when ranks first communicate
                segment.unlink(missing_ok=True)
    node.Barrier()


def mapped(maps: Path) -> set[Path]:
    """The segments that a process has mapped, by its file `maps`; none where that cannot be read."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = (Path(line.split(None, 5)[-1]) for line in lines if str(FOLDER) in line)
    return {path for path in paths if path.parent == FOLDER and any(map(path.match, NAMES))}


def stale(folder: Path = FOLDER) -> list[Path]:
    """The segments of this user in a folder that no process has open or mapped: what jobs left that were killed."""
    own = _own(folder)
    used = set().union(*map(_used, Path("/proc").glob("[0-9]*"))) if own else set()
    return sorted(own.keys() - used)


def remove_left(since: float, folder: Path = FOLDER) -> None:
    """Remove what a job that has failed leaves if it was ended inside MPI_Init, before its ranks could `unname` anything.

    Of this user's segments that are younger than the job, which began at `since` (`time.time`), those that nobody uses. Waits
    for the ranks of the job, which may still be ending; no longer than PATIENCE, as those of others may be starting.
    """
    deadline = time.monotonic() + PATIENCE
    while young := {path for path, made in _own(folder).items() if made >= since}:
        for path in young.intersection(stale(folder)):
            path.unlink(missing_ok=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _own(folder: Path) -> dict[Path, float]:
    """The segments of this user in a folder, and when each was made."""
    result = {}
    for path in (path for name in NAMES for path in folder.glob(name)):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                result[path] = status.st_mtime
    return result


def _used(process: Path) -> set[Path]:
    """The segments that a process has open or mapped: who makes one has it open until it has mapped it."""
    opened = set()
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(descriptor.readlink())
    return opened | mapped(process / "maps")


def free_bytes(folder: Path = FOLDER) -> int:
    """The free bytes of the folder; 0 where it does not exist."""
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def warnings(ranks: int, folder: Path = FOLDER) -> list[str]:
    """A line where the folder has too little room for so many ranks of MPICH; it names what ended jobs have left there."""
    free = free_bytes(folder)
    if not folder.is_dir() or free >= needed(ranks):
        return []
    left = stale(folder)
    size = sum(path.lstat().st_size for path in left)
    remedy = (
        f"remove what ended jobs left there, {size >> 20} MiB: rm {shlex.join(map(str, left))}"
        if left
        else ("a container gets more by docker run --shm-size=1g")
    )
    return [f"{folder} has {free >> 20} MiB free, and {ranks} ranks of MPICH need {needed(ranks) >> 20} MiB: {remedy}"]


def needed(ranks: int) -> int:
    """The free bytes of the folder with which so many ranks of MPICH start."""
    return BYTES + ranks * BYTES_PER_RANK


def settings(ranks: int, environ: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """The variables with which so many ranks of MPICH on this node start in the room that the folder has; {} where it is enough.

    Ranks that may lie on other nodes, and those whose transports the user has chosen, are left alone. Raises LaunchError where
    the folder has too little even for ranks that share memory elsewhere.
    """
    free = free_bytes(folder)
    if not folder.is_dir() or free >= needed(ranks) or any(name in environ for name in SPREAD):
        return {}
    least = ranks * LEAST_PER_RANK
    if free < least:
        (warning,) = warnings(ranks, folder)
        raise LaunchError(f"{ranks} ranks cannot start in less than {-(-least >> 20)} MiB of {folder}. {warning}")
    return {} if set(WITHOUT) & set(environ) else WITHOUT
