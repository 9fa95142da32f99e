"""The lease of a run folder: one job at a time writes to a folder, and a job that was killed leaves nothing to clean up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import no_follow, read_json

NAME = "lease"
HEARTBEAT = 10.0
"""Seconds between two heartbeats. A lease that nothing else shows to be left is taken over after twice as long."""
PAUSE = 0.1
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


class Lease:
    """This job's right to write to a run folder, from `take` to the end of the context; on rank 0 alone.

    The file `lease` is made with O_EXCL, locked with flock where the file system has it, and touched by a heartbeat. Another job
    takes it over at once where its lock is free, or its process gone, on the same host. A lock says nothing of other hosts where
    flock is local to a node: there, and without flock, the lease is left once it has missed two heartbeats.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._file: int | None = None
        self._mine: dict[str, Any] = {}
        self._lost = False
        self._released = threading.Event()

    def take(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        """Take the lease of `folder`. Raises ConfigError where another job holds it; the message names the job.

        say : told once that the lease seems left, before it waits for two heartbeats to be missed
        """
        self._path, self._mine = folder / NAME, _this_job()
        first_beat = None
        while True:
            file, made = self._open()
            locked = _lock(file, wait=made)
            if _is_at(file, self._path):
                holder, beat = _read(self._path), os.fstat(file).st_mtime_ns
                if made or (locked and self._left(holder, file, locked)):
                    self._write(file)
                    break
                if locked is None and self._left(holder, file, locked) and self._claim(holder, file):
                    break
                if holder and (locked is False or first_beat not in (None, beat)):
                    os.close(file)
                    raise _in_use(folder, holder)
                if holder and first_beat is None:
                    first_beat = beat
                    say(f"{self._path} is of {_named(holder)}; waiting for its heartbeat")
            os.close(file)
            time.sleep(PAUSE)
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise ConfigError where another job has taken the lease over, because this one stood still for two heartbeats."""
        if self._lost:
            raise ConfigError(f"{self._path} was taken over by {_named(_read(self._path))} while this job stood still.")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the lease back."""
        self._released.set()
        if self._file is not None:
            if _read(self._path) == self._mine:
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def _open(self) -> tuple[int, bool]:
        """The open lease, and whether this process has made it."""
        while True:
            try:
                return os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644), True
            except FileExistsError:
                try:
                    file = no_follow(str(self._path), os.O_RDWR | os.O_NONBLOCK)
                except FileNotFoundError:
                    continue  # it was given back in this moment
                except OSError as error:
                    if error.errno not in NO_FILE:
                        raise
                    raise self._no_file() from None
                if stat.S_ISREG(os.fstat(file).st_mode):
                    return file, False
                os.close(file)
                raise self._no_file() from None

    def _no_file(self) -> ConfigError:
        return ConfigError(f"{self._path} is a link or no file; the lease of a run folder is a regular file. Remove it.")

    def _left(self, holder: dict[str, Any], file: int, locked: bool | None) -> bool:
        """True if the job `holder` is gone; `locked`: this process has the lock of its lease, None where there is no flock."""
        if holder.get("host") == self._mine["host"] and (locked or not _runs(holder["pid"])):
            return True
        return self._age(os.fstat(file)) > 2 * holder.get("heartbeat", HEARTBEAT)

    def _age(self, status: os.stat_result) -> float:
        """The seconds since a file was touched, by the clock of the file system and not of this host."""
        with tempfile.TemporaryFile(dir=self._path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - status.st_mtime

    def _claim(self, holder: dict[str, Any], file: int) -> bool:
        """Take over the lease that `holder` has left, without flock: the job does so that has made the file `lease.claim`."""
        claim = self._path.with_suffix(".claim")
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if self._age(claim.lstat()) > 2 * HEARTBEAT:  # its maker was killed before it could write
                    claim.unlink()
            return False
        try:
            if first := _read(self._path) == holder:
                self._write(file)
        finally:
            claim.unlink()
        return first

    def _write(self, file: int) -> None:
        """Write this job into the lease, which is its own from now on; one that cannot be written is removed."""
        text = json.dumps(self._mine).encode()
        try:
            os.ftruncate(file, 0)
            if os.pwrite(file, text, 0) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._path.unlink()
            os.close(file)
            raise
        self._file = file

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT) and self._file is not None:
            self._lost = _read(self._path) != self._mine
            if not self._lost:
                os.utime(self._file)


def check_free(folder: Path) -> None:
    """Raise ConfigError where a living job of this host holds the lease of a folder; takes nothing, waits for nothing."""
    holder = _read(folder / NAME)
    process = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(process, int) or not _runs(process):
        return
    try:
        file = no_follow(str(folder / NAME), os.O_RDWR | os.O_NONBLOCK)
    except OSError:  # it was given back in this moment, or is not this user's to open: `take` says so
        return
    try:
        if _lock(file, wait=False) is False:
            raise _in_use(folder, holder)
    finally:
        os.close(file)


def _in_use(folder: Path, holder: dict[str, Any]) -> ConfigError:
    return ConfigError(f"{folder} is in use by {_named(holder)}. Wait for its end, or choose another folder.")


def _this_job() -> dict[str, Any]:
    job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), None)
    about = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    return {**about, "heartbeat": HEARTBEAT, "key": os.urandom(8).hex()}


def _named(holder: dict[str, Any]) -> str:
    """The job that a lease names, in a message."""
    job = f" (job {holder['job']})" if holder.get("job") else ""
    return f"process {holder.get('pid')} on {holder.get('host')}{job} since {holder.get('since')}"


def _lock(file: int, wait: bool) -> bool | None:
    """Lock an open file: True where this process has the lock, False where another has it, None where there is no flock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return None
    return True


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(path: Path) -> dict[str, Any]:
    """The job that a lease names; empty where the file is gone, or not yet written."""
    try:
        result = read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    return result


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False
