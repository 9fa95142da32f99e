"""What campaigns share: cases that depend on a seed alone, the table of what they end with, and cases on the ranks of jobs."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SECONDS, SETTLED = 30.0, 0.3
"""Limit of a case; what a rank that was refused leaves to the others before it takes them to wait for it."""
HELD = ("refused", "right", "named", "caught")
"""What a case may end with: an error of ours, right numbers, a hang that the watchdog ends and names, or the probe's error."""
STANDS = "nothing has gone on"
"""What the library's watchdog says of a job."""
MODES: dict[str, dict[str, Any]] = {
    "node memory": {"node_memory": True},
    "MPI": {"node_memory": False},
    "MPI, check": {"node_memory": False, "check": True},
    "node memory, check": {"node_memory": True, "check": True},
}


@dataclass(frozen=True)
class Line:
    """What came of a case: one of HELD, or the finding, and what was said."""

    number: int
    group: str
    name: str
    verdict: str
    said: str = ""
    seconds: float = 0.0

    def tell(self) -> None:
        """Print it, if it is a finding."""
        if self.verdict not in HELD:
            said = "\n    ".join(self.said.strip().splitlines()[-40:])
            print(f"{self.number}: {self.group}, {self.name}: {self.verdict}\n    {said}", flush=True)


def report(lines: Sequence[Line], what: str, longest: str = "") -> int:
    """Print a table of groups and verdicts; returns the status: 1 if there are findings. longest : heads a column of seconds."""
    from summa3d.columns import aligned

    rows = [["group", "cases", *HELD, "findings", *([longest] if longest else [])]]
    for group in sorted({line.group for line in lines}):
        of = [line for line in lines if line.group == group]
        counts = [sum(line.verdict == one for line in of) for one in HELD]
        rows.append([group, *map(str, (len(of), *counts, len(of) - sum(counts)))])
        rows[-1] += [f"{max(line.seconds for line in of):.1f}"] if longest else []
    print("\n".join(aligned(rows, left=[0])))
    found = sum(line.verdict not in HELD for line in lines)
    print(f"{len(lines)} {what}: {found} findings")
    return 1 if found else 0


def options(doc: str | None, cases: int) -> argparse.ArgumentParser:
    """The options of every campaign."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="Run the cases of these numbers alone.")
    parser.add_argument("--limit", type=float, default=SECONDS, help="Seconds after which a case hangs; more on a busy machine.")
    return parser


# ---------------------------------------------------------------------------------------------------- on the ranks of a job


def axes_of(size: int) -> dict[str, int]:
    """The axes of the grids of so many ranks."""
    return {"x": size, "y": 1, "z": 1} if size % 2 else {"x": 2, "y": size // 2, "z": 1}


class Finding(Exception):
    """What must not be."""


@dataclass
class RankCase:
    """A case on all ranks of a job, or, with a victim, on one of them. `run` gives a verdict and what was said."""

    group: str
    name: str
    mode: str
    victim: int | None

    def run(self, world: World, number: int) -> tuple[str, str]:
        """Run the case on this rank."""
        raise NotImplementedError


@dataclass
class Scene(RankCase):
    """A case that plays on a grid of its own: `play` returns one of HELD, or raises a Finding.

    hangs : what the watchdog's report of a hang matches; without it a hang is a finding.
    """

    play: Callable[[World, Any, int], str]
    hangs: str = ""

    def run(self, world: World, number: int) -> tuple[str, str]:
        """Play, and meet the other ranks on the board."""
        with world.own(self.mode) as grid:
            try:
                found = self.play(world, grid, number), ""
            except Finding as error:
                found = str(error), ""
            except Exception as error:
                if os.getpid() != world.process:
                    raise
                found = blame(error), str(error)[:300]
            if os.getpid() == world.process:
                world.board.meet(number)
            return found


def blame(error: Exception) -> str:
    """The class of an error, and the line that raised it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"


@dataclass(frozen=True)
class Kind:
    """A campaign on ranks: its name on the command line, what its cases are called, and the groups they are drawn from.

    watchdog : seconds after which the library ends a job that hangs; 0, never.
    """

    name: str
    what: str
    groups: tuple[tuple[Callable[[random.Random, int, int], RankCase], int], ...]
    watchdog: float = 0.0

    def drawn(self, seed: int, number: int, rank: int, size: int) -> RankCase:
        """Case `number`, alike on all ranks but for the numbers in its arrays."""
        chance = random.Random(seed * 1_000_003 + number)
        groups = [group for group, weight in self.groups for _ in range(weight)]
        return chance.choice(groups)(chance, rank, size)


