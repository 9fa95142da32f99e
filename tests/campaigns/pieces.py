"""Faults between the pieces of products: a rank is killed, stopped or raises between two of them; or ranks sleep now and then.

`python tests/campaigns pieces --cases 200 --seed 1`. A job whose rank strikes ends in time, names the rank, and leaves no process
and no file of the node's memory; one that only sleeps has exact numbers. Half run without copies between processes.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from pathlib import Path

import jobs
from campaigns import core

PROGRAM = str(Path(__file__).with_name("pieces_job.py"))
LIMIT, IN_TIME = 1.0, 10.0
"""Seconds of the watchdog; those beyond it in which a job must have ended."""
NO_COPIES = {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}
SAID = {
    "kill": "rank {who} of {ranks} (process {process}) ended first",
    "stop": "(process {process}) is stopped",
    "raise": "uncaught exception on rank {who} of {ranks}",
}
"""What strikes, and what is said of it."""
HOW = (*SAID, "delays")


def trial(folder: Path, how: str, ranks: int, seed: int, room: float, copies: bool = True) -> list[str]:
    """Return what does not hold of a job in which a rank strikes at a random moment between two pieces, or ranks sleep.

    room : further seconds of every limit, on a busy machine
    """
    chance = random.Random(f"{how} {seed}")
    who, count = chance.randrange(ranks), chance.randint(1, 40)
    before = set(os.listdir("/dev/shm"))
    words = [PROGRAM, how, str(who), str(count), str(seed)]
    environ = {"SUMMA3D_WATCHDOG": str(LIMIT), "TMPDIR": str(folder), **({} if copies else NO_COPIES)}
    if how == "kill":  # which launch tells of, and a fork is its server's
        launch = ["-m", "summa3d", "launch", "-n", str(ranks), *words]
        ended = jobs.run_serial(launch, extra=environ, cwd=folder, fresh=True)
    else:
        ended = jobs.run(words, ranks, extra=environ, cwd=folder)
    if how == "delays":
        return [] if (ended.status, ended.stdout) == (0, "0 wrong\n") else [ended.stdout + ended.stderr]
    since = time.time() - float((folder / "at").read_text())
    processes = {int(file.name[4:]): int(file.read_text()) for file in folder.glob("rank?")}
    problems = [] if ended.status != 0 else ["it went on as if nothing had happened"]
    if since > LIMIT + IN_TIME + room:
        problems.append(f"it ended {since:.1f} s after the fault")
    if (said := SAID[how].format(who=who, ranks=ranks, process=processes[who])) not in ended.stderr:
        problems.append(f"no {said!r} in: {ended.stderr}")
    until = time.monotonic() + 1 + room  # what was killed has ended once it had a core
    while any(map(is_there, processes.values())) and time.monotonic() < until:
        time.sleep(0.02)
    left = {f"process {process}" for process in processes.values() if is_there(process)}
    left |= {name for name in set(os.listdir("/dev/shm")) - before if "summa3d" in name}
    return problems + [f"left behind: {name}" for name in left]


def is_there(process: int) -> bool:
    """Return whether a process has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def main() -> int:
    """Run the trials of the command line."""
    parser = core.options(__doc__, cases=200)
    parser.add_argument("--room", type=float, default=0.0, help="Further seconds of every limit, on a busy machine.")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; limit {LIMIT:g} s, room {args.room:g} s, seed {args.seed}")
    lines = []
    for number in args.only or range(args.cases):
        how, ranks, copies = HOW[number % len(HOW)], 2 + number % 3, number // len(HOW) % 2 == 0
        with tempfile.TemporaryDirectory(prefix="summa3d-pieces-") as name:
            began = time.monotonic()
            problems = trial(Path(name), how, ranks, args.seed * 1000 + number, args.room, copies)
        verdict = "; ".join(problems) or ("right" if how == "delays" else "named")
        name = f"{ranks} ranks, {'with' if copies else 'without'} copies between processes"
        lines.append(core.Line(number, how, name, verdict, "", time.monotonic() - began))
        lines[-1].tell()
    return core.report(lines, "faults between pieces", "longest: s")
