"""What is known of a point before it runs: seconds on a cluster, bytes of a rank, and words that its program moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..dry.record import ENTER, LEAVE, Op, Part
from ..errors import CapacityError
from ..plan.cluster import Cluster, load
from .file import Sweep
from .points import Point

if TYPE_CHECKING:
    from ..dry.step import Setting

GIB = 2**30


def cluster_of(sweep: Sweep) -> Cluster | None:
    """The cluster that predicts a sweep's times; None where it names none. Raises ClusterError for one that is unknown."""
    return load(sweep.cluster) if sweep.cluster else None


def seconds(point: Point, cluster: Cluster | None) -> float | None:
    """The predicted seconds of a point; None without a cluster, for products, and for pipelines, which no trace here covers."""
    if cluster is None or point.what == "gemm" or point.settings.grid.pp > 1:
        return None
    from ..comm.topology import Topology
    from ..plan.replay import Work

    config = point.settings
    topology = Topology.checked(config.grid.axes, config.grid.rank_order, config.grid.tile)
    return Work.of(topology, _ops(point)).seconds(cluster)


def _ops(point: Point) -> Iterator[Op]:
    """The operations of the rank with the largest blocks, as often as it runs them."""
    from ..dry.step import run
    from ..plan.cells import BLOCK, cells
    from ..train.dry_run import training_of

    setting = setting_of(point)
    if point.what == "block":
        for _ in range(setting.model.layers):
            yield from (op for trace in cells(setting)[BLOCK] for op in trace)
        return
    for segment, times in run(setting, training_of(point.settings)).parts:
        for _ in range(times):
            yield from segment.ops


def words(point: Point) -> int | None:
    """The words that the fullest rank of a point of block or train receives, by the dry run of its program; None of products."""
    if point.what == "gemm":
        return None
    from ..dry.rank_classes import classes, even
    from ..dry.step import run
    from ..train.dry_run import training_of

    setting = setting_of(point)
    ranks = classes(setting) if even(setting) else range(point.ranks)  # where parts are uneven, words differ in a class
    found = []
    for rank in ranks:
        own = replace(setting, rank=rank)
        if point.what == "block":
            found.append(_moved(part for part in run(own).parts if part.segment.cell not in (ENTER, LEAVE)))
        else:
            found.append(_moved(run(own, training_of(point.settings)).parts))
    return max(found)


def _moved(parts: Iterable[Part]) -> int:
    """The words of all communications."""
    return sum(times * op.words for segment, times in parts for op in segment.ops if op.kind == "move")


def check_memory(point: Point, limit: float) -> None:
    """Raise CapacityError where the fullest rank of a point of block or train would take more than `limit` bytes."""
    if not limit or point.what == "gemm":
        return
    from ..dry.rank_classes import steps
    from ..dry.step import Training
    from ..train.dry_run import training_of

    training = training_of(point.settings) if point.what == "train" else Training()
    peak = max(step.peak for _, _, step in steps(setting_of(point), training))
    if peak > limit:
        raise CapacityError(f"a rank would take {peak / GIB:.3g} GiB; the limit is {limit / GIB:.3g} GiB.")


def setting_of(point: Point) -> Setting:
    """The setting of a point's dry run."""
    from ..train.dry_run import setting_of as of_config

    config = point.settings
    return of_config(config, on_device=config.device == "cuda")
