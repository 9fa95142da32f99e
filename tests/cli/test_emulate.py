"""`summa3d launch --emulate` starts ranks on nodes of this machine with ports of their own, of which nothing is ever left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

from summa3d.cli import main as entry
from summa3d.errors import LaunchError
from summa3d.launcher import emulate
from summa3d.launcher.emulate import Emulated, EmulatedNodes, network_of

ENDLESS = """
import json, os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
everyone = world.gather((os.readlink("/proc/self/ns/net"), os.stat("/dev/shm").st_dev))
if world.rank == 0:
    print(json.dumps(everyone), flush=True)
{end}
time.sleep(1000)
"""
EXCHANGE = """
import json, time
import numpy as np
from mpi4py import MPI
world, times = MPI.COMM_WORLD, []
message, answer = np.zeros(1 << 20, np.uint8), np.zeros(1, np.uint8)
for _ in range(4):
    start = time.perf_counter()
    if world.rank == 0:
        world.Send(message, 1)
        world.Recv(answer, 1)
    else:
        world.Recv(message, 0)
        world.Send(answer, 0)
    times.append(time.perf_counter() - start)
if world.rank == 0:
    print(json.dumps(min(times)))
"""


def why_not() -> str | None:
    """Return why no node can be emulated here; None where one could be."""
    if emulate.why_not() is not None:
        return emulate.why_not()
    try:
        with Emulated(EmulatedNodes(1, 1e9)):
            return None
    except LaunchError as error:
        return str(error)


REASON = why_not()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=f"no emulated nodes here: {REASON}")


def start(options: str, ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start `summa3d launch --emulate`, as the leader of a process group."""
    command = [sys.executable, "-m", "summa3d", "launch", "--emulate", options, "-n", str(ranks), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=jobs.environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def namespaces() -> dict[str, list[int]]:
    """The network namespaces of this machine that processes are in, each with these processes."""
    found: dict[str, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.setdefault(os.readlink(folder / "ns/net"), []).append(int(folder.name))
        except OSError:
            continue
    return found


def of_this_machine() -> tuple[str, set[str]]:
    """Return what a launch must leave as it was: mounts, and links."""
    return Path("/proc/self/mounts").read_text(), set(os.listdir("/sys/class/net"))


@pytest.mark.parametrize(
    "text",
    ["", "nodes=4", "port=1gbit", "nodes=0,port=1gbit", "nodes=2,port=fast", "nodes=2,port=0gbit", "nodes=2,port=1gbit,a=1"],
)
def test_options_that_cannot_be_read_are_an_error_with_an_example(text: str) -> None:
    with pytest.raises(LaunchError, match=r"takes nodes=N .*: --emulate nodes=4,port=1gbit"):
        network_of(text)


def test_what_is_missing_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "tc" else found(name, path=path))
    assert entry.main(["launch", "--emulate", "nodes=2,port=1gbit", "-n", "2", "doctor"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "LaunchError: nodes cannot be emulated: tc is missing (Debian: apt-get install iproute2 util-linux)."
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert emulate.why_not() == "only root makes their namespaces and links"
    monkeypatch.undo()
    assert "only hydra" in str(emulate.why_not("openmpi"))


@needs_nodes
def test_ranks_that_the_nodes_do_not_divide_are_an_error_that_names_those_that_fit() -> None:
    with (
        Emulated(EmulatedNodes(2, 1e9)) as nodes,
        pytest.raises(LaunchError, match="2 nodes do not divide 3 ranks; 2, 4 or 8 would"),
    ):
        nodes.command(["mpiexec"], 3, ["program"])


@needs_nodes
def test_a_product_sees_hosts_with_their_own_ranks_and_is_right() -> None:
    product = ("gemm", "--m", "61", "--n", "67", "--k", "71", "--grid", "x=2,y=1,z=2", "--check", "--json")
    before = of_this_machine()
    job = start("nodes=2,port=1gbit", 4, *product)
    stdout, stderr = job.communicate(timeout=100)
    assert job.returncode == 0, stderr
    found = json.loads(stdout)
    assert found["relative_error"] < 1e-13
    machine = found["machine"]
    assert (machine["nodes"], machine["hosts"], machine["ranks_per_node"]) == (2, ["node1", "node2"], [2, 2])
    assert of_this_machine() == before


@needs_nodes
def test_a_message_is_no_faster_than_the_port(tmp_path: Path) -> None:
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    job = start("nodes=2,port=200mbit", 2, str(tmp_path / "exchange.py"))
    stdout, stderr = job.communicate(timeout=100)
    assert job.returncode == 0, stderr
    free = 2 * 65536  # what either end of a link sends at once after a pause
    assert json.loads(stdout) > ((1 << 20) - free) / network_of("nodes=2,port=200mbit").bandwidth


@needs_nodes
@pytest.mark.parametrize("end", ["success", "exception", "rank killed", "Ctrl-C", "SIGTERM", "launcher killed"])
def test_nothing_is_left_however_a_job_ends(end: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    last = {"success": "raise SystemExit(0)", "exception": "raise ValueError(world.rank)"}
    program.write_text(ENDLESS.format(end=last.get(end, "")))
    before, began = of_this_machine(), time.monotonic()
    job = start("nodes=2,port=1gbit", 2, str(program))
    assert job.stdout is not None
    first = job.stdout.readline()
    assert first, job.communicate()[1]
    ranks = json.loads(first)
    spaces = {space for space, _ in ranks}
    assert len(spaces - {os.readlink("/proc/self/ns/net")}) == 2
    assert os.stat("/dev/shm").st_dev not in {device for _, device in ranks}
    if end == "rank killed":
        processes = [pid for space in spaces for pid in namespaces()[space]]
        victim = next(pid for pid in processes if b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2])
        os.kill(victim, signal.SIGKILL)
    elif end == "Ctrl-C":
        job.send_signal(signal.SIGINT)
    elif end == "SIGTERM":
        job.terminate()
    elif end == "launcher killed":
        job.kill()
    _, stderr = job.communicate(timeout=200)
    assert time.monotonic() - began < 200
    wanted = {"success": 0, "Ctrl-C": 130, "launcher killed": -9}
    assert job.returncode == wanted[end] if end in wanted else job.returncode > 0, stderr
    assert "launch/emulate.py" not in stderr, stderr
    deadline = time.monotonic() + 100  # the kernel may still be ending processes of a launcher that was killed
    while spaces & namespaces().keys():
        assert time.monotonic() < deadline, namespaces()
        time.sleep(0.05)
    assert of_this_machine() == before
