"""Ctrl-C in a terminal, and signals before anything can hear them: a run saves and ends once, and other commands end at once.

And signals to anybody at every stage of a run, in a mount namespace of its own (signalled.py): root, and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import devices
import jobs
import pytest
from small_runs import assignments, metrics_of, write_corpus

from summa3d.comm.health.processes import children, descendants, environment_of, launched_as, state_of
from summa3d.launcher import follow
from summa3d.launcher.runtime import loaded_runtime

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="other processes have no pretended device")

PATIENCE = 300.0
ROOT = Path(__file__).parent.parent.parent
SUMMA3D = [sys.executable, "-m", "summa3d"]


class Terminal:
    """A command in a terminal of its own, as a shell starts one: in the foreground. What it shows is `shown`."""

    def __init__(self, command: Sequence[str], cwd: Path, **variables: str) -> None:
        self.process, self.file = pty.fork()
        if self.process == 0:
            os.chdir(cwd)
            os.execvpe(command[0], command, jobs.environment(variables))
        self.shown, self._ended = "", False

    def type(self, keys: str) -> None:
        os.write(self.file, keys.encode())

    def until(self, seen: Callable[[], bool]) -> None:
        """Read what is shown until `seen`, or until the command ends."""
        os.set_blocking(self.file, False)
        deadline = time.monotonic() + PATIENCE
        while not seen() and not self._ended:
            assert time.monotonic() < deadline, self.shown
            try:
                new = os.read(self.file, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # nobody has it open any more
                self._ended = True
            else:
                self.shown, self._ended = self.shown + new.decode(errors="replace"), not new

    def status(self) -> int:
        """The exit status, as a shell gives it."""
        self.until(lambda: False)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def close(self) -> None:
        for process in (self.process, *descendants(self.process)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os.close(self.file)


def endless(folder: Path, ranks: int = 2, **changes: object) -> list[str]:
    """The words of a run without an end."""
    write_corpus(folder / "corpus.txt")
    settings = assignments(folder / "corpus.txt", grid__y=ranks, train__steps=100_000, train__checkpoint_every=0, **changes)
    return ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)]]


def has_steps(folder: Path, number: int = 3) -> bool:
    return (folder / "run/metrics.jsonl").exists() and len(metrics_of(folder)) >= number


def ranks_of(process: int) -> dict[int, int]:
    """Rank → process, of those that a process has started."""
    own = launched_as(environment_of(process))
    found = {one: launched_as(environment_of(one)) for one in descendants(process)}
    return {launched[1]: one for one, launched in reversed(found.items()) if launched not in (None, own)}  # type: ignore[index]


@pytest.mark.parametrize("ways", ["terminal", "one rank", pytest.param("group", marks=pytest.mark.wide)])
def test_ctrl_c_under_launch_saves_once_however_often_it_arrives_within_a_second(tmp_path: Path, ways: str) -> None:
    """The keys of a terminal, a signal to a rank that shows nothing, or to the whole foreground group, as `timeout` sends it."""
    job = Terminal([*SUMMA3D, "launch", "-n", "2", *endless(tmp_path)], tmp_path)
    try:
        job.until(lambda: has_steps(tmp_path))
        for _ in range(2):
            if ways == "terminal":
                job.type("\x03")
            elif ways == "group":
                os.killpg(job.process, signal.SIGINT)
            else:
                os.kill(ranks_of(job.process)[1], signal.SIGINT)
        assert job.status() == 75, job.shown
    finally:
        job.close()
    step, shown = len(metrics_of(tmp_path)), " ".join(job.shown.split())
    assert f"SIGINT: saved after step {step} of" in shown, job.shown
    before, *after = shown.split("saving; Ctrl-C again stops at once")
    assert len(after) == 1 and "saved after step" not in before, job.shown
    assert (tmp_path / f"run/checkpoints/step-{step}/index.json").is_file() and "Traceback" not in job.shown


def test_the_second_ctrl_c_ends_a_run_that_cannot_save(tmp_path: Path) -> None:
    job = Terminal([*SUMMA3D, "launch", "-n", "2", *endless(tmp_path)], tmp_path)
    try:
        job.until(lambda: has_steps(tmp_path))
        os.kill(ranks_of(job.process)[1], signal.SIGSTOP)
        job.type("\x03")
        job.until(lambda: "saving; Ctrl-C again" in job.shown)
        time.sleep(1.1)
        assert os.waitpid(job.process, os.WNOHANG) == (0, 0), job.shown
        job.type("\x03")
        assert job.status() == 130, job.shown
    finally:
        job.close()
    assert "Traceback" not in job.shown and "SIGINT ended the job" in job.shown, job.shown


ENDS_WITH_0 = """
import os, signal, threading, time
from summa3d.launcher import follow
def interrupt():
    for pause in {}:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
