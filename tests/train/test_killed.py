"""A rank is killed, or asked to end, at any op of a step or while it writes a checkpoint: --resume brings the same end.

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

from summa3d.launcher.runtime import loaded_runtime

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="other processes have no pretended device")

RANKS = 2
ENDS_WITHIN = 50.0
PATIENCE = 300.0
MEASURED = (
    *("tokens_per_second", "seconds", "words_per_rank", "words_by_axis"),
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
    assert trained(folder).status == 0
    return numbers(folder)


def trained(folder: Path, *more: str, killed: str = "-1 0 - 0", **changes: object) -> jobs.Ended:
    """The run of two ranks, one of which may kill itself."""
    program = str(Path(__file__).with_name("killed_rank.py"))
    extra = {"KILLED": killed, "KILLED_AT": str(folder / "at")}
    return jobs.run([program, *train_arguments(folder, *more, **changes)], RANKS, extra=extra, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("killed", "complete", "left"),
    [
        ("1 4 copy 1", [2], None),
        ("1 4 file 1", [2], ".tmp-step-4"),
        pytest.param("0 4 index 1", [2], ".tmp-step-4", marks=pytest.mark.wide),
        ("0 4 rename 1", [2], ".tmp-step-4"),
        pytest.param("0 2 delete 1", [4, 6], ".old-step-2", marks=pytest.mark.wide),
    ],
)
def test_a_rank_killed_while_a_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, uninterrupted: list[dict[str, Any]], killed: str, complete: list[int], left: str | None
) -> None:
    """In the thread of the writer, while the next steps are taken."""
    write_corpus(tmp_path / "corpus.txt")
    assert trained(tmp_path, killed=killed).status != 0
    assert saved(tmp_path) == [f"step-{step}" for step in complete]
    assert left is None or (tmp_path / "run" / "checkpoints" / left).is_dir(), "it was killed at another time"
    ended = trained(tmp_path, "--resume")
    assert ended.status == 0 and f"resumed after step {complete[-1]}" in ended.stderr, ended.stderr
    assert numbers(tmp_path) == uninterrupted
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-6"]


def test_a_rank_killed_in_a_step_ends_the_job_soon(tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    write_corpus(tmp_path / "corpus.txt")
    endless = launch(train_arguments(tmp_path, train__steps=100_000, train__keep=1))
    try:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step-10").is_dir())
        process = rank_process(tmp_path / "run", 1)
        mapped = Path(f"/proc/{process}/maps").read_text()
        os.kill(process, signal.SIGKILL)
        began = time.monotonic()
        output, _ = endless.communicate(timeout=PATIENCE)
    finally:
        endless.kill()
    assert time.monotonic() - began < ENDS_WITHIN
    assert endless.returncode != 0
    assert f"rank 1 of 2 (process {process}) ended first, without a report" in output
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
    "train__background": False,
}
"""Two stages, which share a table, and two replicas of each, with more than one bucket of gradients."""
CONTEXTS: dict[str, object] = {
    **{"grid__dp": 1, "grid__cp": 2, "context__kind": "ring"},
    **{"model__attention_dropout": 0.0, "replicas__zero": 2},
}
"""In place of the replicas, two contexts, whose keys travel in every pass of a stage."""


def kills(number: int, kinds: dict[str, int]) -> list[str]:
    """Seeded kills, each in a step of its own: of every kind in turn, on any rank, at the beginning or the end of any such op."""
    chance, found = random.Random(2026), []
    for step in range(2, number + 2):
        kind = list(kinds)[(step * 5) % len(kinds)]
        count = chance.choice((-1, 1)) * chance.randint(1, kinds[kind])
        found.append(f"{0 if kind == 'rename' else chance.randrange(4)} {step} {kind} {count}")
    return found


def replicas_job(
    folder: Path, steps: int, schedule: str, *more: str, killed: str = "-1 0 - 0", by: str = "SIGKILL", **changes: object
) -> jobs.Ended:
    changed = {**REPLICAS, "pipeline__schedule": schedule, **changes}
    settings = assignments(folder / "corpus.txt", train__steps=steps, **changed)
    arguments = ["train", "demo", "--run", str(folder / "run"), *[part for one in settings for part in ("--set", one)], *more]
    program = str(Path(__file__).with_name("killed_rank.py"))
    extra = {"KILLED": killed, "KILLED_AT": str(folder / "at"), "KILLED_BY": by}
    return jobs.run([program, *arguments], 4, extra=extra, timeout=PATIENCE)


def files_of(folder: Path, step: int) -> dict[str, Any]:
    """Name, size and checksum of the files of a checkpoint."""
    return json.loads((folder / "run" / "checkpoints" / f"step-{step}" / "index.json").read_text())["files"]


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("number", "schedule", "changes"),
    [
        (4, "1f1b", CONTEXTS),
        pytest.param(40, "1f1b", {}, marks=WIDE),
        pytest.param(9, "zb-h1", {}, marks=WIDE),
        pytest.param(9, "zb-h1", CONTEXTS, marks=WIDE),
    ],
)
def test_replicas_or_contexts_of_a_pipeline_that_are_killed_again_and_again_end_with_the_same_bits(
    tmp_path: Path, number: int, schedule: str, changes: dict[str, object]
) -> None:
    """Each job takes one step more than the one before it, and is killed in the next, or while it saves that."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        write_corpus(folder / "corpus.txt")
    steps = number + 2
    assert (ended := replicas_job(whole, steps, schedule, **changes)).status == 0, ended.stderr
    for done, killed in enumerate(kills(number, KINDS[schedule])):
        ended = replicas_job(parts, steps, schedule, *["--resume"] * (done > 0), killed=killed, **changes)
        at = parts / "at"
        assert ended.status != 0 and at.exists(), (killed, ended.stdout, ended.stderr)
        assert time.time() - float(at.read_text()) < ENDS_WITHIN, killed
        at.unlink()
        assert f"step-{done + 1}" in saved(parts) and f"step-{done + 2}" not in saved(parts), killed
        assert numbers(parts)[: done + 1] == numbers(whole)[: done + 1], killed
    assert (ended := replicas_job(parts, steps, schedule, "--resume", **changes)).status == 0, ended.stderr
    assert numbers(parts) == numbers(whole) and files_of(parts, steps) == files_of(whole, steps)


