"""The points of a sweep: every configuration on every rank count, named by a hash of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ..bench.products import Problem, ProductEntry, fewest_words, own_choice
from ..cluster import Cluster, load
from ..columns import counted
from ..comm.device.select import requested_device
from ..comm.topology import describe, several
from ..dtypes import dtype_of
from ..errors import ClusterError, ConfigError, GridError, Summa3dError, nearest
from ..files import grid_of
from ..gemm.algorithms.registry import ALGORITHMS, algorithm
from ..gemm.cost.machine import Machine
from .file import Sweep, flat, nested
from .rules import grown

if TYPE_CHECKING:
    from ..nn.schemes.scheme import Scheme
    from ..train.config import Config

ID_LENGTH = 12
CHOSEN, ALL, PLANNED, FEWEST, EVERY = "chosen", "all", "planned", "fewest", "every"
SIZES = ("m", "n", "k")
PRODUCT = (*SIZES, "form", "dtype", "device", "algorithm")
WORK = ("m", "n", "k", "form", "dtype", "device", "model.", "data.", "train.batch", "train.seed")
"""Keys, or their beginnings, that name the work of a point; the others say how it is done, and are raced."""
GRID = "grid."
Keys = Mapping[str, Any]
"""Dotted keys and their values."""


@dataclass(frozen=True)
class Point:
    """One measurement: what, on how many ranks, by which configuration (dotted keys; axes as grid.x), and which repetition.

    series, x : its line and place in plots. race : equal for the points of one rank count that are run in turn. The three are not
    part of the content.
    """

    what: str
    ranks: int
    config: Keys
    repeat: int = 0
    series: str = field(default="", compare=False)
    x: Any = field(default=None, compare=False)
    race: str = field(default="", compare=False)

    @cached_property
    def id(self) -> str:
        """The first digits of the content's hash.

        >>> Point("gemm", 1, {"m": 2, "n": 2, "k": 2}).id == Point("gemm", 1, {"k": 2, "m": 2, "n": 2}).id
        True
        """
        content = json.dumps([self.what, self.ranks, self.config, self.repeat], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:ID_LENGTH]

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the grid; none where the library chooses them when it runs."""
        return {key.removeprefix(GRID): size for key, size in self.config.items() if key.startswith(GRID) and type(size) is int}

    @property
    def label(self) -> str:
        """Series and grid."""
        axes = several(self.axes)
        return " ".join(filter(None, (self.series, describe(axes) if axes else "", f"#{self.repeat + 1}" if self.repeat else "")))

    @property
    def problem(self) -> Problem:
        """The product of a point of gemm."""
        return Problem(**{key: value for key, value in self.config.items() if key in PRODUCT[:-1]})

    @property
    def options(self) -> dict[str, Any]:
        """The options of its algorithm."""
        return {key: value for key, value in self.config.items() if key not in PRODUCT and not key.startswith(GRID)}

    @property
    def settings(self) -> Config:
        """The configuration of a point of block or train."""
        from ..train.config import from_table

        return from_table(nested(self.config))


@dataclass(frozen=True)
class Refusal:
    """A point that cannot be run, and why."""

    label: str
    ranks: int
    error: Summa3dError


def expand(sweep: Sweep) -> tuple[list[Point], list[Refusal]]:
    """The points of a sweep, each content once, and those that no grid, scheme or configuration allows.

    Raises ConfigError for keys of a product that are unknown, and for a rule of weak scaling that cannot be applied.
    """
    result: dict[str, Point] = {}
    refused = []
    for item in _all(sweep):
        if isinstance(item, Refusal):
            refused.append(item)
        else:
            result.setdefault(item.id, item)
    return list(result.values()), refused


def races(points: Sequence[Point], sweep: Sweep, shared: bool = False) -> list[list[Point]]:
    """The points that are run in turn; `shared`: products on several rank counts of one start, too."""
    result: dict[Any, list[Point]] = {}
    for point in points:
        together = (point.race, point.repeat, point.ranks * (not shared or sweep.what != "gemm"))
        result.setdefault(together if sweep.order == "interleaved" else point.id, []).append(point)
    return list(result.values())


def _all(sweep: Sweep) -> Iterator[Point | Refusal]:
    first = sweep.base_ranks or sweep.ranks[0]
    for repeat in range(sweep.repeats):
        for name, base, vary, weak in sweep.parts:
            spec = vary.pop("grid", base.pop("grid", PLANNED))
            for index, ranks in enumerate(sweep.ranks):
                for values in product(*(value if isinstance(value, list) else [value] for value in vary.values())):
                    unscaled = {**_defaults(sweep), **base, **_together(vary, values)}
                    config = grown(sweep.what, weak, unscaled, ranks, first, index)
                    yield from _on_grids(sweep, name, vary, unscaled, config, ranks, spec, repeat)