kinds = "import signal; signal.signal(signal.SIGINT, lambda *found: 0); [signal.pause() for _ in range({})]"
print(follow.follow([{!r}, "-c", kinds], dict(os.environ)))
"""


@pytest.mark.parametrize(("pauses", "status"), [([2.0], 0), ([2.0, 1.2], 130)])
def test_a_launcher_that_ends_its_ranks_with_status_0_was_interrupted_the_second_time(pauses: list[float], status: int) -> None:
    """As MPICH's may; one that ends well after a single interrupt has ended well."""
    program = ENDS_WITH_0.format(pauses, len(pauses), sys.executable)
    assert jobs.run_serial(["-c", program], fresh=True, timeout=60).stdout.strip() == str(status)


def test_ctrl_c_of_a_process_without_a_launcher_saves(tmp_path: Path) -> None:
    job = Terminal([*SUMMA3D, *endless(tmp_path, ranks=1)], tmp_path)
    try:
        job.until(lambda: has_steps(tmp_path))
        job.type("\x03")
        assert job.status() == 75, job.shown
    finally:
        job.close()
    step = len(metrics_of(tmp_path))
    assert f"rank 0 got SIGINT: saved after step {step} of" in " ".join(job.shown.split()), job.shown


def test_ctrl_c_ends_another_command_at_once_and_names_a_rank(tmp_path: Path) -> None:
    product = ["launch", "-n", "2", "gemm", "--m", "64", "--n", "64", "--k", "64", "--repeat", "100000000"]
    job = Terminal([*SUMMA3D, *product], tmp_path)
    try:
        job.until(lambda: len(ranks_of(job.process)) == 2 and all(computes(one) for one in ranks_of(job.process).values()))
        job.type("\x03")
        assert job.status() == 130, job.shown
    finally:
        job.close()
    assert "interrupted on rank " in job.shown and "Traceback" not in job.shown, job.shown


def computes(process: int) -> bool:
    """Return whether a rank has been working for some seconds, longer than it takes to start."""
    state = state_of(process)
    return state is not None and state.seconds > 4


def test_what_is_typed_reaches_rank_0_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 0:\n    print('got', input())\n")
    job = Terminal([*SUMMA3D, "launch", "-n", "2", "asks.py"], tmp_path)
    try:
        job.type("seven\n")
        assert job.status() == 0, job.shown
    finally:
        job.close()
    assert "got seven" in job.shown


FOLLOWS = """
import ctypes, os, signal, sys
from summa3d.launcher import follow
class Kernel:
    def __init__(self, name): pass
    def prctl(self, *words): os.kill(os.getpid(), signal.SIGINT)  # in the child, before it is the launcher
ctypes.CDLL = Kernel
print(follow.follow(["sleep", "60"], dict(os.environ)))
"""


def test_an_interrupt_between_fork_and_exec_of_the_launcher_is_not_lost() -> None:
    ended = jobs.run_serial(["-c", FOLLOWS], fresh=True, timeout=50)
    assert ended.stdout.strip() == "130" and "Traceback" not in ended.stderr, ended.stderr


