# The parent's side of the mpiworlds plugin: one mpiexec per world size, one report per test from the reports of its ranks.
# May import pytest, mpiworlds and summa3d.cli (to find the launcher). Never initialises MPI.
# Next: mpiworlds.py for the ranks' side; test_mpiworlds.py for what it promises.
from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from mpiworlds import FOLDER_VARIABLE, timeout_of, world_size_of

from summa3d.cli.launch import mpi_command

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
GRACE = 3.0  # seconds that the other ranks may stay in a test after one has failed in it
START = 90.0  # seconds for mpiexec, imports and collection, before the first rank enters its first test
START_PER_RANK = 1.0  # and for each rank: all of them share this machine's cores
LOG_TAIL = 3000  # characters of mpiexec's own output shown with a failure
# Robust rather than fast: other work on this machine must not turn the waiting of ranks into minutes.
ROBUST = {"OMP_NUM_THREADS": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
SEGMENTS = re.compile(r"mpich_shm|mpich-|sm_segment|vader_segment|osc_rdma|psm|ucx_shm")
OLD_ENOUGH = 2.0  # seconds: a younger segment may be another job's that is just being mapped
OWN_FRAMES = ("_pytest", "pluggy", "mpiworlds.py", "<frozen runpy>", "pytest/__main__.py")


@dataclass
class RankLog:
    """What one rank has told so far."""

    position: int = 0
    pid: int | None = None
    started: dict[str, float] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
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
            self.done.add(event["test"])
        elif kind == "collect":
            self.collect_errors.append(event["text"])
        else:
            self.reports.setdefault(event["test"], []).append(event)


class World:
    """One mpiexec with `size` ranks that run `items` in order; their reports come through files in `folder`."""

    def __init__(self, size: int, items: list[pytest.Item], config: pytest.Config) -> None:
        self.size, self.items = size, items
        self.logs = [RankLog() for _ in range(size)]
        self.folder = Path(tempfile.mkdtemp(prefix="mpiworlds"))
        self.launched = time.time()
        (self.folder / "tests").write_text("\n".join(item.nodeid for item in items))
        environ = {**ROBUST, **os.environ, FOLDER_VARIABLE: str(self.folder), "PYTEST_ADDOPTS": ""}
        arguments = ["-m", "pytest", *_rank_options(config), f"@{self.folder / 'tests'}"]
        command, environment, _ = mpi_command(size, arguments, environ)
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
            path = self.folder / f"rank{rank}.jsonl"
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(log.position)
                    data = file.read()
                complete = data[: data.rfind(b"\n") + 1]
                log.position += len(complete)
                for line in complete.splitlines():
                    log.take(json.loads(line))

    def wait_for(self, item: pytest.Item) -> str:
        """Wait until every rank has left the test; return "" or why that will not happen."""
        test, timeout = item.nodeid, timeout_of(item)
        first_failure: float | None = None
        while True:
            ended = self.process.poll() is not None  # asked before the last reading, so that nothing written is missed
            self.listen()
            if all(test in log.done for log in self.logs):
                return ""
            now = time.time()
            began = min((log.started[test] for log in self.logs if test in log.started), default=None)
            if ended:
                return self._why_ended(test)
            if first_failure is None and any(log.failed(test) for log in self.logs):
                first_failure = now
            if first_failure is not None and now - first_failure > GRACE:
                return f"a rank failed, and {GRACE:g} s later others were still in the test"
            if began is not None and now - began > timeout:
                return f"timeout: after {timeout:g} s not all ranks have finished"
            if began is None and now - self.launched > START + START_PER_RANK * self.size and not self._busy():
                return f"the world of {self.size} ranks did not start within {now - self.launched:.0f} s"
            time.sleep(0.01)

    def _busy(self) -> bool:
        """Whether every rank has already run something: then the world has started, and this test is next."""
        return all(log.started for log in self.logs)

    def _why_ended(self, test: str) -> str:
        where = "in this test" if any(test in log.started for log in self.logs) else "before this test"
        return f"the job ended {where} (mpiexec's exit status: {self.process.returncode})"

    def release(self, item: pytest.Item) -> None:
        """All ranks have left the test: let those that failed in it go on."""
        (self.folder / f"go{self.items.index(item)}").touch()

    def stacks(self) -> dict[int, str]:
        """Ask every living rank for its stacks; also what faulthandler left of a rank that crashed."""
        if self.process.poll() is None:
            self._signal_ranks(signal.SIGUSR1)
            time.sleep(0.5 + 0.02 * self.size)
        found = {}
        for rank in range(self.size):
            with contextlib.suppress(OSError):
                lines = (self.folder / f"stack{rank}.txt").read_text(errors="replace").splitlines()
                found[rank] = "\n".join(line for line in lines if not any(frame in line for frame in OWN_FRAMES))
        return found

    def log_tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-LOG_TAIL:].strip()

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
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for log in self.logs:
            if log.pid is not None and _is_rank_of(log.pid, self.folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(log.pid, number)


class Parent:
    """Runs mpi tests in worlds, grouped by size after the tests that use no MPI, and reports for all ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.time()
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 128 + number))  # ends the world too
        self.world: World | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=world_size_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        size = world_size_of(item)
        if size == 0:
            return None
        if self.world is None:
            items = item.session.items
            todo = [other for other in items[items.index(item) :] if world_size_of(other) == size]
            self.world = World(size, todo, self.config)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, self.world):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self.world is not None and (nextitem is None or world_size_of(nextitem) != size):
            self._close(patience=20)
        return True

    def pytest_sessionfinish(self) -> None:
        self._close(patience=0)
        remove_stale_segments(since=self.began)  # also those of jobs that tests started, and killed

    def _close(self, patience: float) -> None:
        if self.world is not None:
            self.world.close(patience)
            self.world = None

    def _reports(self, item: pytest.Item, world: World) -> list[pytest.TestReport]:
        why = world.wait_for(item)
        stacks = world.stacks() if why else {}
        reports = [_merged(item, world, phase, why, stacks) for phase in PHASES]
        if why:
            self._close(patience=0)
        else:
            world.release(item)
        return reports


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
    """What is known of the ranks that had not finished: where they stand, or why they never began."""
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


def _is_rank_of(pid: int, folder: Path) -> bool:
    """Whether a process still is the rank that wrote its id: ids are given anew (where /proc cannot tell, believe it)."""
    try:
        return f"@{folder}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
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
