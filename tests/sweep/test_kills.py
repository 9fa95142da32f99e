"""Sweeps whose ranks, launcher or whole job are killed: what is collected in the end is what an undisturbed sweep has."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest

from summa3d.cli.main import main as cli

MARK = "SWEEP_OF_THIS_TEST"
FILE = """
name = "killed"
what = "gemm"
ranks = [1, 2]
base = {m = 40, n = 30, algorithm = "cuboid"}
vary = {k = [20, 21, 22], dtype = ["float32", "float64"], form = ["nn", "nt"]}
rounds = 2
order = "sequential"
"""
POINTS = 24
WAIT = 300.0
KINDS = ("rank", "launcher", "job")


class Job:
    """`summa3d sweep run` on a file, and everything that it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder / "out", str(folder)
        self.command = [sys.executable, "-m", "summa3d", "sweep", "run", str(folder / "killed.toml"), "--dir", str(self.folder)]
        (folder / "killed.toml").write_text(FILE)

    def start(self, *options: str) -> None:
        environ = jobs.environment({MARK: self.mark, "OMP_NUM_THREADS": "1"})
        with (self.folder.parent / "said").open("a") as said:
            self.process = subprocess.Popen(
                [*self.command, *options], env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def processes(self, kind: str = "job") -> list[int]:
        """The process ids of the ranks, of their launcher, or of all."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes()
                if f"{MARK}={self.mark}\0".encode() in environ:
                    is_rank = b"PMI_RANK=" in environ or b"OMPI_COMM_WORLD_RANK=" in environ
                    is_launcher = not is_rank and int(entry.name) != self.process.pid and b"summa3d" not in self._program(entry)
                    if kind == "job" or (kind == "rank" and is_rank) or (kind == "launcher" and is_launcher):
                        found.append(int(entry.name))
        return sorted(found)

    @staticmethod
    def _program(entry: Path) -> bytes:
        return (entry / "cmdline").read_bytes().partition(b"\0")[0]

    def lines(self) -> int:
        return sum(file.read_bytes().count(b"\n") for file in self.folder.rglob("points.jsonl"))

    def kill(self, kind: str, chosen: random.Random) -> bool:
        """Kill one rank, the launcher, or everything at once, at some moment of a start; whether there was one."""
        deadline = time.monotonic() + WAIT
        while not self.processes("rank"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        found = self.processes(kind)
        if kind == "rank":
            found = [chosen.choice(found)] if found else []
        elif kind == "launcher":
            found = found[:1]
        else:
            found = [self.process.pid, *found]  # first that which would start ranks again
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(found)

    def finish(self) -> int:
        return self.process.wait(WAIT)

    def said(self) -> str:
        return (self.folder.parent / "said").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for process in made.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def expected() -> dict[str, tuple[dict[str, Any], int]]:
    """id → configuration and words of every point, by the closed form of the product."""
    from summa3d.files import from_toml
    from summa3d.gemm.algorithms.registry import algorithm
    from summa3d.sweep.file import read
    from summa3d.sweep.points import expand

    points, refused = expand(read(from_toml(FILE)))
    assert len(points) == POINTS and not refused
    found = {}
    for point in points:
        one = point.problem
        volume = algorithm("cuboid").volume(algorithm("cuboid").plan(one.form, one.m, one.n, one.k), point.axes, one.dtype)
        found[point.id] = dict(point.config), volume.max_words
    return found


def collected(job: Job) -> list[dict[str, Any]]:
    out = job.folder.parent / "all.jsonl"
    assert cli(["sweep", "collect", str(job.folder), "-o", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def check(job: Job) -> None:
    lines = collected(job)
    assert not [line for line in lines if "error" in line], job.said()
    ids = [line["id"] for line in lines]
    assert len(ids) == len(set(ids)) == POINTS, job.said()
    assert {line["id"]: (line["config"], line["words"]) for line in lines} == expected()
    assert all(line["words"] == line["words_formula"] and len(line["seconds"]["all"]) == 2 for line in lines)
    whole = [line for file in job.folder.rglob("points.jsonl") for line in file.read_text().splitlines()]
    assert sum("error" not in json.loads(line) for line in whole) == POINTS  # no point was measured twice, nor half


def disturb(job: Job, kills: list[str], seed: int) -> None:
    """Start the sweep and kill what `kills` names, each after some more lines and some time; start it again until it ends."""
    chosen, killed = random.Random(seed), 0
    job.start()
    for kind in kills:
        while True:
            goal = min(POINTS - 1, job.lines() + chosen.randint(0, POINTS // (len(kills) + 1)))
            deadline = time.monotonic() + WAIT
            while job.lines() < goal and job.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chosen.random() * 0.05)
            if job.process.poll() is not None:
                job.start("--retry")
            if job.kill(kind, chosen):
                killed += 1
                break
    for _ in range(len(kills) + 1):
        if job.finish() == 0:
            break
        job.start("--retry")  # a point whose ranks were killed twice is an error
    assert killed == len(kills)


def test_a_sweep_that_loses_a_rank_and_then_its_job_has_every_point_once(job: Job) -> None:
    disturb(job, ["rank", "job"], seed=3)
    check(job)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(6))
def test_a_sweep_killed_at_five_moments_is_an_undisturbed_one(job: Job, seed: int) -> None:
    chosen = random.Random(seed)
    disturb(job, [*KINDS, *chosen.choices(KINDS, k=2)], seed)
    check(job)


def test_a_point_that_kills_its_ranks_alone_too_has_a_line_that_says_so_and_the_others_are_measured(tmp_path: Path) -> None:
    """Ranks are a program of the test: it dies in the races of one point, and appends the lines of the others."""
    from summa3d.files import from_toml
    from summa3d.sweep.file import read
    from summa3d.sweep.lines import RUNNING, append, folder_of, known_in, missing
    from summa3d.sweep.measure import about, whole
    from summa3d.sweep.points import expand, races
    from summa3d.sweep.run import Runner

    sweep = read({**from_toml(FILE), "order": "interleaved", "ranks": [2]})
    points, _ = expand(sweep)
    bad, starts, retried = points[3], [], [False]

    def start(ranks: int, options: Any) -> int:
        starts.append(list(options))
        folder = folder_of(tmp_path, ranks)
        folder.mkdir(parents=True, exist_ok=True)
        own = [point for point in points if "--only" not in options or point.id in options]
        before = float(options[options.index("--retry-before") + 1])
        for race in races(missing(own, known_in(tmp_path, print), before), sweep):
            (folder / RUNNING).write_text(json.dumps([point.id for point in race]))
            if bad in race and not retried[0]:
                return 137
            append(folder, [whole({**about(point), "race": len(race), "seconds": 1.0}, sweep, {}) for point in race])
        return 0

    said: list[str] = []
    runner = Runner(sweep, tmp_path, start, said.append)
    assert runner.run(points, [2]) == 1
    known = known_in(tmp_path, said.append)
    assert [one for one in known if "error" in known[one]] == [bad.id] and "status 137" in known[bad.id]["error"]
    assert set(known) == {point.id for point in points}
    assert runner.run(points, [2]) == 1 and len(starts) == len({json.dumps(one) for one in starts}) + 1  # nothing is left to run
    retried[0] = True
    runner.retry_before = time.time() + 1
    assert runner.run(points, [2]) == 0 and not [one for one in known_in(tmp_path, print).values() if "error" in one]


def test_ranks_that_die_before_they_measure_anything_end_the_sweep(tmp_path: Path) -> None:
    from summa3d.errors import LaunchError
    from summa3d.files import from_toml
    from summa3d.sweep.file import read
    from summa3d.sweep.points import expand
    from summa3d.sweep.run import Runner

    sweep = read(from_toml(FILE))
    with pytest.raises(LaunchError, match="the start of 1 rank ended with status 127 before any point"):
        Runner(sweep, tmp_path, lambda ranks, options: 127, print).run(expand(sweep)[0], [1, 2])
