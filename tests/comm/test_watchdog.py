"""A rank that is stopped, or asleep where nobody lets it go on, ends the job and is named; one that is busy does not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from small_runs import assignments, write_corpus

from summa3d.comm.health import flight, processes, watchdog
from summa3d.comm.health.watchdog import ASLEEP, STOPPED, WAITS, WORKS, Look, kind_of
from summa3d.errors import ConfigError
from summa3d.launcher import follow
from summa3d.node_support import watchdog_seconds

LIMIT = 1.0
BEYOND = 100.0  # many times what the end of a job takes, and less than a rank that nobody ends would wait
"""Seconds beyond the limit in which a job must have ended."""
PROGRAM = str(Path(__file__).parents[1] / "stopped_rank.py")
PRODUCT = ("gemm", "--m", "64", "--n", "64", "--k", "64")
BENCH = ("bench", "gemm", "--m", "64", "--n", "64", "--k", "64")


@contextlib.contextmanager
def process(*command: str) -> Iterator[int]:
    """A process of its own, killed in the end."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def seen(process: int, number: int = 0, waits: bool = False, before: int = 0, elapsed: float = 0.3) -> str:
    """Return what a rank of this process does, as two looks see it."""
    state = processes.state_of(process)
    assert state is not None
    time.sleep(elapsed)
    return kind_of(flight.Neighbour(1, process, number, waits), Look(before, state.seconds, 0.0), elapsed)


def test_a_stopped_a_sleeping_a_waiting_and_a_busy_rank_are_told_apart() -> None:
    with process("sh", "-c", "echo; exec sleep 60") as sleeps:
        assert seen(sleeps) == ASLEEP
        assert seen(sleeps, waits=True) == WAITS
        assert seen(sleeps, number=5, before=4) == WORKS
        os.kill(sleeps, signal.SIGSTOP)
        assert seen(sleeps, waits=True) == STOPPED
        os.kill(sleeps, signal.SIGCONT)
        assert seen(sleeps) == ASLEEP
    with process("sh", "-c", "echo; while :; do :; done") as works:
        assert seen(works) == WORKS
    assert processes.state_of(works) is None


def test_a_silent_rank_is_named_at_the_limit_and_one_that_goes_on_is_forgotten() -> None:
    looks = watchdog.NodeWatch(LIMIT)
    looks.seconds = 0.0  # its own thread looks at nothing
    with process("sh", "-c", "echo; exec sleep 60") as sleeps, process("sh", "-c", "echo; while :; do :; done") as works:
        ranks = [flight.Neighbour(0, works, 7, False), flight.Neighbour(1, sleeps, 7, False)]
        within = watchdog.PATIENCE / 3
        assert looks.look(ranks, within) == {}
        time.sleep(0.1)
        assert looks.look(ranks, within) == {}
        assert looks.look([ranks[0], ranks[1]._replace(number=8)], within) == {}
        assert [looks.look([ranks[0], ranks[1]._replace(number=8)], within) for _ in range(2)] == [{}, {}]
        assert looks.look([ranks[0], ranks[1]._replace(number=8)], within) == {ranks[1]._replace(number=8): ASLEEP}


def test_a_job_of_which_every_rank_waits_is_ended_and_not_one_of_which_a_rank_works() -> None:
    looks = watchdog.NodeWatch(LIMIT)
    looks.seconds = 0.0
    with process("sh", "-c", "echo; while :; do :; done") as one, process("sh", "-c", "echo; while :; do :; done") as other:
        ranks = [flight.Neighbour(0, one, 7, True), flight.Neighbour(1, other, 7, False)]
        assert [looks.look(ranks, 1.0) for _ in range(5)] == [{}] * 5
        ranks[1] = ranks[1]._replace(waits=True)
        assert [len(looks.look(ranks, 1.0)) for _ in range(3)] == [0, 0, 2]


