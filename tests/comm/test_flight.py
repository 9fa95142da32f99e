"""The flight recorder: after a failure, who waits where, for whom and since when; nothing is left of a job that ends well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import jobs
import pytest

from summa3d.comm.health import flight, flight_files
from summa3d.comm.transport.call import Route
from summa3d.launcher import follow

JOB = """
import os, sys, threading, time
import numpy as np
from mpi4py import MPI
from summa3d.comm.health.failure import install_abort_hook
from summa3d.comm.health.watchdog import Watchdog
from summa3d.comm.grid import Grid

comm, how = MPI.COMM_WORLD, sys.argv[1]
grid = Grid(comm, {"x": 2, "y": 2})
for _ in range(5):
    grid["x"].all_reduce(np.ones(4))
if how == "fine":
    grid.free()
    sys.exit()
if how == "watched":
    install_abort_hook()
    watchdog = Watchdog(2)
if how == "alone":
    if comm.rank == 0:
        threading.Timer(2, os.kill, (os.getpid(), 9)).start()
        grid["y", "x"].all_reduce(np.ones(5))
    sys.exit()
if comm.rank == 3:
    time.sleep(1)
    os.kill(os.getpid(), 9) if how == "killed" else time.sleep(60)
if comm.rank == 0:
    grid["y"].all_gather(np.ones(3))
