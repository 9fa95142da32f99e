"""Faults at random moments of a training run: how it ends, and whether it goes on to the same numbers; again and again, too.

`python tests/campaigns faults --ranks 4,8 --trials 6 --seed 1` plants 15 kinds of them, and prints a table of what they end with.
A trial plants one fault in a run of 20 steps (planted/). The run must end in time, with one report that names the rank, and leave
nothing behind. Resumed, it must come to the numbers of the undisturbed run: to the bit on the same grid, or 1e-9 on others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jobs
import numpy as np
from campaigns import core
from safetensors import safe_open

from summa3d import errors
from summa3d.comm.health.processes import environment_of, launched_as
from summa3d.launcher.runtime import THREAD_VARIABLES

PLANTED = Path(__file__).with_name("planted")
STEPS, BATCH = 20, 24
SETTINGS = {
    **{"dtype": "float64", "model.layers": 1, "model.hidden": 24, "model.heads": 6, "model.sequence": 16, "model.dropout": 0.1},
    **{"train.steps": STEPS, "train.batch": BATCH, "train.accumulate": 2, "train.warmup": 2, "train.sample_tokens": 0},
    **{"train.evaluate_every": 5, "train.evaluate_batches": 2, "train.checkpoint_every": 3, "train.peak_tflops": 0.05},
    "scheme": "cuboid",
}
GRIDS = {
    2: [{"y": 2}, {"z": 2}, {"x": 2}],
    4: [{"y": 2, "z": 2}, {"x": 2, "y": 2}, {"x": 2, "z": 2}],
    8: [{"x": 2, "y": 2, "z": 2}],
}
"""Ranks → grids: the first is that of the trials; runs that are launched again and again may take each in turn."""
CONTEXTS: dict[int, dict[str, int]] = {2: {"cp": 2}, 4: {"cp": 2, "z": 2}, 8: {"cp": 2, "y": 2, "z": 2}}
RING = {"context.kind": "ring", "model.attention_dropout": 0.0}
"""Ranks → the grid of the trials with contexts (--contexts), and the settings of all their runs."""
EXPERTS: dict[int, dict[str, int]] = {2: {"ep": 2}, 4: {"ep": 2, "z": 2}, 8: {"ep": 2, "y": 2, "z": 2}}
MIXTURE = {"model.family": "mixtral", "model.ffn": 12, "model.experts": 5, "model.balance": 0.1, "model.moe.bias_rate": 0.01}
"""The same of the trials with experts (--experts)."""
OTHERS: dict[int, tuple[int, dict[str, int]]] = {2: (1, {}), 4: (2, {"y": 2}), 8: (4, {"x": 2, "z": 2})}
"""Ranks → the ranks and the grid on which every other trial is resumed."""
STAGES = ("start", "set-up", "forward", "backward", "optimizer", "evaluation", "copy", "write", "publish", "clean")
OF_CHECKPOINTS = STAGES[6:]
"""Stages to which a run on a busy machine comes less often: a checkpoint that is due while one is written is put off."""
BY_RANK_0 = ("publish", "clean")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGSTOP", "abort")
IN_CALLS = STAGES[2:6]
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SIGNALS, STAGES),
    **dict.fromkeys(("exception", "thread exception", "lock held", "slow rank"), STAGES[1:]),
    "full disk": ("set-up", *IN_CALLS, "copy", "write", "publish"),
    "failing write": ("write", "publish", "clean"),
    "failing read": ("read",),
    "corrupt read": ("read",),
    "desynchronised call": IN_CALLS,
}
"""The stages in which a kind of fault can strike."""
STUCK = ("SIGSTOP", "lock held", "desynchronised call")
GOES_ON = ("slow rank", "failing write")
ON_RESUME = ("failing read", "corrupt read")
ASKED = ("SIGTERM", "SIGINT")
"""Signals that ask a run to save and to end."""
PREEMPTED = 75
MEASURED = re.compile("seconds|share|per_second|mfu|exposed|words|resumed")
"""Keys of a metrics line that are measured, and so are never the same."""
READS = 8
"""Calls among which a read fails: every rank makes more."""
DELAY = 0.01
"""Seconds between the call that a fault is planted in, and the fault, in half of the trials of signals."""
IN_TIME = 10.0
ROOM_TO_START = 120.0
TABLE = "what each rank was doing:"
HEADS = rf"uncaught exception|(?:{'|'.join(errors.__all__)}): |interrupted\b|.*got SIG(?:TERM|INT): "
"""The first line of a report, beside the table."""


@dataclass(frozen=True)
class Fault:
    """What is planted: at the `count`-th call of the stage's functions in `rank`, or `delay` seconds later."""

    kind: str
    stage: str
    rank: int
    count: int
    delay: float
    variant: str

    def __str__(self) -> str:
        where = f"after {self.delay:.2f} s" if self.stage == "start" else f"call {self.count}"
        return f"{self.kind} on rank {self.rank} in {self.stage}, {where}"


