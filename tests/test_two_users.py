"""Another user of the node, who may write to the temporary folder: none of the victim's files is changed, no report lost.

The victim is root and the stranger uid 65534; what the stranger can foresee is planted before the victim comes by.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jobs
import numpy as np
import pytest

from summa3d.comm.health import flight, flight_files, processes
from summa3d.comm.transport.node_memory import NOTE, offered
from summa3d.errors import Summa3dError
from summa3d.files import replace_text
from summa3d.gemm.files import raw as matrices
from summa3d.launcher import segments
from summa3d.sweep import lines
from summa3d.train import metrics
from summa3d.train.checkpoint import folder as checkpoints
from summa3d.train.checkpoint import safetensors
from summa3d.train.lease import Lease

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
STRANGER, SECRET, JOB = 65534, "precious of the victim", "4711.1"
FORGED = flight_files.HEADER


@dataclass
class Place:
    """`shared`: as the temporary folder of a node is; `home`: the victim's alone; `target`: a file there."""

    shared: Path
    home: Path

    @property
    def target(self) -> Path:
        return self.home / "notes"

    @property
    def flights(self) -> Path:
        """The first name of the folder of the victim's records."""
        return self.shared / f"summa3d-flight-0-{JOB}"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    top = Path(tempfile.mkdtemp(prefix="two-users-"))  # pytest's own folders are closed to others
    top.chmod(0o755)
    here = Place(top / "tmp", top / "home")
    here.shared.mkdir()
    here.shared.chmod(0o1777)
    here.home.mkdir(mode=0o700)
    for name in ("notes", "0.flight", "ended", "keep", "index.json", "rank-0.safetensors", "train.bin"):
        (here.home / name).write_text(SECRET)
    monkeypatch.setattr("tempfile.tempdir", str(here.shared))
    monkeypatch.setattr(processes, "job_name", lambda: JOB)
    monkeypatch.setattr(flight, "recorder", None)
    monkeypatch.delenv(flight_files.VARIABLE, raising=False)
    monkeypatch.chdir(here.shared)
    yield here
    shutil.rmtree(top)


