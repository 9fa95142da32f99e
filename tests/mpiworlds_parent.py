"""The parent's side of the mpiworlds plugin: an mpiexec per world size, and one report of a test from those of its ranks.

It never initialises MPI, and runs tests itself only where none of a session's tests needs ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import forkserver
import processor_time
import pytest
from mpiworlds import FOLDER_VARIABLE, timeout_of, world_size_of

from summa3d.cli.launch import mpi_command
from summa3d.launcher.runtime import loaded_runtime

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
POLL = 0.03  # seconds between two readings of what ranks have written; only ranks that failed wait for one
PATIENCE = 20.0  # seconds that a world may take to end after its last test
GRACE = 3.0  # seconds that the other ranks may stay in a test after one has failed in it
START = 300.0  # seconds for mpiexec, imports and collection, before the first rank enters its first test
START_PER_RANK = 1.0  # and for each rank: all of them share this machine's cores
LOG_TAIL = 3000  # characters of mpiexec's own output shown with a failure
# Robust rather than fast: other work on this machine must not turn the waiting of ranks into minutes.
SLEEPING = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # ranks that wait sleep, of jobs that tests start too
ROBUST = {"OMP_NUM_THREADS": "1", **SLEEPING}
PR_SET_TIMERSLACK, SLACK = 29, 1_000_000
"""Nanoseconds that the kernel may add to a sleep, of this process and all that it starts. A rank that waits in MPI asks, sleeps
for 1 ns, and asks again: with the usual 50 µs each takes a fifth of a core, with 200 µs a twentieth."""
SEGMENTS = re.compile(r"mpich_shm|mpich-|sm_segment|vader_segment|osc_rdma|psm|ucx_shm")
OLD_ENOUGH = 2.0  # seconds: a younger segment may be another job's that is just being mapped
OWN_FRAMES = ("_pytest", "pluggy", "mpiworlds.py", "<frozen runpy>", "pytest/__main__.py")


@dataclass
class RankLog:
    """What one rank has told so far."""

    file: IO[bytes] | None = None
    rest: bytes = b""
    pid: int | None = None
    started: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time that each test took this rank."""
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    collect_errors: list[str] = field(default_factory=list)

    def failed(self, test: str) -> bool:
        return any(report["outcome"] == "failed" for report in self.reports.get(test, []))

    def take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "born":
            self.pid = event["pid"]
        elif kind == "start":
            self.started[event["test"]] = event["at"]
        elif kind == "done":
            self.done[event["test"]] = event["took"]
        elif kind == "collect":
            self.collect_errors.append(event["text"])
        else:
            self.reports.setdefault(event["test"], []).append(event)


def may_fork(config: pytest.Config) -> bool:
    """True if processes may be forks: on Linux, of MPICH, whose launcher speaks with a rank through one open descriptor."""
    return forkserver.available() and not config.getoption("--fresh-ranks") and loaded_runtime().vendor == "mpich"


class Servers:
    """The fork servers of a session: two, of which ranks take turns, so that hashes and addresses differ between ranks."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="mpiworlds")
        files = Path(self.folder.name) / "files"
        files.write_text("\n".join(dict.fromkeys(item.nodeid.partition("::")[0] for item in items)))
        self.mark = f"@{files}"
        command = [sys.executable, "-m", "pytest", *_rank_options(config), self.mark]
        _, environment, _ = mpi_command(2, [], {**ROBUST, **os.environ, "PYTEST_ADDOPTS": ""})
        self.servers = [forkserver.Server(command, environment, config.rootpath) for _ in range(2)]

    def command(self) -> list[str]:
        """Return what stands where a rank's Python would, but for its arguments."""
        return forkserver.stub_command(self.servers)

    def log_tail(self) -> str:
        """Return what the servers have printed: why they ended, if they have."""
        return "\n".join(server.log.read_text(errors="replace")[-LOG_TAIL:] for server in self.servers).strip()

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.folder.cleanup()


