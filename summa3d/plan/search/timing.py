"""Seconds of plans: least times by closed forms and by counted operations, and the replay of their cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple

from ...cluster import Cluster
from ...comm.topology import Topology
from ...dry.record import ENTER, LEAVE, Op
from ...dtypes import dtype_of
from ...train.config import master_dtype
from ..cells import BLOCK, Cell
from ..links import loads
from ..predict import Durations, Step
from ..price import Prices
from ..replay import Span, replay
from .cells import Cells, Inner, matrices
from .plans import ORDER, Plan
from .store import Store

CELLS = (ENTER, BLOCK, LEAVE)
PASSES = (False, True)
MARGIN = 0.95
"""Of what one rank alone computes and saves that no scheme does without: some fuse or leave out a copy."""
Key = tuple[Inner, int, tuple[tuple[str, int], ...], int]
"""What the times of cells depend on: their sizes, units of the micro-batch, tile, and ranks outside the grid of a stage."""


@dataclass(frozen=True)
class Placed(Step):
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

    `spans` replays traced cells. Two lower bounds of that come before: `floor` needs no trace, and is larger where it is given
    placements, whose links it then knows; `least` counts the operations of traced cells.
    """

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self.cluster, self.store = cluster, store
        self._compute: dict[tuple[Inner, int], list[float]] = {}
        self._prices: dict[object, Prices] = {}
        self._least: dict[Key, Durations] = {}
        self._spans: dict[Key, dict[tuple[str, bool], Span]] = {}
        self._floors: dict[tuple[Inner, int, bool, int], dict[str, float]] = {}
        self._saved: dict[tuple[str, int], float] = {}
        self._shares: dict[tuple[str, str, bool, int, int], float] = {}

    # -- without a trace

    def floor(self, plan: Plan, placements: Sequence[Plan] = ()) -> float:
        """Seconds that the plan takes at least: with one of these placements, or, without them, wherever its ranks lie.

        That is an equal share of what one rank alone would compute, which one trace tells for all plans, and the words that
        products must move.
        """
        key = plan.inner, plan.units, bool(placements), plan.pp * (plan.zero == 3)
        if key not in self._floors:
            parts = {cell: sum(self._share(plan, cell, way) for way in PASSES) for cell in CELLS}
            words, computed = [*least_words(plan.inner, plan.rows)], parts[BLOCK]
            moved = [self._moved(one, words) for one in placements] or [self._moved_anywhere(plan.inner, words)]
            parts[BLOCK] = min(max(computed + ports, streams) for ports, streams in moved)
            parts[BLOCK] += self._gathered(plan, bool(placements)) if plan.zero == 3 else 0.0
            self._floors[key] = parts
        parts, last = self._floors[key], plan.pp - 1
        work = [plan.layers_of(rank) * parts[BLOCK] for rank in (0, last)]
        work[0] += parts[ENTER]
        work[1] += parts[LEAVE]
        if plan.pp == 1:
            work = [work[0] + parts[LEAVE]]
        return plan.micro_batches * max(work) + (plan.pp - 1) * min(plan.layers) * parts[BLOCK]

    def _share(self, plan: Plan, cell: str, backward: bool) -> float:
        """Seconds of a rank's share of a cell's arithmetic, if all products were cubes."""
        inner = plan.inner
        key = inner.recompute, cell, backward, plan.rows, inner.ranks
        if key not in self._shares:
            cells, rows = self.alone(plan)
            prices = self._outer("dp", 1, inner.ranks * plan.dp * plan.pp)
            seconds = 0.0
            for kind, many in cells.counts[cell, backward].items():
                op = cells.kinds[kind].at(rows)
                if op.kind == "product":
                    side = (op.flops / (2 * inner.ranks)) ** (1 / 3)
                    seconds += many * prices.product(op._replace(m=side, n=side, k=side, batch=1, read=0, written=0))
                elif op.kind == "elements":
                    seconds += many * prices.elements((op.read + op.written) / inner.ranks)
            self._shares[key] = MARGIN * seconds
        return self._shares[key]

    def alone(self, plan: Plan) -> tuple[Cells, int]:
        """The cells that one rank alone would run, and at how many units: rows."""
        axes = tuple({"x": 1, "y": 1, "z": 1}.items())
        return self.store.cells(replace(plan.inner, scheme="oned", axes=axes, regather=False, unit=1), plan.rows)

    def saved(self, plan: Plan) -> float:
        """Bytes of a block that a rank saves for backward at least: an equal share of what one rank alone would save."""
        key = plan.inner.recompute, plan.rows
        if key not in self._saved:
            cells, rows = self.alone(plan)
            self._saved[key] = MARGIN * sum(piece.net.at(rows) for piece in cells.forward if piece.cell == BLOCK)
        return self._saved[key] / plan.inner.ranks

    def _moved(self, plan: Plan, words: Sequence[Least]) -> tuple[float, float]:
        """Seconds for which communications use ports, and for which the busiest axis is in use, by so many words and messages."""
        prices, ports, streams = self._prices_of(plan), 0.0, dict[str, float]()
        for axis, name, many, messages in words:
            if many:
                fixed, moving = prices.parts(move(name, axis, int(many / messages), plan.inner.dtype))
                ports += messages * moving
                streams[axis] = streams.get(axis, 0.0) + messages * (fixed + moving)
        return ports, max(streams.values(), default=0.0)

    def _gathered(self, plan: Plan, placed: bool) -> float:
        """Seconds of the gathers of a block's shared weights with zero 3; sums of their gradients may hide behind arithmetic.

        placed : by the loads of links; else by the fastest ports
        """
        passes, words = 2 + (plan.inner.recompute == "full"), plan.inner.block_elements // (plan.inner.ranks * plan.dp)
        op, levels = move("all_gather", "dp", words * (plan.dp - 1), plan.inner.dtype), self.cluster.levels
        if placed:
            return passes * self._outer("dp", plan.inner.ranks, plan.dp, plan.pp).parts(op)[1]
        return passes * op.words * dtype_of(op.dtype).nbytes * min(1 / (level.ports * level.bandwidth) for level in levels)

    def _moved_anywhere(self, inner: Inner, words: Sequence[Least]) -> tuple[float, float]:
        """The least of `_moved` over all placements, and below: ports between nodes of s ranks carry their fair share.

        Of an axis whose rings have k members in a node, s/k rings leave it. The k of all axes multiply to s at most (Loomis and
        Whitney), and of what does not leave the node it is the size of the axis. So the sum of volume·s/k is at least n times the
        geometric mean of what their n axes would have with the whole s. Every message has the hops of its axis.
        """
        levels, volumes, streams = self.cluster.levels, dict[str, float](), dict[str, float]()
        if len(levels) < 2 or self.cluster["host.slots"]:
            return 0.0, 0.0
        hop, launch = min(level.latency for level in levels), self.cluster["collectives.launch"]
        for axis, _, many, messages in words:
            if inner.shape[axis] > 1:
                volumes[axis] = volumes.get(axis, 0.0) + many * dtype_of(inner.dtype).nbytes
                streams[axis] = streams.get(axis, 0.0) + messages * (launch + hop * (inner.shape[axis] - 1))
        node, port = levels[-2].size, levels[-1]
        fastest, least = min(1 / level.bandwidth for level in levels) * sum(volumes.values()), float("inf")
        for inside in product((False, True), repeat=len(volumes)):
            share = node / prod(inner.shape[axis] for axis, one in zip(volumes, inside, strict=True) if one)
            out = [volume for volume, one in zip(volumes.values(), inside, strict=True) if not one]
            if share >= 1:
                mean = len(out) * (prod(out) / share) ** (1 / len(out)) if out else 0.0
                least = min(least, max(mean, sum(out) / node) * node / (port.ports * port.bandwidth))
        return max(fastest, least), max(streams.values(), default=0.0)

    def slowest_level(self, plan: Plan, axis: str) -> tuple[str, float]:
        """The level of links that a ring along an axis of the stage's grid is bound by, and its seconds per byte."""
        levels = self.cluster.levels
        ((load, _),) = loads(self._prices_of(plan).topology, axis, levels, "ring")
        ports = [(level.name, one / level.bandwidth) for one, level in zip(load.one_way, levels, strict=True)]
        return max(ports, key=lambda one: one[1])

    # -- by operations

    def least(self, plan: Plan) -> Durations:
        """Seconds of each cell if all communication that need not be waited for at once is hidden; sends; what comes after."""
        key = self._key(plan)
        if key not in self._least:
            cells, units = self.store.cells(plan.inner, plan.units)
            seconds = self._seconds(plan, cells, units)
            sums: dict[tuple[str, bool], float] = {}
            for at in ((cell, way) for cell in CELLS for way in PASSES):
                behind = cells.behind[at]
                sums[at] = sum(seconds[kind] * (many - behind.get(kind, 0)) for kind, many in cells.counts[at].items())
            forward, backward = ({cell: sums[cell, way] for cell in CELLS} for way in PASSES)
            self._least[key] = Durations(forward, backward, 0.0, 0.0)
        return self._least[key]._replace(send=self.send(plan), after=sum(self.after(plan)))

    def _seconds(self, plan: Plan, cells: Cells, units: int) -> list[float]:
        """Seconds of each kind of operation."""
        prices, key = self._prices_of(plan), (plan.inner, plan.units)
        if key not in self._compute:
            self._compute[key] = [0.0 if one.op.kind == "move" else prices.price(one.at(units)) for one in cells.kinds]
        known = self._compute[key]
        return [
            prices.price(kind.at(units)) if kind.op.kind == "move" else known[place] for place, kind in enumerate(cells.kinds)
        ]

    # -- by replay

    def spans(self, plan: Plan) -> Mapping[tuple[str, bool], Span]:
        """(cell, backward) → its replay."""
        key = self._key(plan)
        if key not in self._spans:
            cells, units = self.store.cells(plan.inner, plan.units)
            prices = self._prices_of(plan)
            self._spans[key] = {(cell, way): replay(cells.trace(cell, way, units), prices) for cell in CELLS for way in PASSES}
        return self._spans[key]

    def step(self, plan: Plan, least: bool = False) -> Placed:
        """The step of a plan: of replayed cells, or of their least seconds."""
        if least:
            parts = self.least(plan)
        else:
            spans = self.spans(plan)
            forward, backward = ({cell: spans[cell, way].seconds for cell in CELLS} for way in PASSES)
            parts = Durations(forward, backward, self.send(plan), sum(self.after(plan)))
        cells = {cell: Cell() for cell in CELLS}
        topology = Topology({"dp": plan.dp, "pp": plan.pp}, ("dp", "pp"), {"dp": 1, "pp": 1})
        return Placed(cells, topology, plan.schedule, plan.layers, plan.micro_batches, parts=parts)

    def closed(self, plan: Plan, least: bool = False) -> float:
        """Seconds of the plan, the pipeline by its closed form."""
        step = self.step(plan, least)
        return step.closed(step.parts) + step.parts.after

    def seconds(self, plan: Plan) -> float:
        """Seconds of the plan, the pipeline simulated."""
        return self.step(plan).seconds(self.cluster)

    # -- around the cells

    def send(self, plan: Plan) -> float:
        """Seconds of a message between stages."""
        if plan.pp == 1:
            return 0.0
        outer = self._outer("pp", plan.inner.ranks * plan.dp, plan.pp)
        whole = plan.rows * plan.inner.model.sequence * plan.inner.model.hidden
        words, dtype = -(-whole // plan.inner.ranks), plan.inner.dtype
        seconds = outer.seconds(move("send", "pp", words, dtype))
        if plan.inner.scheme == "oned" and plan.inner.ranks > 1:  # the parts of copies are gathered where they arrive
            seconds += self._prices_of(plan).seconds(move("all_gather", "y", whole - words, dtype))
        return seconds

    def after(self, plan: Plan) -> After:
        """Seconds behind the last backward, of the rank that holds most parameters."""
        cells, _ = self.store.cells(plan.inner, plan.units)
        held, dp = max(elements_of(plan, cells)), plan.dp
        updated = held if plan.zero in (0, 3) else -(-held // dp)  # the cells of zero 3 update a shard already
        return After(self._replicas(plan, held), self._optimizer(plan, cells, updated))

    def _replicas(self, plan: Plan, held: int) -> float:
        """Gradients are reduce-scattered in the dtype of weights that the optimizer keeps, weights gathered in that of layers.

        With zero 2 gradients are summed in every micro-batch; what zero 3 moves is part of the cells.
        """
        dtype = master_dtype(plan.inner.dtype)
        seconds = 0.0
        if plan.dp > 1 and plan.zero < 3:
            outer = self._outer("dp", plan.inner.ranks, plan.dp, plan.pp)
            words = held * (plan.dp - 1) // plan.dp
            gathered = dtype if plan.zero == 0 else plan.inner.dtype
            sums = plan.micro_batches if plan.zero == 2 else 1
            seconds = sums * outer.seconds(move("reduce_scatter", "dp", words, dtype))
            seconds += outer.seconds(move("all_gather", "dp", words, gathered))
        cells, _ = self.store.cells(plan.inner, plan.units)
        if plan.pp > 1 and cells.elements["tied"]:  # both ends sum the table's gradient
            pair = self._outer("pp", plan.inner.ranks * plan.dp, plan.pp)
            table = cells.elements["tied"] if plan.zero == 0 else -(-cells.elements["tied"] // plan.dp)
            seconds += pair.seconds(move("send", "pp", table, dtype))
        return seconds

    def _optimizer(self, plan: Plan, cells: Cells, held: int) -> float:
        prices, traced = self._prices_of(plan), sum(cells.elements[cell] for cell in CELLS)
        seconds = 0.0
        for piece in (*cells.copies, *cells.optimizer):
            for kind, _ in piece.ops:
                op = cells.kinds[kind].at(plan.units)
                part = held / traced if op.kind == "elements" else 1.0
                seconds += prices.seconds(op._replace(read=round(op.read * part), written=round(op.written * part)))
        return seconds

    # -- prices

    def _key(self, plan: Plan) -> Key:
        around = plan.dp * plan.pp
        if plan.zero < 3 and not self.cluster["host.slots"]:  # else ranks slow each other down, wherever they are
            around = min(around, self._repeat(plan.inner.ranks))
        return plan.inner, plan.units, plan.tile, around

    def _repeat(self, ranks: int) -> int:
        """Grids of a stage, side by side, that fill whole units of all levels with a size."""
        return _copies(ranks, tuple(level.size for level in self.cluster.levels if level.size))

    def _prices_of(self, plan: Plan) -> Prices:
        """Prices inside the grid of a stage, with the replicas that share its units of links, or its weights (zero 3)."""
        _, _, tile, around = self._key(plan)
        inner, replicas = plan.inner, plan.dp if plan.zero == 3 else around
        key = inner.axes, tile, around, replicas
        if key not in self._prices:
            shape = {**inner.shape, "dp": replicas, "pp": around // replicas}
            topology = Topology.checked(shape, [name for name in ORDER if name in shape], dict(tile))
            self._prices[key] = Prices(self.cluster, topology)
        return self._prices[key]

    def _outer(self, axis: str, inside: int, size: int, outside: int = 1) -> Prices:
        """Prices along an axis whose neighbours are `inside` ranks apart."""
        if (axis, inside, size, outside) not in self._prices:
            topology = Topology.checked({"in": inside, axis: size, "out": outside}, ["in", axis, "out"])
            self._prices[axis, inside, size, outside] = Prices(self.cluster, topology)
        return self._prices[axis, inside, size, outside]


def move(name: str, axis: str, words: int, dtype: str) -> Op:
    """A communication outside the cells."""
    return Op("move", "forward", "", name, axis=axis, words=words, dtype=dtype)


@cache
def _copies(ranks: int, sizes: tuple[int, ...]) -> int:
    return next(many for many in range(1, prod(sizes) + 1) if all(ranks * many % size == 0 for size in sizes))


def elements_of(plan: Plan, cells: Cells) -> list[int]:
    """Elements of the parameters that a rank holds of each stage of a pipeline."""
    of, last = cells.elements, plan.pp - 1
    layers = [sum(plan.layers[stage] for stage in range(rank, len(plan.layers), plan.pp)) for rank in range(plan.pp)]
    held = [many * of[BLOCK] + of[ENTER] * (rank == 0) + of[LEAVE] * (rank == last) for rank, many in enumerate(layers)]
    held[last] += of["tied"] * (plan.pp > 1)
    return held


class Least(NamedTuple):
    """What a rank receives along an axis in a block at least, by so many communications at least."""

    axis: str
    collective: str
    words: float
    messages: int


def least_words(inner: Inner, rows: int) -> Iterator[Least]:
    """What a rank receives in a block at least, without what may hide behind arithmetic."""
    tokens, shape, ranks = rows * inner.model.sequence, inner.shape, inner.ranks
    passes = 2 if inner.recompute == "full" else 1  # of forward
    if inner.scheme == "oned":
        yield Least("y", "all_gather", passes * 4 * tokens * inner.model.hidden * (1 - 1 / ranks), passes * 4)
        return
    for place, (k, n) in enumerate(matrices(inner.model)):
        if inner.scheme.startswith(("cuboid", "oned-sp")):
            of_a, of_c = ("y", "z") if place % 2 == 0 else ("z", "y")
            again = inner.regather  # backward gathers both operands
            of = (of_a, passes + again, tokens * k), (of_c, passes + 1, tokens * n), ("x", passes + 1 + again, k * n)
            for axis, times, size in of:
                yield Least(axis, "all_gather", times * (shape[axis] - 1) * size / ranks, times)
        else:
            panels, depth = max(shape["x"], shape["y"]), shape.get("d", 1)
            for axis, size in (("y", tokens * k), ("x", k * n * depth)):
                yield Least(axis, "broadcast", (passes + 1) * (shape[axis] - 1) * size / ranks, (passes + 1) * panels)
