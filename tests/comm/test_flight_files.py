"""Flight records among a user's files: nothing of the user's is deleted or replaced, and a running job keeps its records."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

from summa3d.comm.health import flight, flight_files, processes
from summa3d.launcher import ended

FAILS = """
import sys
import numpy as np
from mpi4py import MPI
from summa3d import Grid
grid = Grid(MPI.COMM_WORLD, {"x": 2})
grid["x"].all_reduce(np.ones(4))
if grid.rank == 1 and len(sys.argv) > 1:
    raise ValueError("bug in my script")
grid["x"].all_reduce(np.ones(4))
"""
LONG = """
import time
from pathlib import Path
from mpi4py import MPI
from summa3d import Grid
grid = Grid(MPI.COMM_WORLD, {"x": 2})
Path(f"up{grid.rank}").touch()
while not Path("go").exists():
    sum(range(30000))
if grid.rank == 1:
    time.sleep(90)
grid["x"].barrier()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program, and a temporary folder of its own."""
    (tmp_path / "job.py").write_text(FAILS)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def launched(folder: Path, *words: str, **variables: str) -> jobs.Ended:
    extra = {"TMPDIR": str(folder / "tmp"), **variables}
    return jobs.run_serial(["-m", "summa3d", "launch", "-n", "2", *words], cwd=folder, extra=extra)


def files_of(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_job_that_fails_keeps_its_records_beside_a_users_folder_flight(folder: Path) -> None:
    (folder / "flight").mkdir()
    (folder / "flight" / "data.csv").write_text("my measurements")
    for _ in range(2):
        ended = launched(folder, "job.py", "fails")
        assert ended.status != 0
        assert "kept: summa3d doctor --flight flight-1\n" in ended.stderr
        assert "ended first" not in ended.stderr, "the one that fails says why, and ends the other"
    assert files_of(folder / "flight") == {"data.csv": "my measurements"}
    assert {file.name for file in (folder / "flight-1").iterdir()} == {"0.flight", "1.flight", "ended"}
    assert not (folder / "flight-2").exists()


@pytest.mark.parametrize("starter", ["launch", "mpiexec"])
def test_a_clean_end_leaves_all_that_a_user_has_in_the_folder_of_the_records(folder: Path, starter: str) -> None:
    mine = folder / "mine"
    (mine / "sub").mkdir(parents=True)
    for name in ("sub/thesis.tex", "1.flight.txt", "notes.flight", "7.flight", "keep", "ended"):
        (mine / name).write_text("precious")
    before = files_of(mine)
    variables = {flight_files.VARIABLE: str(mine), "TMPDIR": str(folder / "tmp")}
    ended = launched(folder, "job.py", **variables) if starter == "launch" else jobs.run(["job.py"], 2, folder, extra=variables)
    assert ended.status == 0, ended.stderr
    assert files_of(mine) == before


def test_a_users_file_that_is_called_like_a_record_is_left_alone_and_the_job_runs(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "0.flight").write_text("data of my glider")
    ended = launched(folder, "job.py", **{flight_files.VARIABLE: str(folder / "mine")})
    assert ended.status == 0, ended.stderr
    assert files_of(folder / "mine") == {"0.flight": "data of my glider"}


def record(folder: Path, rank: int, process: int | None = None, node: int | None = None, ended: float = 0.0) -> Path:
    """The file of a rank of 2, as a process would leave it."""
    recorder = flight.Recorder(folder / f"{rank}.flight", rank, 2)
    here = (os.getpid() if process is None else process, processes.this_node() if node is None else node)
    flight_files.HEADER.pack_into(recorder.memory, 0, flight_files.MAGIC, rank, 2, *here, 0.0, ended)
    return recorder.file


def dead() -> int:
    """The id of a process that has ended."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize(
    "whose, hours, stays",
    [
        ("a running rank's", 48, True),
        ("an ended rank's", 48, False),
        ("an ended rank's", 0.5, True),
        ("another node's", 48, True),
        ("another node's", 24 * 31, False),
        ("nobody's", 48, False),
    ],
)
def test_another_job_sweeps_up_what_no_running_job_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str, hours: float, stays: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new = flight_files.new_folder(), flight_files.new_folder()
    (old / f"{flight_files.CLAIM}{os.geteuid()}-1.2").touch()
    if whose != "nobody's":
        process, node = (None if whose == "a running rank's" else dead()), (1 if whose == "another node's" else None)
        os.utime(record(old, 0, process, node), (time.time() - 3600 * hours,) * 2)
    os.utime(old, (time.time() - 3600 * hours,) * 2)
    flight_files.sweep(new)
    assert old.exists() == stays
    assert new.exists()


