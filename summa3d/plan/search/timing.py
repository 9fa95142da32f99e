"""Seconds of plans: least times by closed forms and by counted operations, and the replay of their cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import NamedTuple

from ...cluster import Cluster
from ...comm.topology import Topology
from ...dry.record import ENTER, LEAVE, Op
from ...train.config import TrainConfig, master_dtype
from ..cells import BLOCK, Cell
from ..links import loads
from ..muon import MuonStep, muon_step
from ..predict import Durations, PredictedStep
from ..price import Prices, move
from ..replay import ReplayTimes, replay
from .cells import PASSES, Cells, StageGrid
from .plans import ORDER, Plan
from .stages import fullest
from .store import Store

CELLS = (ENTER, BLOCK, LEAVE)
ADAMW = TrainConfig()
CellKey = tuple[StageGrid, int, tuple[tuple[str, int], ...], int]
"""What the times of cells depend on: their sizes, units of the micro-batch, tile, and ranks outside the grid of a stage."""


@dataclass(frozen=True)
class PlacedPlan(PredictedStep):
    """A step whose parts have known seconds."""

    parts: Durations = field(default_factory=lambda: Durations({}, {}, 0.0, 0.0))

    def durations(self, cluster: Cluster) -> Durations:
        """The seconds of the parts."""
        return self.parts


class After(NamedTuple):
    """Seconds behind the last backward: sums and gathers over replicas; copies, norm and the optimizer's step."""

    replicas: float
    optimizer: float


