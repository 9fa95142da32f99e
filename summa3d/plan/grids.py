"""Several grids of one configuration in one table: what a dry run of each says, its predicted seconds, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf, prod
from typing import Any

from ..cluster import Cluster
from ..columns import counted
from ..comm.topology import OUTER, describe, divisors, several
from ..errors import ConfigError, GridError, LayoutError, Summa3dError
from ..files import grid_of
from ..nn.choose import FOR_MODELS, SchemeChoice
from ..nn.schemes.registry import SCHEME_SPECS
from ..table import Column, Table
from ..train import toml
from ..train.config import SCHEMES, Config, GridConfig
from ..train.dry_run import MEBI, predict
from .pick import Exact, plan_of
from .search.memory import usable
from .search.timing import Times

ALL = "all"
STATES = ("parameters", "gradients", "optimizer")
Asked = tuple[str, dict[str, int]]
"""A scheme, and the sizes of all axes of a grid."""


@dataclass(frozen=True)
class ComparedGrid:
    """A step on a grid.

    words, messages : that the fullest rank receives. held : bytes of weights, gradients and moments. peak : the most bytes, with
    its share of a node's memory. seconds : predicted; None where nothing predicts them. reason : why it does not fit, or ""
    """

    scheme: str
    grid: Mapping[str, int]
    words: int | None = None
    messages: int | None = None
    held: int | None = None
    peak: int | None = None
    seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Grids in the order of their predicted seconds; those that no rank can hold or run are the last, with the reason.

    cluster : by which seconds are predicted; None where nothing describes the device. limit : bytes that a rank may hold; None
    where nothing says it.
    """

    ranks: int
    ranks_per_node: int
    cluster: str | None
    limit: float | None
    rows: Sequence[ComparedGrid]

    def as_json(self) -> dict[str, Any]:
        """The fields, with a row for each grid."""
        return asdict(self)

    def table(self) -> Table:
        """A row for each grid."""
        rows = self.rows
        seconds = f"seconds by cluster {self.cluster}" if self.cluster else "no seconds: nothing describes the device"
        within = "" if self.limit is None else f", {self.limit / MEBI:,.0f} MiB a rank"
        columns = [
            Column("scheme", [row.scheme for row in rows], left=True),
            Column("grid", [describe(several(row.grid) or {"x": 1}) for row in rows], left=True),
            Column("words", [row.words for row in rows], "{:,}".format),
            Column("messages", [row.messages for row in rows], "{:,}".format),
            Column("MiB held", [None if row.held is None else row.held / MEBI for row in rows], "{:,.1f}".format),
            Column("MiB peak", [None if row.peak is None else row.peak / MEBI for row in rows], "{:,.1f}".format),
            Column("s/step", [row.seconds for row in rows], "{:.3g}".format),
            Column("does not fit", [row.reason or None for row in rows], left=True),
        ]
        return Table(f"{counted(self.ranks, 'rank')}, {self.ranks_per_node} a node; {seconds}{within}", columns)


def asked_grids(text: str, config: Config, ranks: int, free: bool) -> list[Asked]:
    """The grids that a text names: "all", or sizes of axes, each perhaps with its scheme, as "x=2,z=4;dp=8;scheme=oned,y=8".

    free : whether "all" is of all schemes, each grid once, and not of the configuration's alone

    Raises ConfigError for another text.
    """
    if text == ALL:
        return list(_all(config, ranks, free))
    result = []
    for item in text.split(";"):
        words = [word.strip() for word in item.split(",")]
        names = [word.removeprefix("scheme=") for word in words if word.startswith("scheme=")]
        sizes = grid_of(",".join(word for word in words if not word.startswith("scheme=")))
        if sizes is None or len(names) > 1 or not {*names} <= {*SCHEMES}:
            raise ConfigError(
                f"--grids {item.strip()!r} is no grid; write all, or grids with semicolons between them, each perhaps with a "
                f"scheme, as 'x=2,y=2,z=2;dp=8;scheme=oned,y=8'. Schemes: {', '.join(SCHEMES)}."
            )
        result.append((names[0] if names else config.scheme, sizes))
    return result


