"""The scheme and grid of a training run whose configuration has none: of those that move few words, the fastest by prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ..cluster import Cluster, here_file, load
from ..comm.topology import describe
from ..errors import GridError, LayoutError
from ..nn.choose import EQUAL, SchemeChoice, ranked
from ..nn.schemes.products import family_of
from ..nn.schemes.registry import SCHEME_SPECS
from ..parallel.schedule import is_split
from .search.cells import Cells, StageGrid
from .search.plans import Plan
from .search.store import Store
from .search.timing import Times

if TYPE_CHECKING:
    from ..train.config import Config

HOST = "host"
"""The cluster by which runs on the host are planned where this machine has not been calibrated."""
PRICED = 6
"""How many grids are priced: that of the fewest words of each family, and others in the order of their words."""


@dataclass(frozen=True)
class Pick:
    """A scheme and its grid; the predicted seconds of a step; on which cluster; how many grids were priced, and how many fit.

    Where a single one fits, none is priced.
    """

    scheme: str
    grid: dict[str, int]
    seconds: float | None
    cluster: str
    priced: int
    fitting: int

    def __str__(self) -> str:
        why = "the only one that fits"
        if self.seconds is not None:
            among = f"the fastest of {self.priced} predicted, of {self.fitting} that fit"
            why = f"{self.seconds:.2g} s a step on cluster {self.cluster}, {among}"
        return f"scheme {self.scheme}, grid {describe(self.grid)}: {why}"


class Exact(Store):
    """Cells traced at one size of the micro-batch, where sizes need not divide."""

    def cells(self, inner: StageGrid, units: int) -> tuple[Cells, int]:
        """The cells for micro-batches of `units` units, and 1."""
        return self._at(inner, units)


def pick(
    config: Config,
    ranks: int,
    schemes: Sequence[str],
    cluster: Cluster,
    tell: Callable[[str], None] = lambda line: None,
) -> Pick:
    """Pick a scheme and a grid of `ranks` ranks, for each replica and stage of a configuration, on a described cluster.

    A fixed number of grids (`PRICED`) is priced, so that the same configuration has the same pick everywhere: their steps are
    traced at the micro-batch of the configuration, or read from the cache of cells, and replayed. Of equals it takes the fewest
    words. `tell` is given a line for each file of cells that cannot be used.

    Raises GridError where no grid fits.
    """
    found = ranked(config.model, config.rows, ranks, schemes, config.regather, config.vectors)
    if len(found) == 1:
        return Pick(found[0].scheme, found[0].grid, None, cluster.name, 0, 1)
    times, priced = Times(cluster, Exact(tell)), []
    for one in shortened(found):
        try:
            priced.append((times.seconds(plan_of(config, one, cluster)), one))
        except (LayoutError, GridError):  # some ragged sizes fit a scheme's layers, and not the planner
            continue
    fastest = min(seconds for seconds, _ in priced)
    seconds, best = next(pair for pair in priced if pair[0] <= EQUAL * fastest)
    return Pick(best.scheme, best.grid, seconds, cluster.name, len(priced), len(found))


def shortened(found: Sequence[SchemeChoice]) -> list[SchemeChoice]:
    """PRICED choices in the order of their words: the first of each family, then others; each program once."""
    ordered = sorted(found, key=lambda one: one.words)
    ordered = [one for one in ordered if not SCHEME_SPECS[one.scheme].repeats({"x": 1, "y": 1, "z": 1, **one.grid})] or ordered
    first = {family_of(one.scheme, {"z": 1, **one.grid}): one for one in reversed(ordered)}.values()
    others = [one for one in ordered if one not in first]
    kept = [*first, *others[: PRICED - len(first)]]
    return [one for one in ordered if one in kept]


def plan_of(config: Config, choice: SchemeChoice, cluster: Cluster) -> Plan:
    """The plan of a configuration on a grid, as the search prices it."""
    grid, replicas, pipeline = config.grid, config.replicas, config.pipeline
    inner = StageGrid(
        config.model,
        choice.scheme,
        tuple({"x": 1, "y": 1, "z": 1, **choice.grid}.items()),
        config.recompute,
        config.regather,
        config.dtype,
        "cpu" if cluster["host.slots"] else "cuda",
        config.rows,
        grid.dp if replicas.zero == 3 else 1,
        cluster.ranks_per_node(prod(choice.grid.values()) * grid.outer),
        is_split(pipeline.schedule, grid.pp),
    )
    return Plan(inner, grid.dp, grid.pp, pipeline.chunks, 1, config.train.accumulate, replicas.zero, schedule=pipeline.schedule)


def cluster_for(device: str, ranks: int, ranks_per_node: int, cores: int) -> Cluster | None:
    """The cluster by which a run is planned: this machine's, if it was calibrated for such ranks, else `HOST`.

    cores : of a node. None on devices that have not been calibrated: no file describes a device that is not known. Raises
    ClusterError for a file of this machine that cannot be read.
    """
    if here_file().exists():
        here = load("here")
        if bool(here["host.slots"]) == (device == "cpu") and (len(here.levels) > 1 or ranks_per_node >= ranks):
            inner = f"{here.levels[0].name}.size"
            return here.replaced({inner: ranks_per_node}, "measured") if len(here.levels) > 1 else here
    if device != "cpu":
        return None
    return host(ranks_per_node, cores, "measured")


def host(ranks_per_node: int, cores: int, source: str) -> Cluster:
    """`HOST` with so many ranks on a node, and so many cores."""
    return load(HOST).replaced({"node.size": ranks_per_node, "host.slots": cores}, source)