MOMENTS = ("prepare", "F", "B", "T", "R", "norm", "update", "evaluation", "file")


def moments(number: int) -> list[tuple[str, str]]:
    """Seeded kinds and ranks of requests to end, each kind in turn from the first on."""
    chance = random.Random(2027)
    return [(MOMENTS[place * 5 % len(MOMENTS)], f"{chance.randrange(4)}") for place in range(number)]


@pytest.mark.parametrize("number", [2, pytest.param(40, marks=WIDE)])
def test_a_run_that_is_asked_to_end_loses_no_step(tmp_path: Path, number: int) -> None:
    """Pipelines of replicas, each job of which is asked at another moment; a checkpoint is due only every other step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        write_corpus(folder / "corpus.txt")
    changes: dict[str, object] = {"train__evaluate_every": 1, "train__checkpoint_every": 2, "train__background": True}
    steps = 2 * number + 3 + 2 * (number // len(MOMENTS))
    assert (ended := replicas_job(whole, steps, "1f1b", **changes)).status == 0, ended.stderr
    done = 0
    for kind, rank in moments(number):
        step = done // 2 * 2 + 2
        late = 3 if kind == "file" else 1  # it is written behind the next steps, until the next one is due
        killed = f"{rank} {step} {kind} 1"
        ended = replicas_job(parts, steps, "1f1b", *["--resume"] * (done > 0), killed=killed, by="SIGTERM", **changes)
        assert ended.status == 75, (killed, ended.stdout, ended.stderr)
        taken = len(metrics_of(parts)) if (parts / "run" / "metrics.jsonl").exists() else 0
        assert taken == done if kind == "prepare" else step <= taken <= step + late, killed
        words = f"saved after step {taken}" if taken else "nothing to save"
        assert f"rank {rank} got SIGTERM: {words} of {steps}" in " ".join(ended.stderr.split())
        assert f"step-{taken}" in saved(parts) if taken else not saved(parts)
        done = taken
    assert (ended := replicas_job(parts, steps, "1f1b", "--resume", **changes)).status == 0, ended.stderr
    assert numbers(parts) == numbers(whole) and files_of(parts, steps) == files_of(whole, steps)


@pytest.mark.parametrize("number", [1, pytest.param(40, marks=WIDE)])
def test_launch_or_a_rank_is_asked_to_end_at_a_random_time(tmp_path: Path, number: int) -> None:
    """Each job starts the run anew, or goes on; asked by SIGTERM, or by the signal that the configuration names."""
    chance, steps = random.Random(2028), {"train__steps": 100_000, "train__signal": "SIGUSR1", "train__checkpoint_every": 1000}
    write_corpus(tmp_path / "corpus.txt")
    done = 0
    for trial in range(number):
        job = launch(train_arguments(tmp_path, *["--resume"] * (trial > 0), **steps))
        try:
            wait_for(lambda before=done: len(list(rank_processes(tmp_path / "run"))) == RANKS and steps_in(tmp_path) > before)
            time.sleep(chance.uniform(0, 1.0))
            process = chance.choice((job.pid, rank_process(tmp_path / "run", 1)))
            os.kill(process, chance.choice((signal.SIGTERM, signal.SIGUSR1)))
            output, _ = job.communicate(timeout=PATIENCE)
        finally:
            job.kill()
        before, done = done, steps_in(tmp_path)
        assert job.returncode == 75 and done > before, output
        assert f"saved after step {done} of" in output
        assert f"step-{done}" in saved(tmp_path)
        assert [line["step"] for line in metrics_of(tmp_path)] == [*range(1, done + 1)]


def steps_in(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


LISTENS = """
import time
from summa3d import preemption
preemption.SAME = 2
preemption.listen("SIGTERM", "SIGUSR1")
print("ready", flush=True)
while preemption.received() is None:
    time.sleep(0.01)
print(preemption.received().name, flush=True)
time.sleep(600)
"""


def test_the_second_request_ends_a_process_at_once_and_an_echo_of_the_first_does_not() -> None:
    job = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        job.send_signal(signal.SIGTERM)
        assert job.stdout.readline() == "SIGTERM\n"
        assert job.poll() is None
        time.sleep(2.1)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(300) == 128 + signal.SIGUSR1
    finally:
        job.kill()