class World:
    """One mpiexec with `size` ranks that run `items` in order; their reports come through files in `folder`.

    Size 0 is one process without MPI.
    """

    def __init__(self, size: int, items: list[pytest.Item], config: pytest.Config, servers: Servers | None) -> None:
        self.size, self.items, self.servers = size, items, servers
        self.logs = [RankLog() for _ in range(max(size, 1))]
        self.folder = Path(tempfile.mkdtemp(prefix="mpiworlds"))
        self.launched = time.time()
        self.past = 0  # tests that all ranks have left
        self.first_failure: float | None = None
        (self.folder / "tests").write_text("\n".join(item.nodeid for item in items))
        mine = f"@{self.folder / 'tests'}"
        self.mark = servers.mark if servers else mine
        python = servers.command() if servers else [sys.executable, "-m", "pytest", *_rank_options(config)]
        environment = {**os.environ, FOLDER_VARIABLE: str(self.folder), "PYTEST_ADDOPTS": ""}
        command = [*python, mine]
        if size:
            command, environment, _ = mpi_command(size, command[1:], {**ROBUST, **environment})
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd=config.rootpath,
            )

    def listen(self) -> None:
        """Take in what the ranks have written since the last time."""
        for rank, log in enumerate(self.logs):
            if log.file is None:
                with contextlib.suppress(FileNotFoundError):
                    log.file = open(self.folder / f"rank{rank}.jsonl", "rb")  # noqa: SIM115  (open until the world is closed)
            if log.file is not None and (data := log.file.read()):
                complete, _, log.rest = (log.rest + data).rpartition(b"\n")
                for line in complete.splitlines():
                    log.take(json.loads(line))

    def outcome(self, item: pytest.Item) -> str | None:
        """Return None while a rank is in the test, "" when every rank has left it, or why that will not happen."""
        test, timeout = item.nodeid, timeout_of(item)
        ended = self.process.poll() is not None  # asked before the last reading, so that nothing written is missed
        self.listen()
        if all(test in log.done for log in self.logs):
            self.first_failure = None
            return ""
        now = time.time()
        began = min((log.started[test] for log in self.logs if test in log.started), default=None)
        if ended:
            return self._why_ended(test)
        if self.first_failure is None and any(log.failed(test) for log in self.logs):
            self.first_failure = now
        if self.first_failure is not None and now - self.first_failure > GRACE:
            return f"a rank failed, and {GRACE:g} s later others were still in the test"
        if began is not None and now - began > timeout:
            return f"timeout: after {timeout:g} s not all ranks have finished"
        if began is None and now - self.launched > START + START_PER_RANK * self.size and not self._busy():
            return f"the world of {self.size} ranks did not start within {now - self.launched:.0f} s"
        return None

    def _busy(self) -> bool:
        """Return whether every rank has already run something: then the world has started, and this test is next."""
        return all(log.started for log in self.logs)

    def _why_ended(self, test: str) -> str:
        where = "in this test" if any(test in log.started for log in self.logs) else "before this test"
        return f"the job ended {where} (mpiexec's exit status: {self.process.returncode})"

    def release(self) -> None:
        """All ranks have left their test, or will not: let those that failed in it go on to the next."""
        self.items.pop(0)
        (self.folder / f"go{self.past}").touch()
        self.past += 1

    def stacks(self) -> dict[int, str]:
        """Ask every living rank for its stacks; also what faulthandler left of a rank that crashed."""
        if self.process.poll() is None:
            self._signal_ranks(signal.SIGUSR1)
            time.sleep(0.5 + 0.02 * self.size)
        found = {}
        for rank in range(len(self.logs)):
            with contextlib.suppress(OSError):
                lines = (self.folder / f"stack{rank}.txt").read_text(errors="replace").splitlines()
                found[rank] = "\n".join(line for line in lines if not any(frame in line for frame in OWN_FRAMES))
        return found

    def log_tail(self) -> str:
        own = (self.folder / "log").read_text(errors="replace")[-LOG_TAIL:].strip()
        return own if self.servers is None else "\n".join(filter(None, (own, self.servers.log_tail())))

    def close(self, patience: float) -> None:
        """End the job, by force if it does not end within `patience` seconds, and remove what it leaves behind."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        if self.process.returncode != 0:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
                    break
            self._signal_ranks(signal.SIGKILL)  # ranks may live in process groups of their own
            remove_stale_segments(since=self.launched)
        for log in self.logs:
            if log.file is not None:
                log.file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for log in self.logs:
            if log.pid is not None and _is_rank_of(log.pid, self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(log.pid, number)


class Lanes:
    """Runs groups of tests, of one world size or of one file without MPI, several at a time; keeps the reports of each test."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item], account: processor_time.Account) -> None:
        self.config = config
        self.reports: dict[str, list[pytest.TestReport]] = {}
        self.account = account
        groups: dict[tuple[int, str], list[pytest.Item]] = {}
        for item in items:
            size = world_size_of(item)
            groups.setdefault((size, "" if size else str(item.path)), []).append(item)
        long = {key: (-size * len(group), path.count("/")) for key, group in groups.items() for size, path in (key,)}
        self.waiting = [(size, groups[size, path]) for size, path in sorted(groups, key=long.get)]
        self.running: list[World] = []
        self.ending: list[tuple[World, float]] = []
        self.servers = Servers(config, items) if may_fork(config) else None

    def wait_for(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Return the reports of a test, when it has ended."""
        while item.nodeid not in self.reports:
            self._start()
            for world in list(self.running):
                self._follow(world)
            self._sweep()
            time.sleep(POLL)
        return self.reports.pop(item.nodeid)

    def close(self) -> None:
        """End what still runs."""
        for world in (*self.running, *(world for world, _ in self.ending)):
            world.close(0)
        self.running, self.ending, self.waiting = [], [], []
        if self.servers is not None:
            self.servers.close()

    def _start(self) -> None:
        """Start groups while there is room: worlds, whose ranks wait for each other most of the time, in half of the lanes."""
        lanes = self.config.getoption("--lanes")
        for group in list(self.waiting):
            size, items = group
            worlds = sum(world.size > 0 for world in self.running)
            if len(self.running) < lanes and not (size and worlds >= (lanes + 1) // 2):
                self.waiting.remove(group)
                self.running.append(World(size, items, self.config, self.servers))

    def _follow(self, world: World) -> None:
        """Take in the tests that a world has ended; one that fails to end its test is ended, and the rest of its tests wait."""
        while world.items:
            item = world.items[0]
            why = world.outcome(item)
            if why is None:
                return
            stacks = world.stacks() if why else {}
            told = {report["when"] for log in world.logs for report in log.reports.get(item.nodeid, [])}
            phases = [phase for phase in PHASES if phase in told or (why and phase == "call")]
            self.reports[item.nodeid] = [_merged(item, world, phase, why, stacks) for phase in phases]
            self.account.tests[item.nodeid] += sum(log.done.get(item.nodeid, 0.0) for log in world.logs)
            world.release()
            if why:
                self.running.remove(world)
                world.close(patience=0)
                if world.items:
                    self.waiting.insert(0, (world.size, world.items))
                return
        self.running.remove(world)
        self.ending.append((world, time.time() + PATIENCE))

    def _sweep(self) -> None:
        """Close worlds whose tests have ended, by force those that do not end by themselves."""
        for ending in list(self.ending):
            world, deadline = ending
            if world.process.poll() is not None or time.time() > deadline:
                self.ending.remove(ending)
                world.close(patience=0)


class Parent:
    """Has tests run by worlds, grouped by size after the tests that use no MPI, and reports for all ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.time()
        if sys.platform == "linux":
            forkserver.LIBC.prctl(PR_SET_TIMERSLACK, SLACK)
        os.environ |= {name: value for name, value in SLEEPING.items() if name not in os.environ}
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 128 + number))  # ends the worlds too
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's jobs in the background do, and all that they start
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.lanes: Lanes | None = None
        self.account, self.here = processor_time.Account(), ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=world_size_of)

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if any(map(world_size_of, session.items)) and not session.testsfailed and not self.config.option.collectonly:
            elsewhere = [item for item in session.items if not self._runs_here(item)]
            self.lanes = Lanes(self.config, elsewhere, self.account)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.lanes is None or self._runs_here(item):
            self.account.tests[item.nodeid] -= processor_time.used()  # what it takes here is added at its end
            self.here = item.nodeid
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.lanes.wait_for(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid == self.here:
            self.account.tests[nodeid] += processor_time.used()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which tests took the processors."""
        terminalreporter.write_sep("=", "processor time")
        for line in self.account.lines(self.config.getoption("--processor-times")):
            terminalreporter.write_line(line)

    def _runs_here(self, item: pytest.Item) -> bool:
        """Return whether this process runs a test: one without MPI where there is one lane, one that --worlds left no size."""
        alone = self.config.getoption("--lanes") == 1
        return world_size_of(item) == 0 and (alone or item.get_closest_marker("mpi") is not None)

    def pytest_sessionfinish(self) -> None:
        if self.lanes is not None:
            self.lanes.close()
        remove_stale_segments(since=self.began)  # also those of jobs that tests started, and killed


def _merged(item: pytest.Item, world: World, phase: Phase, why: str, stacks: dict[int, str]) -> pytest.TestReport:
    """One report of one phase from those of all ranks; `why` the test was cut short counts as a failure of its call."""
    told = {
        rank: report
        for rank, log in enumerate(world.logs)
        for report in log.reports.get(item.nodeid, [])
        if report["when"] == phase
    }
    failed = {rank: report for rank, report in told.items() if report["outcome"] == "failed"}
    text = "\n".join(_grouped({rank: report["text"] for rank, report in failed.items()}, world.size))
    sections = [
        (f"{name} ({ranks})", content)
        for name in dict.fromkeys(name for report in failed.values() for name, _ in report["sections"])
        for ranks, content in _by_value({rank: dict(report["sections"]).get(name, "") for rank, report in failed.items()})
        if content
    ]
    if why and phase == "call":
        text = "\n".join(filter(None, (text, f"--- {why}", *_unfinished(item.nodeid, world, stacks))))
        sections += [("mpiexec output", world.log_tail())] if world.log_tail() else []
    outcome: Literal["passed", "failed", "skipped"] = "failed" if text else "passed"
    longrepr: Any = text or None
    skips = [report for report in told.values() if report["outcome"] == "skipped"]
    if not text and skips and len(skips) == len(told):
        outcome, longrepr = "skipped", (str(item.path), item.location[1] or 0, skips[0]["text"])
    duration = max((report["duration"] for report in told.values()), default=0.0)
    merged = pytest.TestReport(item.nodeid, item.location, {}, outcome, longrepr, phase, sections=sections, duration=duration)
    expected = [report["wasxfail"] for report in told.values() if report["wasxfail"] is not None]
    if outcome != "failed" and expected:
        merged.wasxfail = expected[0]  # type: ignore[attr-defined]
    return merged


def _unfinished(test: str, world: World, stacks: dict[int, str]) -> Iterator[str]:
    """Return what is known of the ranks that had not finished: where they stand, or why they never began."""
    errors = {rank: "\n".join(log.collect_errors) for rank, log in enumerate(world.logs) if log.collect_errors}
    yield from _grouped(errors, world.size)
    standing = {rank: stacks.get(rank, "").strip() for rank, log in enumerate(world.logs) if test not in log.done}
    gone = "(no stack: the process was gone)"
    for ranks, stack in _by_value({rank: stack or gone for rank, stack in standing.items()}):
        yield f"--- {ranks} of {world.size} had not finished; innermost call first:\n{stack}"


def _grouped(texts: dict[int, str], size: int) -> list[str]:
    return [f"--- {ranks} of {size} ---\n{text}" for ranks, text in _by_value(texts)]


def _by_value(texts: dict[int, str]) -> list[tuple[str, str]]:
    """Ranks that say the same, but for addresses and their own temporary folder, say it once: [("ranks 1, 2", text), …]."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        same = re.sub(r"0x[0-9a-f]+", "0x…", text)
        groups.setdefault(re.sub(r"/tmp\d+/", "/tmp…/", same), []).append(rank)
    return [
        (("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)), texts[ranks[0]] if len(ranks) == 1 else text)
        for text, ranks in groups.items()
    ]


def _rank_options(config: pytest.Config) -> Iterable[str]:
    """Options for the ranks' pytest: the parent's where they change what a test does, else plain."""
    yield from ("-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=")
    yield from ("--rootdir", str(config.rootpath), "--import-mode", config.getoption("importmode"))
    if config.inipath is not None:
        yield from ("-c", str(config.inipath))
    if config.getoption("only_mpi", False):  # an option of pytest-mpi
        yield "--only-mpi"


def _is_rank_of(pid: int, mark: str) -> bool:
    """Return whether a process still is the rank that wrote its id: ids are given anew (where /proc cannot tell, believe it)."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()


def remove_stale_segments(since: float) -> None:
    """Delete the shared-memory files that a killed job has left: ours, of an MPI library, made since then, mapped by nobody."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or not Path("/proc/self/maps").exists():
        return
    mapped, began = "", time.time()  # reading takes a while where processes are many: what is made meanwhile is left alone
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text(errors="replace")
    for segment in folder.iterdir():
        with contextlib.suppress(OSError):
            facts = segment.stat()
            ours = facts.st_uid == os.getuid() and since - 1 <= facts.st_ctime <= began - OLD_ENOUGH
            if ours and SEGMENTS.match(segment.name) and str(segment) not in mapped:
                segment.unlink()