class Board:
    """What each rank has come to, in memory that all of them map."""

    ENTERED, REFUSED, DONE, MET = 1, 2, 3, 4

    def __init__(self, file: Path, rank: int, size: int) -> None:
        import numpy as np

        if rank == 0:
            np.zeros((size, 8)).tofile(file)
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
        self.states, self.rank = np.memmap(file, np.float64, "r+", shape=(size, 8)), rank

    def write(self, number: int, state: int) -> None:
        """Write this rank's state in a case."""
        self.states[self.rank, :3] = number, state, time.monotonic()

    def others_wait(self, number: int, settled: float) -> bool:
        """Return whether others are in the call, or through it, in which this rank was refused. False where all were refused."""
        while True:
            came, state, since = self.states[:, 0], self.states[:, 1], self.states[:, 2]
            if (came == number).all():
                if (state == self.REFUSED).all():
                    return False
                if (state == self.DONE).any() or time.monotonic() - since.max() > settled:
                    return True
            time.sleep(0.001)

    def wait(self, number: int, state: int, ranks: Sequence[int], seconds: float = 60.0) -> bool:
        """Wait, asleep and outside of any communication, until these ranks have come so far in a case; False after `seconds`."""
        end = time.monotonic() + seconds
        while not all(self.states[rank, 0] > number or (self.states[rank, :2] >= (number, state)).all() for rank in ranks):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def meet(self, number: int) -> None:
        """Wait for all ranks at the end of a case; the case's limit ends what never comes."""
        self.write(number, self.MET)
        self.wait(number, self.MET, range(len(self.states)), float("inf"))


@dataclass
class World:
    """What the cases of a job share: communicators, a board, and a grid of each mode."""

    comm: Any
    control: Any
    board: Board
    settled: float
    grids: dict[str, Any] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)

    def grid(self, mode: str) -> Any:
        """The grid of a mode, made where there is none."""
        from summa3d import Grid

        if mode not in self.grids:
            own = self.comm.Dup()
            self.grids[mode] = Grid(own, axes_of(self.comm.size), **MODES[mode]), own
        return self.grids[mode][0]

    @contextlib.contextmanager
    def own(self, mode: str) -> Iterator[Any]:
        """A grid that no other case uses, on a communicator of its own."""
        from summa3d import Grid
        from summa3d.errors import Summa3dError

        comm = self.comm.Dup()
        grid = Grid(comm, axes_of(self.comm.size), **MODES[mode])
        try:
            yield grid
        finally:
            with contextlib.suppress(Summa3dError):
                grid.free()
            if os.getpid() == self.process:
                comm.Free()

    def drop(self, mode: str) -> None:
        """Free a grid whose ranks are out of step."""
        from summa3d.errors import Summa3dError

        grid, own = self.grids.pop(mode)
        with contextlib.suppress(Summa3dError):
            grid.free()
        own.Free()


def afterwards(world: World, mode: str, number: int) -> str:
    """Return what is wrong with right calls after a case; empty if nothing is."""
    import numpy as np

    from summa3d import DistMatrix

    grid, size = world.grid(mode), world.comm.size
    summed = grid.world.all_reduce(np.full(3, float(number + world.comm.rank)))
    if not np.array_equal(summed, np.full(3, size * number + size * (size - 1) / 2)):
        return "a wrong sum afterwards"
    if not np.array_equal(grid["x"].all_gather(np.full(2, number)), np.full(2 * grid["x"].size, number)):
        return "a wrong gather afterwards"
    whole = np.arange(72.0).reshape(12, 6) + number
    if number % 8 == 0:
        moved = DistMatrix.from_global(whole, grid, "m:x k:y").redistribute("m k:y")
        if not np.array_equal(moved.to_global(), whole):
            return "a wrong redistribution afterwards"
    return ""


