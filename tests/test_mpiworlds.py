"""What the mpiworlds plugin promises, on a file of tests that fail in every way: each is named, with its ranks, in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

HERE = Path(__file__).parent
NOTING = """
@pytest.fixture(autouse=True)
def noted(comm):
    from pathlib import Path

    comm.Barrier()
    paths = {line.split(None, 5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
    Path(__file__).with_name(f"mapped-{os.getpid()}").write_text("\\n".join(paths))
"""
"""Each rank writes down which segments it maps: of /dev/shm, what other jobs leave there is no business of a test's."""
BURN = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
BAD = """
import os, signal, subprocess, sys, time
import pytest
from mpi4py import MPI

four = pytest.mark.mpi(sizes=(4,), timeout=250)

def meet(comm):  # a barrier that sleeps: one that polls takes a core for as long as a test lets it wait
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.02)

def test_serial():
    assert not MPI.COMM_WORLD.size > 1

def test_hears_an_interrupt():
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

@pytest.mark.mpi(sizes=(1, 4))
def test_good_first(comm, world_size, tmp_path, shared_tmp_path):
    assert comm.size == world_size
    assert comm.allreduce(1) == world_size
    folders = comm.allgather(str(tmp_path))
    assert len(set(folders)) == world_size and str(shared_tmp_path) == folders[0]

@four
def test_one_rank_fails(comm):
    assert comm.rank != 1, "only rank one"

@four
def test_all_ranks_fail(comm):
    assert object() is None, "every rank"

@four
def test_good_between(comm):
    assert comm.allreduce(1) == 4

@four
def test_takes_time(comm):
    if comm.rank == 1:
        subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)
    until = time.process_time() + 0.3 * (comm.rank == 2)
    while time.process_time() < until:
        pass

@four
def test_raises_before_barrier(comm):
    if comm.rank == 2:
        raise ValueError("left early")
    meet(comm)

@pytest.mark.mpi(sizes=(4,), timeout=3)
def test_deadlock(comm):
    if comm.rank != 3:
        comm.Barrier()
    else:
        while True:
            time.sleep(1)

@four
def test_leaves_by_exit(comm):
    if comm.rank == 1:
        os._exit(7)
    comm.Barrier()

@four
def test_segfault(comm):
    if comm.rank == 1:
        import ctypes
        ctypes.string_at(0)
    comm.Barrier()

@four
def test_mpi_error(comm):
    comm.send(1, dest=99)

@four
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure(comm):
    assert False

@four
def test_skips(comm):
    pytest.skip("not today")

@four
def test_good_last(comm):
    assert comm.allreduce(1) == 4
"""


def in_the_background() -> None:
    """Ignore what a shell's script has its jobs in the background ignore."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_pytest(
    folder: Path, *options: str, launcher: tuple[str, ...] = (), before: Callable[[], None] | None = None
) -> tuple[str, int]:
    (folder / "conftest.py").write_text('pytest_plugins = ("mpiworlds",)\n')
    (folder / "pytest.ini").write_text("[pytest]\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [*launcher, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environ, text=True, timeout=300, preexec_fn=before, **quiet)
    return done.stdout, done.returncode


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "test_bad.py").write_text(BAD)
    output, status = run_pytest(folder, "-rA", before=in_the_background)
    assert status == 1, output
    return output


def section(report: str, test: str) -> str:
    """The part of pytest's report that belongs to one failed test."""
    start = report.index(f"_ {test}[w4] _")
    end = report.find("\n_____", start)
    return report[start : end if end > 0 else None]


def test_every_test_has_its_own_outcome(report: str) -> None:
    for test in ("test_good_first[w1]", "test_good_first[w4]", "test_good_between[w4]", "test_good_last[w4]", "test_serial"):
        assert f"PASSED test_bad.py::{test}" in report, report
    assert "7 failed, 7 passed, 1 skipped, 1 xfailed" in report, report


def test_an_interrupt_is_heard_also_where_a_script_starts_pytest_in_the_background(report: str) -> None:
    assert "PASSED test_bad.py::test_hears_an_interrupt" in report, report


def test_the_processor_time_of_a_test_is_that_of_its_ranks_and_of_what_they_start(report: str) -> None:
    said = report[report.index(" processor time ") :]
    seconds = {test: float(many) for many, test in re.findall(r"^([\d.]+)s test_bad\.py::(\S+)$", said, re.MULTILINE)}
    assert seconds["test_takes_time[w4]"] >= 0.6 and len(seconds) == 8
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


def test_so_is_that_of_programs_that_are_forked(request: pytest.FixtureRequest) -> None:
    if jobs.WARM_VARIABLE not in os.environ:
        pytest.skip("no program is forked in this session")
    assert jobs.run_serial(["-c", BURN]).status == 0
    lines = Path(os.environ[jobs.WARM_VARIABLE]).with_name("times").read_text().splitlines()
    assert max(float(line.partition(" ")[0]) for line in lines if line.endswith(f" {request.node.nodeid}")) >= 0.3


def test_a_failure_names_its_rank(report: str) -> None:
    text = section(report, "test_one_rank_fails")
    assert "--- rank 1 of 4 ---" in text
    assert "only rank one" in text
    assert text.count("AssertionError: only rank one") == 1


def test_equal_failures_of_all_ranks_are_told_once(report: str) -> None:
    text = section(report, "test_all_ranks_fail")
    assert "--- ranks 0, 1, 2, 3 of 4 ---" in text
    assert text.count("AssertionError: every rank") == 1


def test_a_rank_that_raises_before_a_barrier_is_told_with_the_stacks_of_the_others(report: str) -> None:
    text = section(report, "test_raises_before_barrier")
    assert "ValueError: left early" in text
    assert "ranks 0, 1, 3 of 4 had not finished" in text
    assert 'test_bad.py", line' in text and "in test_raises_before_barrier" in text


def test_a_deadlock_fails_by_its_timeout_with_every_stack(report: str) -> None:
    text = section(report, "test_deadlock")
    assert "timeout: after 3 s" in text
    assert "ranks 0, 1, 2 of 4 had not finished" in text and "rank 3 of 4 had not finished" in text
    assert text.count("in test_deadlock") == 2


@pytest.mark.parametrize("test", ["test_leaves_by_exit", "test_segfault"])
def test_a_rank_that_dies_fails_the_test_it_was_in(report: str, test: str) -> None:
    assert "the job ended in this test" in section(report, test)


def test_a_crash_shows_the_stack_of_the_rank_that_crashed(report: str) -> None:
    assert "Segmentation fault" in section(report, "test_segfault")


def test_an_mpi_error_is_an_exception(report: str) -> None:
    assert "invalid rank" in section(report, "test_mpi_error").lower()


@pytest.fixture(params=["with", pytest.param("without", marks=pytest.mark.wide)])
def beside(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Options of a pytest with pytest-mpi, whose marker and option have the same names, and without it."""
    pytest.importorskip("pytest_mpi")
    return () if request.param == "with" else ("-p", "no:pytest_mpi")


def test_worlds_and_keywords_select(tmp_path: Path, beside: tuple[str, ...]) -> None:
    (tmp_path / "test_bad.py").write_text(BAD)
    output, status = run_pytest(tmp_path, *beside, "--worlds", "1", "-k", "good_first", "-v")
    assert status == 0, output
    assert "test_good_first[w1] PASSED" in output and "1 passed" in output, output


def test_only_mpi_leaves_out_tests_that_use_none(tmp_path: Path) -> None:
    pytest.importorskip("pytest_mpi")
    (tmp_path / "test_bad.py").write_text(BAD)
    output, status = run_pytest(tmp_path, "--worlds", "1", "-k", "good_first or serial", "--only-mpi", "-rs")
    assert status == 0 and "1 passed, 1 skipped" in output and "test does not use mpi" in output, output


def test_it_leaves_no_shared_memory_behind(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir() or not Path("/proc/self/maps").exists():
        pytest.skip("no /dev/shm, or no way to know what a process maps of it")
    (tmp_path / "test_bad.py").write_text(BAD.replace("comm.Barrier()", "meet(comm)") + NOTING)
    run_pytest(tmp_path, "-k", "deadlock")
    noted = [file.read_text().splitlines() for file in tmp_path.glob("mapped-*")]
    assert len(noted) == 4
    left = {segment for segments in noted for segment in segments if Path(segment).exists()}
    assert not left


def guest_launcher(ranks: int) -> tuple[str, ...]:
    from summa3d.launcher.runtime import find_launcher, loaded_runtime

    return (*find_launcher(loaded_runtime()).command, "-n", str(ranks))


@pytest.fixture
def oversubscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    from summa3d.launcher.runtime import loaded_runtime, rank_environment

    for name, value in rank_environment(loaded_runtime().vendor, 5, 1)[0].items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("oversubscribed")
def test_a_users_own_mpiexec_runs_what_fits_and_reports_other_ranks_failures(tmp_path: Path, beside: tuple[str, ...]) -> None:
    (tmp_path / "test_bad.py").write_text(BAD)
    output, status = run_pytest(tmp_path, *beside, "--with-mpi", "-k", "good or one_rank or serial", launcher=guest_launcher(5))
    assert status != 0
    assert output.count("test session starts") == 1, output
    assert "--- rank 1: test_bad.py::test_one_rank_fails[w4] (call) failed" in output, output
    assert "5 passed, 1 skipped" in output, output  # rank 0's own count: the serial test is left to a plain pytest


@pytest.mark.usefixtures("oversubscribed")
def test_a_deadlock_under_a_users_own_mpiexec_ends_with_stacks(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(BAD)
    began = time.monotonic()
    output, status = run_pytest(tmp_path, "--with-mpi", "-k", "deadlock", launcher=guest_launcher(4))
    assert status != 0
    assert time.monotonic() - began < 200
    assert output.count("test_deadlock[w4] has not finished for 3 s") == 4, output


@pytest.mark.usefixtures("oversubscribed")
def test_a_rank_that_leaves_a_test_alone_ends_a_users_own_mpiexec(tmp_path: Path) -> None:
    """Long before the test's timeout of 250 s: the others wait in a barrier for the rank whose test has failed."""
    (tmp_path / "test_bad.py").write_text(BAD)
    began = time.monotonic()
    output, status = run_pytest(tmp_path, "--with-mpi", "-k", "good_first or raises or good_last", launcher=guest_launcher(5))
    assert status != 0
    assert time.monotonic() - began < 200
    assert "ValueError: left early" in output, output
    assert "--- rank 2: 10 s later, other ranks are still in test_bad.py::test_raises_before_barrier[w4]." in output, output
