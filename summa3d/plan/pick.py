"""The scheme and grid of a training run whose configuration has none: of those that move few words, the fastest by prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..cluster import Cluster, here_file, load
from ..columns import counted
from ..comm.topology import describe, divisors
from ..errors import GridError, LayoutError
from ..nn.choose import EQUAL, SchemeChoice, ranked
from ..nn.schemes.products import family_of
from ..nn.schemes.registry import SCHEME_SPECS
from ..parallel.outer import SEARCHED
from ..parallel.schedule import is_split
from ..train.config import REPLICAS
from .search.cells import Cells, StageGrid
from .search.memory import memory
from .search.plans import Plan
from .search.store import Store
from .search.timing import Times

if TYPE_CHECKING:
    from ..train.config import Config

HOST = "host"
"""The cluster by which runs on the host are planned where this machine has not been calibrated."""
PRICED = 6
"""How many grids are priced: that of the fewest words of each family, replicas alone, and others in the order of their words."""


@dataclass(frozen=True)
class Pick:
    """A scheme and its grid; the predicted seconds of a step; on which cluster; how many grids were priced, and how many fit.

    assumed : whether no rate of that cluster has been measured. Where a single grid fits, none is priced.
    """

    scheme: str
    grid: dict[str, int]
    seconds: float | None
    cluster: str
    priced: int
    fitting: int
    assumed: bool = False

    def __str__(self) -> str:
        why = "the only one that fits"
        if self.seconds is not None:
            among = f"the fastest of {self.priced} predicted, of {self.fitting} that fit"
            machine = f"cluster {self.cluster}{', an assumed machine' if self.assumed else ''}"
            why = f"{self.seconds:.2g} s a step on {machine}, {among}"
        return f"scheme {self.scheme}, grid {describe(self.grid)}: {why}"


class GridCandidate(NamedTuple):
    """A scheme on the grid of each replica and stage, the configuration with its replicas, and the words of a step, about."""

    config: Config
    choice: SchemeChoice
    words: float


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

    Where the configuration's `chosen` has replicas, these too: the `ranks` ranks are then of a stage, and the grid has `dp`.

    A fixed number of grids (`PRICED`) is priced, so that the same configuration has the same pick everywhere: their steps are
    traced at the micro-batch of the configuration, or read from the cache of cells, and replayed. Of equals it takes the fewest
    words. What exceeds the memory of a rank is left out, if anything does not. `tell` is given a line for each file of cells that
    cannot be used.

    Raises GridError where no grid fits.
    """
    eligible = candidates(config, ranks, schemes)
    chosen = {} if REPLICAS not in config.chosen else {"dp": eligible[0].config.grid.dp}
    if len(eligible) == 1:
        return Pick(eligible[0].choice.scheme, {**eligible[0].choice.grid, **chosen}, None, cluster.name, 0, 1)
    times, priced = Times(cluster, Exact(tell), config.train), []
    for item in shortened(eligible):
        plan = plan_of(item.config, item.choice, cluster)
        try:
            held = memory(plan, *times.store.cells(plan.inner, plan.units), times.muon(plan))
            priced.append((times.seconds(plan), held.total, item))
        except (LayoutError, GridError):  # some ragged sizes fit a scheme's layers, and not the planner
            continue
    fewest = max(cluster["device.memory"], min(held for _, held, _ in priced))
    fitting = [entry for entry in priced if entry[1] <= fewest]
    fastest = min(seconds for seconds, *_ in fitting)
    seconds, _, best = next(entry for entry in fitting if entry[0] <= EQUAL * fastest)
    grid = best.choice.grid | ({"dp": best.config.grid.dp} if chosen else {})
    return Pick(best.choice.scheme, grid, seconds, cluster.name, len(priced), len(eligible), is_assumed(cluster))


def is_assumed(cluster: Cluster) -> bool:
    """Return whether no rate of a cluster's products has been measured, or is from a source."""
    return all(number.source == "assumed" for key, number in cluster.numbers.items() if key.startswith("peak."))


