"""Signals to ranks, mpiexec and the launcher at every stage of a run, one job after the other: how each ends, and what is left.

`python signalled.py FOLDER SEED NUMBER RANKS [SECONDS]` in a mount namespace of its own, whose /dev/shm it may look at, as
test_signals.py starts it. Jobs go on where the one before ended; the last comes to the numbers of the run that nobody disturbed.
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
from typing import NamedTuple

HERE = Path(__file__).parent
LAUNCH = """
import os, sys
from summa3d.cli.launch import holding, mpi_command
from summa3d.launcher.follow import follow
command, environ, _ = mpi_command(int(sys.argv[1]), sys.argv[2:])
sys.exit(follow(holding(command), environ))
"""
ENDS_WITHIN = 120.0
"""Seconds from a signal to the end of the last process, on a machine with other work; on a quiet one SECONDS is 10."""
STAGES = ("start", "init", "prepare", "F", "B", "norm", "update", "evaluation", "file", "rename")
ASKS, KILLS = ("SIGTERM", "SIGINT"), ("SIGKILL", "SIGSEGV", "SIGHUP", "SIGQUIT")
GRIDS = {2: {"y": 2}, 4: {"pp": 2, "dp": 2}, 8: {"pp": 2, "dp": 2, "y": 2}}
"""Ranks → grid: four and more are pipelines, whose first op is their warm-up."""


class Trial(NamedTuple):
    """A signal, whom it strikes, and where rank `rank` is then."""

    by: str
    who: str
    stage: str
    rank: int


def trials(seed: int, number: int, ranks: int) -> Iterator[Trial]:
    """Seeded signals: each stage in turn, as often asked to end as killed. In a rank SIGHUP only has UCX log."""
    chance = random.Random(seed)
    for place in range(number):
        stage = STAGES[(place * 3 + seed) % len(STAGES)]
        by = chance.choice((*ASKS, *ASKS, *KILLS))
        who = chance.choice(("mpiexec", "launch") if by == "SIGHUP" else ("rank", "rank", "mpiexec", "launch"))
        yield Trial(by, who, stage, 0 if stage == "rename" else chance.randrange(ranks))


def settings(folder: Path, ranks: int, steps: int) -> list[str]:
    sys.path.insert(0, str(HERE.parent))
    from small_runs import assignments

    grid = GRIDS[ranks]
    changes: dict[str, object] = {f"grid__{axis}": size for axis, size in grid.items()}
    changes |= {"model__layers": 2, "train__accumulate": 2} if "pp" in grid else {}
    changes |= {"scheme": "serial"} if set(grid) == {"pp", "dp"} else {}
    changes |= {"train__steps": steps, "train__checkpoint_every": 1, "train__evaluate_every": 1, "train__background": False}
    texts = assignments(folder.parent / "corpus.txt", **{"train__batch": 24, **changes})
    return ["train", "demo", "--run", str(folder), *[part for one in texts for part in ("--set", one)]]


def run(folder: Path, ranks: int, steps: int, trial: Trial | None = None, step: int = 0) -> tuple[int, str]:
    """The status and the output of a job, once all of its processes have ended."""
    killed = f"{trial.rank} {step} {trial.stage} 1" if trial else "-1 0 - 0"
    extra = {"KILLED": killed, "KILLED_AT": str(folder.parent / "at"), "TRIED": str(folder), "TMPDIR": str(folder.parent / "tmp")}
    extra |= {"KILLED_BY": trial.by, "KILLED_WHO": trial.who} if trial else {}
    words = [str(HERE / "killed_rank.py"), *settings(folder, ranks, steps), *(["--resume"] if saved(folder) else [])]
    with (folder.parent / "output").open("w+") as output:  # a rank that outlives its launcher holds no pipe open
        words = [sys.executable, "-c", LAUNCH, str(ranks), *words]
        job = subprocess.Popen(words, env={**os.environ, **extra}, stdout=output, stderr=output, preexec_fn=as_in_a_terminal)
        status = job.wait(600)
        ended = time.monotonic()
        while left := processes(str(folder)):
            assert time.monotonic() - ended < ENDS_WITHIN, (trial, "processes left", left)
            time.sleep(0.05)
        output.seek(0)
        return 128 - status if status < 0 else status, output.read()


def as_in_a_terminal() -> None:
    """Ignore nothing that a shell lets jobs in the background ignore."""
    for name in (*ASKS, "SIGHUP", "SIGQUIT"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)


def processes(tried: str) -> list[int]:
    """The processes of a job."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"TRIED={tried}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def saved(folder: Path) -> int:
    """The newest step that a run has saved."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def result(folder: Path, step: int) -> dict[str, object]:
    """Name, size and checksum of the files of a checkpoint."""
    files: dict[str, object] = json.loads((folder / f"checkpoints/step-{step}/index.json").read_text())["files"]
    return files


def check(trial: Trial, status: int, said: str, folder: Path, ranks: int) -> None:
    """Raise AssertionError unless a job has ended as its signal asks, has said why, and has left nothing."""
    text = " ".join(said.split())
    assert "Traceback" not in said, (trial, said)
    asked = trial.by in ASKS
    if asked and trial.who != "launch":
        assert status in ((0, 75) if trial.stage in ("end", "rename", "file") else (75,)), (trial, status, said)
    elif trial.who == "launch" and trial.by in ("SIGHUP", "SIGQUIT"):
        assert status != 0 and f"{trial.by} ended the job" in text, (trial, status, said)
    elif trial.who == "launch" and not asked:  # mpiexec is then asked to end
        assert status == 128 + signal.Signals[trial.by], (trial, status, said)
    else:
        assert status != 0 or trial.stage in ("end", "rename", "file"), (trial, status, said)
    if status == 75:
        assert re.search(rf"rank \d+ got {trial.by}|rank \d+ got SIGTERM", text), (trial, said)
    elif trial.who == "rank" and not asked:
        assert f"rank {trial.rank} of {ranks}" in text and "ended first" in text, (trial, said)
    elif trial.who == "mpiexec" and not asked:
        known = (f"{trial.by} ended the launcher", "ended first", "got", "before a rank was seen")
        assert any(one in text for one in known), (trial, said)
    left = [file for place in ("/dev/shm", folder.parent / "tmp") for file in Path(place).iterdir()]
    assert not left, (trial, left, said)


def main() -> None:
    folder, seed, number, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    within = float(sys.argv[5]) if len(sys.argv) > 5 else ENDS_WITHIN
    (folder / "tmp").mkdir(exist_ok=True)
    whole, parts, longest = folder / f"whole-{ranks}", folder / f"parts-{ranks}", 0.0
    steps = 3 * number + 2
    status, said = run(whole, ranks, steps)
    assert status == 0, said
    for trial in trials(seed, number, ranks):
        (folder / "at").unlink(missing_ok=True)
        before = saved(parts)
        status, said = run(parts, ranks, steps, trial, before + 1)
        assert (folder / "at").exists(), (trial, "was not struck", said)
        took = time.time() - float((folder / "at").read_text())
        assert took < within, (trial, took, said)
        longest = max(longest, took)
        check(trial, status, said, parts, ranks)
        saves = status == 75 or trial.who == "launch"  # whose end, too, has mpiexec ask the ranks
        assert before <= saved(parts) <= before + (3 if saves else 1), (trial, before, saved(parts))
        print(*trial, status, saved(parts), f"{took:.1f} s", flush=True)
    last = Trial("SIGINT", "launch", "end", 0)  # once the last step is taken, a run ends as usual
    status, said = run(parts, ranks, steps, last, steps)
    check(last, status, said, parts, ranks)
    assert status == 0, said
    assert result(parts, steps) == result(whole, steps), "resumed runs end with other bits"
    print(f"held {number} on {ranks} ranks; the longest took {longest:.1f} s")


if __name__ == "__main__":
    main()