def _together(keys: Iterable[str], values: Sequence[Any]) -> dict[str, Any]:
    """One value of each key that is varied; a table of values that vary together stands for its own keys."""
    result: dict[str, Any] = {}
    for key, value in zip(keys, values, strict=True):
        result |= flat(value) if isinstance(value, Mapping) else {key: value}
    return result


def _defaults(sweep: Sweep) -> dict[str, Any]:
    """Keys of a point's content that its file may leave out."""
    result: dict[str, Any] = {"device": requested_device(None)}
    if sweep.what == "gemm":
        return {"form": "nn", "dtype": "float64", "algorithm": CHOSEN, **result}
    if sweep.config:
        from ..train.config import read_table

        return {**flat(read_table(sweep.config)), **result}
    return result


def _on_grids(
    sweep: Sweep, name: str, vary: Keys, unscaled: Keys, config: Keys, ranks: int, spec: Any, repeat: int
) -> Iterator[Point | Refusal]:
    """The points of one configuration: one for each grid that `spec` asks for."""
    race = json.dumps({key: value for key, value in unscaled.items() if key.startswith(WORK)}, sort_keys=True)
    try:
        if sweep.what == "gemm":
            _check_product(config)
        for chosen, axes in _grids(sweep, config, ranks, spec):
            own = {**config, **chosen, **{f"{GRID}{axis}": size for axis, size in axes.items()}}
            x = ranks if sweep.x == "ranks" else describe(axes) if sweep.x == "grid" else own.get(sweep.x)
            point = Point(sweep.what, ranks, own, repeat, _series(sweep, name, vary, own), x, race)
            if sweep.what != "gemm":
                _check(point)
            yield point
    except Summa3dError as error:
        if isinstance(error, ClusterError) or (isinstance(error, ConfigError) and sweep.what == "gemm"):
            raise
        yield Refusal(_series(sweep, name, vary, config), ranks, error)


def _series(sweep: Sweep, name: str, vary: Keys, config: Keys) -> str:
    """The name of a point's line: its series, else the scheme or algorithm, and what else is varied."""
    main = "algorithm" if sweep.what == "gemm" else "scheme"
    others = [f"{key.rpartition('.')[2]}={config[key]}" for key in vary if key not in (main, sweep.x) and key in config]
    return " ".join([name or str(config.get(main, "cuboid")), *others])


def _grids(sweep: Sweep, config: Keys, ranks: int, spec: Any) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Part of the configuration that the grid decides, and the grids that are meant. Raises GridError where there is none."""
    if isinstance(spec, list):
        listed = [axes_of(item) for item in spec]
        fitting = [axes for axes in listed if prod(axes.values()) == ranks]
        if not fitting:
            raise GridError(f"none of the grids that are listed has {counted(ranks, 'rank')}.")
        if sweep.what == "gemm":
            _check_listed(config["algorithm"], fitting, ranks)
        yield from (({}, axes) for axes in fitting)
    elif spec not in (PLANNED, FEWEST, EVERY):
        yield from _grids(sweep, config, ranks, [spec])
    elif sweep.what == "gemm":
        yield from _of_products(config, ranks, spec)
    else:
        yield from (({}, axes) for axes in _of_models(sweep, config, ranks, spec))


def _check_product(config: Keys) -> None:
    """Raise ConfigError for unknown or missing keys of a product, and for an unknown algorithm or dtype."""
    known = (*PRODUCT, *(option for result in ALGORITHMS.values() for option in result.options))
    for key in config:
        if key not in known and not key.startswith(GRID):
            raise ConfigError(f"unknown key {key!r} of a product; the nearest is {nearest(key, list(known))!r}.")
    missing = [size for size in SIZES if size not in config]
    if missing:
        raise ConfigError(f"a product needs {', '.join(missing)} in base.")
    dtype_of(config["dtype"])
    if config["algorithm"] not in (CHOSEN, ALL):
        algorithm(str(config["algorithm"]))


def _check_listed(name: str, grids: Sequence[Mapping[str, int]], ranks: int) -> None:
    """Raise ConfigError unless grids of a list are those of one algorithm, and GridError for one that it does not have."""
    if name in (CHOSEN, ALL):
        raise ConfigError(f"algorithm = {name!r} has grids of its own: name an algorithm beside a list of grids.")
    own = [several(grid) for grid in algorithm(name, ranks).grids(ranks)]
    for axes in grids:
        if several(axes) not in own:
            known = " · ".join(describe(grid) for grid in algorithm(name).grids(ranks))
            raise GridError(f"{name} has no grid {describe(axes)}. Its grids of {counted(ranks, 'rank')}: {known}.")


def _of_products(config: Keys, ranks: int, spec: str) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    name = config["algorithm"]
    if name == CHOSEN:
        yield {}, {}
        return
    problem = Point("gemm", ranks, config).problem
    for item in ALGORITHMS if name == ALL else [name]:
        rules = algorithm(item, None if name == ALL else ranks)
        grids = list(rules.grids(ranks))
        if grids:
            chosen = grids if spec == EVERY else [fewest_words(rules, problem, ranks)]
            yield from (({"algorithm": rules.name}, dict(axes)) for axes in chosen)


def _of_models(sweep: Sweep, config: Keys, ranks: int, spec: str) -> Iterator[dict[str, int]]:
    """The grids of a model for each replica and stage: the planner's pick, the one of the fewest words, or all that fit."""
    from ..nn.choose import choose
    from ..nn.schemes.registry import SCHEME_SPECS
    from ..plan.pick import pick

    given = {key.removeprefix(GRID): size for key, size in config.items() if key.startswith(GRID) and type(size) is int}
    if set(given) - {"dp", "pp"}:
        if prod(given.values()) != ranks:
            raise GridError(f"grid {describe(given)} does not have {counted(ranks, 'rank')}.")
        yield given
        return
    settings = Point("block", ranks, config).settings
    if ranks % settings.grid.outer:
        raise GridError(f"{counted(ranks, 'rank')} cannot be divided into {settings.grid.outer} replicas and stages.")
    inner = ranks // settings.grid.outer
    cluster = _planned_on(sweep, settings.device) if spec == PLANNED else None
    if cluster is not None:
        yield pick(settings, inner, [settings.scheme], cluster).grid
        return
    if spec != EVERY:
        yield choose(settings.model, settings.rows, inner, [settings.scheme], settings.regather, settings.vectors).grid
        return
    fitting = [axes for axes in SCHEME_SPECS[settings.scheme].grids(inner) if _fits(config, ranks, axes)]
    if not fitting:
        raise GridError(f"no grid of {inner} ranks fits scheme {settings.scheme} and these sizes.")
    yield from fitting


