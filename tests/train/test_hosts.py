"""Hosts that refuse something: a run on one rank comes to the same bits, or ends in one line and goes on once it may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import devices
import jobs
import pytest
from small_runs import assignments, write_corpus

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="other processes have no pretended device")

NO_FLOCK = """
import errno, fcntl, os, sys, time
def none(file, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
{}
from summa3d.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
JUMPS = "now, beats = time.time, iter(range(10**9)); time.time = lambda: now() {} * (next(beats) > 20)"
PATCHES = {
    "no flock": "fcntl.flock = none",
    "a clock that goes back a day": JUMPS.format("- 86400"),
    "a clock that goes on a year": JUMPS.format("+ 3e7"),
    "a slow file system": "sync = os.fsync; os.fsync = lambda file: (time.sleep(0.3), sync(file))",
}
"""What changes in a process before it imports summa3d."""
LIMITS = {
    "64 descriptors": "ulimit -n 64",
    "no HOME": "unset HOME",
    "HOME that cannot be written": "export HOME=/proc",
    "the locale C": "export LC_ALL=C LANG=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
    "nothing asserted": "export PYTHONOPTIMIZE=1",
    "umask 0777": "umask 0777",
}
"""What a shell does before it starts the run."""
REFUSED = {
    "files of at most 16 KiB": "ulimit -f 16",
    "memory for half of the imports": "ulimit -v 600000",
}


def words(folder: Path, *more: str) -> list[str]:
    settings = assignments(folder / "corpus.txt", scheme="serial", train__steps=4, train__evaluate_every=0, dtype="float32")
    return ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)], *more]


def weights(folder: Path) -> bytes:
    return (folder / "run/checkpoints/step-4/rank-0.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder / "corpus.txt")
    ended = jobs.run_serial(["-m", "summa3d", *words(folder)])
    assert ended.status == 0, ended.stderr
    return weights(folder)


def shell(folder: Path, before: str, *more: str) -> jobs.Ended:
    """The run, started by a shell that has done something before."""
    command = ["sh", "-c", f'{before}; exec "$@"', "sh", sys.executable, "-m", "summa3d", *words(folder, *more)]
    done = subprocess.run(command, cwd=folder, env=jobs.environment(), capture_output=True, text=True, timeout=300)
    return jobs.Ended(done.returncode, done.stdout, done.stderr, 0.0)


@pytest.mark.parametrize("name", PATCHES)
def test_a_host_that_lacks_something_trains_to_the_same_bits(tmp_path: Path, undisturbed: bytes, name: str) -> None:
    write_corpus(tmp_path / "corpus.txt")
    ended = jobs.run_serial(["-c", NO_FLOCK.format(PATCHES[name]), *words(tmp_path)])
    assert ended.status == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert weights(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "name", [name if name == "64 descriptors" else pytest.param(name, marks=pytest.mark.wide) for name in LIMITS]
)
def test_a_shell_that_limits_something_trains_to_the_same_bits(tmp_path: Path, undisturbed: bytes, name: str) -> None:
    write_corpus(tmp_path / "corpus.txt")
    ended = shell(tmp_path, LIMITS[name])
    assert ended.status == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert weights(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "name", ["files of at most 16 KiB", pytest.param("memory for half of the imports", marks=pytest.mark.wide)]
)
def test_what_a_host_refuses_is_a_line_and_the_run_goes_on_without_the_limit(
    tmp_path: Path, undisturbed: bytes, name: str
) -> None:
    write_corpus(tmp_path / "corpus.txt")
    ended = shell(tmp_path, REFUSED[name])
    assert ended.status not in (0, 139) and "Traceback" not in ended.stderr, ended.stderr
    again = shell(tmp_path, ":", "--start-or-resume")
    assert again.status == 0, again.stderr
    assert weights(tmp_path) == undisturbed


FILLED = """
mkdir -p run && mount -t tmpfs -o size={size} tmpfs run || exit 200
"$@"
status=$?
mount -o remount,size=64m run
"$@" --start-or-resume || exit 201
cp run/checkpoints/step-4/rank-0.safetensors weights
exit $status
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
@pytest.mark.parametrize("size", ["96k", *(pytest.param(size, marks=pytest.mark.wide) for size in ("4k", "12k", "48k", "160k"))])
def test_a_full_disk_is_a_line_and_the_run_goes_on_once_there_is_room(tmp_path: Path, undisturbed: bytes, size: str) -> None:
    write_corpus(tmp_path / "corpus.txt")
    script = ["unshare", "--mount", "sh", "-c", FILLED.format(size=size), "sh", sys.executable, "-m", "summa3d"]
    done = subprocess.run(
        [*script, *words(tmp_path)], cwd=tmp_path, env=jobs.environment(), capture_output=True, text=True, timeout=300
    )
    if done.returncode == 200 or done.stderr.startswith("unshare: "):
        pytest.skip(f"no disk can be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "No space left on device" in done.stderr, done.stderr
    assert (tmp_path / "weights").read_bytes() == undisturbed


ENDING_MEMORY = """
import sys, resource
import torch._dynamo, torch._inductor
import summa3d.train.loop, summa3d.gemm, summa3d.nn, summa3d.parallel.pipeline
from summa3d.cli.main import main
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ({room} << 20),) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("room", [64, *(pytest.param(room, marks=pytest.mark.wide) for room in (0, 2, 4, 8, 16, 32, 100, 200))])
def test_memory_that_ends_after_the_imports_is_a_line(tmp_path: Path, undisturbed: bytes, room: int) -> None:
    write_corpus(tmp_path / "corpus.txt")
    ended = jobs.run_serial(["-c", ENDING_MEMORY.format(room=room), *words(tmp_path)])
    assert ended.status != 0 and "Traceback" not in ended.stderr, ended.stderr
    assert shell(tmp_path, ":", "--start-or-resume").status == 0
    assert weights(tmp_path) == undisturbed


OTHER = """
import os, sys
from summa3d.cli.main import main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.umask(0o777)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_with_umask_0777_is_refused_in_a_line() -> None:
    """It cannot enter the folders that it makes."""
    folder = Path("/var/tmp") / f"summa3d-host-{os.getpid()}"
    folder.mkdir()
    try:
        folder.chmod(0o777)
        write_corpus(folder / "corpus.txt").chmod(0o644)
        ended = jobs.run_serial(["-c", OTHER, *words(folder)])
        assert ended.status == 1 and "Traceback" not in ended.stderr, ended.stderr
        assert "Permission denied" in ended.stderr.splitlines()[-1], ended.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.wide
def test_of_ten_starts_at_once_into_one_folder_one_trains_and_nine_are_refused_in_a_line(
    tmp_path: Path, undisturbed: bytes
) -> None:
    write_corpus(tmp_path / "corpus.txt")
    command = [sys.executable, "-m", "summa3d", *words(tmp_path)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, env=jobs.environment(), stdout=pipe, stderr=pipe, text=True) for _ in range(10)]
    ended = [(job, *job.communicate(timeout=600)) for job in started]
    assert [job.returncode for job, *_ in ended].count(0) == 1, ended
    for job, _, said in ended:
        assert job.returncode == 0 or "is in use by" in said or "already holds a run" in said, said
        assert "Traceback" not in said
    assert weights(tmp_path) == undisturbed