def test_launch_kills_what_stays_stopped_and_names_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with process("sh", "-c", "PMI_SIZE=4 PMI_RANK=2 sleep 60 & echo; wait") as launcher:
        (rank,) = processes.descendants(launcher)
        while processes.launched_as(processes.environment_of(rank)) is None:  # the shell's fork has not begun `sleep` yet
            time.sleep(0.01)
        looks = follow.Stopped(LIMIT)
        looks.look(launcher)
        os.kill(rank, signal.SIGSTOP)
        while (state := processes.state_of(rank)) is not None and state.letter != processes.STOPPED:
            time.sleep(0.01)
        for _ in range(3):  # the time for which launch itself was stopped does not count
            looks._last -= 1000.0
            looks.look(launcher)
        assert processes.state_of(rank) is not None
        looks._last -= 2 * follow.LOOK_EVERY
        looks.look(launcher)
        while processes.state_of(rank) is not None:
            time.sleep(0.01)
    said = capsys.readouterr().err
    assert said == f"summa3d launch: rank 2 of 4 (process {rank}) has been stopped for 1 s; the job ends\n"


def test_the_limit_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUMMA3D_WATCHDOG", raising=False)
    assert watchdog_seconds() == 600 and watchdog_seconds(7.0) == 7
    monkeypatch.setenv("SUMMA3D_WATCHDOG", "0")
    assert watchdog_seconds(7.0) == 0
    for text in ("soon", "-1", "nan", "1e300"):
        monkeypatch.setenv("SUMMA3D_WATCHDOG", text)
        with pytest.raises(ConfigError, match=f"SUMMA3D_WATCHDOG is '{text}'; it takes seconds"):
            watchdog_seconds()


def disturbed(folder: Path, at: str, *arguments: str, launched: bool = False) -> tuple[jobs.Ended, float]:
    """A job of two ranks, one of which stops, waits for a lock or works; how it ended, and seconds since then."""
    extra = {"AT": at, "AT_FILE": str(folder / "at"), "SUMMA3D_WATCHDOG": str(LIMIT), "TMPDIR": str(folder)}
    if launched:  # it looks at its children, and a fork is its server's
        ended = jobs.run_serial(["-m", "summa3d", "launch", "-n", "2", PROGRAM, *arguments], extra=extra, cwd=folder, fresh=True)
    else:
        ended = jobs.run([PROGRAM, *arguments], 2, extra=extra, cwd=folder)
    return ended, time.time() - float((folder / "at").read_text())


def training(folder: Path, **changes: object) -> list[str]:
    corpus = write_corpus(folder / "corpus.txt")
    settings = assignments(corpus, grid__y=2, train__steps=2, train__keep=0, **changes)
    return ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)]]


def named(ended: jobs.Ended, rank: int, what: str) -> bool:
    return re.search(rf"rank {rank}( of 2)? \(process \d+\) (is|has been) {what}", ended.stderr) is not None


@pytest.mark.parametrize(
    ("how", "function"),
    [
        ("stop", "summa3d.train.data.tokens prepare"),
        pytest.param("lock", "summa3d.train.data.tokens prepare", marks=pytest.mark.wide),
        pytest.param("stop", "summa3d.train.loop take_step", marks=pytest.mark.wide),
        pytest.param("lock", "summa3d.train.loop take_step", marks=pytest.mark.wide),
        pytest.param("stop", "summa3d.train.loop finish", marks=pytest.mark.wide),
        pytest.param("lock", "summa3d.train.loop finish", marks=pytest.mark.wide),
    ],
)
def test_a_rank_that_is_silent_in_training_is_named_soon_after_the_limit(tmp_path: Path, how: str, function: str) -> None:
    ended, seconds = disturbed(tmp_path, f"1 {how} {function}", *training(tmp_path))
    assert ended.status != 0 and seconds < LIMIT + BEYOND, (seconds, ended.stderr)
    if how == "stop":
        assert named(ended, 1, "stopped"), ended.stderr
    else:
        assert "in disturb" in ended.stderr, ended.stderr
    assert not list(tmp_path.glob("summa3d-flight-*/none"))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("summa3d.cli.gemm measure", PRODUCT),
        ("summa3d.bench.products run_benchmark", BENCH),
    ],
)
@pytest.mark.parametrize("how", ["stop", "lock"])
def test_a_rank_that_is_silent_in_another_command_is_named(
    tmp_path: Path, how: str, function: str, arguments: tuple[str, ...]
) -> None:
    ended, seconds = disturbed(tmp_path, f"0 {how} {function}", *arguments)
    assert ended.status != 0 and seconds < LIMIT + BEYOND, (seconds, ended.stderr)
    assert named(ended, 0, "stopped" if how == "stop" else "asleep"), ended.stderr


