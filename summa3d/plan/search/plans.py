"""Plans: how a model may be trained on so many ranks, and the enumeration of all that divide evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import gcd, lcm, prod
from operator import eq, ge, le
from typing import Any, NamedTuple

import numpy as np

from ...comm.topology import DEFAULT_ORDER as ORDER
from ...comm.topology import Topology, divisors
from ...errors import ConfigError
from ...nn.config import LARGEST_SIZE, ModelConfig
from ...nn.schemes.products import A, B, alone, family_of
from ...nn.schemes.registry import SCHEME_SPECS, SERIAL
from ...nn.schemes.validate import needs
from ...parallel.outer import SEARCHED, OuterAxis
from ...parallel.schedule import held_stages, is_split, rule_of
from .cells import StageGrid
from .stages import HeavyRank, balanced, heaviest, homes_of

SCHEMES = tuple(name for name, spec in SCHEME_SPECS.items() if not spec.limits and name != SERIAL)
FAMILIES = ("1-D", "FSDP", "2-D", "2.5-D", "cuboid")
UNITS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Micro-batches that are tried, in units of the fewest rows that a grid divides."""
MOST_CHUNKS = 8
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
"""Schedules that are tried; gpipe takes as long as 1f1b, and more memory."""
VARIANTS = (("none", False), ("none", True), ("selective", False), ("full", False))
"""(recompute, regather) that are tried; "full" keeps no gathered operand from forward to backward, so that none is regathered."""
MemoryOption = tuple[int, int]
"""How a plan saves memory: the place of its (recompute, regather) and of its stage of ZeRO among those that are tried."""


@dataclass(frozen=True)
class Era:
    """What the programs of a time could do: their schemes, (recompute, regather), stages of ZeRO, schedules, further axes."""

    schemes: tuple[str, ...] = SCHEMES
    variants: tuple[tuple[str, bool], ...] = VARIANTS
    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = SCHEDULES
    outer: tuple[OuterAxis, ...] = SEARCHED


COPYING = tuple(name for name in SCHEMES if not SCHEME_SPECS[name].residual.axes)
"""The schemes all of whose ranks hold the whole stream, and all-reduce it."""
ERAS = {"2021": Era(COPYING, (("full", False),), (0,), ("1f1b", "interleaved"), ()), "now": Era()}
"""2021: Megatron-LM's all-reduces, every layer recomputed, no ZeRO, no zero-bubble schedules."""


@dataclass(frozen=True)
class Space:
    """What is searched: a model, ranks, the sequences of a step, and what plans may be.

    nodes : ranks of the cluster's levels that have a size. shared : ranks that share a node's memory. least, most, fixed : key
    (`keys_known`) → what it may be.
    """

    model: ModelConfig
    ranks: int
    batch: int
    dtype: str
    device: str
    nodes: tuple[int, ...]
    shared: int = 1
    era: Era = ERAS["now"]
    least: Mapping[str, int] | None = None
    most: Mapping[str, int] | None = None
    fixed: Mapping[str, Any] | None = None

    @property
    def outer(self) -> list[OuterAxis]:
        """The era's further axes that a model of such sequences is searched with, and those that are asked for."""
        asked = {*(self.least or ()), *(self.most or ()), *(self.fixed or ())}
        return [axis for axis in self.era.outer if axis.is_searched(self.model, asked)]