def on_ranks(kind: Kind, numbers: list[int], seed: int, folder: Path, settled: float, seconds: float) -> None:
    """The program of each rank: the cases of these numbers; rank 0 writes a line for each."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    world = World(comm, comm.Dup(), Board(folder / "board", rank, size), settled)
    for number, mode in enumerate(MODES):  # what takes long is no part of a case
        world.grid(mode)
        afterwards(world, mode, 8 * number)
    for group, _ in kind.groups:
        group(random.Random(seed), rank, size)
    for number in numbers:
        if rank == 0:
            (folder / "now").write_text(str(number))
        with (folder / f"stacks{rank}").open("w") as stacks:
            faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
            case = kind.drawn(seed, number, rank, size)
            verdict, said = case.run(world, number)
            try:
                verdict = afterwards(world, case.mode, number) or verdict
            except Exception as error:
                verdict, said = f"{blame(error)} afterwards", str(error)[:300]
            every = world.control.allgather((verdict, said))
            faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            found = next((one for one in every if one[0] not in HELD), every[case.victim or 0])
            with (folder / "lines").open("a") as lines:
                lines.write(json.dumps(asdict(line_of(number, case, *found))) + "\n")
    for mode in list(world.grids):
        world.drop(mode)


def line_of(number: int, case: RankCase, verdict: str, said: str) -> Line:
    """The line of a case on ranks."""
    where = "all ranks" if case.victim is None else f"rank {case.victim}"
    return Line(number, case.group, f"{case.name}, {case.mode}, on {where}", verdict, said)


# -------------------------------------------------------------------------------------------------------------------- the parent


def job(words: list[str], folder: Path, seconds: float, watchdog: float) -> tuple[int, str]:
    """Status and output of a job in a folder, which is killed after so many seconds."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SUMMA3D_WATCHDOG": f"{watchdog:g}", "TMPDIR": str(folder)}
    made = subprocess.Popen(
        words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = made.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(made.pid, signal.SIGKILL)
        output, _ = made.communicate()
    return made.returncode, output


def run(kind: Kind, numbers: list[int], ranks: int, seed: int, settled: float, seconds: float) -> list[Line]:
    """Run cases on ranks; a job that dies is restarted behind the case at which it died."""
    from summa3d.cli.launch import find_launcher, loaded_runtime

    lines: list[Line] = []
    launcher = find_launcher(loaded_runtime(), os.environ).command
    while left := numbers[len(lines) :]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "numbers").write_text(json.dumps(left))
            program = [sys.executable, str(Path(__file__).with_name("__main__.py")), kind.name, "--on-ranks", name]
            words = ["--seed", str(seed), "--settled", str(settled), "--limit", str(seconds)]
            status, said = job(
                [*launcher, "-n", str(ranks), *program, *words], folder, seconds * (4 + 0.03 * len(left)), kind.watchdog
            )
            text = (folder / "lines").read_text() if (folder / "lines").exists() else ""
            done = [Line(**json.loads(line)) for line in text.splitlines()]
            if len(done) < len(left):
                if not (folder / "now").exists():
                    raise RuntimeError(said)
                stacks = "\n".join(file.read_text() for file in sorted(folder.glob("stacks*")))
                number = left[len(done)]
                case = kind.drawn(seed, number, 0, ranks)
                if "Timeout" in stacks:
                    verdict, said = "hang", stacks
                else:
                    named = isinstance(case, Scene) and case.hangs and re.search(case.hangs, said)
                    verdict = "named" if named else f"the job died: {status}"
                done.append(line_of(number, case, verdict, said[-4000:]))
        for line in done:
            line.tell()
        lines += done
    return lines


def main(kind: Kind, doc: str | None) -> int:
    """Print each finding as it comes, and a table of groups and verdicts at the end; the status is 1 if there are any."""
    parser = options(doc, cases=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--settled", type=float, default=SETTLED, help="Seconds after which a rank is taken to wait.")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks is not None:
        numbers = json.loads((args.on_ranks / "numbers").read_text())
        on_ranks(kind, numbers, args.seed, args.on_ranks, args.settled, args.limit)
        return 0
    lines = run(kind, args.only or list(range(args.cases)), args.ranks, args.seed, args.settled, args.limit)
    again = [line.number for line in lines if line.verdict == "hang" or (line.verdict not in HELD and STANDS in line.said)]
    if again:  # a rank that had no processor for long was taken for one that waits: only what hangs twice does
        patient = replace(kind, watchdog=5 * kind.watchdog)
        slower = {number: run(patient, [number], args.ranks, args.seed, 3.0, args.limit)[0] for number in again}
        lines = [slower.get(line.number, line) for line in lines]
    return report(lines, f"{kind.what} on {args.ranks} ranks")
