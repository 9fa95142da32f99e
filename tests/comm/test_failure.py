"""A failure on any rank ends the job soon, non-zero, and is told once; ranks that must agree say where they do not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import pytest

from summa3d.errors import AgreementError, LayoutError, Summa3dError

RANKS = 8
SOON = 200.0  # less than a rank that nobody ends would sleep: seconds within which a failed job must have ended
HOOK = """
import os, sys, threading, time
from pathlib import Path
from mpi4py import MPI
from summa3d.comm.health.failure import install_abort_hook
from summa3d.comm.health.watchdog import Watchdog
from summa3d.errors import LayoutError
install_abort_hook()
comm = MPI.COMM_WORLD
comm.Barrier()
Path(f"ready{comm.rank}").write_text(f"{os.getpid()} {time.time()}")
"""


def run_job(folder: Path, body: str) -> tuple[jobs.Ended, float]:
    """Run HOOK and `body` on every rank; return how the job ended and the seconds from its first barrier to its end."""
    (folder / "job.py").write_text(HOOK + body)
    ended = jobs.run(["job.py"], RANKS, cwd=folder)
    now = time.time()
    began = max(float(file.read_text().split()[1]) for file in folder.glob("ready*"))
    return ended, now - began


@pytest.mark.parametrize("rank", [0, 5])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_once(tmp_path: Path, rank: int) -> None:
    ended, seconds = run_job(tmp_path, f"if comm.rank == {rank}:\n    raise ValueError('broken')\ncomm.Barrier()\n")
    assert ended.status != 0
    assert seconds < SOON
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr
    assert ended.stderr.count("ValueError: broken") == 1
    assert f"uncaught exception on rank {rank} of {RANKS}" in ended.stderr


def test_an_exception_on_all_ranks_is_told_once_by_rank_0(tmp_path: Path) -> None:
    ended, seconds = run_job(tmp_path, "raise ValueError('broken')\n")
    assert ended.status != 0
    assert seconds < SOON
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr
    assert "uncaught exception on rank 0" in ended.stderr


def test_an_exception_in_a_thread_ends_the_job(tmp_path: Path) -> None:
    body = """
def work():
    raise ValueError("broken")
if comm.rank == 3:
    threading.Thread(target=work).start()
