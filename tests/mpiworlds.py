"""A pytest plugin: `@pytest.mark.mpi(sizes=(1, 2, 8))` runs a test on that many MPI ranks, from one plain pytest.

A pytest has one of four roles.

*parent*   ``python -m pytest``: collects, has the tests run by one mpiexec per world size and by processes without MPI, four
           such groups at a time (``--lanes``), merges what the ranks report (mpiworlds_parent.py).
*server*   started by the parent: collects once, and is forked for every rank (forkserver.py). Imports are paid once.
*rank*     a fork of a server, or (``--fresh-ranks``, and where forks cannot be) a pytest that mpiexec itself starts: runs the
           tests of its world, writes its reports to a file.
*guest*    ``mpiexec -n N python -m pytest --with-mpi``, started by a user: tests of up to N ranks run on the first ones,
           larger ones are skipped; rank 0 reports, the others speak only of failures, at once. A rank whose test failed ends
           the job where the others do not leave that test too.

A test asks for the fixture ``comm``, a communicator of exactly its world size. The plugin pytest-mpi may be installed: marker
and option have the same names, and in every role pytest-mpi is told that this plugin brings the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import forkserver
import processor_time
import pytest
from _pytest.tmpdir import TempPathFactory

FOLDER_VARIABLE = "MPIWORLDS_FOLDER"  # set by the parent for the ranks it starts
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
FEW = 2  # ranks, up to which `make test` runs each world size that a test names
DEFAULT_TIMEOUT = 300.0
SERIAL_TIMEOUT = 900.0  # of a test without MPI that a process of its own runs
GUEST_GRACE = 10.0  # seconds that the other ranks of a guest may stay in a test after one has failed in it
BACKSTOP = 60.0  # seconds after a test's timeout at which a rank ends itself: only where the parent has died


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--worlds", default="", metavar="SIZES", help="run mpi tests at these world sizes only: --worlds 1,4")
    parser.addoption("--lanes", type=int, default=4, help="groups of tests that run at once; 1: one after the other")
    parser.addini("preloaded", "modules that fork servers import beside those that test files import", type="args")
    parser.addoption("--fresh-ranks", action="store_true", help="start a Python for every rank; fork none")
    parser.addoption("--world-timeout", type=float, default=DEFAULT_TIMEOUT, help="seconds for an mpi test that names no timeout")
    parser.addoption("--processor-times", type=int, default=8, metavar="N", help="show the N tests that take the most; 0: all")
    with contextlib.suppress(ValueError):  # pytest-mpi is installed, and has it already
        parser.addoption("--with-mpi", action="store_true", help="these pytests were started by your own mpiexec")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi(sizes=(2,), timeout=300, every=False): run on so many MPI ranks, one mpiexec a size")
    if forkserver.LISTENER_VARIABLE in os.environ:
        config.pluginmanager.register(RankServer(config), "mpiworlds-server")
    elif FOLDER_VARIABLE in os.environ:
        config.pluginmanager.register(Rank(config), "mpiworlds-rank")
    elif config.getoption("--with-mpi") or launched_rank() is not None:
        config.pluginmanager.register(Guest(config), "mpiworlds-guest")
    else:
        from mpiworlds_parent import Parent

        config.pluginmanager.register(Parent(config), "mpiworlds-parent")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Tell pytest-mpi that tests with the marker have their ranks: it would skip them."""
    config.option.with_mpi = not config.getoption("only_mpi", False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("mpi")
    if marker is None:
        return
    wanted = [int(size) for size in metafunc.config.getoption("--worlds").split(",") if size]
    sizes = [size for size in marker.kwargs.get("sizes", (2,)) if not wanted or size in wanted]
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    every = wanted or marker.kwargs.get("every", False)
    left_out = [] if every else wide_sizes(metafunc.definition.nodeid, sizes)
    cases = [pytest.param(size, marks=pytest.mark.wide) if size in left_out else size for size in sizes]
    metafunc.parametrize("world_size", cases, ids=[f"w{size}" for size in sizes], indirect=True)


def wide_sizes(test: str, sizes: Sequence[int]) -> list[int]:
    """Of a test's world sizes of more than `FEW` ranks all but one, which its name decides: tests take turns."""
    large = [size for size in sizes if size > FEW]
    return [size for number, size in enumerate(large) if number != crc32(test.encode()) % len(large)]


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return how many ranks this test runs on."""
    size: int = request.param
    return size


@pytest.fixture
def comm(world_size: int) -> Iterator[Any]:
    """A communicator of exactly the test's world size, its own: nothing that a failed test left in flight reaches the next."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank >= world_size or world.size < world_size:
        pytest.skip(f"needs {world_size} ranks; this is rank {world.rank} of {world.size}")
    own = world.Create_group(world.group.Incl(range(world_size)))
    yield own
    own.Free()


@pytest.fixture
def shared_tmp_path(comm: Any, tmp_path: Path) -> Path:
    """One temporary folder, the same on all ranks (`tmp_path` is each rank's own)."""
    folder: Path = comm.bcast(tmp_path)
    return folder


def world_size_of(item: pytest.Item) -> int:
    """Return the world size of a collected test, 0 for one that uses no MPI."""
    if item.get_closest_marker("mpi") is None:
        return 0
    size = item.callspec.params["world_size"]  # type: ignore[attr-defined]
    return size if isinstance(size, int) else 0  # --worlds left none of its sizes: pytest skips it


def timeout_of(item: pytest.Item) -> float:
    """Return the seconds after which a test has hung."""
    marker = item.get_closest_marker("mpi")
    if marker is None:
        return SERIAL_TIMEOUT
    return float(marker.kwargs.get("timeout", item.config.getoption("--world-timeout")))


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process, without asking MPI; None where there was no launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), None)