@dataclass(frozen=True)
class Plan:
    """A way to train a model: the grid of a stage, replicas, pipeline, micro-batch, placement.

    units : of the micro-batch (`StageGrid.unit` rows each). tile : the sub-grid that a node holds; empty, ranks in their order.
    schedule : of the pipeline; `inner` is of its kind of backward.
    """

    inner: StageGrid
    dp: int
    pp: int
    chunks: int
    units: int
    micro_batches: int
    zero: int
    tile: tuple[tuple[str, int], ...] = ()
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        assert self.inner.split == is_split(self.schedule, self.pp), f"cells of {self.inner} are not those of {self.schedule}"

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch of one replica."""
        return self.units * self.inner.unit

    @property
    def copies(self) -> int:
        """Ranks that hold copies of a dense weight: replicas, along all their axes."""
        return self.dp * self.inner.copies

    @property
    def expert_copies(self) -> int:
        """Ranks that hold copies of an expert's weight."""
        return self.copies // self.inner.expert_groups

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage of the pipeline."""
        return self.inner.ranks * self.copies

    @property
    def shape(self) -> dict[str, int]:
        """Axis → size of the whole grid."""
        return {**self.inner.shape, **dict(self.inner.outer), "dp": self.dp, "pp": self.pp}

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return balanced(self.inner.model.layers, self.pp, self.chunks)

    @property
    def homes(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return homes_of(self.schedule, self.pp, self.chunks)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank of the pipeline."""
        return held_stages(self.homes, self.pp)

    def layers_of(self, rank: int) -> int:
        """Layers of a rank of the pipeline, in all its chunks."""
        return sum(self.layers[stage] for stage in self.stages[rank])

    @property
    def family(self) -> str:
        """The family of its scheme and grid."""
        return family_of(self.inner.scheme, self.inner.shape)

    def topology(self) -> Topology:
        """The placement of all ranks."""
        return Topology.checked(self.shape, [name for name in ORDER if name in self.shape], dict(self.tile))

    def keys(self) -> dict[str, Any]:
        """The keys of a training configuration that the plan decides, dotted."""
        inner, grid = self.inner, {f"grid.{axis}": size for axis, size in self.shape.items()}
        result = {"scheme": inner.scheme, **grid, **dict(inner.options), "grid.order": ",".join(ORDER)}
        if self.tile:
            result["grid.tile"] = dict(self.tile)
        result |= {"pipeline.schedule": self.schedule, "pipeline.chunks": self.chunks, "train.accumulate": self.micro_batches}
        result |= {"recompute": inner.recompute, "regather": inner.regather, "replicas.zero": self.zero}
        result |= {"overlap.pieces": inner.pieces} if inner.pieces > 1 else {}
        result |= {"overlap.gather": inner.ahead} if inner.device == "cuda" or inner.ahead else {}
        return result | {"train.batch": self.rows * self.dp * self.micro_batches, "dtype": inner.dtype}

    def __str__(self) -> str:
        axes = " ".join(f"{axis}{size}" for axis, size in self.inner.shape.items() if size > 1)
        around = "".join(f" · {axis} {size}" for axis, size in self.inner.outer)
        around += "".join(f" · {key.rpartition('.')[2]} {_as_given(value)}" for key, value in self.inner.options)
        pipe = "" if self.pp == 1 else f" · pp {self.pp}" + (f"×{self.chunks}" if self.chunks > 1 else "")
        pipe += f" {self.schedule}" if self.inner.split else ""
        replicas = "" if self.dp == 1 else f" · dp {self.dp}"
        zero = f" · zero {self.zero}" if self.copies > 1 and self.zero != 1 else ""
        kept = {"none": "regather" if self.inner.regather else "keep"}.get(self.inner.recompute, self.inner.recompute)
        behind = f" · {self.inner.pieces} pieces" if self.inner.pieces > 1 else ""
        behind += f" · prefetch {self.inner.ahead}" if self.inner.ahead else ""
        tile = " · tile " + " ".join(f"{axis}{size}" for axis, size in self.tile if size > 1) if self.tile else ""
        return f"{self.inner.scheme} {axes or 'y1'}{around}{pipe}{replicas}{zero} · b {self.rows} · {kept}{tile}{behind}"


class OuterGrid(NamedTuple):
    """A row of `PlanTable`: the number of its `StageGrid`, and what is around the grid of a stage.

    schedule : its place in SCHEDULES
    """

    inner: int
    dp: int
    pp: int
    schedule: int
    chunks: int
    units: int
    micro_batches: int