@pytest.mark.wide
@pytest.mark.parametrize("place", ["", "summa3d.cli.main _yield_while_waiting", "summa3d.cli.gemm measure"])
def test_under_launch_a_stopped_rank_is_named_from_its_first_line_on(tmp_path: Path, place: str) -> None:
    ended, seconds = disturbed(tmp_path, f"1 stop {place}", *PRODUCT, launched=True)
    assert ended.status != 0 and seconds < LIMIT + BEYOND, (seconds, ended.stderr)
    assert named(ended, 1, "stopped"), ended.stderr
    assert not list(tmp_path.glob("summa3d-flight-*"))


@pytest.mark.wide
def test_a_rank_stopped_while_it_generates_is_named(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    words = [part for one in assignments(corpus, train__steps=1) for part in ("--set", one)]
    trained = jobs.run_serial(["-m", "summa3d", "train", "demo", "--run", "run", *words], cwd=tmp_path)
    assert trained.status == 0, trained.stderr
    asked = ("generate", "run", "--prompt", "a", "--tokens", "4")
    ended, seconds = disturbed(tmp_path, "1 stop summa3d.train.generate sample", *asked)
    assert ended.status != 0 and seconds < LIMIT + BEYOND, (seconds, ended.stderr)
    assert named(ended, 1, "stopped"), ended.stderr


@pytest.mark.wide
def test_a_rank_that_works_in_one_long_call_while_others_wait_does_not_end_the_job(tmp_path: Path) -> None:
    ended, seconds = disturbed(tmp_path, "0 work summa3d.train.data.tokens prepare", *training(tmp_path))
    assert ended.status == 0, ended.stderr
    assert seconds > LIMIT + watchdog.PATIENCE + 2


SCRIPT = """
import sys
from mpi4py import MPI
from summa3d import Grid
comm, how = MPI.COMM_WORLD, sys.argv[1]
grid = Grid(comm, {"x": comm.size})
if comm.rank == 1 and how == "raise":
    raise ValueError("broken")
if comm.rank == 1 and how == "exit":
    sys.exit(3)
if how != "end":
    comm.Barrier()
try:
    sys.exit(4)
except SystemExit:
    pass
sys.exit(0)
"""


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "uncaught exception on rank 1 of 3:\nTraceback"),
        ("exit", 3, "rank 1 of 3 exits with status 3, and so the job ends\n"),
        ("end", 0, ""),
    ],
)
def test_in_a_script_an_exception_and_a_status_of_one_rank_end_the_job(tmp_path: Path, how: str, status: int, said: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = jobs.run(["script.py", how], 3, cwd=tmp_path)
    assert ended.status == status, ended.stderr
    assert ended.stderr.startswith(said) and ended.stderr.count("Traceback") == (how == "raise"), ended.stderr
    assert bool(ended.stderr) == bool(said)


SLEEPS = """
import threading, time
import numpy as np
from pathlib import Path
from mpi4py import MPI
from summa3d import Grid
comm = MPI.COMM_WORLD
grid = Grid(comm, {"x": comm.size})
if comm.rank == 0:
    Path("at").write_text(str(time.time()))
    grid["x"].all_reduce(np.ones(1))
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


def test_a_script_that_hangs_is_ended_where_the_variable_is_set(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLEEPS)
    ended = jobs.run(["script.py"], 2, extra={"SUMMA3D_WATCHDOG": str(LIMIT), "TMPDIR": str(tmp_path)}, cwd=tmp_path)
    assert ended.status != 0 and time.time() - float((tmp_path / "at").read_text()) < LIMIT + BEYOND, ended.stderr
    assert named(ended, 1, "asleep outside"), ended.stderr


@pytest.mark.mpi(sizes=(2,))
def test_pytest_is_left_alone(make_grid) -> None:  # type: ignore[no-untyped-def]
    before = sys.excepthook, sys.exit
    make_grid(x=2)
    assert (sys.excepthook, sys.exit) == before


def test_a_script_may_opt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from summa3d.comm.health.failure import _is_left_alone

    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "_pytest"})
    assert not _is_left_alone()
    monkeypatch.setenv("SUMMA3D_ABORT", "no")
    assert _is_left_alone()