def candidates(config: Config, ranks: int, schemes: Sequence[str]) -> list[GridCandidate]:
    """Every scheme on every grid that fits, of the configuration's replicas, or of all numbers of them that may be chosen.

    Those on which ranks hold parts alike; if there are none, all. Raises GridError, as `ranked` does, where none fits.
    """
    try:
        return _candidates(config, ranks, schemes, alike=True)
    except GridError:
        return _candidates(config, ranks, schemes, alike=False)


def _candidates(config: Config, ranks: int, schemes: Sequence[str], alike: bool) -> list[GridCandidate]:
    every, result, refused = [config.grid.dp], [], None
    if REPLICAS in config.chosen:
        every = [dp for dp in divisors(ranks) if config.train.micro_batch % dp == 0]
    for dp in every:
        own = replace(config, grid=replace(config.grid, dp=dp))
        inner = ranks * config.grid.dp // dp
        try:
            fitting = ranked(own.local_model, own.rows, inner, schemes, own.regather, own.vectors, alike)
        except GridError as error:
            refused = refused or error
            continue
        result += [
            GridCandidate(own, item, own.train.accumulate * item.words + words_of_replicas(own, inner)) for item in fitting
        ]
    if not result:
        raise refused or GridError(f"no number of replicas fits {counted(ranks, 'rank')}.")
    return result


def words_of_replicas(config: Config, inner: int) -> float:
    """The words that a rank of `inner` ranks receives in a step in sums of its matrices' gradients and gathers of its matrices.

    About, where zero is 3, which gathers a table as often as it is used.
    """
    model, dp, many = config.model, config.grid.dp, config.train.accumulate
    elements = model.layers * model.block_elements + model.vocabulary * model.hidden
    each = {2: (many + 1) / 2, 3: 3 * many / 2}.get(config.replicas.zero, 1.0)
    return each * 2 * (dp - 1) / dp * elements / inner / config.grid.pp


def shortened(result: Sequence[GridCandidate]) -> list[GridCandidate]:
    """PRICED candidates in the order of their words: the first of each family, and of replicas alone, then others.

    Each program is there once.
    """

    def family(candidate: GridCandidate) -> str:
        alone = candidate.config.grid.dp > 1 and prod(candidate.choice.grid.values()) == 1
        return REPLICAS if alone else family_of(candidate.choice.scheme, {"z": 1, **candidate.choice.grid})

    def once(candidate: GridCandidate) -> bool:
        return not SCHEME_SPECS[candidate.choice.scheme].repeats({"x": 1, "y": 1, "z": 1, **candidate.choice.grid})

    several = {item.config.grid.dp for item in result if once(item)}  # replicas of which a scheme is there that others repeat
    ordered = sorted((item for item in result if once(item) or item.config.grid.dp not in several), key=lambda item: item.words)
    first = {family(item): item for item in reversed(ordered)}.values()
    others = [item for item in ordered if item not in first]
    kept = [*first, *others[: PRICED - len(first)]]
    return [item for item in ordered if item in kept]


def plan_of(config: Config, choice: SchemeChoice, cluster: Cluster) -> Plan:
    """The plan of a configuration on a grid, as the search prices it."""
    grid, replicas, pipeline = config.grid, config.replicas, config.pipeline
    around = [item for item in SEARCHED if grid.axes.get(item.name, 1) > 1]
    outer = tuple((item.name, grid.axes[item.name]) for item in around)
    options = tuple((key, reduce(getattr, key.split("."), config)) for item in around for key in item.values)
    copies = prod(size for _, size in outer)
    inner = StageGrid(
        config.model,
        choice.scheme,
        tuple({"x": 1, "y": 1, "z": 1, **choice.grid}.items()),
        config.recompute,
        config.regather,
        config.dtype,
        "cpu" if cluster["host.slots"] else "cuda",
        config.train.micro_batch // grid.dp,
        grid.dp * copies if replicas.zero == 3 else 1,
        cluster.ranks_per_node(prod(choice.grid.values()) * grid.outer),
        is_split(pipeline.schedule, grid.pp),
        outer,
        options,
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