@dataclass
class Ended:
    """How a job ended: status (None: it had to be killed), output, seconds, those since the fault, and what it left behind."""

    status: int | None
    output: str
    seconds: float
    since: float | None
    left: list[str]


@dataclass
class Trial:
    """A fault, what became of the run, and what did not hold; `again`: the ranks on which it was resumed."""

    ranks: int
    again: int
    fault: Fault
    seconds: float = 0.0
    status: int | None = None
    problems: list[str] = field(default_factory=list)
    output: str = ""


class Runs:
    """Starts the run of a folder, and waits for its end.

    limit : its train.watchdog and SUMMA3D_WATCHDOG. room : further seconds of every limit, on a busy machine. changes : settings
    """

    def __init__(self, folder: Path, limit: float, room: float, **changes: object) -> None:
        self.folder, self.limit, self.room = folder, limit, room
        self.settings = {**SETTINGS, "train.watchdog": limit, "data.path": folder / "corpus.txt", **changes}
        chance = random.Random(7)
        words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 6))) for _ in range(50)]
        (folder / "corpus.txt").write_text(" ".join(chance.choices(words, k=4000)))

    def start(
        self, run: Path, ranks: int, grid: dict[str, int], plan: dict[str, Any] | None, *more: str, **changes: object
    ) -> subprocess.Popen[bytes]:
        """Start the run on ranks, with a fault in it; its output goes to the file `output` beside its folder."""
        settings = {**self.settings, **{f"grid.{axis}": size for axis, size in grid.items()}, **changes}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "summa3d", "launch", "-n", str(ranks), "train", "demo", "--run", str(run), *words, *more]
        temporary = run.parent / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        environ = jobs.environment(dict.fromkeys(THREAD_VARIABLES, "1"))
        environ |= {"TMPDIR": str(temporary), "CHAOS_RUN": str(run), "CHAOS": json.dumps(plan)}
        environ["SUMMA3D_WATCHDOG"] = str(self.limit)
        environ["PYTHONPATH"] = f"{PLANTED}{os.pathsep}{environ['PYTHONPATH']}"
        with (run.parent / "output").open("wb") as output:
            return subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=run.parent,
                start_new_session=True,
            )

    def end(self, job: subprocess.Popen[bytes], run: Path, began: float, patience: float) -> Ended:
        """Wait for the end of a job: so long from its fault, or longer from its start where there is none."""
        at, deadline, left = run.parent / "at", began + max(ROOM_TO_START, patience) + self.room, list[str]()
        try:
            while job.poll() is None and time.time() < deadline:
                time.sleep(0.02)
                if at.exists() and (text := at.read_text()):
                    deadline = min(deadline, float(text) + patience + self.room)
            now, status = time.time(), job.poll()
            since = now - float(at.read_text()) if at.exists() else None
            at.unlink(missing_ok=True)
            time.sleep(0.2)
            left += [f"process {process} ({name})" for process, name in processes(run)] if status is not None else []
        finally:
            for process, _ in processes(run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        job.wait()
        left += [f"temporary file {path.name}" for path in (run.parent / "tmp").iterdir()]
        left += [f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()] if PRIVATE in os.environ else []
        shutil.rmtree(run.parent / "tmp")
        for path in Path("/dev/shm").iterdir() if PRIVATE in os.environ else ():
            path.unlink()
        return Ended(status, (run.parent / "output").read_text(errors="replace"), now - began, since, left)

    def run(
        self, run: Path, ranks: int, grid: dict[str, int], plan: dict[str, Any] | None = None, *more: str, patience: float = 300.0
    ) -> Ended:
        """Start the run, and wait for its end."""
        began = time.time()
        return self.end(self.start(run, ranks, grid, plan, *more), run, began, patience)


class World:
    """The trials on so many ranks: the undisturbed run, how often each rank comes to each stage, and a run that is half done."""

    def __init__(self, runs: Runs, ranks: int, grid: dict[str, int]) -> None:
        self.runs, self.ranks, self.grid = runs, ranks, grid
        self.whole, self.half = runs.folder / f"whole-{ranks}" / "run", runs.folder / f"half-{ranks}" / "run"
        self._checked(self.whole, 0, {"ranks": None, "counts": str(runs.folder / f"counts-{ranks}")})
        self.counts = [json.loads((runs.folder / f"counts-{ranks}.{rank}").read_text()) for rank in range(ranks)]

    def _checked(self, run: Path, status: int, plan: dict[str, Any]) -> None:
        ended = self.runs.run(run, self.ranks, self.grid, plan)
        if ended.status != status:
            sys.exit(f"the run to compare with ended with status {ended.status} instead of {status}:\n{ended.output}")

    def plan(self, fault: Fault, run: Path) -> dict[str, Any]:
        """Return what planted/ is told of a fault."""
        ranks = None if fault.kind == "full disk" else [fault.rank]  # a disk is full for all
        seconds = 0.6 * self.runs.limit
        return {**asdict(fault), "ranks": ranks, "seconds": seconds, "at": str(run.parent / "at")}

    def draw(self, kind: str, number: int, seed: int) -> Fault:
        """A fault of a kind at a random moment: stages in turn, rank and call at random."""
        chance = random.Random(f"{seed} {self.ranks} {kind} {number}")
        stages = KINDS[kind]
        stage = stages[(number + seed * 3 + sum(map(ord, kind))) % len(stages)] if number < len(stages) else chance.choice(stages)
        rank = 0 if stage in BY_RANK_0 else chance.randrange(self.ranks)
        most = READS if stage == "read" else self.counts[rank][stage] if stage != "start" else 1
        if most > 3 and (kind == "full disk" or stage in OF_CHECKPOINTS):  # a write must follow
            most //= 2
        count = chance.randint(1, most)
        delay = chance.uniform(0, DELAY) if kind in SIGNALS and chance.random() < 0.5 else 0.0
        if stage == "start":
            delay = chance.uniform(0.05, self.counts[rank]["start"])
        variant = chance.choice(("extra", "missing") if kind == "desynchronised call" else ("interpreter", "another"))
        return Fault(kind, stage, rank, count, delay, variant)

    def trial(self, kind: str, number: int, seed: int) -> Trial:
        """Plant a fault, judge the end of the run, resume it, and compare it with the undisturbed one."""
        fault, run = self.draw(kind, number, seed), self.runs.folder / "trial" / "run"
        shutil.rmtree(run.parent, ignore_errors=True)
        if kind in ON_RESUME:
            if not self.half.exists():
                self._checked(self.half, PREEMPTED, self.plan(Fault("SIGTERM", "forward", 0, 21, 0.0, ""), self.half))
            shutil.copytree(self.half, run)
        if kind == "corrupt read":
            damage(newest(run), fault)
        patience = 3 * IN_TIME + self.runs.limit
        more = ("--resume",) if kind in ON_RESUME else ()
        ended = self.runs.run(run, self.ranks, self.grid, self.plan(fault, run), *more, patience=patience)
        ranks, grid = (self.ranks, self.grid) if (number + seed) % 2 == 0 else OTHERS[self.ranks]
        result = Trial(self.ranks, ranks, fault, ended.seconds if ended.since is None else ended.since, ended.status)
        result.problems += judge(fault, ended, self.runs.limit, self.runs.room, newest(run))
        if kind == "corrupt read":  # as the message advises
            shutil.rmtree(newest(run))
        resumed = self.runs.run(run, ranks, grid, None, *(("--resume",) if (run / "config.toml").exists() else ()))
        result.problems += [f"left behind by the resumed run: {what}" for what in resumed.left]
        if resumed.status != 0:
            result.problems.append(f"the resumed run ended with status {resumed.status}")
        else:
            result.problems += differences(self.whole, run, exact=ranks == self.ranks)
        result.output = ended.output + (resumed.output if resumed.status else "")
        return result


def judge(fault: Fault, ended: Ended, limit: float, room: float, saved: Path | None) -> list[str]:
    """Return what did not hold of the end of a disturbed run."""
    problems = [f"left behind: {what}" for what in ended.left]
    if ended.status is None:
        return [*problems, "it did not end"]
    if ended.since is None and fault.kind != "corrupt read":
        return [*problems, "the fault did not strike"]
    most = room + IN_TIME + (limit if fault.kind in STUCK else 0.0)
    seconds = ended.seconds if ended.since is None else ended.since
    if fault.kind not in (*GOES_ON, "corrupt read") and seconds > most:
        problems.append(f"it ended {seconds:.1f} s after the fault; at most {most:g}")
    if fault.kind in GOES_ON:
        problems += [] if ended.status == 0 else [f"it ended with status {ended.status}, and was to go on"]
        retried = fault.kind == "slow rank" or "Trying again." in " ".join(ended.output.split())
        return problems if retried else [*problems, "the failed write was not said"]
    asked = re.search(rf"rank {fault.rank} got {fault.kind}: saved after step\s+(\d+)", ended.output)
    if fault.kind in ASKED and (fault.stage not in ("start", "set-up") or ended.status == 0):
        kept = asked is not None and saved is not None and saved.name == f"step-{asked[1]}"
        over = ended.status == 0 and f"got {fault.kind}" not in ended.output  # in the last step
        return problems if (ended.status == PREEMPTED and kept) or over else [*problems, f"status {ended.status}, saved {saved}"]
    if ended.status == 0:
        problems.append("it went on as if nothing had happened")
    return problems + reports(fault, ended)


def reports(fault: Fault, ended: Ended) -> list[str]:
    """Return what does not hold of the report of a failed run: one, which names the rank, or the file; no more than one table."""
    text, problems = ended.output, []
    heads = [line for line in text.splitlines() if re.match(HEADS, line)]
    if len(heads) > 1:
        problems.append(f"{len(heads)} reports: {heads}")
    if text.count(TABLE) > 1:
        problems.append(f"{text.count(TABLE)} tables")
    if not re.search(names(fault), text):
        problems.append("no report names " + ("the file" if fault.kind in (*ON_RESUME, "full disk") else "the rank"))
    if "Traceback" in text and "exception" not in fault.kind and fault.kind != "lock held":
        problems.append("a traceback")
    return problems


def names(fault: Fault) -> str:
    """Return what the report of a failed run must match: the name of a file, or of the rank, by who can know it."""
    if fault.kind in (*ON_RESUME, "full disk"):
        return r"trial/run"
    ended = rf"summa3d launch: .*rank {fault.rank} of \d+ \(process \d+\).* ended first"
    if fault.kind in ("SIGKILL", "SIGSEGV", "abort"):
        return ended
    if fault.kind in ASKED:
        return rf"rank {fault.rank} got {fault.kind}: |interrupted on rank {fault.rank} of|{ended}"
    if "exception" in fault.kind:
        return rf"uncaught exception on rank {fault.rank} "
    if fault.kind == "SIGSTOP":
        return rf"rank {fault.rank} (?:of \d+ )?\(process \d+\) (?:is|has been) stopped"
    if fault.kind == "desynchronised call":
        return rf"on ranks? (?:\d+, )*{fault.rank}\b|, for ranks? (?:\d+, )*{fault.rank}\b"
    silent = rf"rank {fault.rank}(?:: runs| \(process \d+\) is asleep| of \d+ \[[^;\]]*\]: no training step)"
    return rf"{silent}|, for ranks? (?:\d+, )*{fault.rank}\b"


def damage(checkpoint: Path | None, fault: Fault) -> None:
    """Change a byte of a file of a checkpoint."""
    assert checkpoint is not None
    chance = random.Random(str(fault))
    file = chance.choice(sorted(checkpoint.iterdir()))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= chance.randint(1, 255)
    file.write_bytes(data)


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = [path for path in (run / "checkpoints").glob("step-*") if (path / "index.json").is_file()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


def differences(whole: Path, run: Path, exact: bool) -> list[str]:
    """Return what differs between two runs: the numbers of each step, and the final weights and moments; exactly, or to 1e-9."""
    lines = [[json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (whole, run)]
    steps = [[{key: value for key, value in line.items() if not MEASURED.search(key)} for line in one] for one in lines]
    if [line.keys() for line in steps[0]] != [line.keys() for line in steps[1]]:
        return ["the resumed run has other lines of metrics"]
    numbers = [np.hstack([np.ravel(value) for line in one for value in line.values()]).astype(float) for one in steps]
    ours, theirs = tensors(whole), tensors(run)
    pairs = {"metrics": numbers, **{name: [ours[name], theirs[name]] for name in ours}}
    if not exact:
        pairs = {name: [determined(name, one) for one in pair] for name, pair in pairs.items()}
    problems = []
    for name, (one, other) in pairs.items():
        same = np.array_equal(one, other) if exact else np.abs(one - other).max() <= 1e-9 * np.abs(one).max()
        problems += [] if same else [f"{name} differs by {np.abs(one - other).max() / np.abs(one).max():.1e} of the largest"]
    return problems[:3]


def determined(name: str, tensor: np.ndarray) -> np.ndarray:
    """Return what training determines of a tensor: all but the biases of keys, of [head][query, key, value][d].

    A constant added to all keys changes no attention. The gradient of their biases is rounding, which Adam makes whole steps of.
    """
    if not name.endswith("attention.qkv.bias"):
        return tensor
    return tensor.reshape(SETTINGS["model.heads"], 3, -1)[:, ::2]


def tensors(run: Path) -> dict[str, np.ndarray]:
    """The whole tensors of a run's newest checkpoint."""
    folder, found = newest(run), {}
    assert folder is not None
    for name, entry in json.loads((folder / "index.json").read_text())["tensors"].items():
        whole = np.full(entry["shape"], np.nan)
        for piece in entry["pieces"]:
            with safe_open(folder / piece["file"], framework="np") as file:
                whole[tuple(slice(*part) for part in piece["slices"])] = file.get_tensor(name)
        found[name] = whole
    return found


def processes(run: Path) -> Iterator[tuple[int, str]]:
    """The processes of a job, and what they run."""
    mark = b"CHAOS_RUN=" + os.fsencode(run)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), (folder / "comm").read_text().strip()
        except OSError:  # it has ended
            continue


PRIVATE = "CHAOS_PRIVATE_SHM"


def with_private_memory() -> None:
    """Start this program anew in a mount namespace with a /dev/shm of its own, where the system lets it."""
    if PRIVATE in os.environ or shutil.which("unshare") is None:
        return
    script = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        os.execve(shutil.which("unshare"), [*command, *sys.orig_argv], {**os.environ, PRIVATE: "1"})


def campaign(runs: Runs, grids: Mapping[int, dict[str, int]], kinds: Sequence[str], number: int, seed: int) -> list[Trial]:
    """So many trials of each kind on each number of ranks, and its grid; every one is said."""
    found = list[Trial]()
    for ranks, grid in grids.items():
        world = World(runs, ranks, grid)
        for kind in kinds:
            for place in range(number):
                trial = world.trial(kind, place, seed)
                words = "; ".join(trial.problems) or f"status {trial.status}, {trial.seconds:.1f} s, then equal on {trial.again}"
                note(f"{ranks} ranks: {trial.fault}: {words}")
                found.append(trial)
                line_of(len(found), trial).tell()
    return found


def line_of(number: int, trial: Trial) -> core.Line:
    """The line of a trial."""
    group, seconds = f"{trial.fault.kind}, {trial.ranks} ranks", 0.0 if trial.fault.kind in GOES_ON else trial.seconds
    return core.Line(number, group, str(trial.fault), "; ".join(trial.problems) or "right", trial.output, seconds)


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(text, file=sys.stderr, flush=True)


def claim(words: str, held: bool) -> None:
    """Print whether a claim holds."""
    print(f"  {'holds' if held else 'DOES NOT HOLD'}: {words}")


def failing_again_and_again(runs: Runs, ranks: int, between: float, minutes: float, several: bool, seed: int) -> dict[str, Any]:
    """Relaunch a run until it is done, while ranks are killed at exponential times; goodput beside Daly's bound.

    between : the mean seconds between two failures. several : whether every launch takes another grid
    """
    costs = costs_of(runs, ranks)
    tau, share = daly(between, costs["checkpoint"], costs["restart"])
    every = max(SOONEST, round(tau / costs["step"]))
    steps = every * max(1, round(60 * minutes / costs["step"] / every))
    note(", ".join(f"{name} {seconds:.3f} s" for name, seconds in costs.items()) + f"; checkpoints {tau:.2f} s apart")
    settings = {"train.steps": steps, "train.checkpoint_every": every, "train.evaluate_every": 0}
    whole, run, grids = (
        runs.folder / "whole" / "run",
        runs.folder / "failing" / "run",
        GRIDS[ranks] if several else GRIDS[ranks][:1],
    )
    ended = runs.end(runs.start(whole, ranks, grids[0], None, **settings), whole, time.time(), 10 * 60 * minutes)
    if ended.status != 0:
        sys.exit(f"the run to compare with ended with status {ended.status}:\n{ended.output}")
    began, launches, kills, repeated, ends, starts = time.time(), 0, 0, 0.0, 0.0, 0
    for left in failures(between, random.Random(seed)):
        resumed, file = ("--resume",) if (run / "config.toml").exists() else (), identity(run)
        started = time.time()
        job = runs.start(run, ranks, grids[launches % len(grids)], None, *resumed, **settings)
        launches += 1
        while job.poll() is None and time.time() < started + left:
            time.sleep(0.05)
        if strikes := job.poll() is None:
            kill(job, run, random.Random(f"{seed} {kills}"))
            kills += 1
        now = time.time()
        ended = runs.end(job, run, now, IN_TIME)
        if ended.status == 0:
            break
        if not strikes:
            sys.exit(f"the run failed by itself, with status {ended.status}:\n{ended.output}")
        ends += time.time() - now
        starts += identity(run) == file
        repeated += sum(line["seconds"] for line in lines_of(run) if line["step"] > saved(run)) if identity(run) != file else 0.0
    wall, useful = time.time() - began, sum(line["seconds"] for line in lines_of(run))
    bound = useful / (useful / share + costs["launch"])  # Daly's formulas count a start after each failure, and not the first
    found = {"launches": launches, "kills": kills, "in starts": starts, "every": every, "steps": steps, "wall": wall}
    found |= {"useful": useful, "repeated": repeated, "ends": ends, "goodput": useful / wall, "bound": bound, "grids": grids}
    return costs | found | {"differences": differences(whole, run, exact=not several), "load": os.getloadavg()[0]}


LARGER = {"model.layers": 2, "model.hidden": 192, "model.sequence": 64, "train.clip": 1.0}
"""The model of runs that last minutes: of a step that is long beside what a relaunch reads."""
STABLE = {"train.learning_rate": 1e-5}
"""What a run over several grids needs for its rounding to stay rounding: at 1e-3, 400 steps make 1e-10 of 1e-15."""
SOONEST = 3
"""Steps after which a checkpoint that is written in the background may be complete."""
RESTARTS, SPREAD = 3, 8


def failures(between: float, chance: random.Random) -> Iterator[float]:
    """Exponential times of this mean; the quantiles of each 8 are spread evenly, so that the mean of a short run is theirs."""
    while True:
        for place in chance.sample(range(SPREAD), SPREAD):
            yield -between * float(np.log1p(-(place + chance.random()) / SPREAD))


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def identity(run: Path) -> int:
    """Return which file the metrics are in: a resumed run, once it begins its steps, replaces the file."""
    file = run / "metrics.jsonl"
    return file.stat().st_ino if file.exists() else 0


def saved(run: Path) -> int:
    """The step of a run's newest complete checkpoint; 0 without any."""
    found = newest(run)
    return 0 if found is None else int(found.name.partition("-")[2])


def kill(job: subprocess.Popen[bytes], run: Path, chance: random.Random) -> None:
    """Kill a rank of a job; the launcher, where no rank has started."""
    victims = [process for process, _ in processes(run) if of_rank(process)]
    os.kill(chance.choice(victims or [job.pid]), signal.SIGKILL)


def costs_of(runs: Runs, ranks: int) -> dict[str, float]:
    """Seconds of a step, of a checkpoint, of a launch, and of a restart: from a kill to the first step that follows.

    From one run that is killed and launched again as it will be: with the end of the job before.
    """
    run, every, number, chance = runs.folder / "costs" / "run", 5, 8, random.Random(0)
    settings = {"train.steps": 10**6, "train.checkpoint_every": every, "train.evaluate_every": 0}

    def reached(job: subprocess.Popen[bytes], steps: int, before: int = 0) -> float:
        """Return when a file of metrics, other than `before`, has so many lines."""
        while job.poll() is None:
            if identity(run) not in (0, before) and len(lines_of(run)) >= steps:
                return time.time()
            time.sleep(0.01)
        sys.exit(f"a run without an end has ended:\n{(run.parent / 'output').read_text()}")

    began = time.time()
    job = runs.start(run, ranks, GRIDS[ranks][0], None, **settings)
    first, now = reached(job, 1), reached(job, every * number)
    seconds = [line["seconds"] for line in lines_of(run)][: every * number]
    checkpoint = (now - first - sum(seconds[2:])) / (number - 1)  # all that is not a step: copies, and what they keep waiting
    step, starts = float(np.median(seconds)), []
    for _ in range(RESTARTS):
        file, killed = identity(run), time.time()
        kill(job, run, chance)
        runs.end(job, run, killed, IN_TIME)
        job = runs.start(run, ranks, GRIDS[ranks][0], None, "--resume", **settings)
        starts.append(reached(job, saved(run) + 1, file) - killed - 2 * step)  # a line is written after the next step
    kill(job, run, chance)
    runs.end(job, run, time.time(), IN_TIME)
    launch = first - began - sum(seconds[:2])
    return {"step": step, "checkpoint": max(checkpoint, 1e-3), "launch": launch, "restart": float(np.mean(starts))}


def daly(between: float, checkpoint: float, start: float) -> tuple[float, float]:
    """Daly's interval between checkpoints (2006, eq. 37), and the share of the time that is useful with it (eq. 20).

    start : the seconds of a restart, from a failure to the first step after it
    """
    part = checkpoint / (2 * between)
    tau = np.sqrt(2 * checkpoint * between) * (1 + np.sqrt(part) / 3 + part / 9) - checkpoint
    return float(tau), float(tau / (between * np.exp(start / between) * np.expm1((tau + checkpoint) / between)))


def of_rank(process: int) -> bool:
    """Return whether a process is a rank of its job, and not a launcher."""
    return launched_as(environment_of(process)) is not None


def soak(runs: Runs, ranks: int, minutes: float) -> dict[str, Any]:
    """Memory, descriptors and maps of all ranks of a long run, sampled every few seconds, and how much each grows."""
    run, began = runs.folder / "soak" / "run", time.time()
    job = runs.start(
        run, ranks, GRIDS[ranks][0], None, **{"train.steps": 10**6, "train.checkpoint_every": 20, "train.evaluate_every": 20}
    )
    found: list[tuple[float, ...]] = []
    while job.poll() is None and time.time() < began + 60 * minutes:
        time.sleep(2.0)
        samples = [sample(process) for process, _ in processes(run) if of_rank(process)]
        if (run / "metrics.jsonl").exists() and len(samples) == ranks and all(samples):
            found.append((time.time() - began, *np.sum([one for one in samples if one], axis=0)))
    job.send_signal(signal.SIGTERM)
    ended = runs.end(job, run, time.time(), IN_TIME)
    whole = np.array(found)
    steady = whole[len(whole) // 4 :]
    result: dict[str, Any] = {
        "status": ended.status,
        "left": ended.left,
        "steps": len((run / "metrics.jsonl").read_text().splitlines()),
    }
    for column, name in enumerate(QUANTITIES, 1):
        slope, _ = np.polyfit(steady[:, 0], steady[:, column], 1)
        grows = slope * (steady[-1, 0] - steady[0, 0])
        result[name] = {"first": whole[0, column], "steady": steady[0, column], "last": whole[-1, column], "grows": grows}
    return result | {"samples": found}


QUANTITIES = ("RSS", "PSS", "anonymous", "descriptors", "maps")
FLAT = ("RSS", "anonymous", "descriptors", "maps")
"""PSS moves with other processes that map the same libraries."""


def sample(process: int) -> tuple[float, ...] | None:
    """MB of a process, resident, proportional and of no file, its descriptors and its maps; None where it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        rollup = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
        memory = [int(rollup[name].split()[0]) / 1024 for name in ("Rss", "Pss", "Anonymous")]
        return *memory, len(list((folder / "fd").iterdir())), (folder / "maps").read_text().count("\n")
    except OSError:
        return None


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="4,8", help="Try on so many ranks: of 2, 4 and 8.")
    parser.add_argument("--kinds", default=",".join(KINDS), help="Try these kinds of faults, with commas.")
    parser.add_argument("--trials", type=int, default=6, help="Trials of each kind on each number of ranks.")
    parser.add_argument("--contexts", action="store_true", help="Split sequences over two ranks, in a ring.")
    parser.add_argument("--experts", action="store_true", help="Train a mixture, whose experts two ranks share.")
    parser.add_argument("--full", action="store_true", help="20 trials of each.")
    parser.add_argument("--seed", type=int, default=1, help="Of the moments.")
    parser.add_argument("--limit", type=float, default=5.0, help="Seconds of the watchdog of every run.")
    parser.add_argument("--room", type=float, default=0.0, help="Further seconds for every limit, on a busy machine.")
    parser.add_argument(
        "--mtbf", type=float, metavar="SECONDS", help="Relaunch a run that fails at exponential times, of this mean."
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="How long that run's steps last undisturbed.")
    parser.add_argument("--grids", choices=("one", "several"), default="one", help="Whether each relaunch takes another grid.")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="Sample memory, descriptors and maps of a run of so many minutes."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to FILE.")
    args = parser.parse_args()
    if args.contexts and args.experts:
        parser.error("--contexts and --experts are trials of their own. Give one of them.")
    args.worlds = [int(word) for word in args.ranks.split(",")]
    args.chosen = args.kinds.split(",")
    if unknown := [kind for kind in args.chosen if kind not in KINDS] + [ranks for ranks in args.worlds if ranks not in OTHERS]:
        parser.error(f"unknown: {unknown[0]}; kinds: {', '.join(KINDS)}; ranks: {', '.join(map(str, OTHERS))}")
    return args


def main() -> int:
    """Do what the options say, and print whether the claims hold."""
    args, status = options(), 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and so end the runs, and remove their files
    with_private_memory()
    if PRIVATE not in os.environ:
        note("what is left in /dev/shm is not looked at: this system gives this program none of its own")
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{os.cpu_count()} cores, {load}; limit {args.limit:g} s, room {args.room:g} s, seed {args.seed}")
    with tempfile.TemporaryDirectory(prefix="summa3d-faults-") as name:
        around, settings = (CONTEXTS, RING) if args.contexts else (EXPERTS, MIXTURE) if args.experts else ({}, {})
        long = LARGER | (STABLE if args.grids == "several" else {}) if args.mtbf else {}
        runs = Runs(Path(name), args.limit, args.room, **long, **settings)
        if args.mtbf:
            result = failing_again_and_again(runs, args.worlds[0], args.mtbf, args.minutes, args.grids == "several", args.seed)
            tell_goodput(result)
        elif args.soak:
            result = soak(runs, args.worlds[-1], args.soak)
            for what in QUANTITIES:
                one = result[what]
                growth = f"fitted growth {one['grows']:+,.1f}"
                print(f"{what}: {one['first']:,.0f}, {one['steady']:,.0f}, {one['last']:,.0f}; {growth}")
            flat = all(abs(result[what]["grows"]) <= 0.01 * result[what]["steady"] for what in FLAT)
            claim("flat to 1 % after a quarter of the time; status 75 when asked to end", flat and result["status"] == 75)
        else:
            grids = {ranks: around[ranks] if around else GRIDS[ranks][0] for ranks in args.worlds}
            trials = campaign(runs, grids, args.chosen, 20 if args.full else args.trials, args.seed)
            result = {"trials": [asdict(trial) for trial in trials], "load": os.getloadavg()[0]}
            status = core.report([line_of(*one) for one in enumerate(trials)], "faults", "longest: s")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return status


def tell_goodput(result: dict[str, Any]) -> None:
    """Print what became of a run that failed again and again."""
    print(f"{result['launches']} launches, {result['kills']} kills, {result['in starts']} of them in a start, ", end="")
    print(f"{result['steps']} steps in {result['wall']:.0f} s: {result['useful']:.1f} s of steps that count, ", end="")
    print(f"{result['repeated']:.1f} s of steps that were repeated, {result['ends']:.1f} s of ends; the rest of starts")
    print(f"goodput {result['goodput']:.3f}, Daly's bound {result['bound']:.3f}, a checkpoint every {result['every']} steps")
    claim("the weights of the undisturbed run", not result["differences"])
    print("".join(f"    {one}\n" for one in result["differences"]), end="")
    claim("goodput at least 0.9 of Daly's bound", result["goodput"] >= 0.9 * result["bound"])