grid["x"].all_reduce(np.ones(5))
"""
CALLS = ('    grid["y"].all_gather(np.ones(3))', 'grid["x"].all_reduce(np.ones(5))', '    grid["x"].all_reduce(np.ones(4))')
ALONE = JOB.splitlines().index('        grid["y", "x"].all_reduce(np.ones(5))') + 1
TRIPLE, FIVE, FOUR = (JOB.splitlines().index(line) + 1 for line in CALLS)
GATHER = r"waits \d+\.\d s in all_gather of float64 \[·\], dim 0, sizes \[3, 3\]"
SUM = r"waits \d+\.\d s in all_reduce of float64 \[5\], sum"
WAITS = (
    rf"rank 0: {GATHER} over y \(ranks 0, 1\), call 1, for rank 1; .*job.py:{TRIPLE} ",
    rf"rank 1: {SUM} over x \(ranks 1, 3\), call 6, for rank 3; .*job.py:{FIVE} ",
    rf"rank 2: {SUM} over x \(ranks 0, 2\), call 6, for rank 0; .*job.py:{FIVE} ",
    r"rank 3: runs, and communicates nothing since all_reduce of float64 \[4\], sum over x \(ranks 1, 3\), call 5, "
    rf".*job.py:{FOUR} ",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the job, and a temporary folder of its own."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def launched(folder: Path, how: str) -> jobs.Ended:
    extra = {"TMPDIR": str(folder / "tmp")}
    return jobs.run_serial(["-m", "summa3d", "launch", "-n", "4", "job.py", how], cwd=folder, extra=extra)


def test_launch_says_who_waited_for_whom_when_a_rank_was_killed(folder: Path) -> None:
    ended = launched(folder, "killed")
    assert ended.status != 0
    for line in WAITS:
        assert re.search(line, ended.stderr), (line, ended.stderr)
    assert list((folder / "tmp").glob("summa3d-flight*")) == []
    shown = jobs.run_serial(["-m", "summa3d", "doctor", "--flight", str(folder / "flight")])
    assert shown.stdout.strip() in ended.stderr
    assert shown.stdout.count("waits") == 3


def test_a_rank_that_alone_is_the_first_to_use_an_axis_is_named(folder: Path) -> None:
    ended = launched(folder, "alone")
    assert ended.status != 0
    line = rf"rank 0: waits \d+\.\d s in the first use over y·x \(4 ranks\); .*job.py:{ALONE} "
    assert re.search(line, ended.stderr), ended.stderr


def test_a_clean_end_leaves_nothing_and_says_nothing(folder: Path) -> None:
    ended = launched(folder, "fine")
    assert ended.status == 0, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert {file.name for file in folder.iterdir()} == {"job.py", "tmp"}
    assert list((folder / "tmp").glob("summa3d-flight*")) == []


def test_without_launch_a_watchdog_keeps_the_records_and_says_where(folder: Path) -> None:
    ended = jobs.run(["job.py", "watched"], 4, cwd=folder, extra={"TMPDIR": str(folder / "tmp")})
    assert ended.status != 0
    assert ended.stderr.count("what each rank was doing: summa3d doctor --flight flight") == 1, ended.stderr
    found = flight.read_folder(folder / "flight")
    lines = "\n".join(flight.table(found, flight.ended(folder / "flight")))
    for line in WAITS:
        assert re.search(line, lines), (line, lines)


def begin(recorder: flight.Recorder, records: flight.AxisRecords, what: str) -> int:
    """Record the begin of a barrier that is called `what`."""
    route = Route("barrier", False, 0, 0)
    route.recorded = recorder.text(what, lambda: what) << 32 | recorder.text(records.label, lambda: records.label) << 16
    return records.begin(route, None, time.perf_counter(), flight.WAITED_FOR)


def test_a_file_holds_the_last_records_and_each_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, records = flight.Recorder(tmp_path / "1.flight", 1, 4), flight.AxisRecords("x (ranks 1, 3)", list)
    monkeypatch.setattr(flight, "recorder", recorder)
    what = ("all_reduce", "all_gather", "all_reduce")
    assert [recorder.text(name, lambda name=name: name) for name in what] == [0, 1, 0]
    calls = 3 * flight.KEPT + 5
    for number in range(1, calls + 1):
        begun = begin(recorder, records, what[number % 2])
        if number < calls:
            flight.end(begun, time.perf_counter())
    found = flight.read(tmp_path / "1.flight")
    assert found is not None
    assert [one.number for one in found.records] == list(range(calls - flight.KEPT + 1, calls + 1))
    assert found.waits == found.records[-1]
    assert (found.waits.what, found.waits.axis, found.waits.count) == ("all_gather", "x (ranks 1, 3)", calls)
    assert abs(found.waits.began - time.time()) < 60


def test_a_rank_that_calls_something_else_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, name in enumerate(("all_reduce", "all_reduce", "all_gather")):
        recorder = flight.Recorder(tmp_path / f"{rank}.flight", rank, 4)
        monkeypatch.setattr(flight, "recorder", recorder)
        begin(recorder, flight.AxisRecords("x (ranks 0, 1, 2, 3)", list), name)
    first, *others = flight.table(flight.read_folder(tmp_path), time.time())[1:]
    assert ", rank 2 called all_gather; " in first
    assert others[-1] == "  ranks 3: no record on this node"


def test_a_launch_ends_ranks_that_wait_for_ranks_that_have_ended_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorders, records, begun = list[flight.Recorder](), flight.AxisRecords("x (ranks 0, 1, 2)", list), list[int]()
    others = flight.AxisRecords("y (ranks 0, 1)", list)
    for rank in range(3):
        recorders.append(flight.Recorder(tmp_path / f"{rank}.flight", rank, 3))
        monkeypatch.setattr(flight, "recorder", recorders[-1])
        begun.append(begin(recorders[-1], records, "barrier"))
    elapsed = iter(range(0, 1000, 2))
    monkeypatch.setattr(follow.time, "monotonic", lambda: float(next(elapsed)))
    with subprocess.Popen(["sleep", "9"]) as job:
        alone = follow.StrandedRanks(tmp_path, 4.0)

        def looks(times: int) -> bool:
            for _ in range(times):
                alone.look(job.pid)
            return alone.ended

        assert not looks(5)  # all wait, and nobody has ended
        flight.end(begun[2], time.perf_counter())
        recorders[2].close()
        assert not looks(2)  # 0 s and 2 s
        monkeypatch.setattr(flight, "recorder", recorders[1])
        flight.end(begun[1], time.perf_counter())
        assert not looks(5)  # rank 1 is at work
        begin(recorders[1], others, "barrier")
        monkeypatch.setattr(flight, "recorder", recorders[0])
        flight.end(begun[0], time.perf_counter())
        begin(recorders[0], others, "barrier")
        assert not looks(5)  # both wait for each other
        begin(recorders[0], records, "barrier")
        assert not looks(2)  # and one for rank 2, not for long
        (tmp_path / "0.flight").rename(tmp_path / "away")
        assert not looks(5)  # a rank of another node is not seen
        (tmp_path / "away").rename(tmp_path / "0.flight")
        assert not looks(2) and looks(1)
    assert job.returncode == -signal.SIGTERM
    assert "ranks 0, 1 waited 4 s for ranks that have ended" in capsys.readouterr().err


@pytest.mark.wide
def test_a_norm_that_rank_0_alone_asks_for_ends_the_job_with_who_waited(folder: Path) -> None:
    (folder / "norm.py").write_text(
        "from mpi4py import MPI\nfrom summa3d import DistMatrix, Grid\n"
        'grid = Grid(MPI.COMM_WORLD, {"x": 2, "y": 2})\nA = DistMatrix.zeros((4, 4), grid, "m:x k:y")\n'
        "print(A.norm()) if grid.rank == 0 else None\n"
    )
    code = (
        "import sys; from summa3d.launcher import follow; follow.ALONE = 2.0; from summa3d.cli.main import main; sys.exit(main())"
    )
    ended = jobs.run_serial(["-c", code, "launch", "-n", "4", "norm.py"], fresh=True, cwd=folder, timeout=100)
    assert ended.status != 0 and "rank 0 waited 2 s for ranks that have ended: a call that they did not make" in ended.stderr
    assert re.search(r"rank 0: waits .*\n  rank 1: has ended", ended.stderr), ended.stderr


def test_who_reads_where_records_are_kept_while_another_rank_says_so_reads_it_whole(tmp_path: Path) -> None:
    """Each rank of a node writes the same file, and one that fails may read it at any time."""
    records = tmp_path / f"summa3d-flight-{os.geteuid()}-a-job"
    records.mkdir(mode=0o700)
    flight_files.keep_in(tmp_path / "a", records)
    with (records / flight_files.KEEP).open() as opened:
        flight_files.keep_in(tmp_path / "longer", records)
        assert opened.read() == str(tmp_path / "a")
    assert (records / flight_files.KEEP).read_text() == str(tmp_path / "longer")
    assert [file.name for file in records.iterdir()] == [flight_files.KEEP]
