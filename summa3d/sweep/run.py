"""Running a sweep from outside its ranks: a start for each rank count, what to do when one dies, and job scripts for Slurm."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..columns import aligned, counted
from ..errors import DataError, LaunchError, Summa3dError
from ..files import from_json, replace_text
from ..jobs.script import JobSite, compose, header
from ..train.lease import Lease
from . import predict
from .file import Sweep
from .lines import RUNNING, Say, SweepLine, append, folder_of, known_in, mend, missing
from .points import Point, Refusal, expand

Start = Callable[[int, Sequence[str]], int]
"""(ranks, further options of `summa3d sweep run`) → the exit status of a start of so many ranks."""
JOB = """# Written by `summa3d sweep submit`. Task i measures the sweep on rank count i of {counts}.
# Submitted again, it measures what is missing.
export SUMMA3D_MPIEXEC=${{SUMMA3D_MPIEXEC:-srun ${{SRUN_OPTIONS:-}} --kill-on-bad-exit=1 {bound}}}
{command} --ranks {counts} --array
"""
BOUND = {"cpu": "--cpus-per-task=$THREADS --cpu-bind=cores", "cuda": "--cpu-bind=none --gpu-bind=none"}
"""How srun binds ranks, by their device."""


def planned(sweep: Sweep, tell: Callable[[int, int], None] = lambda done, total: None) -> tuple[list[Point], list[Refusal]]:
    """The points of a sweep, and those that are refused, by scheme, grid, configuration or memory.

    tell : is given how many points are checked, of how many

    Raises ClusterError for an unknown cluster, and for a dtype that it has no peak of.
    """
    points, refused = expand(sweep)
    cluster = predict.cluster_of(sweep)
    limit = sweep.memory or (0.0 if cluster is None else cluster["device.memory"])
    fitting = []
    for number, point in enumerate(points):
        tell(number, len(points))
        if cluster is not None and point.what != "gemm":
            cluster.peak(point.settings.dtype)  # raises the error of a dtype that the cluster does not know, before anything runs
        try:
            predict.check_memory(point, limit)
            fitting.append(point)
        except Summa3dError as error:
            refused.append(Refusal(point.label, point.ranks, error))
    return fitting, refused


@dataclass
class Runner:
    """Runs the missing points of a sweep, count after count; the starts of ranks are `start`'s.

    retry_before : points whose line is an error of an earlier time (seconds since 1970) are run again.
    """

    sweep: Sweep
    directory: Path
    start: Start
    say: Say
    retry_before: float = 0.0

    def run(self, points: Sequence[Point], counts: Sequence[int]) -> int:
        """Run them; returns 1 where points are left with an error, else 0. Raises LaunchError where ranks cannot be started."""
        for count in counts:
            own = [point for point in points if point.ranks == count]
            if self._todo(own):
                self._count(own, count)
        known = known_in(self.directory, self.say)
        return int(any("error" in known[point.id] for point in points if point.id in known and point.ranks in counts))

    def _todo(self, points: Sequence[Point]) -> list[Point]:
        return missing(points, known_in(self.directory, self.say), self.retry_before)

    def _count(self, points: Sequence[Point], count: int) -> None:
        """Run the points of one rank count: in one start, and after its death those of the race that it died in one by one."""
        while todo := self._todo(points):
            status, running = self._started(count, [])
            left = self._todo(points)
            if status == 0 or not left:
                return
            if not running and len(left) == len(todo):
                raise LaunchError(f"the start of {counted(count, 'rank')} ended with status {status} before any point.")
            self.say(f"the start of {counted(count, 'rank')} ended with status {status}; its race is run again, point by point.")
            for point in left:
                if point.id in running:
                    status, _ = self._started(count, ["--only", point.id])
                    if status and self._todo([point]):
                        self._fail(point, status)

    def _started(self, count: int, options: Sequence[str]) -> tuple[int, list[str]]:
        """The exit status of a start, and the race that it was in when it ended; none before its first and after its last."""
        file, began = folder_of(self.directory, count) / RUNNING, time.time()
        status = self.start(count, [*options, "--retry-before", str(self.retry_before)])
        if status == 0 or not file.exists() or file.stat().st_mtime < began - 1:
            return status, []
        running: list[str] = from_json(file.read_text() or "[]")
        return status, running

    def _fail(self, point: Point, status: int) -> None:
        from .measure import about, whole

        folder = folder_of(self.directory, point.ranks)
        error = f"the ranks ended with status {status}, alone as well; retry it with --retry."
        self.say(f"{point.id} {point.label}: {error}")
        with Lease() as lease:
            lease.take(folder, self.say)
            mend(folder, self.say)
            append(folder, [whole({**about(point), "race": 1, "error": error}, self.sweep, {})])


def nodes_of(sweep: Sweep, ranks: int) -> int:
    """The nodes that hold so many ranks."""
    return -(-ranks // sweep.ranks_per_node)


def plan_table(sweep: Sweep, points: Sequence[Point], known: Mapping[str, SweepLine]) -> list[str]:
    """A line for each point: id, ranks, what it is, predicted seconds of one measurement and node-hours of all its rounds."""
    cluster = predict.cluster_of(sweep)
    rows, total = [], 0.0
    for point in points:
        machine = predict.machine_of(point, cluster, sweep.ranks_per_node) if point.what == "gemm" else None
        seconds = predict.seconds(point, cluster, machine)
        hours = None if seconds is None else seconds * (sweep.rounds + 1) * nodes_of(sweep, point.ranks) / 3600
        total += hours or 0.0
        cells = ("–", "–") if seconds is None or hours is None else (f"{seconds:.3g}", f"{hours:.2g}")
        state = "" if point.id not in known else "failed" if "error" in known[point.id] else "done"
        rows.append((point.id, str(point.ranks), *cells, f"{point.label}  {_sizes(point)}", state))
    heads = ("id", "ranks", "predicted s", "node-hours", "point", "")
    lines = aligned([heads, *rows], left=(0, 4, 5))
    if cluster is not None:
        band = f"±{cluster['band.percent']:g} %"
        lines.append(
            f"{len(points)} points, {total:.2g} node-hours of rounds as predicted for {cluster.name} ({band}), without set-up"
        )
    return lines


def _sizes(point: Point) -> str:
    names = ("m", "n", "k") if point.what == "gemm" else ("train.batch", "model.hidden", "model.heads", "model.layers")
    short = {"train.batch": "b", "model.hidden": "h", "model.heads": "a", "model.layers": "l"}
    return ",".join(f"{short.get(name, name)}={point.config[name]}" for name in names if name in point.config)


def status_table(sweep: Sweep, points: Sequence[Point], known: Mapping[str, SweepLine]) -> list[str]:
    """Table of points that are measured, have failed, and are missing, by rank count; each error; lines of other settings."""
    lines = [f"{'ranks':>6}{'points':>8}{'done':>7}{'failed':>8}{'missing':>9}"]
    for count in sweep.ranks:
        own = [point for point in points if point.ranks == count]
        failed = [point for point in own if "error" in known.get(point.id, {})]
        absent = missing(own, known)
        lines.append(f"{count:>6}{len(own):>8}{len(own) - len(failed) - len(absent):>7}{len(failed):>8}{len(absent):>9}")
    for point in points:
        if "error" in known.get(point.id, {}):
            lines.append(f"{point.id} {point.label}: {known[point.id]['error'].splitlines()[0]}")
    if others := len(known.keys() - {point.id for point in points}):
        lines.append(f"the folder holds {counted(others, 'point')} of other settings: give the --set of their run to see them")
    return lines


def write_jobs(sweep: Sweep, command: Sequence[str], directory: Path, at: JobSite) -> list[str]:
    """Write a job script for each number of nodes, an array over its rank counts; returns the lines that submit them.

    Raises DataError where the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory} cannot be written: {error.strerror}.") from None
    of_nodes: dict[int, list[int]] = {}
    for ranks in sweep.ranks:
        of_nodes.setdefault(nodes_of(sweep, ranks), []).append(ranks)
    lines = []
    for nodes, counts in of_nodes.items():
        file = directory / f"job-{nodes}.sh"
        options = {"time": shlex.quote(sweep.limit), "array": f"0-{len(counts) - 1}", "requeue": ""}
        head = header(at, shlex.quote(f"{sweep.name}-{nodes}"), nodes, min(sweep.ranks_per_node, max(counts)), options)
        body = JOB.format(counts=",".join(map(str, counts)), command=shlex.join(command), bound=BOUND[at.device])
        replace_text(file, compose(at, head, body))
        lines.append(f"sbatch {shlex.quote(str(file))}")
    return lines