class PlanTable:
    """Plans of one scheme, with the same further axes and one kind of backward, as columns of numbers.

    None saves memory, and what does is beside each.

    inners : their grids. sizes : axis → size. inner : the number of a row's grid. dp, pp, chunks, units, micro_batches, copies :
    as of `Plan`. ranks : of a scheme's grid. share : rows of a micro-batch whose work such a grid has. total : ranks of a plan.
    schedule : a place in SCHEDULES.
    """

    def __init__(self, era: Era, inners: Sequence[StageGrid], around: Sequence[OuterGrid]) -> None:
        self.era, self.inners = era, inners
        table = np.array(around, dtype=np.int64).T
        self.inner, *self.around = table
        self.dp, self.pp, self.schedule, self.chunks, self.units, self.micro_batches = self.around
        self.sizes = {axis: self._of([inner.shape.get(axis, 1) for inner in inners]) for axis in inners[0].shape}
        self.ranks, copies = self._of([inner.ranks for inner in inners]), inners[0].copies
        self.copies, self.share = self.dp * copies, self.units * self._of([inner.unit for inner in inners]) / copies
        self.total = int(self.ranks[0] * self.copies[0] * self.pp[0])
        self.family = np.array([family_of(inner.scheme, inner.shape) for inner in inners])[self.inner]

    def _of(self, values: Iterable[int]) -> Any:
        return np.array([*values], dtype=np.int64)[self.inner]

    def __len__(self) -> int:
        return len(self.inner)

    @cached_property
    def savings(self) -> dict[MemoryOption, Any]:
        """Each saving → which rows have it: what gathers or computes again, or keeps less on each replica.

        One whose places are both at least those of another takes fewer bytes and more seconds.
        """
        item, result = self.inners[0], {}
        moving = (axis for product in item.products for operand in (A, B) for axis in product.apart(operand))
        gathers = item.gathers & np.any([self.sizes[axis] > 1 for axis in moving] or False, axis=0)
        for place, (recompute, regather) in enumerate(self.era.variants):
            if recompute == "selective" and not item.model.attention_dropout:
                continue  # fused attention keeps no scores
            for stage in range(len(self.era.zero)):
                result[place, stage] = (gathers if regather else True) & ((self.copies > 1) | (stage == 0))
        return result

    @cached_property
    def layers(self) -> Any:
        """Columns: layers of the first and the last rank of a pipeline, and of the smallest stage.

        A fourth one is whether the first rank has the last stage too.
        """

        def of(pp: int, schedule: int, chunks: int) -> tuple[int, ...]:
            stages, homes = balanced(self.inners[0].model.layers, pp, chunks), homes_of(SCHEDULES[schedule], pp, chunks)
            first, last = ([many for many, home in zip(stages, homes, strict=True) if home == rank] for rank in (0, pp - 1))
            return sum(first), sum(last), min(stages), int(homes[-1] == 0)

        return _by_kind(of, self.pp, self.schedule, self.chunks)

    @cached_property
    def heaviest(self) -> Any:
        """Of each row, what ranks of its pipeline hold when they keep most (`stages.heaviest`): columns, for several of them."""

        def of(pp: int, schedule: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
            result = heaviest(SCHEDULES[schedule], pp, micro_batches, chunks, self.inners[0].model.layers)
            return tuple(number for item in result for number in item)

        columns = _by_kind(of, self.pp, self.schedule, self.chunks, np.minimum(self.micro_batches, 2 * self.pp))
        return columns.reshape(-1, len(HeavyRank._fields), len(self))

    def inner_of(self, saving: MemoryOption, row: int) -> StageGrid:
        """Key of the cells of a row; of row 0 for all rows, but for its grid, unit and number of replicas."""
        recompute, regather = self.era.variants[saving[0]]
        replicas = int(self.copies[row]) if self.era.zero[saving[1]] == 3 else 1
        return _kept(self.inners[self.inner[row]], recompute, regather, replicas)

    def plan(self, row: int, saving: MemoryOption = (0, 0)) -> Plan:
        """The plan of a row that saves so much."""
        dp, pp, schedule, chunks, units, micro_batches = (int(column[row]) for column in self.around)
        zero, name = self.era.zero[saving[1]], SCHEDULES[schedule]
        return Plan(self.inner_of(saving, row), dp, pp, chunks, units, micro_batches, zero, schedule=name)


def _by_kind(function: Callable[..., tuple[int, ...]], *columns: Any) -> Any:
    """Columns of what a function returns for each row of columns; it is called once for rows that are alike."""
    kinds, place = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return np.array([function(*map(int, item)) for item in kinds.T]).T[:, place.reshape(-1)]


@cache
def _kept(inner: StageGrid, recompute: str, regather: bool, replicas: int) -> StageGrid:
    return replace(inner, recompute=recompute, regather=regather, replicas=replicas)


def less(saving: MemoryOption) -> tuple[MemoryOption, ...]:
    """The savings just below one, which save less and are as fast at least: only where none of them fits, it is of use."""
    place, stage = saving
    return (*([(0, stage)] if place else []), *([(place, stage - 1)] if stage else []))


SHORT = {"b": "micro_batch", "t": "y", "accumulate": "train.accumulate", "order": "grid.order", "tile": "grid.tile"}
SHORT |= {name: f"grid.{name}" for name in ORDER}
OPTIONS = {key: values for axis in SEARCHED for key, values in axis.values.items()}
"""Key of a further axis → its values."""
SHORT |= {"chunks": "pipeline.chunks", "schedule": "pipeline.schedule", "zero": "replicas.zero"}


def value_of(plan: Plan, key: str) -> Any:
    """The value of a key, in its short or its whole form; micro_batch is the rows of one."""
    if key in ("b", "micro_batch"):
        return plan.rows
    return plan.keys().get(SHORT.get(key, key), {} if key in ("tile", "grid.tile") else 1)


def keys_known() -> list[str]:
    """The keys that --fix and --limit take."""
    return sorted({*SHORT, *SHORT.values(), *OPTIONS, "scheme", "recompute", "regather", "family"} - {"t"})


def columns(space: Space, rejected: Counter[tuple[str, str]]) -> list[PlanTable]:
    """Return the plans that divide evenly and save no memory (`PlanTable.savings`), with the default placement.

    They are in tables by scheme, kind of backward and further axes.

    What does not divide is counted in `rejected` by family and reason.
    """
    recompute, regather = space.era.variants[0]
    result: dict[object, tuple[list[StageGrid], list[OuterGrid]]] = {}
    kinds = [*dict.fromkeys(is_split(name, 2) for name in space.era.schedules)]
    for scheme, shape, unit, (outer, options) in inners(space, rejected):
        ranks, family = prod(shape.values()) * prod(size for _, size in outer), family_of(scheme, shape)
        of = space.model, scheme, tuple(shape.items()), recompute, regather, space.dtype, space.device, unit
        several = {split: result.setdefault((scheme, outer, options, split), ([], [])) for split in kinds}
        for pp in divisors(space.ranks // ranks):
            if pp > space.model.layers:
                rejected[family, "more stages than layers"] += 1
                continue
            for item in _around(len(several[kinds[0]][0]), unit, family, space, pp, space.ranks // ranks // pp, rejected):
                several[is_split(SCHEDULES[item.schedule], pp)][1].append(item)
        for split, (every, _) in several.items():
            every.append(StageGrid(*of, shared=space.shared, split=split, outer=outer, options=options))
    return [PlanTable(space.era, every, around) for every, around in result.values() if around]


Around = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, Any], ...]]
"""Sizes of further axes that have several ranks, and their options."""