def test_a_sweep_leaves_what_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new, own = flight_files.new_folder(), flight_files.new_folder(), tmp_path / "own"
    own.mkdir()
    (old / "thesis.tex").write_text("precious")
    (own / "0.flight").write_text("precious")
    link = old.with_name(f"{old.name}-link")
    link.symlink_to(own)
    for one in (old, own):
        os.utime(one, (0, 0))
    flight_files.sweep(new)
    assert (old / "thesis.tex").read_text() == (own / "0.flight").read_text() == "precious"


@pytest.mark.parametrize("which, replaced", [("of a rank that runs", False), ("of one that has ended", True), ("none", False)])
def test_a_record_replaces_one_of_a_process_that_is_gone(tmp_path: Path, which: str, replaced: bool) -> None:
    file = tmp_path / "0.flight"
    if which == "none":
        file.write_text("precious")
    else:
        record(tmp_path, 0, process=None if which == "of a rank that runs" else dead())
    before = file.read_bytes()
    try:
        flight.Recorder(file, 0, 2)
    except FileExistsError:
        assert not replaced
    assert (file.read_bytes() != before) == replaced


KEEPS = """
import os, sys
from pathlib import Path
from summa3d.comm.health import flight_files
flight_files.keep_open(Path(sys.argv[1]))
input()
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody hears of it")
def test_a_rank_that_ends_closes_its_record_before_an_older_connection(tmp_path: Path) -> None:
    """By which MPI's launcher hears of the end, and ends the others: their records are closed later."""
    (tmp_path / "3.flight").touch()
    mine, other = socket.socketpair()
    os.dup2(other.fileno(), 100)  # there are lower numbers that are free
    other.close()
    closings, order = ended.closings_in(tmp_path), select.epoll()
    rank = subprocess.Popen([sys.executable, "-c", KEEPS, str(tmp_path / "3.flight")], pass_fds=[100], stdin=subprocess.PIPE)
    os.close(100)
    for descriptor in (mine.fileno(), closings):
        order.register(descriptor, select.EPOLLIN)
    with mine, order:
        rank.communicate(b"\n")
        assert [descriptor for descriptor, _ in order.poll()] == [closings, mine.fileno()]
    assert ended.ended_in_order(closings) == [3]


def test_an_older_jobs_watchdog_still_ends_it_when_another_job_has_begun(folder: Path) -> None:
    (folder / "long.py").write_text(LONG)
    extra = {"TMPDIR": str(folder / "tmp"), "SUMMA3D_WATCHDOG": "2"}
    job = jobs.start(["long.py"], 2, folder, extra)
    try:
        while not all((folder / f"up{rank}").exists() for rank in range(2)):
            assert job.poll() is None
            time.sleep(0.05)
        (records,) = (folder / "tmp").glob("summa3d-flight-*")
        os.utime(records, (time.time() - 7200,) * 2)
        assert launched(folder, "job.py").status == 0
        assert {file.name for file in records.iterdir()} == {"0.flight", "1.flight"}
    finally:
        (folder / "go").touch()
        ended = jobs.finish(job, timeout=120)
    assert ended.status != 0
    assert "rank 1 (process" in ended.stderr and "is asleep outside of any communication" in ended.stderr, ended.stderr


def test_what_a_record_says_is_shown_without_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = flight.Recorder(tmp_path / "0.flight", 0, 2)
    monkeypatch.setattr(flight, "recorder", recorder)
    with flight.waiting_in("\x1b[2Ja barrier", "all\x07 ranks"):
        lines = flight.table(flight.read_folder(tmp_path), time.time())
    assert "\\x1b[2Ja barrier over all\\x07 ranks" in lines[1]