def _all(config: Config, ranks: int, free: bool) -> Iterator[Asked]:
    """Every grid of so many ranks in the configuration's stages, with every number of replicas."""
    pp = config.grid.pp
    for name in FOR_MODELS if free else (config.scheme,):
        for dp in divisors(ranks // pp) if ranks % pp == 0 else ():
            for shape in SCHEME_SPECS[name].grids(ranks // pp // dp):
                sizes = {"x": 1, "y": 1, "z": 1, **shape}
                if not free or not SCHEME_SPECS[name].repeats(sizes):
                    yield name, {**sizes, "dp": dp, "pp": pp}


def compare(
    config: Config,
    asked: Sequence[Asked],
    ranks: int,
    ranks_per_node: int,
    cluster: Cluster | None,
    memory: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """A dry run, and the predicted seconds, of each grid.

    cluster : None where nothing describes the device. memory : bytes of a device, of which a reserve is kept free; the default is
    the cluster's, unless that is assumed. `tell` is given how many grids are done, of how many.
    """
    if memory is None and cluster is not None and cluster.numbers["device.memory"].source != "assumed":
        memory = cluster["device.memory"]
    limit = None if memory is None else usable(memory)
    times = None if cluster is None else Times(cluster.filled(ranks), Exact(), config.train)
    rows = []
    for number, item in enumerate(asked):
        tell(number, len(asked))
        rows.append(_row(config, item, ranks, ranks_per_node, times, limit))
    rows.sort(key=lambda row: (row.words is None, inf if row.seconds is None else row.seconds, row.words or 0))
    return Comparison(ranks, ranks_per_node, None if cluster is None else cluster.name, limit, rows)


def _row(config: Config, asked: Asked, ranks: int, ranks_per_node: int, times: Times | None, limit: float | None) -> ComparedGrid:
    scheme, sizes = asked
    try:
        kept = {key: value for key, value in toml.dump(config.grid).items() if key in ("order", "check")}
        grid = toml.build(GridConfig, {**kept, **sizes}, "grid.")
        if prod(grid.axes.values()) != ranks:
            raise GridError(f"it has {prod(grid.axes.values())} ranks, not {ranks}")
        own = replace(config, scheme=scheme, grid=grid, chosen="")
        result = predict(own, ranks_per_node)
    except Summa3dError as error:
        return ComparedGrid(scheme, sizes, reason=str(error).partition("\n")[0])
    held, peak = sum(result["bytes"][term] for term in STATES), result["bytes"]["peak"] + result["bytes"]["node"]
    reason = "" if limit is None or peak <= limit else f"{peak / MEBI:,.0f} MiB of {limit / MEBI:,.0f}"
    words, messages = (_total(result[what]) for what in ("words", "messages"))
    seconds = None
    if times is not None:
        with suppress(LayoutError, GridError):  # ragged sizes fit a scheme's layers, and not the planner
            seconds = _priced(own, times)
    return ComparedGrid(scheme, grid.axes, words, messages, held, peak, seconds, reason)


def seconds_of(config: Config, cluster: Cluster) -> float:
    """The predicted seconds of a step of a configuration on its own grid.

    Raises LayoutError and GridError for ragged sizes that fit a scheme's layers, and not the planner.
    """
    return _priced(config, Times(cluster.filled(prod(config.grid.axes.values())), Exact(), config.train))


def _priced(config: Config, times: Times) -> float:
    inner = {axis: size for axis, size in config.grid.axes.items() if axis not in OUTER}
    return times.seconds(plan_of(config, SchemeChoice(config.scheme, inner, 0), times.cluster))


def _total(amounts: Mapping[str, Mapping[str, int]]) -> int:
    """Words or messages of all phases and axes."""
    return sum(amount for axes in amounts.values() for amount in axes.values())