def _planned_on(sweep: Sweep, device: str | None) -> Cluster | None:
    """The cluster that grids are planned on: the sweep's, else, on the host, nodes of its ranks_per_node; None on devices.

    Nothing of the machine at hand, so that the same file has the same points on every one.
    """
    from ..plan.pick import host

    if sweep.cluster:
        return load(sweep.cluster)
    return None if device == "cuda" else host(sweep.ranks_per_node, sweep.ranks_per_node, "assumed")


def _fits(config: Keys, ranks: int, axes: Mapping[str, int]) -> bool:
    """Return whether a grid takes the point, with like parts on all ranks."""
    try:
        point = Point("block", ranks, {**config, **{f"{GRID}{axis}": size for axis, size in axes.items()}})
        _check(point).check_even(point.settings.model, point.settings.rows)
    except Summa3dError:
        return False
    return True


def _check(point: Point) -> Scheme:
    """Raise the error that the point's own run would raise of its configuration, grid and sizes; else return its scheme."""
    from ..nn.schemes.scheme import Scheme

    settings = point.settings
    size = prod(settings.grid.axes.values())
    if size != point.ranks:
        raise GridError(f"grid {settings.grid} has {counted(size, 'rank')}, and not {point.ranks}.")
    if point.what == "block" and settings.grid.outer > 1:
        raise GridError(f"grid {settings.grid}: blocks alone have no replicas or stages; what = 'train' has.")
    layouts = Scheme.of(settings.scheme, settings.grid.axes)
    layouts.check(settings.model, settings.rows)
    return layouts


def axes_of(given: Any) -> dict[str, int]:
    """A grid of a list: a table, or text such as "x=2,y=2". Raises ConfigError for anything else.

    >>> axes_of("x=2,y=2")
    {'x': 2, 'y': 2}
    """
    result: dict[str, Any] | None = None
    if isinstance(given, Mapping):
        result = {name.strip(): size for name, size in given.items()}
    elif isinstance(given, str):
        result = grid_of(given)
    if result is None or any(type(size) is not int for size in result.values()):
        raise ConfigError(f"{given!r} is no grid; write it as x=2,y=2.")
    return result


def entry_of(point: Point, machine: Machine) -> ProductEntry:
    """The entry of the benchmark of products that measures a point; `machine` is what the library chooses by."""
    if point.config["algorithm"] == CHOSEN:
        return own_choice(point.problem, point.ranks, machine)
    return ProductEntry(algorithm(point.config["algorithm"]).name, point.axes, point.problem, point.options)
