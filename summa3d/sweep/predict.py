"""What is known of a point before it runs: seconds on a cluster, bytes of a rank, and words that its program moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..bench.predicted import of_product
from ..cluster import Cluster, load
from ..dry.record import ENTER, LEAVE, RepeatedSegment
from ..errors import CapacityError
from ..gemm.cost.machine import Machine, default_cluster
from .file import Sweep
from .points import Point, entry_of

if TYPE_CHECKING:
    from ..bench.blocks import BlockEntry, Case
    from ..dry.step import Setting

GIB = 2**30


def cluster_of(sweep: Sweep) -> Cluster | None:
    """The cluster that predicts a sweep's times; None where it names none. Raises ClusterError for one that is unknown."""
    return load(sweep.cluster) if sweep.cluster else None


def machine_of(point: Point, cluster: Cluster | None, ranks_per_node: int) -> Machine:
    """Machine by which the library chooses a product's algorithm, before its ranks are started."""
    node = point.config["device"] == "cpu" and ranks_per_node >= point.ranks
    return Machine(cluster or default_cluster(), node)


def seconds(point: Point, cluster: Cluster | None, machine: Machine | None = None) -> float | None:
    """The predicted seconds of a point, of a product on `machine`; None without a cluster."""
    if cluster is None:
        return None
    if point.what == "gemm":
        machine = machine or machine_of(point, cluster, 1)
        return of_product(entry_of(point, machine), machine)
    if point.what == "block":
        from ..bench.predicted import of_block

        return of_block(*block_of(point), cluster)
    from ..plan.training import seconds as of_step

    return of_step(point.settings, cluster)


def block_of(point: Point) -> tuple[BlockEntry, Case]:
    """The entry and the case of the benchmark of blocks that measure a point."""
    from ..bench.blocks import BlockEntry, Case

    config = point.settings
    case = Case(config.model, config.train.batch, config.dtype, config.device or "cpu")
    return BlockEntry(config.scheme, config.grid.axes, config.regather, config.overlap_on(case.device == "cuda")), case


def words(point: Point) -> int | None:
    """The words that the fullest rank of a point of block or train receives, by the dry run of its program; None of products."""
    if point.what == "gemm":
        return None
    from ..dry.rank_classes import classes, even
    from ..dry.step import run
    from ..train.dry_run import training_of

    setting = setting_of(point)
    ranks = classes(setting) if even(setting) else range(point.ranks)  # where parts are uneven, words differ in a class
    result = []
    for rank in ranks:
        own = replace(setting, rank=rank)
        if point.what == "block":
            result.append(_moved(part for part in run(own).parts if part.segment.cell not in (ENTER, LEAVE)))
        else:
            result.append(_moved(run(own, training_of(point.settings)).parts))
    return max(result)


def _moved(parts: Iterable[RepeatedSegment]) -> int:
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
