"""A process that imports once and is forked for every rank: what is slow in a Python process is its imports.

A launcher starts a stub (forkserver_stub.py) where it would start a rank. The stub sends its environment and its open
descriptors, the launcher's own among them, to a server; the server forks a process that takes them over and is the rank.
A fork whose stub is gone is killed, so that a launcher ends forks as it ends ranks; a stub ends with its fork's status.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import processor_time

STUB = Path(__file__).with_name("forkserver_stub.py")
LISTENER_VARIABLE = "FORKSERVER_LISTENER"  # the descriptor of a server's socket, open from before its start
LIBC = ctypes.CDLL(None)
MADV_COLLAPSE, HUGE = 25, 2**21
BACKLOG = 128  # stubs that may wait while a server still imports


def available() -> bool:
    """Return whether this system can: Linux with descriptors of processes."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def stub_command(servers: Sequence[Server]) -> list[str]:
    """Return what a launcher starts instead of a rank; the rank's arguments follow."""
    return [sys.executable, "-I", "-S", str(STUB), ":".join(str(server.path) for server in servers)]


class Server:
    """A fork server as its owner sees it: it ends with its owner, whose end of its standard input it watches."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="forkserver")
        self.path = Path(self.folder.name) / "socket"
        self.log = Path(self.folder.name) / "log"
        self.times = Path(self.folder.name) / "times"  # of its forks, by `processor_time.note`
        self.python = Path(self.folder.name) / "python"  # for those who take the name of a program
        self.python.write_text(f"#!{sys.executable} -IS\nimport sys\nsys.argv.insert(1, {str(self.path)!r})\n{STUB.read_text()}")
        self.python.chmod(0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, open(self.log, "w") as log:
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environ, LISTENER_VARIABLE: str(listener.fileno())},
                pass_fds=[listener.fileno()],
                start_new_session=True,
                cwd=cwd,
            )

    def close(self) -> None:
        """End the server and every fork of it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


@dataclass
class Request:
    """What a stub asks for."""

    environment: dict[str, str]
    folder: str
    parent: int
    """The stub's: the launcher's process on this node, by which ranks of one job know each other."""
    arguments: list[str]
    descriptors: list[int]
    python: str
    """The program whose start is a fork of the same server."""

    def take_over(self) -> None:
        """Make this process the stub's: environment, folder, parent, standard descriptors, and the connection to the launcher."""
        LIBC.on_exit(LIBC._exit, None)  # the exit ends here, before libraries that the server has loaded take 0.1 s to tidy up
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # which the server has found for itself
        os.chdir(self.folder)
        os.getppid = lambda: self.parent
        for target, descriptor in enumerate(self.descriptors[:3]):
            os.dup2(descriptor, target)
            os.close(descriptor)
        if "PMI_FD" in os.environ:
            os.set_inheritable(self.descriptors[3], True)
            os.environ["PMI_FD"] = str(self.descriptors[3])


def collapse() -> None:
    """Have this process's memory in huge pages where the kernel can: with small ones a fork takes 13 ms of a core more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) // HUGE for address in place.split("-"))
        if rights == "rw-p" and inode == "0" and end > begin + 1:
            LIBC.madvise(ctypes.c_void_p((begin + 1) * HUGE), ctypes.c_size_t((end - begin - 1) * HUGE), MADV_COLLAPSE)


def serve() -> Request | None:
    """Fork for every stub that connects. Returns the stub's request in a fork; None in the server, when its owner is gone."""
    listener = socket.socket(fileno=int(os.environ.pop(LISTENER_VARIABLE)))
    python = str(Path(listener.getsockname()).with_name("python"))
    gc.collect()
    gc.freeze()  # a fork's collector would write to every object, and so copy every page
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # which counts a million objects one by one, for each trace of a dry run
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()  # torch would unregister all that it has registered at the end of each fork: 40 ms of a core
    forks: dict[int, tuple[int, socket.socket, Request]] = {}  # process descriptor → process, its stub, what that asked for
    while True:
        stubs = {stub: process for process, stub, _ in forks.values()}
        ready, _, _ = select.select([0, listener, *forks, *stubs], [], [])
        if 0 in ready:
            for process, _, _ in forks.values():
                os.kill(process, signal.SIGKILL)
            return None
        for stub in stubs.keys() & set(ready):
            os.kill(stubs[stub], signal.SIGKILL)  # not reaped yet: the id is still this fork's
        for descriptor in forks.keys() & set(ready):
            _end(*forks.pop(descriptor), Path(python).with_name("times"))
            os.close(descriptor)
        if listener in ready:
            stub, _ = listener.accept()
            request = _received(stub, python)
            if request is None:
                stub.close()
                continue
            process = os.fork()
            if process == 0:
                for other in (listener, stub, *(other for _, other, _ in forks.values())):
                    other.close()
                for descriptor in forks:
                    os.close(descriptor)
                return request
            for descriptor in request.descriptors:
                os.close(descriptor)
            forks[os.pidfd_open(process)] = (process, stub, request)


def leave(status: int, last: Callable[[], object] = lambda: None) -> NoReturn:
    """End a fork as the interpreter does, `last` after its handlers, but free no object.

    Freeing writes to each, and so copies every page that a fork shares with its server: 0.2 s of a core.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    last()
    sys.stdout.flush()
    sys.stderr.flush()
    LIBC.exit(status)  # libraries that the fork has begun to use end: MPICH takes leave of its launcher
    raise AssertionError("a process goes on after its exit")


def _end(process: int, stub: socket.socket, request: Request, times: Path) -> None:
    """Reap a fork, tell its stub how it ended, and note what it took."""
    _, status, usage = os.wait4(process, 0)
    processor_time.note(times, request.environment, usage)
    with contextlib.suppress(OSError):  # the stub may have been ended by its launcher
        stub.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    stub.close()


def _received(stub: socket.socket, python: str) -> Request | None:
    """Read a stub's request; None if the stub ended meanwhile."""
    descriptors = array.array("i")
    head, ancillary, _, _ = stub.recvmsg(8, socket.CMSG_LEN(4 * descriptors.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    size, text = int.from_bytes(head, "little"), b""
    while len(text) < size and (part := stub.recv(size - len(text))):
        text += part
    if not head or len(text) < size:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    environment, folder, parent, arguments = marshal.loads(text)
    decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return Request(decoded, folder, parent, arguments, list(descriptors), python)
