"""A rank is killed, at any op of a step or in the middle of writing a checkpoint: the job ends, and --resume brings the same end.

Starts real jobs with `summa3d launch`; see killed_rank.py for those that kill themselves.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices
import jobs
import pytest
from small_runs import assignments, metrics_of, write_corpus

from summa3d.cli.launch import mpi_command
from summa3d.launch.runtime import loaded_runtime

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="other processes have no pretended device")

RANKS = 2
ENDS_WITHIN = 10.0
PATIENCE = 120.0
MEASURED = (
    *("tokens_per_second", "seconds", "words_per_rank"),
    *("arithmetic_share", "communication_share", "idle_share", "waited_seconds", "exposed_communication"),
    *("model_flops_per_second", "mfu"),
)


def train_arguments(folder: Path, *more: str, **changes: object) -> list[str]:
    settings = assignments(folder / "corpus.txt", grid__y=RANKS, dtype="float32", **changes)
    return ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)], *more]


def launch(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "summa3d", "launch", "-n", str(RANKS), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in (*MEASURED, "resumed")} for line in metrics_of(folder)]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir() if path.name.startswith("step-"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The numbers of the run that nobody kills."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_corpus(folder / "corpus.txt")
    job = launch(train_arguments(folder))
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    return numbers(folder)


def resume(folder: Path, from_step: str) -> None:
    job = launch(train_arguments(folder, "--resume"))
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert f"resumed after step {from_step}" in output


@pytest.mark.parametrize("killed", ["1 4 file 1", "0 4 rename 1"])
def test_a_rank_killed_while_a_checkpoint_is_written(tmp_path: Path, uninterrupted: list[dict[str, Any]], killed: str) -> None:
    write_corpus(tmp_path / "corpus.txt")
    program = str(Path(__file__).with_name("killed_rank.py"))
    command, environment, _ = mpi_command(RANKS, [program, *train_arguments(tmp_path)])
    job = subprocess.run(
        command, env={**environment, "KILLED": killed, "KILLED_AT": str(tmp_path / "at")}, capture_output=True, timeout=PATIENCE
    )
    assert job.returncode != 0
    assert saved(tmp_path) == ["step-2"]
    assert (tmp_path / "run" / "checkpoints" / ".tmp-step-4").is_dir(), "it was not killed while writing"

    resume(tmp_path, from_step="2")
    assert numbers(tmp_path) == uninterrupted
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-6"]


def test_a_rank_killed_in_a_step_ends_the_job_soon(tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    write_corpus(tmp_path / "corpus.txt")
    endless = launch(train_arguments(tmp_path, train__steps=100_000, train__keep=1))
    try:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step-10").is_dir())
        mapped = Path(f"/proc/{rank_process(tmp_path / 'run', 1)}/maps").read_text()
        os.kill(rank_process(tmp_path / "run", 1), signal.SIGKILL)
        began = time.monotonic()
        endless.communicate(timeout=PATIENCE)
    finally:
        endless.kill()
    assert time.monotonic() - began < ENDS_WITHIN
    assert endless.returncode != 0
    assert not list(rank_processes(tmp_path / "run"))
    segments = set(re.findall(r"(/dev/shm/mpich_shm_\S+)", mapped))
    assert segments or loaded_runtime().vendor != "mpich"
    assert not [segment for segment in segments if Path(segment).exists()], "a killed job leaves no shared memory"
    assert numbers(tmp_path)[0]["loss"] == uninterrupted[0]["loss"]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the job did not get there"
        time.sleep(0.01)


def rank_processes(run: Path) -> Iterator[tuple[int, int]]:
    """(rank, process id) of every rank that trains in this run folder."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            environment = dict(part.split(b"=", 1) for part in (entry / "environ").read_bytes().split(b"\0") if b"=" in part)
        except OSError:
            continue
        rank = environment.get(b"PMI_RANK", environment.get(b"OMPI_COMM_WORLD_RANK"))
        if rank is not None and str(run).encode() in arguments and b"launch" not in arguments:
            yield int(rank), int(entry.name)


def rank_process(run: Path, rank: int) -> int:
    return dict(rank_processes(run))[rank]


REST = {"T": 1, "R": 2, "norm": 1, "update": 1, "file": 1, "rename": 1}
KINDS = {"1f1b": {"F": 2, "B": 2, **REST}, "zb-h1": {"F": 2, "X": 2, "W": 2, **REST}}
"""What a rank is killed in by schedule, and how many there are in a step, or in a checkpoint."""
REPLICAS: dict[str, object] = {
    **{"scheme": "serial", "grid__pp": 2, "grid__dp": 2, "model__layers": 2, "model__sequence": 8, "train__batch": 8},
    **{"train__accumulate": 2, "train__checkpoint_every": 1, "train__evaluate_every": 0, "replicas__bucket": 20_000},
}
"""Two stages, which share a table, and two replicas of each, with more than one bucket of gradients."""


def kills(number: int, kinds: dict[str, int]) -> list[str]:
    """Seeded kills, each in a step of its own: of every kind in turn, on any rank, at the beginning or the end of any such op."""
    chance, found = random.Random(2026), []
    for step in range(2, number + 2):
        kind = list(kinds)[(step * 5) % len(kinds)]
        count = chance.choice((-1, 1)) * chance.randint(1, kinds[kind])
        found.append(f"{0 if kind == 'rename' else chance.randrange(4)} {step} {kind} {count}")
    return found


def replicas_job(folder: Path, steps: int, schedule: str, *more: str, killed: str = "-1 0 - 0") -> jobs.Ended:
    settings = assignments(folder / "corpus.txt", train__steps=steps, **{**REPLICAS, "pipeline__schedule": schedule})
    arguments = ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)], *more]
    program = str(Path(__file__).with_name("killed_rank.py"))
    return jobs.run([program, *arguments], 4, extra={"KILLED": killed, "KILLED_AT": str(folder / "at")}, timeout=PATIENCE)


def files_of(folder: Path, step: int) -> dict[str, Any]:
    """Name, size and checksum of the files of a checkpoint."""
    return json.loads((folder / "run" / "checkpoints" / f"step-{step}" / "index.json").read_text())["files"]


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("number", "schedule"), [(4, "1f1b"), pytest.param(40, "1f1b", marks=WIDE), pytest.param(9, "zb-h1", marks=WIDE)]
)
def test_replicas_of_a_pipeline_that_are_killed_again_and_again_end_with_the_same_bits(
    tmp_path: Path, number: int, schedule: str
) -> None:
    """Each job takes one step more than the one before it, and is killed in the next, or while it saves that."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        write_corpus(folder / "corpus.txt")
    steps = number + 2
    assert (ended := replicas_job(whole, steps, schedule)).status == 0, ended.stderr
    for done, killed in enumerate(kills(number, KINDS[schedule])):
        ended = replicas_job(parts, steps, schedule, *["--resume"] * (done > 0), killed=killed)
        at = parts / "at"
        assert ended.status != 0 and at.exists(), (killed, ended.stdout, ended.stderr)
        assert time.time() - float(at.read_text()) < ENDS_WITHIN, killed
        at.unlink()
        assert f"step-{done + 1}" in saved(parts) and f"step-{done + 2}" not in saved(parts), killed
        assert numbers(parts)[: done + 1] == numbers(whole)[: done + 1], killed
    assert (ended := replicas_job(parts, steps, schedule, "--resume")).status == 0, ended.stderr
    assert numbers(parts) == numbers(whole) and files_of(parts, steps) == files_of(whole, steps)
