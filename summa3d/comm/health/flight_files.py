"""The files of flight recorders: the folder of a job on a node, this user's alone, and what the library removes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ...files import no_follow, remove_files, replacing, whole
from . import processes

VARIABLE, NO = "SUMMA3D_FLIGHT", "no"
"""The folder of the recorders of a job, as `summa3d launch` sets it; "no": nothing is recorded."""
SUFFIX, CLAIM = ".flight", "summa3d-failure-"
"""How the file of a rank ends; how the file begins that the rank of a node makes which reports a failure."""
KEEP, ENDED, SAVED = "keep", "ended", "flight"
"""Files that say in which folder records are to be kept, and when their job ended; the folder in which they are kept there."""
OWN_NAMES = re.compile(rf"[0-9]+\{SUFFIX}|{CLAIM}.*|(\.[0-9a-f]+-)?{KEEP}|{ENDED}")
LIFETIME = 3600.0
"""Seconds after which the folder of a job that has ended otherwise than cleanly is swept up."""
LIFETIME_ELSEWHERE = 30 * 86400.0
"""The same for a folder that a job of another node may use, whose processes cannot be seen."""
ABOVE = 128
"""Numbers between the descriptors that are open when a record begins and that of `keep_open`: MPI_Init may come later."""
NAMES = 100
"""Names that are tried for a folder where others have taken the first ones."""
HEADER = struct.Struct("<8sqqqqdd")
"""What the file is, rank, ranks, process, node, seconds from the records' clock to the wall's, and the end or 0."""
MAGIC = b"flight2\n"


class Head(NamedTuple):
    """What a rank's file begins with; `ended` is 0 before the rank's end."""

    rank: int
    ranks: int
    process: int
    node: int
    offset: float
    ended: float

    @property
    def lives(self) -> bool:
        """Return whether the process is one of this node and has not ended."""
        return not self.ended and self.node == processes.this_node() and processes.state_of(self.process) is not None


@contextlib.contextmanager
def opened(file: Path, anybodys: bool = False) -> Iterator[BinaryIO]:
    """A regular file, of this user unless it may be `anybodys`. Raises OSError for any other, and for a link; waits for none."""
    with open(file, "rb", opener=lambda name, flags: no_follow(name, flags | os.O_NONBLOCK)) as result:
        status = os.fstat(result.fileno())
        if not stat.S_ISREG(status.st_mode) or not (anybodys or status.st_uid == os.geteuid()):
            raise PermissionError(f"{file} is no regular file of this user")
        yield result


def head_of(file: Path) -> Head | None:
    """Header of a rank's file; None for a file that is none, or another user's."""
    with contextlib.suppress(OSError, struct.error), opened(file) as stream:
        magic, *head = HEADER.unpack(stream.read(HEADER.size))
        return Head(*head) if magic == MAGIC else None
    return None


def records_of(folder: Path) -> dict[int, Path]:
    """Rank → file, of the names that a folder has."""
    ranks = {whole(file.stem): file for file in folder.glob(f"*{SUFFIX}")}
    return {rank: file for rank, file in ranks.items() if rank is not None}


def create(file: Path) -> int:
    """A new file that is open for writing and reading. What a process has left that is gone is replaced; else raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(file, flags, 0o600)
    except FileExistsError:
        head = head_of(file)
        if head is None or head.lives:
            raise
        file.unlink()
        return os.open(file, flags, 0o600)