class RankServer:
    """Collects once, and is forked for every rank: a fork goes on as the pytest of its world's tests."""

    def __init__(self, config: pytest.Config) -> None:
        import mpi4py

        mpi4py.rc.initialize = False  # a test file may import MPI; each fork initialises it for itself
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        capture = self.config.pluginmanager.getplugin("capturemanager")
        assert capture is not None
        capture.stop_global_capturing()  # its files would be shared by all forks
        for module in self.config.getini("preloaded"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        request = forkserver.serve()
        if request is None:
            return True
        request.take_over()
        initialise_mpi()
        self.config.pluginmanager.register(Rank(self.config), "mpiworlds-rank")
        self.config.add_cleanup(lambda: forkserver.leave(0))  # failures have been reported
        self.config._tmp_path_factory = TempPathFactory.from_config(self.config, _ispytest=True)  # type: ignore[attr-defined]
        capture.start_global_capturing()
        items = {item.nodeid: item for item in session.items}
        session.items[:] = [items[test] for test in Path(request.arguments[0][1:]).read_text().splitlines()]
        return None


def initialise_mpi() -> None:
    """Do in a fork what importing mpi4py.MPI does in a fresh process: now if the server has imported it, else at the import."""
    import mpi4py

    mpi4py.rc.initialize = True
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(MPI.Finalize)


class Rank:
    """One rank of a world that the parent started. It writes a line of JSON for every event, and never runs ahead of a failure.

    A rank whose test failed waits, on a file rather than in MPI, until the parent has seen every rank leave that test:
    otherwise it would meet the others' collectives with those of the next test.
    """

    def __init__(self, config: pytest.Config) -> None:
        folder = Path(os.environ.pop(FOLDER_VARIABLE))  # a pytest that a test starts is no rank of this world
        rank = launched_rank() or 0
        config.option.basetemp = str(folder / f"tmp{rank}")
        self.folder = folder
        self.events = open(folder / f"rank{rank}.jsonl", "a", buffering=1)  # noqa: SIM115  (open until the process ends)
        self.stack = open(folder / f"stack{rank}.txt", "w")  # noqa: SIM115
        faulthandler.enable(self.stack)
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=True)
        self.tests = 0
        self.failed = False
        self.emit(event="born", pid=os.getpid())

    def emit(self, **facts: object) -> None:
        self.events.write(json.dumps(facts) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.failed = False
        backstop = timeout_of(item) + BACKSTOP
        faulthandler.dump_traceback_later(backstop, exit=True, file=self.stack)
        self.emit(event="start", test=item.nodeid, at=time.time())
        before = processor_time.used()
        outcome = yield
        self.emit(event="done", test=item.nodeid, took=processor_time.used() - before)
        while self.failed and not (self.folder / f"go{self.tests}").exists():
            time.sleep(0.02)
        self.tests += 1
        faulthandler.cancel_dump_traceback_later()
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        self.emit(
            event="report",
            test=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            duration=report.duration,
            text=_text_of(report),
            sections=report.sections if report.failed else [],
            wasxfail=getattr(report, "wasxfail", None),
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.emit(event="collect", text=report.longreprtext)


def _text_of(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return report.longreprtext if report.failed else ""


class Guest:
    """One rank under the user's own mpiexec. Only rank 0 keeps pytest's terminal; any rank prints its failures at once."""

    def __init__(self, config: pytest.Config) -> None:
        from summa3d.cli.main import start_mpi

        start_mpi()  # ranks that outnumber the cores yield while they wait; a launcher of another MPI is an error
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD.Dup()  # nothing that a failed test left in flight is in the way
        self.rank = self.world.rank
        self.stderr = os.dup(2)  # the real one: pytest captures the descriptor while a test runs
        if self.rank != 0:
            config.option.basetemp = tempfile.mkdtemp(prefix=f"mpiworlds-rank{self.rank}-")
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (what pytest's terminal, made after this, will write to)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        alone = pytest.mark.skip(reason="uses no MPI; runs under a plain `python -m pytest`")
        for item in items:
            if world_size_of(item) == 0:
                item.add_marker(alone)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if world_size_of(item) == 0:
            return (yield)
        from summa3d.comm.health.watchdog import Watchdog

        with Watchdog(timeout_of(item), what=f"{item.nodeid} has not finished", output=self.stderr):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = f"\n--- rank {self.rank}: {report.nodeid} ({report.when}) failed\n{report.longreprtext}\n"
            os.write(self.stderr, text.encode(errors="replace"))
        if "mpi" in report.keywords and (report.when == "call" or (report.when == "setup" and not report.passed)):
            self.leave(report)

    def leave(self, report: pytest.TestReport) -> None:
        """Wait until every rank has left the test; where it failed here and others stay in it, end the job on all ranks."""
        request, patience = self.world.Ibarrier(), GUEST_GRACE if report.failed else float("inf")
        began = time.monotonic()
        while not request.Test():
            if time.monotonic() - began > patience:
                text = f"--- rank {self.rank}: {patience:g} s later, other ranks are still in {report.nodeid}. The job ends.\n"
                os.write(self.stderr, text.encode())
                self.world.Abort(1)
            time.sleep(0.001)
