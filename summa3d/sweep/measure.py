"""Measuring points on the ranks of one start: races of interleaved rounds, and a line for each point behind its race."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.clock import sleep_until_all_are_here
from ..bench.machine import machine
from ..bench.products import run_benchmark as run_products
from ..columns import counted
from ..comm.device.select import take_device
from ..comm.transport.node_memory import in_one_node
from ..errors import ConfigError, LaunchError, Summa3dError
from ..files import replacing
from ..gemm.cost.machine import Machine, default_cluster
from ..train.lease import Lease
from ..train.on_root import on_root
from . import predict
from .file import Sweep
from .lines import RUNNING, Say, SweepLine, append, folder_of, known_in, mend, missing
from .points import Point, entry_of, races

if TYPE_CHECKING:
    from mpi4py import MPI

DYING = 10.0
"""Seconds in which the ranks of a killed start are gone."""
PAUSE = 0.2


def measure(
    sweep: Sweep, points: Sequence[Point], world: MPI.Intracomm, directory: Path, shared: bool, retry_before: float, say: Say
) -> int:
    """Run the points that have no line yet, race after race; returns how many. Collective over `world`.

    points : of `world.size` ranks; `shared`, of fewer too, while the other ranks sleep. retry_before : as of `missing`.
    """
    folder = folder_of(directory, world.size)

    def begin() -> list[Point]:
        folder.mkdir(parents=True, exist_ok=True)
        _take(lease, folder, say)
        (folder / RUNNING).unlink(missing_ok=True)
        mend(folder, say)
        return missing(points, known_in(directory, say), retry_before)

    with Lease() as lease:
        todo = on_root(world, begin, LaunchError)
        facts = machine(world, probe=False)
        ready = races(todo, sweep, shared)
        for number, race in enumerate(ready, 1):
            if world.rank == 0:
                with replacing(folder / RUNNING) as new:
                    new.write_text(json.dumps([point.id for point in race]))
                names = ", ".join(dict.fromkeys(point.label for point in race))
                counts = sorted({point.ranks for point in race})
                of = counted(counts[0], "rank") if len(counts) == 1 else f"{', '.join(map(str, counts))} ranks"
                say(f"{number}/{len(ready)}: {of}: {names}")
            lines = run_race(race, sweep, world, folder)
            on_root(world, partial(append, folder, [whole(line, sweep, facts) for line in lines]), LaunchError)
        if world.rank == 0:
            (folder / RUNNING).unlink(missing_ok=True)
    return len(todo)


def _take(lease: Lease, folder: Path, say: Say) -> None:
    """Take the folder's lease; ranks of a start that was killed may hold it for a moment."""
    deadline = time.monotonic() + DYING
    while True:
        try:
            return lease.take(folder, say)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE)


def whole(line: SweepLine, sweep: Sweep, facts: dict[str, Any]) -> SweepLine:
    """A line with what is known of its sweep and of the machine."""
    about = {"name": sweep.name, "kind": sweep.kind, "x": sweep.x, "published": dict(sweep.published), "rounds": sweep.rounds}
    cluster = predict.cluster_of(sweep)
    about |= {"cluster": sweep.cluster, "band": None if cluster is None else cluster["band.percent"]}
    return {**line, "time": time.time(), "sweep": about, "machine": facts}


def run_race(race: Sequence[Point], sweep: Sweep, world: MPI.Intracomm, folder: Path) -> list[SweepLine]:
    """The lines of a race. Where a point raises an error, each is run by itself, and the line of that point says the error.

    Collective; equal on every rank.
    """
    try:
        result = RUN[sweep.what](race, sweep, world, folder)
    except Summa3dError as error:
        if len(race) > 1:
            return [line for point in race for line in run_race([point], sweep, world, folder)]
        return [{**about(race[0]), "race": 1, "error": f"{type(error).__name__}: {error}"}]

    return [{**about(point), "race": len(race), **measured} for point, measured in zip(race, result, strict=True)]


def about(point: Point) -> SweepLine:
    """Name of a point in its line."""
    names = {"id": point.id, "what": point.what, "ranks": point.ranks, "series": point.series, "x": point.x}
    return {**names, "label": point.label, "repeat": point.repeat, "config": dict(point.config)}


def _products(race: Sequence[Point], sweep: Sweep, world: MPI.Intracomm, folder: Path) -> list[dict[str, Any]]:
    cluster, device = predict.cluster_of(sweep), race[0].config["device"]
    if device == "cuda":
        take_device(world)
    machine = Machine(cluster or default_cluster(), node=device == "cpu" and in_one_node(world))
    rows = run_products([entry_of(point, machine) for point in race], world, sweep.rounds)["rows"]
    result = []
    for point, row in zip(race, rows, strict=True):
        words = {"words": row.get("words_per_rank"), "words_formula": row.get("words_per_rank_formula")}
        seconds = {"seconds": row["seconds"], "predicted": predict.seconds(point, cluster, machine)}
        result.append({**seconds, "flops": point.problem.flops, **words, "split": row.get("split"), "row": row})
    return result


def _on_first(world: MPI.Intracomm, ranks: int, act: Callable[[MPI.Intracomm], Any]) -> Any:
    """Result of `act` on the first `ranks` ranks, while the others sleep; equal on every rank, and so is its error."""
    result, error = None, None
    if world.rank < ranks:
        comm = world if ranks == world.size else world.Create_group(world.Get_group().Incl(range(ranks)))
        try:
            result = act(comm)
        except Summa3dError as caught:
            error = caught
        if comm is not world:
            comm.Free()
    sleep_until_all_are_here(world)
    result, error = world.bcast((result, error))
    if error is not None:
        raise error
    return result


def _blocks(race: Sequence[Point], sweep: Sweep, world: MPI.Intracomm, folder: Path) -> list[dict[str, Any]]:
    from ..bench.blocks import run_benchmark as run_blocks
    from ..train.device import open_device

    entries, cases = zip(*map(predict.block_of, race), strict=True)
    open_device(cases[0].device, world)
    rows = _on_first(world, race[0].ranks, lambda comm: run_blocks(entries, cases[0], comm, sweep.rounds))["rows"]
    work, result = {"flops": cases[0].flops, "sequences": cases[0].batch}, []
    for row in rows:
        words = sum(row["words_per_rank"].values())
        result.append({"seconds": row["seconds"]["both"], **work, "words": words, "split": row["split"], "row": row})
    return _foretold(race, sweep, world, result)


def _steps(race: Sequence[Point], sweep: Sweep, world: MPI.Intracomm, folder: Path) -> list[dict[str, Any]]:
    from .steps import run_steps

    settings = [point.settings for point in race]
    result = _on_first(world, race[0].ranks, lambda comm: run_steps(settings, comm, sweep.rounds, folder))
    return _foretold(race, sweep, world, result)


def _foretold(race: Sequence[Point], sweep: Sweep, world: MPI.Intracomm, lines: Sequence[SweepLine]) -> list[dict[str, Any]]:
    """Measurement of a point, with the words and seconds that a dry run on rank 0 says; collective."""
    cluster = predict.cluster_of(sweep)

    def dry() -> list[SweepLine]:
        return [{"predicted": predict.seconds(point, cluster), "words_formula": predict.words(point)} for point in race]

    said = on_root(world, dry, LaunchError)
    return [{**measured, **foretold} for measured, foretold in zip(lines, said, strict=True)]


RUN = {"gemm": _products, "block": _blocks, "train": _steps}
"""What is measured → what runs a race of it: (points, sweep, ranks, folder) → what was measured of each point; collective."""
