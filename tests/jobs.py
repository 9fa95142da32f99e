"""Starting real MPI jobs from tests that use no MPI themselves: a Python program, or `summa3d ARGS…`, on several ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import forkserver

from summa3d.cli.launch import mpi_command
from summa3d.launcher.runtime import Runtime, loaded_runtime

WARM_VARIABLE = "TESTS_PYTHON"
Variables = Mapping[str, str] | None
ROOT = Path(__file__).parent.parent
COMMANDS = """
import contextlib, importlib, io, json, sys
from summa3d.cli.main import parser_of, start_mpi
from summa3d.errors import Summa3dError
start_mpi()
from mpi4py import MPI
for name, *words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = importlib.import_module(f"summa3d.cli.{name}").run(parser_of(name).parse_args(words))
        except SystemExit as end:
            status = end.code
        except Summa3dError as error:
            status = 1
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    told = MPI.COMM_WORLD.gather((status, out.getvalue(), err.getvalue()))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(told))
"""
"""Commands of summa3d one after the other, and how each ended on every rank."""


def warm_server() -> forkserver.Server:
    """Start the server of `python`, which has imported torch and all of summa3d; its owner closes it."""
    program = str(Path(forkserver.__file__).with_name("forkserver_python.py"))
    files = sorted(file for folder in ("summa3d", "kernels") for file in (ROOT / folder).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name != "__main__.py"]
    modules = [re.sub("^kernels", "summa3d.kernels", name).removesuffix(".__init__") for name in names]
    others = ["numpy", "torch", "torch._inductor", "matplotlib.figure", "matplotlib.backends.backend_agg"]
    return forkserver.Server([sys.executable, program, *others, *modules], {**environment(), "OMP_NUM_THREADS": "1"})


def python() -> str:
    """The program to start as Python: one that has imported torch and summa3d already, where there is one.

    A test of how a process starts, of what it imports, or of signals sent to it takes sys.executable.
    """
    return os.environ.get(WARM_VARIABLE, sys.executable)


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def environment(extra: Variables = None) -> dict[str, str]:
    """The environment of a job: this process's, able to import this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **(extra or {})}


@cache
def runtime() -> Runtime:
    """The MPI library of this Python, which another process is asked for."""
    return loaded_runtime()


def start(arguments: list[str], ranks: int, cwd: Path | None = None, extra: Variables = None) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS…` on `ranks` ranks."""
    command, environ, _ = mpi_command(ranks, arguments, environment(extra), runtime())
    command = [python() if word == sys.executable else word for word in command]
    return _popen(command, cwd, environ)


def _popen(command: list[str], cwd: Path | None, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process group of its own, whose output is kept."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def finish(job: subprocess.Popen[str], timeout: float = 300) -> Ended:
    """Wait for a job's end; one that does not end is killed, and its output raised."""
    began = time.monotonic()
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        stdout, stderr = job.communicate(timeout=10)
        raise AssertionError(f"the job did not end within {timeout:g} s\n{stdout}\n{stderr}") from None
    return Ended(job.returncode, stdout, stderr, time.monotonic() - began)


def run(arguments: list[str], ranks: int, cwd: Path | None = None, timeout: float = 300, extra: Variables = None) -> Ended:
    """Run `python ARGUMENTS…` on `ranks` ranks to its end."""
    return finish(start(arguments, ranks, cwd, extra), timeout)


def run_serial(
    arguments: list[str], extra: Variables = None, cwd: Path | None = None, fresh: bool = False, timeout: float = 300
) -> Ended:
    """Run `python ARGUMENTS…` without a launcher; `fresh`: in a process that has imported nothing yet."""
    return finish(_popen([sys.executable if fresh else python(), *arguments], cwd, environment(extra)), timeout)


def printed_by_hash_seeds(program: str, *arguments: str) -> tuple[str, str]:
    """Return what a program of Python prints where texts have the hashes of one seed, and of another."""
    command = [sys.executable, "-c", program, *arguments]
    first, second = (
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    )
    return first, second


def commands(lines: Sequence[Sequence[object]], ranks: int) -> list[Ended]:
    """End of each of these commands of summa3d, one after the other on the ranks of one job: all alike, and only rank 0 prints.

    An error is one that every rank raises. For how a process of summa3d ends, and who prints its error, start it alone.
    """
    job = run(["-c", COMMANDS, json.dumps([[*map(str, line)] for line in lines])], ranks)
    assert job.status == 0 and job.stderr == "", job.stderr
    found = []
    for line, told in zip(lines, job.stdout.splitlines(), strict=True):
        (status, stdout, stderr), *others = json.loads(told)
        errors = {other[2] for other in others}
        assert all(other[:2] == [status, ""] for other in others) and len(errors) < 2, (line, told)
        assert all(stderr.endswith(error) and (status == 1) == (error != "") for error in errors), (line, told)
        found.append(Ended(status, stdout, stderr, 0.0))
    return found
