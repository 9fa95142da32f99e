"""Seconds of plans: least times by counted operations, the replay of their cells, and pipelines of some micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf, prod
from typing import TYPE_CHECKING, NamedTuple

from ...cluster import Cluster
from ...comm.topology import Topology
from ...dry.record import ENTER, LEAVE
from ...dtypes import dtype_of
from ...train.config import TrainConfig, master_dtype
from ..cells import BLOCK, Cell
from ..links import loads
from ..predict import Durations, PredictedStep
from ..price import Prices, move
from ..replay import ReplayTimes, replay, replay_in_turn
from .cells import BEFORE, BEHIND, PASSES, Cells, StageGrid, bucket_of
from .plans import ORDER, Plan
from .stages import fullest
from .store import Store

if TYPE_CHECKING:
    from ..muon import MuonStep

CELLS = (ENTER, BLOCK, LEAVE)
ADAMW = TrainConfig()
CALLS_OF_UPDATE, CALLS_OF_NORM = 5, 6
"""Torch's calls of a parameter, behind the last backward, and for the norm of its gradient."""
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
    """Seconds that no layer hides: sums and gathers over replicas; copies, norm and the optimizer's step."""

    replicas: float
    optimizer: float


class Times:
    """Seconds of plans on a cluster.

    `spans` replays traced cells; `least` counts their operations, which is a lower bound. train : says which optimizer takes the
    step.
    """

    def __init__(self, cluster: Cluster, store: Store, train: TrainConfig = ADAMW) -> None:
        self.cluster, self.store, self.train = cluster, store, train
        self._sizes = tuple(level.size for level in cluster.levels if level.size)
        self._muon: dict[object, MuonStep] = {}
        self._prices: dict[object, Prices] = {}
        self._each: dict[CellKey, tuple[float, ...]] = {}
        self._least: dict[CellKey, Durations] = {}
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
        ports = [(level.name, item / level.bandwidth) for item, level in zip(load.one_way, levels, strict=True)]
        return max(ports, key=lambda item: item[1])

    # -- by operations

    def each(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of each kind of operation of a plan's cells."""
        key = self.key(plan)
        if key not in self._each:
            cells, units = self.store.cells(plan.inner, plan.units)
            prices = self.prices_of(plan)
            self._each[key] = tuple(prices.seconds(kind.at(units)) for kind in cells.kinds)
        return self._each[key]

    def least(self, plan: Plan) -> Durations:
        """Seconds of each cell if all that may run beside other operations is hidden; sends; what comes after.

        On devices weights may be gathered ahead, but a block takes as long as it uses an axis. What is beside the first and the
        last block may hide gathers of these, and takes so much less.
        """
        key = self.key(plan)
        if key not in self._least:
            (cells, _), seconds = self.store.cells(plan.inner, plan.units), self.each(plan)
            ahead = plan.inner.weight_axes if plan.inner.device == "cuda" else frozenset[str]()
            early = {at for at, kind in enumerate(cells.kinds) if kind.op.name == "all_gather" and kind.op.axis in ahead}
            sums: dict[tuple[str, str], float] = {}
            for at in ((cell, way) for cell in CELLS for way in PASSES):
                left = ((kind, many - cells.hidden[at].get(kind, 0)) for kind, many in cells.counts[at].items())
                sums[at] = sum(seconds[kind] * many for kind, many in left if kind not in early)
            for way in PASSES if early else ():
                moves = [(cells.kinds[kind].op.axis, seconds[kind] * many) for kind, many in cells.counts[BLOCK, way].items()]
                busy = max(sum(taken for axis, taken in moves if axis == own) for own in ahead)
                late = max(0.0, busy - sums[BLOCK, way])
                for cell, sign in ((BLOCK, 1), (ENTER, -1), (LEAVE, -1)):
                    sums[cell, way] += sign * late
            self._least[key] = durations(sums)
        return self._least[key]._replace(send=self.send(plan), after=sum(self._after(plan, inf, inf)))

    # -- by replay

    def spans(self, plan: Plan) -> Mapping[tuple[str, str], ReplayTimes]:
        """(cell, pass) → its replay."""
        key = self.key(plan)
        if key not in self._spans:
            cells, units = self.store.cells(plan.inner, plan.units)
            prices = self.prices_of(plan)
            if plan.inner.ahead:
                self._spans[key] = {
                    (cell, way): span for way in PASSES for cell, span in _in_turn(cells, way, units, prices).items()
                }
            else:
                self._spans[key] = {
                    (cell, way): replay(cells.trace(cell, way, units), prices) for cell in CELLS for way in PASSES
                }
        return self._spans[key]

    def step(self, plan: Plan, least: bool = False) -> PlacedPlan:
        """The step of a plan: of replayed cells, or of their least seconds."""
        if least:
            parts = self.least(plan)
        else:
            parts = durations({key: span.seconds for key, span in self.spans(plan).items()})
            parts = parts._replace(send=self.send(plan), after=sum(self.after(plan)))
        cells = {cell: Cell() for cell in CELLS}
        topology = Topology({"stage": plan.stage_ranks, "pp": plan.pp}, ("stage", "pp"), {"stage": 1, "pp": 1})
        return PlacedPlan(cells, topology, plan.schedule, plan.layers, plan.micro_batches, parts=parts)

    def estimate(self, plan: Plan, least: bool = False) -> float:
        """Seconds of the plan, some micro-batches of its pipeline simulated, or, with `least`, what is no more than that."""
        step = self.step(plan, least)
        return (step.least if least else step.few)(step.parts) + step.parts.after

    def seconds(self, plan: Plan) -> float:
        """Seconds of the plan, the pipeline simulated."""
        return self.step(plan).seconds(self.cluster)

    # -- around the cells

    def send(self, plan: Plan) -> float:
        """Seconds of a message between stages."""
        if plan.pp == 1:
            return 0.0
        outer = self.outer("pp", plan.stage_ranks, plan.pp)
        whole = plan.rows * plan.inner.model.sequence * plan.inner.model.hidden
        whole //= plan.inner.copies
        words, dtype = -(-whole // plan.inner.ranks), plan.inner.dtype
        seconds = outer.seconds(move("send", "pp", words, dtype))
        copies = [axis for axis, size in plan.inner.shape.items() if size > 1 and axis not in plan.inner.split_stream]
        if copies:  # whose parts are gathered where they arrive
            seconds += self.prices_of(plan).seconds(move("all_gather", "·".join(copies), whole - words, dtype))
        return seconds

    def after(self, plan: Plan) -> After:
        """Seconds that no layer hides, of the rank that holds most parameters.

        Gradients are summed over replicas in the last backward, with ZeRO 2 in each; with ZeRO 1 and 2 updated weights are
        gathered in the first forward. On devices and between nodes that is hidden, as far as blocks take as long, but for the
        last bucket, and for those with weights of the first layer and of what is before it (`bench/overlap_steps.py`). In a
        node's memory nothing is: ranks that compute move the words themselves.
        """
        in_memory = plan.inner.device != "cuda" and plan.stage_ranks <= plan.inner.shared
        if in_memory or plan.copies == 1 or plan.zero == 3:
            return self._after(plan, 0.0, 0.0)
        forward, *backward = (self.spans(plan)[BLOCK, way].seconds for way in PASSES)
        return self._after(plan, sum(backward), forward)

    def _after(self, plan: Plan, backward: float, forward: float) -> After:
        """The same, where sums and gathers run behind so many seconds of a micro-batch's backward and forward of each block."""
        cells, _ = self.store.cells(plan.inner, plan.units)
        held, rank = max((number_of(plan, cells.elements, rank), rank) for rank in fullest(plan.stages, plan.layers))
        muon = self.muon(plan)
        taken = held if muon is None else held - plan.layers_of(rank) * cells.elements[BLOCK]  # by AdamW
        updated = taken
        if plan.zero in (1, 2):  # the cells of zero 3 update a shard already
            updated = sum(-(-own // copies) for own, _, copies in _by_copies(plan, cells, taken, 0))
        optimizer = self._optimizer(plan, updated, number_of(plan, cells.tensors, rank))
        return After(
            self._replicas(plan, rank, plan.layers_of(rank) * backward, plan.layers_of(rank) * forward),
            optimizer + (0.0 if muon is None else self._of_blocks(plan, muon)),
        )

    def muon(self, plan: Plan) -> MuonStep | None:
        """Muon's step of the blocks of the plan's fullest stage; None where the optimizer is AdamW."""
        if self.train.optimizer == "adamw":
            return None
        from ..muon import muon_step  # torch is imported where something is traced

        inner, layers = plan.inner, max(plan.layers_of(rank) for rank in range(plan.pp))
        key = inner.scheme, inner.axes, inner.outer, inner.dtype, layers, plan.dp, plan.zero
        if key not in self._muon:
            self._muon[key] = muon_step(inner, layers, plan.dp, plan.zero, self.train)
        return self._muon[key]

    def _of_blocks(self, plan: Plan, muon: MuonStep) -> float:
        """Seconds of Muon's step, whose communications are over all ranks of a stage, or along axes of groups of neighbours."""
        from ...nn.muon.groups import group_axes

        seconds, topology = 0.0, plan.topology()
        for op in muon.ops:
            axes = {} if op.kind == "wait" else group_axes(op.axis)
            key = "stage", plan.inner.axes, plan.inner.outer, plan.dp, plan.pp, plan.tile, *axes.items()
            if key not in self._prices:
                placed = Topology.checked({**axes, "others": topology.size // prod(axes.values())}, [*axes])
                self._prices[key] = Prices(self.cluster, placed if axes else topology)
            seconds += 0.0 if op.kind == "wait" else self._prices[key].seconds(op)
        return seconds

    def _replicas(self, plan: Plan, rank: int, backward: float, forward: float) -> float:
        """Seconds of sums and gathers over the replicas of a rank of a pipeline.

        A micro-batch's backward hides sums, its forward gathers. Gradients are reduce-scattered in the dtype of weights that the
        optimizer keeps, weights gathered in that of layers.

        With zero 2 gradients are summed in every micro-batch; what zero 3 moves is part of the cells.
        """
        cells, _ = self.store.cells(plan.inner, plan.units)
        held, tensors = (number_of(plan, of, rank) for of in (cells.elements, cells.tensors))
        dtype, seconds = master_dtype(plan.inner.dtype), 0.0
        first_layer = cells.elements[BLOCK] + cells.elements[ENTER] * (rank == 0)
        needed_first = (item for item, _, _ in _by_copies(plan, cells, first_layer, 0, 1))
        for (own, many, copies), needed in zip(_by_copies(plan, cells, held, tensors), needed_first, strict=True):
            if copies == 1 or plan.zero == 3:
                continue
            outer = self.outer("dp", plan.inner.ranks * plan.copies // copies, copies, plan.pp)
            words = own * (copies - 1) // copies
            gathered = dtype if plan.zero == 0 else plan.inner.dtype
            sums = plan.micro_batches if plan.zero == 2 else 1
            once = outer.seconds(move("reduce_scatter", "dp", words, dtype))
            bucket = bucket_of(plan.inner, plan.inner.ranks) / dtype_of(dtype).nbytes
            last = once * min(1.0, bucket / own) if own else 0.0
            seconds += (sums - 1) * max(0.0, once - backward) + max(last, once - backward)
            backward = max(0.0, backward - once)
            once = outer.seconds(move("all_gather", "dp", words, gathered))
            first = once * min(1.0, ceil(needed / bucket) * bucket / own) if own and plan.zero else once
            seconds += max(first, once - forward)
            forward = max(0.0, forward - once)
            if self.cluster["host.slots"]:
                summed = outer.elements(*bytes_and_calls_of_a_sum(copies, own, many, dtype_of(dtype).nbytes))
                sizes = dtype_of(gathered).nbytes, dtype_of(dtype).nbytes
                node = plan.stage_ranks <= plan.inner.shared
                seconds += sums * summed + outer.elements(*bytes_and_calls_of_a_gather(copies, own, many, *sizes, node))
        if plan.homes[-1] and cells.elements["tied"]:  # both ends sum the table's gradient
            pair = self.outer("pp", plan.stage_ranks, plan.pp)
            table = cells.elements["tied"] if plan.zero == 0 else -(-cells.elements["tied"] // plan.copies)
            seconds += pair.seconds(move("send", "pp", table, dtype))
        return seconds

    def _optimizer(self, plan: Plan, held: int, tensors: int) -> float:
        """Seconds of the update of so many elements of so many parameters: with further axes, that of as many replicas.

        The norm reads every gradient, a kernel a parameter. On hosts torch's calls count, too: of a parameter to find its part's
        gradient, weight and moments, and for its norm.
        """
        if plan.inner.outer:
            plan = replace(plan, inner=replace(plan.inner, outer=(), options=()), dp=plan.copies)
        prices, (cells, _) = self.prices_of(plan), self.store.cells(plan.inner, plan.units)
        seconds = _update(cells, held, prices)
        calls = float(tensors)
        if self.cluster["host.slots"]:
            calls = float((CALLS_OF_UPDATE + CALLS_OF_NORM) * tensors)
        return seconds + prices.elements(dtype_of(master_dtype(plan.inner.dtype)).nbytes * held, calls)

    # -- prices

    def key(self, plan: Plan) -> CellKey:
        """Key of the times of a plan's cells."""
        around = plan.dp * plan.pp
        if plan.zero < 3 and not self.cluster["host.slots"]:  # else ranks slow each other down, wherever they are
            around = min(around, _copies(plan.inner.ranks * plan.inner.copies, self._sizes))
        return plan.inner, plan.units, plan.tile, around

    def prices_of(self, plan: Plan) -> Prices:
        """Prices inside the grid of a stage, with the replicas that share its units of links, or its weights (zero 3)."""
        _, _, tile, around = self.key(plan)
        inner, replicas = plan.inner, plan.dp if plan.zero == 3 else around
        key = inner.axes, inner.outer, tile, around, replicas
        if key not in self._prices:
            shape = {**inner.shape, **dict(inner.outer), "dp": replicas, "pp": around // replicas}
            topology = Topology.checked(shape, [name for name in ORDER if name in shape], dict(tile))
            self._prices[key] = Prices(self.cluster, topology)
        return self._prices[key]

    def outer(self, axis: str, inside: int, size: int, outside: int = 1) -> Prices:
        """Prices along an axis whose neighbours are `inside` ranks apart."""
        if (axis, inside, size, outside) not in self._prices:
            topology = Topology.checked({"in": inside, axis: size, "out": outside}, ["in", axis, "out"])
            self._prices[axis, inside, size, outside] = Prices(self.cluster, topology)
        return self._prices[axis, inside, size, outside]


def _update(cells: Cells, held: int, prices: Prices) -> float:
    """Seconds of the optimizer's operations where a rank holds so many elements."""
    part, seconds = held / sum(cells.elements[cell] for cell in CELLS), 0.0
    for kind, _ in (op for piece in (*cells.copies, *cells.optimizer) for op in piece.ops):
        op = cells.kinds[kind].at(0)
        if op.kind == "elements":
            op = op._replace(read=round(op.read * part), written=round(op.written * part))
        seconds += prices.seconds(op)
    return seconds


def _in_turn(cells: Cells, way: str, units: int, prices: Prices) -> dict[str, ReplayTimes]:
    """The replay of each cell of a pass of three blocks, of which the middle one is as all between.

    What the first and the last block take beyond it is of the cells beside them.
    """
    parts, result = cells.in_order(way, units), dict.fromkeys((*CELLS, BEFORE, BEHIND), ReplayTimes())
    for (cell, _), span in zip(parts, replay_in_turn([ops for _, ops in parts], prices), strict=True):
        result[cell] = result[cell].plus(span)
    between = result[BLOCK]
    axis, moved = max(between.moved.items(), key=lambda item: item[1], default=("", 0.0))
    late = moved - between.seconds
    if late > 0:  # each of many blocks takes as long; what went before the first ones may have hidden these gathers
        result[BLOCK] = between.plus(ReplayTimes(late, exposed={axis: late}))
    for cell, block in ((ENTER, BEFORE), (LEAVE, BEHIND)):
        result[cell] = result[cell].plus(result.pop(block)).plus(result[BLOCK], -1.0)
    return result


def _by_copies(plan: Plan, cells: Cells, held: int, tensors: int, layers: int | None = None) -> list[tuple[int, int, int]]:
    """Elements and number of the parameters that a rank holds, with their copies: dense ones, and experts where these differ.

    layers : that these parameters are of; default the most of a rank
    """
    if plan.copies == plan.expert_copies:
        return [(held, tensors, plan.copies)]
    layers = layers or max(plan.layers_of(rank) for rank in range(plan.pp))
    experts, many = (min(item, layers * of["experts"]) for item, of in ((held, cells.elements), (tensors, cells.tensors)))
    return [(held - experts, tensors - many, plan.copies), (experts, many, plan.expert_copies)]


def bytes_and_calls_of_a_sum(copies: int, held: int, tensors: int, size: int) -> tuple[float, int]:
    """Bytes that a host reads and writes for a sum of gradients over replicas, and torch's calls, of elements of `size` bytes.

    Each part of a gradient is packed. A rank adds up its own part of all members, two by two, and copies it out of the bucket.
    """
    own = held / copies
    return size * (2 * held + 3 * (held - own) + 2 * own), tensors * (2 * copies + 4)


def bytes_and_calls_of_a_gather(copies: int, held: int, tensors: int, size: int, stored: int, node: bool) -> tuple[float, int]:
    """The same of a gather of weights: a rank packs its own, in a node's memory once more, and unpacks the other members'.

    What is rounded is unpacked of all members. stored : bytes of an element before it is rounded to `size` bytes. node : whether
    all ranks of the stage share one's memory
    """
    own, packed = held / copies, 2 if node else 1
    rounds = stored != size
    unpacked = held if rounds else held - own
    rounded = own * (stored + size) * rounds
    return size * 2 * (unpacked + packed * own) + rounded, tensors * (4 * (copies - (not rounds)) + 4)


@cache
def _copies(ranks: int, sizes: tuple[int, ...]) -> int:
    """Grids of so many ranks, side by side, that fill whole units of all these sizes."""
    return next(many for many in range(1, prod(sizes) + 1) if all(ranks * many % size == 0 for size in sizes))


def durations(seconds: Mapping[tuple[str, str], float]) -> Durations:
    """Seconds of (cell, pass) as those of a step's parts, which sends nothing."""
    forward, backward, weights = ({cell: seconds[cell, way] for cell in CELLS} for way in PASSES)
    return Durations(forward, backward, 0.0, 0.0, weights)


def number_of(plan: Plan, of: Mapping[str, int], rank: int) -> int:
    """Elements of the parameters that a rank of a pipeline holds, or how many these are, by those `of` the cells."""
    last = plan.homes[-1]
    ends = of[ENTER] * (rank == 0) + (of[LEAVE] + of["tied"] * (last > 0)) * (rank == last)
    return plan.layers_of(rank) * of[BLOCK] + ends