def keep_open(file: Path) -> int:
    """Open a rank's file once more, until its process ends, and return the descriptor: by that a launcher hears of the end first.

    Linux closes the files of a process that ends from the highest descriptor down, and by one of the lower ones MPI's launcher
    hears of the end, which kills the other ranks then.
    """
    kept = os.open(file, os.O_WRONLY | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # there are no such numbers here
        higher = fcntl.fcntl(kept, fcntl.F_DUPFD_CLOEXEC, max(map(int, os.listdir("/proc/self/fd"))) + ABOVE)
        os.close(kept)
        return higher
    return kept


def _prefix() -> str:
    return f"summa3d-flight-{os.geteuid()}-"


def is_private(folder: Path, others: int = 0o077) -> bool:
    """Return whether this is a folder of this user, not a link to one, whose mode has none of the bits `others`."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & others
    return False


def new_folder() -> Path:
    """A new private folder, whose name nobody can foresee."""
    return Path(tempfile.mkdtemp(prefix=_prefix()))


def is_ours(folder: Path) -> bool:
    """Return whether the library has named this folder, not the user."""
    return folder.name.startswith(_prefix())


def folder_of_job() -> Path:
    """The folder of this job's recorders on this node, made where there is none. Raises OSError where it cannot be.

    In the temporary folder any user may have taken its name. Then it has another one, which all ranks find; where those are taken
    too, this rank has a folder of its own, and says so.
    """
    named = os.environ.get(VARIABLE, "")
    folder = Path(tempfile.gettempdir()) / f"{_prefix()}{processes.job_name()}" if named in ("", NO) else Path(named)
    if not is_ours(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    names = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(1, NAMES))]
    for name in (result for result in names if is_private(result)):
        return name
    for name in names:
        with contextlib.suppress(FileExistsError):
            name.mkdir(mode=0o700)
        if is_private(name):
            return name
    own = new_folder()
    sys.stderr.write(f"summa3d: other users have taken {folder} and its like; this rank records its communications in {own}\n")
    return own


def sweep(folder: Path) -> None:
    """Remove the folders beside this one of this user's jobs that have ended otherwise than cleanly, after an hour."""
    for old in folder.parent.glob(f"{_prefix()}*") if is_ours(folder) else ():
        with contextlib.suppress(OSError):  # its own job may remove it now
            if is_private(old) and time.time() - old.stat().st_mtime > LIFETIME and not _is_used(old):
                remove(old)


def _is_used(folder: Path) -> bool:
    """Return whether a rank that has a file in a folder still runs; of other nodes' ranks nothing is known."""
    for file in records_of(folder).values():
        head = head_of(file)
        elsewhere = head is not None and head.node != processes.this_node()
        if head is not None and (head.lives or (elsewhere and time.time() - file.stat().st_mtime < LIFETIME_ELSEWHERE)):
            return True
    return False


def remove(folder: Path) -> None:
    """Remove recorders' files from a folder, and the folder itself if the library has named it and it is empty then."""
    if is_ours(folder):
        remove_files(folder, OWN_NAMES)
        return
    for file in (*records_of(folder).values(), *folder.glob(f"{CLAIM}{os.geteuid()}-*")):
        if file.name.startswith(CLAIM) or head_of(file) is not None:  # the user may have files that are called like a record
            file.unlink(missing_ok=True)


def claim(folder: Path | None) -> bool:
    """Take this job's one place to print on this node: a file that one process can create. A stranger's takes it from nobody.

    folder : that of this rank's recorder, where it has one

    The file outlives the process, because a slow rank may fail after the first one has already ended.
    """
    try:
        folder = folder_of_job() if folder is None else folder
        file = folder / f"{CLAIM}{os.geteuid()}-{processes.job_name()}"
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        with contextlib.suppress(OSError), opened(file):
            return False
        return True
    except OSError:
        return True
    sweep(folder)
    if not is_ours(folder) and not _is_used(folder):
        for old in folder.glob(f"{CLAIM}{os.geteuid()}-*"):
            with contextlib.suppress(OSError):
                if time.time() - old.lstat().st_mtime > LIFETIME:
                    old.unlink()
    return True


def keep_in(folder: Path, records: Path) -> None:
    """Have the records of a job that fails kept in `folder`, not in the one in which it runs. Each rank of a node says so."""
    if is_ours(records):
        with contextlib.suppress(OSError), replacing(records / KEEP) as new:
            new.write_text(str(folder.resolve()), encoding="utf-8")


def save(folder: Path, now: float) -> Path | None:
    """Copy the records of a job that ended at `now` to where they are kept; None where they cannot be written.

    That is `flight` in the folder of the job, or `flight-1`, … where something else has that name. Records of an earlier job are
    replaced.
    """
    try:
        with opened(folder / KEEP) as kept:
            place = Path(kept.read().decode())
    except (OSError, ValueError):
        place = Path()
    with contextlib.suppress(OSError):
        for number in range(NAMES):
            target = place / (f"{SAVED}-{number}" if number else SAVED)
            if _is_saved(target):
                remove_files(target, OWN_NAMES)
            with contextlib.suppress(FileExistsError):
                target.mkdir(mode=0o700)
                _copy(folder, target, now)
                return target
    return None


def _is_saved(folder: Path) -> bool:
    """Return whether a folder holds the records of a job that has ended, and nothing else."""
    if not is_private(folder, others=0) or not (folder / ENDED).is_file():
        return False
    return all(OWN_NAMES.fullmatch(file.name) and file.is_file() for file in folder.iterdir())


def _copy(folder: Path, target: Path, now: float) -> None:
    (target / ENDED).write_text(repr(now), encoding="utf-8")
    for file in records_of(folder).values():
        with opened(file) as record, open(os.open(target / file.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as copy:
            copy.write(record.read())