def as_stranger(act: Callable[[], object]) -> None:
    """Do something as another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.umask(0)
            act()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def homes_files(place: Place) -> dict[str, tuple[str, int, int]]:
    """Name → contents, mode and owner of all that the victim has."""
    return {file.name: (file.read_text(), file.stat().st_mode, file.stat().st_uid) for file in place.home.iterdir()}


def open_folder(folder: Path, **links: Path) -> None:
    """A folder that anybody may write to, with links by name."""
    folder.mkdir(mode=0o777)
    for name, to in links.items():
        (folder / name.replace("_", ".")).symlink_to(to)


def forged(place: Place, process: int = 1) -> None:
    """Records that say of a process that it is a rank which has stopped."""
    open_folder(place.flights)
    for rank in range(2):
        head = FORGED.pack(flight_files.MAGIC, rank, 2, process, processes.this_node(), 0.0, 0.0)
        (place.flights / f"{rank}.flight").write_bytes(head.ljust(flight.NBYTES, b"\0"))


def named_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(file))


def old(file: Path) -> None:
    os.utime(file, (1, 1), follow_symlinks=False)


def claimed(place: Place, folder: Path) -> Path:
    return folder / f"{flight_files.CLAIM}0-{JOB}"


def all_names(place: Place) -> None:
    for number in range(flight_files.NAMES):
        open_folder(place.flights.with_name(f"{place.flights.name}{f'-{number}' if number else ''}"))


def a_saved_folder(place: Place) -> None:
    open_folder(place.shared / "flight", **{"0_flight": place.home / "0.flight", "1_flight": place.target})
    (place.shared / "flight" / "ended").write_text("1.0")


def swept(place: Place, folder: Callable[[Path], None]) -> None:
    name = place.flights.with_name("summa3d-flight-0-1.2")
    folder(name)
    old(name)


def kept(place: Place) -> None:
    open_folder(place.flights)
    (place.flights / "keep").write_text(str(place.home))


FLIGHTS: dict[str, Callable[[Place], object]] = {
    "a folder with links for records": lambda at: open_folder(at.flights, **{"0_flight": at.target, "1_flight": at.target}),
    "a folder with links to what is not there": lambda at: open_folder(at.flights, **{"0_flight": at.home / "new"}),
    "a folder with a link for the claim": lambda at: open_folder(at.flights, **{claimed(at, at.flights).name: at.home / "new"}),
    "a folder with a link for keep": lambda at: open_folder(at.flights, keep=at.target),
    "a folder with a keep of the stranger's": kept,
    "a folder with a claim": lambda at: (open_folder(at.flights), claimed(at, at.flights).touch()),
    "a folder with a FIFO for a record": lambda at: (open_folder(at.flights), os.mkfifo(at.flights / "0.flight")),
    "a folder with forged records": forged,
    "a folder that is the stranger's alone": lambda at: (open_folder(at.flights), at.flights.chmod(0o700)),
    "a link to the victim's folder": lambda at: at.flights.symlink_to(at.home),
    "a link to the stranger's folder": lambda at: (open_folder(at.shared / "x"), at.flights.symlink_to(at.shared / "x")),
    "a link to nothing": lambda at: at.flights.symlink_to(at.home / "new"),
    "a file": lambda at: at.flights.touch(),
    "a FIFO": lambda at: os.mkfifo(at.flights),
    "a socket": lambda at: named_socket(at.flights),
    "all names that are tried": all_names,
    "a claim in the temporary folder": lambda at: claimed(at, at.shared).touch(),
    "a link for a claim in the temporary folder": lambda at: claimed(at, at.shared).symlink_to(at.home / "new"),
    "an old link to the victim's folder": lambda at: swept(at, lambda name: name.symlink_to(at.home)),
    "an old folder with links": lambda at: swept(at, lambda name: open_folder(name, **{"0_flight": at.home / "0.flight"})),
    "a link for the saved folder": lambda at: (at.shared / "flight").symlink_to(at.home),
    "a saved folder with links": a_saved_folder,
    "a FIFO for the saved folder": lambda at: os.mkfifo(at.shared / "flight"),
}


@pytest.mark.parametrize("attack", FLIGHTS)
def test_no_name_in_the_temporary_folder_reaches_a_file_or_silences_a_failing_job(place: Place, attack: str) -> None:
    before = homes_files(place)
    as_stranger(lambda: FLIGHTS[attack](place))
    flight.start(0, 2)
    assert flight.recorder is not None
    folder = flight.recorder.file.parent
    assert is_roots_alone(folder)
    flight.keep_in(place.shared)
    with flight.waiting_in("a barrier", "all ranks"):
        assert [one.rank for one in flight.neighbours(folder)] == [0]
        assert flight.claim_node() and not flight.claim_node()
        saved = flight_files.save(folder, time.time())
    assert saved is not None and is_roots_alone(saved)
    assert [one.rank for one in flight.read_folder(saved)] == [0]
    assert flight_files.folder_of_job() == folder or attack == "all names that are tried"
    flight.recorder.close()
    assert not folder.exists()
    assert homes_files(place) == before
    if attack.startswith("an old"):
        assert os.path.lexists(place.shared / "summa3d-flight-0-1.2")
    if attack == "a saved folder with links":
        assert len([*(place.shared / "flight").iterdir()]) == 3


NAMED: dict[str, Callable[[Path, Path], object]] = {
    "a claim": lambda claim, target: claim.touch(),
    "a link for the claim": lambda claim, target: claim.symlink_to(target),
    "a FIFO for the claim": lambda claim, target: os.mkfifo(claim),
    "a link for a record": lambda claim, target: (claim.parent / "0.flight").symlink_to(target),
    "a FIFO for another record": lambda claim, target: os.mkfifo(claim.parent / "1.flight"),
}


@pytest.mark.parametrize("attack", NAMED)
def test_no_name_in_a_folder_that_the_victim_has_chosen_reaches_a_file_or_silences_a_failing_job(
    place: Place, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    before = homes_files(place)
    monkeypatch.setenv(flight_files.VARIABLE, str(place.shared))
    as_stranger(lambda: NAMED[attack](claimed(place, place.shared), place.target))
    flight.start(0, 2)
    assert flight.claim_node()
    if flight.recorder is not None:
        assert [one.rank for one in flight.neighbours(place.shared)] == [0]
        flight.recorder.close()
    assert homes_files(place) == before


def is_roots_alone(folder: Path) -> bool:
    status = folder.lstat()
    return (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), status.st_uid) == (stat.S_IFDIR, 0o700, 0)


def in_run(place: Place, name: str, target: Path) -> Path:
    """A run folder that the stranger may write to, in which a name is a link."""
    run = place.shared / "run"
    run.mkdir(exist_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(target)
    return run


def take_lease(place: Place) -> None:
    with Lease() as lease:
        lease.take(place.shared / "run")


def write_file(place: Place) -> None:
    safetensors.write_tensors(place.shared / "run" / "rank-0.safetensors", [], [])


def publish(place: Place) -> None:
    checkpoints.clean(place.shared / "run")
    (place.shared / "run" / ".tmp-step-2").mkdir(exist_ok=True)
    checkpoints.publish(place.shared / "run", 2, {}, 1)


def write_matrix(place: Place) -> None:
    part = place.shared / "run" / "c.npy.part"
    matrices._create(part, b"", 72)
    np.memmap(part, "f8", "r+")[:] = 7


OTHERS: dict[str, tuple[str, str, Callable[[Place], object]]] = {
    "a lease": ("lease", "notes", take_lease),
    "a lease to be made": ("lease", "new", take_lease),
    "the file of a command": ("out.json", "notes", lambda at: replace_text(at.shared / "run" / "out.json", "x")),
    "metrics": ("metrics.jsonl", "notes", lambda at: metrics.open_at(at.shared / "run" / "metrics.jsonl", 0).close()),
    "points of a sweep": (lines.NAME, "notes", lambda at: lines.append(at.shared / "run", [{}])),
    "torn points of a sweep": (lines.NAME, "notes", lambda at: lines.mend(at.shared / "run", lambda text: None)),
    "a file of a checkpoint": ("rank-0.safetensors", "notes", write_file),
    "the temporary folder of a checkpoint": (".tmp-step-2", "", publish),
    "a checkpoint": ("step-2", "", publish),
    "a checkpoint that is being deleted": (".old-step-2", "", publish),
    "the index of a checkpoint": (".tmp-step-2/index.json", "notes", publish),
    "a matrix": ("c.npy.part", "notes", write_matrix),
}


@pytest.mark.parametrize("attack", OTHERS)
def test_nothing_is_written_through_a_link_where_a_stranger_may_write(place: Place, attack: str) -> None:
    name, target, act = OTHERS[attack]
    before = homes_files(place)
    as_stranger(lambda: in_run(place, name, place.home / target))
    try:
        act(place)
    except (OSError, Summa3dError) as error:
        assert name in str(error)
    assert homes_files(place) == before


def test_segments_of_a_stranger_are_neither_removed_nor_named(place: Place) -> None:
    names = ["mpich_shm_$(touch x)", "mpich_shm_link", "mpich_shm_own"]
    as_stranger((place.shared / names[2]).touch)
    for name in names[:2]:
        as_stranger(lambda name=name: (place.shared / name).symlink_to(place.target))
    assert segments.stale(place.shared) == []
    segments.remove_left(0.0, place.shared)
    assert sorted(file.name for file in place.shared.iterdir()) == sorted(names)


def reached_by(process: int) -> list[str]:
    """Of a process's descriptors, memory and environment, what this user can open."""
    reached = []
    for name in ("mem", "environ", "maps", "auxv", "fd", *(f"fd/{number}" for number in range(64))):
        try:
            os.close(os.open(f"/proc/{process}/{name}", os.O_RDONLY))
        except OSError:
            continue
        reached.append(name)
    return reached