class Times:
    """Seconds of plans on a cluster.

    `spans` replays traced cells; `least` counts their operations, which is a lower bound. train : says which optimizer takes the
    step.
    """

    def __init__(self, cluster: Cluster, store: Store, train: TrainConfig = ADAMW) -> None:
        self.cluster, self.store, self.train = cluster, store, train
        self._muon: dict[object, MuonStep] = {}
        self._compute: dict[tuple[StageGrid, int], tuple[list[float], list[tuple[int, Op]]]] = {}
        self._prices: dict[object, Prices] = {}
        self._least: dict[CellKey, Durations] = {}
        self._updates: dict[tuple[StageGrid, int, int], list[float | Op]] = {}
        self._spans: dict[CellKey, dict[tuple[str, str], ReplayTimes]] = {}

    def on(self, cluster: Cluster) -> Times:
        """Seconds of the same plans on another cluster."""
        other = Times(cluster, self.store, self.train)
        other._muon = self._muon
        return other

    # -- links

    def slowest_level(self, plan: Plan, axis: str) -> tuple[str, float]:
        """The level of links that a ring along an axis of the stage's grid is bound by, and its seconds per byte."""
        levels = self.cluster.levels
        ((load, _),) = loads(self.prices_of(plan).topology, axis, levels, "ring")
        ports = [(level.name, one / level.bandwidth) for one, level in zip(load.one_way, levels, strict=True)]
        return max(ports, key=lambda one: one[1])

    # -- by operations

    def least(self, plan: Plan) -> Durations:
        """Seconds of each cell if all that may run beside other operations is hidden; sends; what comes after."""
        key = self.key(plan)
        if key not in self._least:
            cells, units = self.store.cells(plan.inner, plan.units)
            seconds = self._seconds(plan, cells, units)
            sums: dict[tuple[str, str], float] = {}
            for at in ((cell, way) for cell in CELLS for way in PASSES):
                hidden = cells.hidden[at]
                sums[at] = sum(seconds[kind] * (many - hidden.get(kind, 0)) for kind, many in cells.counts[at].items())
            self._least[key] = durations(sums)
        return self._least[key]._replace(send=self.send(plan), after=sum(self.after(plan)))

    def _seconds(self, plan: Plan, cells: Cells, units: int) -> list[float]:
        """Seconds of each kind of operation."""
        prices, key = self.prices_of(plan), (plan.inner, plan.units)
        if key not in self._compute:
            known = [0.0 if one.op.kind == "move" else prices.price(one.at(units)) for one in cells.kinds]
            moves = [(place, one.at(units)) for place, one in enumerate(cells.kinds) if one.op.kind == "move"]
            self._compute[key] = known, moves
        known, moves = self._compute[key]
        found = [*known]
        for place, op in moves:
            found[place] = sum(prices.move(op))
        return found

    # -- by replay

    def spans(self, plan: Plan) -> Mapping[tuple[str, str], ReplayTimes]:
        """(cell, pass) → its replay."""
        key = self.key(plan)
        if key not in self._spans:
            cells, units = self.store.cells(plan.inner, plan.units)
            prices = self.prices_of(plan)
            self._spans[key] = {(cell, way): replay(cells.trace(cell, way, units), prices) for cell in CELLS for way in PASSES}
        return self._spans[key]

    def step(self, plan: Plan, least: bool = False) -> PlacedPlan:
        """The step of a plan: of replayed cells, or of their least seconds."""
        if least:
            parts = self.least(plan)
        else:
            parts = durations({key: span.seconds for key, span in self.spans(plan).items()})
            parts = parts._replace(send=self.send(plan), after=sum(self.after(plan)))
        cells = {cell: Cell() for cell in CELLS}
        topology = Topology({"dp": plan.dp, "pp": plan.pp}, ("dp", "pp"), {"dp": 1, "pp": 1})
        return PlacedPlan(cells, topology, plan.schedule, plan.layers, plan.micro_batches, parts=parts)

    def closed(self, plan: Plan, least: bool = False) -> float:
        """Seconds of the plan, the pipeline by its closed form, or, with `least`, by what is no more than that."""
        step = self.step(plan, least)
        return (step.least if least else step.closed)(step.parts) + step.parts.after

    def seconds(self, plan: Plan) -> float:
        """Seconds of the plan, the pipeline simulated."""
        return self.step(plan).seconds(self.cluster)

    # -- around the cells

    def send(self, plan: Plan) -> float:
        """Seconds of a message between stages."""
        if plan.pp == 1:
            return 0.0
        outer = self.outer("pp", plan.inner.ranks * plan.dp, plan.pp)
        whole = plan.rows * plan.inner.model.sequence * plan.inner.model.hidden
        words, dtype = -(-whole // plan.inner.ranks), plan.inner.dtype
        seconds = outer.seconds(move("send", "pp", words, dtype))
        copies = [axis for axis, size in plan.inner.shape.items() if size > 1 and axis not in plan.inner.split_stream]
        if copies:  # whose parts are gathered where they arrive
            seconds += self.prices_of(plan).seconds(move("all_gather", "·".join(copies), whole - words, dtype))
        return seconds

    def after(self, plan: Plan) -> After:
        """Seconds behind the last backward, of the rank that holds most parameters."""
        cells, _ = self.store.cells(plan.inner, plan.units)
        held, rank = max((elements_of(plan, cells, rank), rank) for rank in fullest(plan.stages, plan.layers))
        muon = self.muon(plan)
        taken = held if muon is None else held - plan.layers_of(rank) * cells.elements[BLOCK]  # by AdamW
        updated = taken if plan.zero in (0, 3) else -(-taken // plan.dp)  # the cells of zero 3 update a shard already
        optimizer = self._optimizer(plan, cells, updated)
        return After(self._replicas(plan, held), optimizer + (0.0 if muon is None else self._of_blocks(plan, muon)))

    def muon(self, plan: Plan) -> MuonStep | None:
        """Muon's step of the blocks of the plan's fullest stage; None where the optimizer is AdamW."""
        if self.train.optimizer == "adamw":
            return None
        inner, layers = plan.inner, max(plan.layers_of(rank) for rank in range(plan.pp))
        key = inner.scheme, inner.axes, inner.dtype, layers, plan.dp, plan.zero
        if key not in self._muon:
            self._muon[key] = muon_step(inner, layers, plan.dp, plan.zero, self.train)
        return self._muon[key]

    def _of_blocks(self, plan: Plan, muon: MuonStep) -> float:
        """Seconds of Muon's step, whose communications are over all ranks of a stage."""
        key = "stage", plan.inner.axes, plan.dp, plan.pp, plan.tile
        if key not in self._prices:
            self._prices[key] = Prices(self.cluster, plan.topology())
        return sum(self._prices[key].seconds(op) for op in muon.ops if op.kind != "wait")

    def _replicas(self, plan: Plan, held: int) -> float:
        """Gradients are reduce-scattered in the dtype of weights that the optimizer keeps, weights gathered in that of layers.

        With zero 2 gradients are summed in every micro-batch; what zero 3 moves is part of the cells.
        """
        dtype = master_dtype(plan.inner.dtype)
        seconds = 0.0
        if plan.dp > 1 and plan.zero < 3:
            outer = self.outer("dp", plan.inner.ranks, plan.dp, plan.pp)
            words = held * (plan.dp - 1) // plan.dp
            gathered = dtype if plan.zero == 0 else plan.inner.dtype
            sums = plan.micro_batches if plan.zero == 2 else 1
            seconds = sums * outer.seconds(move("reduce_scatter", "dp", words, dtype))
            seconds += outer.seconds(move("all_gather", "dp", words, gathered))
        cells, _ = self.store.cells(plan.inner, plan.units)
        if plan.homes[-1] and cells.elements["tied"]:  # both ends sum the table's gradient
            pair = self.outer("pp", plan.inner.ranks * plan.dp, plan.pp)
            table = cells.elements["tied"] if plan.zero == 0 else -(-cells.elements["tied"] // plan.dp)
            seconds += pair.seconds(move("send", "pp", table, dtype))
        return seconds

    def _optimizer(self, plan: Plan, cells: Cells, held: int) -> float:
        prices = self.prices_of(plan)
        key = plan.inner, held, prices.topology.size  # of a micro-batch, nothing here depends
        if key not in self._updates:
            self._updates[key] = [*self._update(cells, held, prices)]
        return sum((prices.seconds(one) if isinstance(one, Op) else one for one in self._updates[key]), 0.0)

    def _update(self, cells: Cells, held: int, prices: Prices) -> Iterator[float | Op]:
        """What the optimizer's operations take where a rank holds so many elements; communications, which depend on links."""
        traced = sum(cells.elements[cell] for cell in CELLS)
        for piece in (*cells.copies, *cells.optimizer):
            for kind, _ in piece.ops:
                op = cells.kinds[kind].at(0)
                part = held / traced if op.kind == "elements" else 1.0
                op = op._replace(read=round(op.read * part), written=round(op.written * part))
                yield op if op.kind == "move" else prices.seconds(op)

    # -- prices

    def key(self, plan: Plan) -> CellKey:
        """What the times of a plan's cells depend on."""
        around = plan.dp * plan.pp
        if plan.zero < 3 and not self.cluster["host.slots"]:  # else ranks slow each other down, wherever they are
            around = min(around, self._repeat(plan.inner.ranks))
        return plan.inner, plan.units, plan.tile, around

    def _repeat(self, ranks: int) -> int:
        """Grids of a stage, side by side, that fill whole units of all levels with a size."""
        return _copies(ranks, tuple(level.size for level in self.cluster.levels if level.size))

    def prices_of(self, plan: Plan) -> Prices:
        """Prices inside the grid of a stage, with the replicas that share its units of links, or its weights (zero 3)."""
        _, _, tile, around = self.key(plan)
        inner, replicas = plan.inner, plan.dp if plan.zero == 3 else around
        key = inner.axes, tile, around, replicas
        if key not in self._prices:
            shape = {**inner.shape, "dp": replicas, "pp": around // replicas}
            topology = Topology.checked(shape, [name for name in ORDER if name in shape], dict(tile))
            self._prices[key] = Prices(self.cluster, topology)
        return self._prices[key]

    def outer(self, axis: str, inside: int, size: int, outside: int = 1) -> Prices:
        """Prices along an axis whose neighbours are `inside` ranks apart."""
        if (axis, inside, size, outside) not in self._prices:
            topology = Topology.checked({"in": inside, axis: size, "out": outside}, ["in", axis, "out"])
            self._prices[axis, inside, size, outside] = Prices(self.cluster, topology)
        return self._prices[axis, inside, size, outside]


@cache
def _copies(ranks: int, sizes: tuple[int, ...]) -> int:
    return next(many for many in range(1, prod(sizes) + 1) if all(ranks * many % size == 0 for size in sizes))


def durations(seconds: Mapping[tuple[str, str], float]) -> Durations:
    """Seconds of (cell, pass) as those of a step's parts, which sends nothing."""
    forward, backward, weights = ({cell: seconds[cell, way] for cell in CELLS} for way in PASSES)
    return Durations(forward, backward, 0.0, 0.0, weights)


def elements_of(plan: Plan, cells: Cells, rank: int) -> int:
    """Elements of the parameters that a rank of a pipeline holds."""
    of, last = cells.elements, plan.homes[-1]
    ends = of[ENTER] * (rank == 0) + (of[LEAVE] + of["tied"] * (last > 0)) * (rank == last)
    return plan.layers_of(rank) * of[BLOCK] + ends
