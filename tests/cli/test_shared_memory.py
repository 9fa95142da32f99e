"""A small /dev/shm, as containers have: killed jobs leave nothing there, and where ranks cannot start a line says so.

In a mount namespace of its own: root, and util-linux.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import jobs
import pytest
from mpi4py import MPI

from summa3d.launcher import segments

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a mount namespace needs root and unshare"),
    pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="MPICH alone keeps its segments in /dev/shm"),
]
KILLS = 20
MOUNTED = 'mount --make-rprivate / && mount -t tmpfs -o size={size}m,mode=1777 tmpfs /dev/shm && exec "$@"'
KILLER = """
import os, pathlib, signal, subprocess, sys, time

def ranks():
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\\0")
        except OSError:
            continue
        if b"TRIED=" + sys.argv[1].encode() in variables and any(one == b"PMI_RANK=3" for one in variables):
            yield int(process.name)

def maps(process):
    try:
        return pathlib.Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return ""

launch = [sys.executable, "-m", "summa3d", "launch", "-n", "8", "gemm", *"--m 64 --n 64 --k 64 --grid x=2,y=2,z=2".split()]
shared = pathlib.Path("/dev/shm")
for number in range(int(sys.argv[2])):
    job = subprocess.Popen([*launch, "--repeat", "1000000"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    found = []
    while job.poll() is None and not found:  # a rank that shares memory, of which the name is gone
        time.sleep(0.05)
        found = [rank for rank in ranks() if "mpich_shm" in maps(rank) and not any(shared.iterdir())]
    for rank in found:
        os.kill(rank, signal.SIGKILL)
    said = job.communicate()[1]
    assert job.returncode, said
    left = sum(file.stat().st_size for file in shared.iterdir())
    assert left == 0, (number, [file.name for file in shared.iterdir()], said)
done = subprocess.run([*launch, "--repeat", "2"], capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print("started after", sys.argv[2], "kills")
"""


def launched(size: int, words: list[str], cwd: Path, extra: dict[str, str] | None = None, timeout: float = 300) -> jobs.Ended:
    """Run Python on these words where /dev/shm has `size` MiB."""
    shell = ["-c", "import os, sys; os.execvp('unshare', sys.argv[1:])"]
    inside = ["unshare", "-m", "sh", "-c", MOUNTED.format(size=size), "sh", sys.executable, *words]
    return jobs.run_serial([*shell, *inside], extra, cwd, timeout)


def test_ranks_without_room_to_share_memory_are_refused_in_a_line(tmp_path: Path) -> None:
    ended = launched(8, ["-m", "summa3d", "launch", "-n", "8", "doctor"], tmp_path)
    said = ended.stderr.strip().splitlines()
    assert ended.status != 0 and "signal" not in ended.stderr.lower()
    assert "8 ranks cannot start in less than 12 MiB of /dev/shm. /dev/shm has 8 MiB free" in said[-1], ended.stderr
    assert "need 56 MiB" in said[-1] and len(said) == 2, ended.stderr  # the first says what is started


LEAVES = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
assert world.sendrecv(world.rank, (world.rank + 1) % world.size, 0, None, (world.rank - 1) % world.size) is not None
node = world.Split_type(MPI.COMM_TYPE_SHARED)
if world.rank == 0:
    print(node.size)
"""


@pytest.mark.parametrize("size", [24, pytest.param(8, marks=pytest.mark.wide), pytest.param(31, marks=pytest.mark.wide)])
def test_ranks_start_where_their_library_would_crash_for_want_of_shared_memory(tmp_path: Path, size: int) -> None:
    """Four in 24 MiB ended in a signal inside MPI_Init."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    ended = launched(size, ["-m", "summa3d", "launch", "-n", "4", "leaves.py"], tmp_path)
    assert (ended.status, ended.stdout) == (0, "4\n"), ended.stderr
    assert f"/dev/shm has {size} MiB free, and 4 ranks of MPICH need 32 MiB" in ended.stderr and "UCX_TLS=^posix" in ended.stderr


def test_ranks_with_enough_shared_memory_use_it_and_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    ended = launched(32, ["-m", "summa3d", "launch", "-n", "4", "leaves.py"], tmp_path)
    assert (ended.status, ended.stdout) == (0, "4\n") and "MiB" not in ended.stderr, ended.stderr


def test_what_ucx_left_is_known_beside_what_mpich_left(tmp_path: Path) -> None:
    left = [tmp_path / "mpich_shm_1", tmp_path / "ucx_shm_posix_1"]
    for file in (*left, tmp_path / "other"):
        file.touch()
    assert segments.stale(tmp_path) == left
    segments.remove_left(0.0, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["other"]


@pytest.mark.wide
def test_a_job_starts_after_twenty_kills_in_64_mib(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "killer.py").write_text(KILLER)
    extra = {"TMPDIR": str(tmp_path / "tmp"), "TRIED": str(tmp_path)}
    ended = launched(64, ["killer.py", str(tmp_path), str(KILLS)], tmp_path, extra, 1200)
    assert ended.stdout.strip() == f"started after {KILLS} kills", ended.stdout + ended.stderr