def test_a_stranger_cannot_open_the_memory_that_ranks_share(place: Place) -> None:
    memory, descriptor = offered(1 << 12, memoryview(bytearray(NOTE)))
    assert memory is not None
    me = os.getpid()
    assert f"fd/{descriptor}" in reached_by(me)  # the victim can
    try:
        as_stranger(lambda: (place.shared / "reached").write_text(json.dumps(reached_by(me))))
        assert json.loads((place.shared / "reached").read_text()) == []
    finally:
        os.close(descriptor)


def test_a_stranger_that_shows_a_stopped_process_as_a_rank_does_not_get_it_killed(place: Place) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        as_stranger(lambda: forged(place, sleeper.pid))
        place.flights.chmod(0o777)
        assert len(list(place.flights.glob("*.flight"))) == 2
        assert flight.neighbours(place.flights) == []
    finally:
        sleeper.kill()
        sleeper.wait()


FAILS = """
import subprocess, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
from summa3d import Grid
from summa3d.comm.health import processes
comm, shared, target = MPI.COMM_WORLD, *map(Path, sys.argv[1:])
if comm.rank == 0:
    folder, claim = shared / f"summa3d-flight-0-{processes.job_name()}", f"summa3d-failure-0-{processes.job_name()}"
    links = "".join(f"ln -s {target} {folder}/{rank}.flight; " for rank in range(2))
    plant = f"mkdir -m 777 {folder}; {links} touch {folder}/{claim} {shared}/{claim}"
    subprocess.run(["sh", "-c", plant], user=65534, check=True)
comm.Barrier()
grid = Grid(comm, {"x": 2})
grid["x"].all_reduce(np.ones(4))
if comm.rank == 1:
    raise ValueError("bug in my script")
grid["x"].all_reduce(np.ones(4))
"""


def test_a_job_whose_names_are_taken_runs_and_its_failure_is_reported_with_its_records(place: Place) -> None:
    (place.home / "job.py").write_text(FAILS)
    before = homes_files(place)
    ended = jobs.run(
        [str(place.home / "job.py"), str(place.shared), str(place.target)], 2, place.home, 120, {"TMPDIR": str(place.shared)}
    )
    assert ended.status != 0
    assert "ValueError: bug in my script" in ended.stderr
    assert "what each rank was doing: summa3d doctor --flight flight\n" in ended.stderr, ended.stderr
    assert [one.rank for one in flight.read_folder(place.home / "flight")] == [0, 1]
    shutil.rmtree(place.home / "flight")
    assert homes_files(place) == before


@pytest.mark.wide
def test_a_stranger_who_swaps_names_meanwhile_reaches_nothing(place: Place) -> None:
    before = homes_files(place)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        os.umask(0)
        while True:
            for plant in FLIGHTS.values():
                try:
                    plant(place)
                    names = [place.flights, place.shared / "flight"]
                    for name in names:
                        shutil.rmtree(name) if name.is_dir() and not name.is_symlink() else name.unlink()
                except OSError:
                    pass
    try:
        for _ in range(300):
            flight.recorder = None
            flight.start(0, 2)
            assert flight.recorder is not None and flight_files.is_private(flight.recorder.file.parent)
            assert flight.claim_node()
            flight_files.save(flight.recorder.file.parent, time.time())
            flight.recorder.close()
            assert homes_files(place) == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
