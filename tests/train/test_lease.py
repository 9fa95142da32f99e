"""The lease of a run folder: one job at a time, whatever happens to the one before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
from small_runs import assignments, metrics_of, shared_corpus, small_config, write_corpus

from summa3d.cli import train as command
from summa3d.errors import ConfigError
from summa3d.train import config as configuration
from summa3d.train import lease
from summa3d.train.lease import Lease
from summa3d.train.loop import train

STEPS = 60


def of_another(folder: Path, **changes: Any) -> Path:
    """A lease that a job of another host, or what `changes` says, has left."""
    path = folder / lease.NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "job": "7", "since": "then", "heartbeat": 0.2, **changes}))
    return path


def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_second_job_is_refused_until_the_first_gives_the_lease_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with Lease() as first:
        first.take(tmp_path)
        with Lease() as second, pytest.raises(ConfigError) as raised:
            second.take(tmp_path)
        message = str(raised.value)
        assert f"process {os.getpid()} on {os.uname().nodename} (job 4711) since 2" in message and "\n" not in message
        assert (tmp_path / lease.NAME).exists()
    assert not (tmp_path / lease.NAME).exists()
    with pytest.raises(ZeroDivisionError), Lease() as third:
        third.take(tmp_path)
        raise ZeroDivisionError
    assert not (tmp_path / lease.NAME).exists()


@pytest.mark.parametrize("flock", [True, False])
def test_a_lease_that_a_killed_process_left_on_this_host_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: bool
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    of_another(tmp_path, host=os.uname().nodename, pid=gone.pid, heartbeat=1000)
    if not flock:
        without_flock(monkeypatch)
    with Lease() as mine:
        mine.take(tmp_path)
        assert json.loads((tmp_path / lease.NAME).read_text())["pid"] == os.getpid()
        if not flock:  # the process runs, and that is all that is known
            with pytest.raises(ConfigError, match="is in use"), Lease() as other:
                Beats(tmp_path / lease.NAME).during(lambda: other.take(tmp_path))


class Beats:
    """The heartbeat of a job on another host."""

    def __init__(self, path: Path) -> None:
        self.path, self.ended = path, threading.Event()

    def during(self, action: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._beat)
        thread.start()
        try:
            action()
        finally:
            self.ended.set()
            thread.join()

    def _beat(self) -> None:
        while not self.ended.wait(0.05):
            os.utime(self.path)


def test_the_lease_of_another_host_is_left_once_it_misses_two_heartbeats(tmp_path: Path) -> None:
    path, said = of_another(tmp_path), []
    with Lease() as mine, pytest.raises(ConfigError, match=r"is in use by process 1 on elsewhere \(job 7\) since then"):
        Beats(path).during(lambda: mine.take(tmp_path, said.append))
    left = os.stat(of_another(tmp_path)).st_mtime_ns
    with Lease() as mine:
        mine.take(tmp_path, said.append)
        assert path.stat().st_mtime_ns > left
    assert len(said) == 2 and "waiting for its heartbeat" in said[1]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("flock", [True, False])
def test_of_many_that_come_at_once_one_gets_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: bool, left: bool
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT", 0.1)
    if not flock:
        without_flock(monkeypatch)
    if left:
        os.utime(of_another(tmp_path), (1, 1))
    leases, refused, start = [Lease() for _ in range(8)], [], threading.Barrier(8)

    def take(one: Lease) -> None:
        start.wait()
        try:
            one.take(tmp_path)
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(one,)) for one in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    for one in leases:
        one.__exit__()
    assert not [*tmp_path.iterdir()]


def test_a_claim_that_a_killed_job_left_is_swept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_flock(monkeypatch)
    for path in (of_another(tmp_path), tmp_path / "lease.claim"):
        path.touch()
        os.utime(path, (1, 1))
    with Lease() as mine:
        mine.take(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [lease.NAME]


@pytest.mark.parametrize("written", [0, 5])
@pytest.mark.parametrize("flock", [True, False])
@pytest.mark.parametrize("left", [True, False])
def test_a_lease_for_which_the_disk_has_no_room_is_not_left_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, flock: bool, left: bool
) -> None:
    if not flock:
        without_flock(monkeypatch)
    if left:
        os.utime(of_another(tmp_path), (1, 1))
    write = os.pwrite

    def on_a_full_disk(file: int, text: bytes, at: int) -> int:
        if not written:
            raise OSError(errno.ENOSPC, "no space left")
        return write(file, text[:written], at)

    with monkeypatch.context() as full, Lease() as refused, pytest.raises(OSError) as raised:
        full.setattr(os, "pwrite", on_a_full_disk)
        refused.take(tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]
    with Lease() as mine:
        mine.take(tmp_path)


def test_a_job_that_stood_still_ends_and_leaves_the_lease_to_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT", 0.02)
    with Lease() as mine:
        mine.take(tmp_path)
        mine.check()
        of_another(tmp_path)
        deadline = time.monotonic() + 120
        with pytest.raises(ConfigError, match="taken over by process 1 on elsewhere"):
            while time.monotonic() < deadline:
                mine.check()
                time.sleep(0.01)
    assert json.loads((tmp_path / lease.NAME).read_text())["host"] == "elsewhere"


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("how", ["new", "resume", "overwrite"])
def test_every_rank_refuses_a_folder_in_use(comm: Any, shared_tmp_path: Path, how: str) -> None:
    settings = small_config(shared_corpus(comm, shared_tmp_path), grid__y=2, train__steps=1)
    run = shared_tmp_path / "run"
    with Lease() as held:
        if comm.rank == 0:
            run.mkdir()
            held.take(run)
        comm.Barrier()
        with pytest.raises(ConfigError) as raised:
            train(settings, comm, run, resume=how == "resume", overwrite=how == "overwrite")
        assert len({*comm.allgather(str(raised.value))}) == 1 and "\n" not in str(raised.value)
        assert not (run / "metrics.jsonl").exists()
        comm.Barrier()
    assert train(settings, comm, run)["steps_taken"] == 1
    comm.Barrier()
    assert not (run / lease.NAME).exists()


@pytest.mark.parametrize("how", [[], ["--start-or-resume"], ["--overwrite"]])
def test_a_folder_in_use_is_refused_before_a_grid_is_chosen(tmp_path: Path, monkeypatch: Any, how: list[str]) -> None:
    from summa3d.cli.main import parser_of

    write_corpus(tmp_path / "corpus.txt")
    monkeypatch.setattr(configuration, "load_for", lambda *arguments: pytest.fail("a grid is chosen"))
    words = [part for one in assignments(tmp_path / "corpus.txt") for part in ("--set", one)]
    args = parser_of("train").parse_args(["demo", "--run", str(tmp_path), *words, *how])
    with Lease() as held:
        held.take(tmp_path)
        with pytest.raises(ConfigError, match="is in use by process"):
            command.run(args)
    lease.check_free(tmp_path)
    of_another(tmp_path)
    lease.check_free(tmp_path)  # what runs on another host is found when the lease is taken
    of_another(tmp_path, host=socket.gethostname(), pid=None)
    lease.check_free(tmp_path)


def run_of(folder: Path, *more: str, **changes: object) -> subprocess.Popen[str]:
    words = [part for one in assignments(folder / "corpus.txt", **changes) for part in ("--set", one)]
    command = [jobs.python(), "-m", "summa3d", "train", "demo", "--run", str(folder / "run"), *words, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.mark.parametrize("pairs", [2, pytest.param(50, marks=pytest.mark.wide)])
def test_of_two_runs_started_at_once_in_one_folder_one_goes_on(tmp_path: Path, pairs: int) -> None:
    write_corpus(tmp_path / "corpus.txt")
    for _ in range(pairs):
        both = [run_of(tmp_path, "--overwrite", train__steps=STEPS, train__evaluate_every=0) for _ in range(2)]
        ends = [(*one.communicate(timeout=300), one.returncode) for one in both]
        assert sorted(status for *_, status in ends) == [0, 1], ends
        refused = next(error for _, error, status in ends if status)
        assert refused.startswith("ConfigError: ") and "is in use by process" in refused and refused.count("\n") == 1
        assert [line["step"] for line in metrics_of(tmp_path)] == [*range(1, STEPS + 1)]
        assert not (tmp_path / "run" / lease.NAME).exists()


def test_the_lease_of_a_run_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    killed = run_of(tmp_path, train__steps=100_000, train__checkpoint_every=100)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "checkpoints" / "step-100").exists():
            assert time.monotonic() < deadline and killed.poll() is None, "the run did not get there"
            time.sleep(0.01)
        holder = json.loads((tmp_path / "run" / lease.NAME).read_text())["pid"]
    finally:
        os.kill(holder, signal.SIGKILL)
        killed.communicate(timeout=300)
    assert (tmp_path / "run" / lease.NAME).exists()
    began = time.monotonic()
    resumed = run_of(tmp_path, "--resume", train__steps=100_000)
    while json.loads((tmp_path / "run" / lease.NAME).read_text() or "{}").get("pid") in (holder, None):
        assert time.monotonic() - began < 300 and resumed.poll() is None
        time.sleep(0.01)
    resumed.kill()
    _, said = resumed.communicate(timeout=300)
    assert "waiting" not in said