def inners(space: Space, rejected: Counter[tuple[str, str]]) -> Iterator[tuple[str, dict[str, int], int, Around]]:
    """(scheme, grid of a stage, unit of the micro-batch, further axes) of all that divide a block."""
    for scheme in space.era.schemes:
        spec = SCHEME_SPECS[scheme]
        for ranks in divisors(space.ranks):
            for own in spec.grids(ranks):
                if spec.repeats(own):
                    continue
                shape = {"x": 1, "y": 1, "z": 1, **own}
                unit, reason = _unit(scheme, space.model, shape)
                if reason:
                    rejected[family_of(scheme, shape), reason] += 1
                    continue
                rows = {item.name for item in space.outer if item.splits_rows}
                for around, why in _outer(space, shape, space.ranks // ranks):
                    if why:
                        rejected[family_of(scheme, shape), why] += 1
                    else:
                        yield scheme, shape, unit * prod(size for axis, size in around[0] if axis in rows), around


def _outer(space: Space, shape: Mapping[str, int], ranks: int) -> Iterator[tuple[Around, str]]:
    """The further axes of the era around a grid, of so many ranks at most, and why they cannot be so; empty where they can."""
    every: list[list[Any]] = []
    for axis in space.outer:
        every.append([(), *((axis, size, values) for size in divisors(ranks)[1:] for values in axis.choices)])
    for around in product(*every):
        several = [item for item in around if item]
        if ranks % prod(size for _, size, _ in several):
            continue
        outer = tuple((axis.name, size) for axis, size, _ in several)
        reasons = (axis.misfit(space.model, {**shape, **dict(outer)}, values) for axis, _, values in several)
        options = tuple(pair for _, _, values in several for pair in values.items())
        yield (outer, options), next((why for why in reasons if why), "")


def _unit(scheme: str, model: ModelConfig, shape: Mapping[str, int]) -> tuple[int, str]:
    """The fewest rows of a micro-batch that the grid divides, and what it does not divide; empty where it divides all."""
    own, unit = alone(scheme), 1
    for need in needs(own.spec, own.after_linear(own.residual), model, 1, model.sequence):
        parts = need.num_shards(shape)
        if need.dim == "batch":
            unit = lcm(unit, parts)
        elif need.size % parts:
            return unit, f"{need.dim} {need.size} does not divide over {'·'.join(need.axes)}"
    return unit, ""


def _around(
    inner: int, unit: int, family: str, space: Space, pp: int, dp: int, rejected: Counter[tuple[str, str]]
) -> Iterator[OuterGrid]:
    """The replicas, micro-batches and chunks around the grid of a stage, which is number `inner` of its scheme."""
    rows, left = divmod(space.batch, dp * unit)
    if left:
        rejected[family, f"batch {space.batch} does not divide"] += 1
        return
    for units in UNITS:
        if rows % units:
            continue
        for schedule, chunks in _schedules(space.era.schedules, space.model.layers, pp, rows // units):
            yield OuterGrid(inner, dp, pp, schedule, chunks, units, rows // units)


@cache
def _schedules(names: tuple[str, ...], layers: int, pp: int, micro_batches: int) -> list[tuple[int, int]]:
    """(Place in SCHEDULES, stages of a rank) of a pipeline's programs; stages that are interleaved have equal layers."""
    if pp == 1:
        return [(0, 1)]
    result = [(name, chunks) for name in names for chunks in range(1, MOST_CHUNKS + 1)]
    result = [(name, chunks) for name, chunks in result if name != "interleaved" or layers % (pp * chunks) == 0]
    return [(SCHEDULES.index(name), chunks) for name, chunks in result if is_possible(name, layers, pp, micro_batches, chunks)]


def is_possible(schedule: str, layers: int, pp: int, micro_batches: int, chunks: int) -> bool:
    """Return whether a schedule takes so many micro-batches and chunks, and the layers fill its stages."""
    try:
        rule_of(schedule, pp, micro_batches, chunks)
        balanced(layers, pp, chunks)
    except ConfigError:
        return False
    return True


def tiles(plan: Plan, nodes: tuple[int, ...]) -> Iterator[Plan]:
    """The plan with every sub-grid of its stage that fills a unit of the cluster's levels, and without one."""
    yield plan
    for tile in _tiles(plan.inner.axes, nodes):
        yield replace(plan, tile=tile)


@cache
def _tiles(axes: tuple[tuple[str, int], ...], nodes: tuple[int, ...]) -> list[tuple[tuple[str, int], ...]]:
    wide = [(axis, size) for axis, size in axes if size > 1]
    ranks = prod(size for _, size in wide)
    result = []
    for many in dict.fromkeys(gcd(node, ranks) for node in nodes):
        for sizes in product(*(divisors(size) for _, size in wide)) if len(wide) > 1 < many else ():
            if prod(sizes) == many:
                result.append(tuple(zip((axis for axis, _ in wide), sizes, strict=True)))
    return result


def refused(space: Space, plan: Plan) -> str:
    """The first of what is fixed and limited that a plan is not within, as it may be given; empty where it is within all."""
    options = ("--fix", "=", space.fixed, eq), ("--limit", ">=", space.least, ge), ("--limit", "<=", space.most, le)
    for option, sign, of, holds in options:
        for key, want in (of or {}).items():
            if not holds(plan.family if key == "family" else value_of(plan, key), want):
                return f"{option} {_GIVEN.get(key, key)}{sign}{_as_given(want)}"
    return ""


_GIVEN = {whole: short for short, whole in SHORT.items() if whole != "y"}
"""Whole key → its short form."""


def _as_given(value: Any) -> str:
    """A value as --fix takes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{axis}={size}" for axis, size in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def positive(name: str, value: int) -> None:
    """Raise ConfigError for a number of ranks or sequences below 1, or beyond 2^31 − 1, the largest communicator of MPI."""
    if not 1 <= value <= LARGEST_SIZE:
        raise ConfigError(f"--{name} is {value}; it must be at least 1, and at most {LARGEST_SIZE}.")