STOPS = """
import os
from summa3d.launcher import follow
follow.PATIENCE = 0.5
print(follow.follow(["sh", "-c", "kill -STOP $$; sleep 60"], dict(os.environ)))
"""


def test_a_launcher_that_is_stopped_is_noticed() -> None:
    ended = jobs.run_serial(["-c", STOPS], {"SUMMA3D_WATCHDOG": "0.5"}, fresh=True, timeout=50)
    assert ended.stdout.strip() == "137", ended.stderr
    assert re.fullmatch(r"summa3d launch: the launcher \(process \d+\) has been stopped for 0.5 s; the job ends\n", ended.stderr)


DIES = """
import os, signal, subprocess, sys, time
signal.signal(int(sys.argv[1]), signal.SIG_DFL)  # jobs in the background of a shell may ignore SIGQUIT
ranks = [
    subprocess.Popen(["sleep", "60"], env={**os.environ, "PMI_SIZE": "2", "PMI_RANK": str(rank)}) for rank in range(2)
]
time.sleep(3)
for rank in map(int, sys.argv[2:]):
    ranks[rank].send_signal(int(sys.argv[1]) if rank == 0 else signal.SIGKILL)
    ranks[rank].wait()
    time.sleep(0.3)
sys.exit(9)
"""


@pytest.mark.parametrize(
    ("number", "order", "first"), [(signal.SIGQUIT, "10", 0), (signal.SIGSEGV, "01", 0), (signal.SIGTERM, "10", 1)]
)
def test_a_rank_that_a_launcher_killed_is_not_named_for_one_that_ended_of_itself(
    capfd: pytest.CaptureFixture[str], number: int, order: str, first: int
) -> None:
    """A launcher sees the connections of a rank close before that rank has ended, and the others may be quicker to end."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15) and order == "10":
        pytest.skip("how another's child ended is told since Linux 6.15")
    assert follow.follow([sys.executable, "-c", DIES, str(int(number)), *order], jobs.environment()) == 9
    assert re.fullmatch(
        rf"summa3d launch: rank {first} of 2 \(process \d+\) ended first, without a report\n", capfd.readouterr().err
    )


REPORTS = """
import os, subprocess, sys
RANK = '''
import os, signal, sys
from summa3d.comm.health import flight
flight.start(rank := int(os.environ["PMI_RANK"]), 2)
if os.fork() == 0:
    os.read(int(sys.argv[1]), 1)  # until the launcher has ended
    os._exit(0)
print(flush=True)
input()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
flight.claim_node()
flight.ends_others()
os._exit(1)
'''
end, _ = os.pipe()
ranks = [
    subprocess.Popen(
        [sys.executable, "-c", RANK, str(end)], env={**os.environ, "PMI_SIZE": "2", "PMI_RANK": str(rank)}, pass_fds=[end],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    for rank in range(2)
]
for rank in ranks:
    rank.stdout.readline()
for rank in map(int, sys.argv[1]):
    ranks[rank].stdin.write(b"\\n")
    ranks[rank].stdin.flush()
    ranks[rank].wait()
sys.exit(9)
"""


@pytest.mark.parametrize("order", ["10", "01"])
def test_a_rank_that_was_killed_before_another_reports_a_failure_is_named(capfd: pytest.CaptureFixture[str], order: str) -> None:
    """Also where a process lives on that was forked from it. If the one that reports came first, it has ended the other."""
    assert follow.follow([sys.executable, "-c", REPORTS, order], jobs.environment()) == 9
    named = r"summa3d launch: rank 1 of 2 \(process \d+\) ended first, without a report\n"
    assert re.fullmatch(named if order == "10" else "", capfd.readouterr().err)


def test_a_launcher_that_ends_before_it_has_started_a_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert follow.follow(["sh", "-c", "exit 3"], jobs.environment()) == 3
    assert capfd.readouterr().err == "summa3d launch: the launcher ended with status 3 before a rank was seen\n"


def test_an_interrupt_before_the_launcher_starts_is_one_line(tmp_path: Path) -> None:
    """While it is looked for: the one that the user has named is asked for its version."""
    asked = tmp_path / "mpiexec"
    asked.write_text("#!/bin/sh\nkill -INT $PPID\nsleep 5\n")
    asked.chmod(0o755)
    product = ["launch", "-n", "2", "gemm", "--m", "8", "--n", "8", "--k", "8"]
    ended = jobs.run_serial(["-m", "summa3d", *product], {"SUMMA3D_MPIEXEC": str(asked)}, fresh=True)
    assert (ended.status, ended.stderr) == (130, "interrupted\n")


def test_a_process_that_ends_while_its_threads_are_listed_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*path: object) -> None:
        raise ProcessLookupError

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, gone)
    assert children(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.wide)])
def test_a_request_that_was_there_before_python_is_heard_and_the_status_says_go_on(tmp_path: Path, number: int) -> None:
    """As a job script leaves it to its ranks: blocked, and sent while they start."""

    def asked() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        os.kill(os.getpid(), number)

    ended = subprocess.run(
        [*SUMMA3D, *endless(tmp_path, ranks=1)],
        env=jobs.environment(),
        capture_output=True,
        text=True,
        preexec_fn=asked,
        timeout=PATIENCE,
    )
    assert ended.returncode == 75, ended.stderr
    assert f"rank 0 got {signal.Signals(number).name}: nothing to save of 100000" in " ".join(ended.stderr.split())


SHOWN = 'start() { shift; "$@"; }; source summa3d/jobs/steps.sh; start() { shift; "$@"; }; GRID=x=1 RANKS=1 train'


RANK = """#!{}
import re, sys
print(*re.findall("Sig(?:Blk|Ign):.(.*)", open("/proc/self/status").read())[:2], sys.argv[1])
"""


@pytest.mark.parametrize("env", ["env of this system", "env without --block-signal"])
def test_job_scripts_hold_a_request_back_until_the_ranks_hear_it(tmp_path: Path, env: str) -> None:
    """A rank that has not imported anything yet blocks SIGTERM, or ignores it where `env` cannot block."""
    program = tmp_path / "summa3d"
    program.write_text(RANK.format(sys.executable))
    program.chmod(0o755)
    if env != "env of this system":
        (tmp_path / "env").write_text("#!/bin/sh\nexit 125\n")
        (tmp_path / "env").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "1"}
    ended = subprocess.run(
        ["/bin/bash", "-c", SHOWN], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    blocked, ignored, command = ended.stdout.split()
    term = 1 << (signal.SIGTERM - 1)
    assert command == "train" and (int(blocked, 16) & term or int(ignored, 16) & term), ended
    assert env != "env of this system" or int(blocked, 16) & term, ended


WIDE = pytest.mark.wide
MOUNTED = 'mount --make-rprivate / && mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm && exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a mount namespace needs root and unshare")
@pytest.mark.skipif(loaded_runtime().vendor != "mpich", reason="its processes between a rank and the launcher are those of MPICH")
@pytest.mark.parametrize(
    ("ranks", "number", "seed"), [pytest.param(*one, marks=WIDE) for one in ((2, 50, 2), (4, 35, 3), (8, 15, 4))]
)
def test_signals_to_anybody_at_any_stage_end_a_run_with_the_reason_and_it_goes_on_to_the_same_bits(
    tmp_path: Path, ranks: int, number: int, seed: int
) -> None:
    """Ranks, mpiexec and the launcher; asked to end, or killed. Nothing is left: no process, no shared memory, no file."""
    write_corpus(tmp_path / "corpus.txt")
    program = [sys.executable, str(Path(__file__).with_name("signalled.py")), *map(str, (tmp_path, seed, number, ranks))]
    command = ["unshare", "-m", "sh", "-c", MOUNTED, "sh", *program]
    ended = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, timeout=PATIENCE * number)
    assert f"held {number} on {ranks} ranks" in ended.stdout, ended.stdout + ended.stderr