comm.Barrier() if comm.rank != 3 else time.sleep(600)
"""
    ended, seconds = run_job(tmp_path, body)
    assert ended.status != 0
    assert seconds < SOON
    assert ended.stderr.count("ValueError: broken") == 1, ended.stderr


def test_a_users_error_on_all_ranks_is_its_message_once_without_traceback(tmp_path: Path) -> None:
    ended, seconds = run_job(tmp_path, "raise LayoutError('batch 6 cannot be split')\n")
    assert ended.status != 0
    assert seconds < SOON
    assert ended.stderr.count("LayoutError: batch 6 cannot be split") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


INTERRUPTS = """
def interrupt(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_while_a_rank_waits_to_report_an_error_is_reported_in_place_of_it(tmp_path: Path) -> None:
    """As Ctrl-C, which ends a rank by way of another's first; later ones change nothing."""
    body = f"""
import signal
{INTERRUPTS}
if comm.rank == 5:
    for after in 0.1, 0.2, 0.25:
        threading.Thread(target=interrupt, args=(after,), daemon=True).start()
    raise LayoutError("broken")
time.sleep(600)
"""
    ended, seconds = run_job(tmp_path, body)
    assert ended.status == 130 and seconds < SOON, ended
    assert ended.stderr.strip() == f"interrupted on rank 5 of {RANKS}"


def test_an_interrupt_just_before_a_rank_claims_the_report_loses_none(tmp_path: Path) -> None:
    body = """
import signal
from summa3d import preemption
ignore = preemption.ignore_interrupts
def interrupted():
    preemption.ignore_interrupts = ignore
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
preemption.ignore_interrupts = interrupted
if comm.rank == 0:
    raise LayoutError("broken")
time.sleep(600)
"""
    ended, _ = run_job(tmp_path, body)
    assert ended.status == 130 and ended.stderr.strip() == f"interrupted on rank 0 of {RANKS}"


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_rank_that_fails_since_another_was_interrupted_leaves_it_to_that_one(tmp_path: Path, axis: str) -> None:
    """Also over an axis without the interrupted rank, which those that failed first have broken."""
    body = f"""
import signal
from summa3d import Grid
{INTERRUPTS}
with Grid(comm, {{"x": 4, "y": 2}}) as grid:
    if comm.rank == 1:
        threading.Thread(target=interrupt, args=(1.0,), daemon=True).start()
    while True:
        grid["x"].barrier()
        grid["{axis}"].barrier()
"""
    ended, seconds = run_job(tmp_path, body)
    assert ended.status == 130 and seconds < SOON, ended
    assert ended.stderr.startswith(f"interrupted on rank 1 of {RANKS}\n") and "Error" not in ended.stderr, ended.stderr


def test_a_hook_that_shows_what_the_one_before_it_wrote_has_something_to_show(tmp_path: Path) -> None:
    """As torch.distributed's, which is put between ours: that of a launched script, and that of a grid."""
    body = """
import contextlib, io
from summa3d.comm.health.failure import prepare_for_failure
before = sys.excepthook
def between(*error):
    with contextlib.redirect_stderr(io.StringIO()) as written:
        before(*error)
    sys.stderr.write(f"[shown] {written.getvalue()}")
sys.excepthook = between
prepare_for_failure(comm)
raise LayoutError('batch 6 cannot be split')
"""
    ended, seconds = run_job(tmp_path, body)
    assert ended.status != 0 and seconds < SOON
    assert ended.stderr.count("[shown] LayoutError: batch 6 cannot be split") == 1, ended.stderr


def test_an_error_of_mpi_itself_ends_the_job(tmp_path: Path) -> None:
    ended, seconds = run_job(tmp_path, "if comm.rank == 2:\n    comm.send(1, dest=99)\ncomm.Barrier()\n")
    assert ended.status != 0
    assert seconds < SOON
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(HOOK + "comm.Barrier() if comm.rank != 6 else time.sleep(600)\n")
    job = jobs.start(["job.py"], RANKS, cwd=tmp_path)
    ready = tmp_path / "ready6"
    deadline = time.monotonic() + SOON
    while not (ready.exists() and ready.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(ready.read_text().split()[0]), signal.SIGKILL)
    ended = jobs.finish(job, timeout=SOON)
    assert ended.status != 0
    assert ended.seconds < SOON


def test_a_hang_ends_with_the_stacks_of_every_stuck_rank(tmp_path: Path) -> None:
    body = """
def stuck_here():
    comm.Barrier()
with Watchdog(2):
    stuck_here() if comm.rank != 4 else time.sleep(600)
"""
    ended, seconds = run_job(tmp_path, body)
    assert ended.status != 0
    assert seconds < SOON
    assert ended.stderr.count("no progress for 2 s") == RANKS, ended.stderr
    assert ended.stderr.count("in stuck_here") == RANKS - 1, ended.stderr


def test_a_watchdog_that_is_touched_stays_quiet(tmp_path: Path) -> None:
    body = """
with Watchdog(1.5) as watchdog:
    for _ in range(8):
        time.sleep(0.3)
        watchdog.touch()
time.sleep(2)
"""
    (tmp_path / "job.py").write_text(HOOK + body)
    ended = jobs.run_serial(["job.py"], cwd=tmp_path)
    assert ended.status == 0, ended.stderr
    assert ended.stderr == ""


def test_without_peers_an_exception_is_the_usual_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(HOOK + "raise ValueError('broken')\n")
    ended = jobs.run_serial(["job.py"], cwd=tmp_path)
    assert ended.status == 1
    assert ended.stderr.startswith("Traceback (most recent call last)")
    assert ended.stderr.count("ValueError: broken") == 1


def raised_by(action: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


@pytest.mark.mpi(sizes=(4,))
def test_agree_on_error_raises_the_lowest_ranks_error_everywhere(comm: Any) -> None:
    from summa3d.comm.health.agreement import agree_on_error

    agree_on_error(comm, None)
    mine = LayoutError(f"from {comm.rank}") if comm.rank in (1, 3) else None
    error = raised_by(lambda: agree_on_error(comm, mine))
    assert type(error) is LayoutError
    assert str(error) == "from 1\n  On ranks 1, 3 of 4 only."


@pytest.mark.mpi(sizes=(3,))
def test_agree_on_error_names_no_rank_where_all_fail_alike(comm: Any) -> None:
    from summa3d.comm.health.agreement import agree_on_error

    error = raised_by(lambda: agree_on_error(comm, Summa3dError("all of us")))
    assert type(error) is Summa3dError
    assert str(error) == "all of us"


@pytest.mark.mpi(sizes=(2,))
def test_agree_on_error_carries_errors_that_need_more_than_a_message(comm: Any) -> None:
    from summa3d.comm.health.agreement import agree_on_error

    mine = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte") if comm.rank == 1 else None
    error = raised_by(lambda: agree_on_error(comm, mine))
    assert isinstance(error, UnicodeError)
    assert "bad byte" in str(error)


@pytest.mark.mpi(sizes=(4,))
def test_check_agreement_names_the_ranks_and_what_they_passed(comm: Any) -> None:
    from summa3d.comm.health.agreement import check_agreement

    check_agreement(comm, "all_gather", {"shape": (3, 4), "dtype": "float32"})
    shape = (3, 5) if comm.rank == 2 else (3, 4)
    error = raised_by(lambda: check_agreement(comm, "all_gather", {"shape": shape, "dtype": "float32"}))
    assert type(error) is AgreementError
    assert "shape: (3, 4) on ranks 0, 1, 3; (3, 5) on rank 2" in str(error)
    assert "dtype" not in str(error)


@pytest.mark.mpi(sizes=(4,))
def test_check_agreement_tells_different_collectives_apart_alike_on_all_ranks(comm: Any) -> None:
    from summa3d.comm.health.agreement import check_agreement

    name = "broadcast" if comm.rank == 3 else "all_reduce"
    error = raised_by(lambda: check_agreement(comm, name, {}))
    assert "operation: all_reduce on ranks 0, 1, 2; broadcast on rank 3" in str(error)
    assert len(set(comm.allgather(str(error)))) == 1
