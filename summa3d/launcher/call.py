"""`launch(function, ranks=4)`: a function of this script or notebook on ranks of this machine, and what each rank returns."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import IO, Any

from .. import interpreter
from ..comm.health.processes import launched_as
from ..errors import LaunchError

PATHS, CALL, RESULT, FAILURE = "paths", "call", "result-{}", "failure-{}"
"""Files of a job's folder: where modules are imported from, what is called, what a rank has returned, what it has raised."""


def launch(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    """Call a function on `ranks` new ranks of this machine, with the same arguments, and return what each of them returns.

    The ranks are those of `summa3d launch -n ranks`: the MPI that mpi4py loads, one BLAS thread each, a watchdog, a table of who
    waited for whom where they fail. What they print appears here, as it comes; Ctrl-C ends them. A call takes some seconds, most
    of them for imports, and leaves nothing behind for the next one.

    Parameters
    ----------
    function : is sent as cloudpickle sends it: of a script, a notebook or an interactive session with what it refers to, and of a
        module that can be imported by its name
    arguments : the same for every rank; the rank itself is `MPI.COMM_WORLD.rank`
    ranks : number of ranks, 1 or more; they may outnumber the cores

    Returns
    -------
    list : the results by rank, copies that have come through a file each

    Moves
    -----
    0 words of the grids' ledgers; the function and its results travel through files of a temporary folder

    Raises
    ------
    LaunchError
        for a number of ranks below 1; in a process that a launcher has started; where cloudpickle is missing, or cannot send
        the function; where a rank raises, with its traceback; where the job ends otherwise, as by a signal

    Examples
    --------
    >>> from summa3d import launch
    >>> def rank():
    ...     from mpi4py import MPI
    ...     return MPI.COMM_WORLD.rank
    >>> launch(rank, ranks=3)  # doctest: +SKIP
    [0, 1, 2]
    """
    pickler = _pickler()
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise LaunchError(f"launch takes a number of ranks of 1 or more; got ranks={ranks!r}.")
    started = launched_as()
    if started is not None and started[0] > 1:
        raise LaunchError(f"launch starts ranks of its own, and this is rank {started[1]} of {started[0]} of {started[2]}.")
    with TemporaryDirectory(prefix="summa3d-call-") as scratch:
        folder = Path(scratch)
        try:
            sent = pickler.dumps((function, arguments))
        except Exception as error:  # whatever an object's own methods raise
            name = getattr(function, "__qualname__", repr(function))
            raise LaunchError(f"launch cannot send {name} to its ranks: {type(error).__name__}: {error}") from error
        (folder / CALL).write_bytes(sent)
        (folder / PATHS).write_text(json.dumps(sys.path), encoding="utf-8")
        words = ("launch", "-q", "-n", str(ranks), "-m", "summa3d.launcher.called", scratch)
        status = _run([sys.executable, *interpreter.module("summa3d", *words)])
        return _results(folder, ranks, status, pickler)


def _pickler() -> ModuleType:
    """The module cloudpickle. Raises LaunchError where it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        raise LaunchError(
            "launch sends functions by cloudpickle, which is not installed: pip install 'summa3d[notebook]'."
        ) from None
    pickler: ModuleType = cloudpickle
    return pickler


def _run(command: list[str]) -> int:
    """Run a command to its end, and return its status; what it prints goes where this Python prints, a notebook's cell too."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        pairs = ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
        copies = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs]
        for copy in copies:
            copy.start()
        try:
            status = child.wait()
        except BaseException:
            child.terminate()  # the launcher ends its ranks
            child.wait()
            raise
        finally:
            for copy in copies:
                copy.join()
    return status


def _copy(source: IO[str], target: IO[str]) -> None:
    """Copy lines as they come."""
    for line in source:
        target.write(line)
        target.flush()


def _results(folder: Path, ranks: int, status: int, pickler: ModuleType) -> list[Any]:
    """Results of all ranks. Raises LaunchError, with the first traceback, where one has not."""
    failures = sorted(folder.glob(FAILURE.format("*")), key=lambda file: file.stat().st_mtime_ns)
    if failures:
        rank, text = failures[0].name.rpartition("-")[2], failures[0].read_text(encoding="utf-8")
        raise LaunchError(f"rank {rank} of {ranks} raised, and so the job has ended:\n{text.rstrip()}")
    files = [folder / RESULT.format(rank) for rank in range(ranks)]
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    if status or missing:
        raise LaunchError(f"the job ended with status {status}; without a result: ranks {missing} of {ranks}.")
    return [pickler.loads(file.read_bytes()) for file in files]
