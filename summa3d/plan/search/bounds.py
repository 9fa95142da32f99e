"""Lower bounds of plans' seconds and bytes that need no trace of theirs: of columns of plans at once, and of one's placements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...dry.record import ENTER, LEAVE
from ...dtypes import HALVES, dtype_of
from ...train.config import master_dtype
from ..cells import BLOCK
from ..price import CHAINS, Prices, move
from .cells import PASSES, Cells, StageGrid, matrices
from .memory import in_pipe, kept_per_element, summed
from .plans import MemoryOption, Plan, PlanTable
from .timing import CELLS, Times

MARGIN = 0.95
"""Of what one rank alone does element by element, and saves, that no scheme does without: some fuse or leave out a copy."""
AXES = ("x", "y", "z", "d")
MANY = 2**30
"""Words of a message whose time is all volume."""
Numeric = Any
"""A number, or a column of them."""


class Moved(NamedTuple):
    """What a rank receives along an axis in a block at least: bytes in all, by so many communications.

    waited : whether nothing else is done meanwhile, so that launches and hops count too.
    """

    axis: str
    name: str
    size: Numeric
    many: Numeric
    waited: bool = False


def moved(inner: StageGrid, sizes: Mapping[str, Numeric], tokens: Numeric) -> Iterator[Moved]:
    """What a rank receives along the axes of a stage, without what may hide behind arithmetic."""
    x, y, z, d = (sizes[axis] for axis in AXES)
    ranks, size = x * y * z * d, dtype_of(inner.dtype).nbytes
    wide = 4 if inner.dtype in HALVES else size  # of sums that are wider than what they sum
    passes = 2 if inner.recompute == "full" else 1  # of forward
    if inner.scheme == "oned":
        many = 2 * passes  # those of backward run behind a product
        yield Moved("y", "all_reduce", many * 2 * (ranks - 1) / ranks * tokens * inner.model.hidden * wide, many, True)
        return
    again, panels = int(inner.regather or inner.replicas > 1), np.maximum(x, y)
    for place, (k, n) in enumerate(matrices(inner.model)):
        if inner.gathers:
            of_a, of_c = ("y", "z") if place % 2 == 0 else ("z", "y")
            rows = (of_a, passes + inner.regather, tokens * k), (of_c, passes + 1, tokens * n), ("x", passes + 1 + again, k * n)
            for axis, times, part in rows:
                yield Moved(axis, "all_gather", times * (sizes[axis] - 1) * part / ranks * size, times)
            continue
        stored = place == 3 and inner.scheme == "summa-transposed"
        sums = passes if stored else 1  # of products along y: of forward where the weight is stored transposed
        of_y, of_x = (y - 1) * tokens * (n if stored else k) / ranks, (x - 1) * k * n / (x * y)
        yield Moved("y", "broadcast", (passes + 2 - sums) * of_y * size, (passes + 2 - sums) * panels, True)
        yield Moved("y", "reduce", sums * of_y * wide, sums * panels, True)
        yield Moved("x", "broadcast", (passes + 1) * of_x * size, (passes + 1) * panels, True)
        yield Moved("x", "reduce", of_x * wide, panels, True)
        yield Moved("d", "all_reduce", 2 * (d - 1) / d * k * n / (x * y) * wide, 1, True)


class Kept(NamedTuple):
    """Bytes of a block that one rank alone keeps of a micro-batch, and those among them that copies of weights take."""

    bytes: Numeric
    weights: Numeric


def kept(inner: StageGrid, sizes: Mapping[str, Numeric], tokens: Numeric, alone: Sequence[Kept]) -> tuple[Numeric, Numeric]:
    """Bytes of a block that a rank keeps of a micro-batch at least: from F to B or X; and then to W, where backward is split.

    alone : those of one rank alone. A rank has its share of them; copies of weights among them are those that it gathers.

    Beside it, copies of the stream are whole around the products and norms of `oned`; products keep the operands that they
    gathered unless backward gathers or computes them again, and what X has gathered for gradients of weights waits for W, but for
    a stream that one rank computes again, and not every grid. SUMMA computes these in X, and owes nothing.
    """
    ranks = sizes["x"] * sizes["y"] * sizes["z"] * sizes["d"]
    share, part = dtype_of(inner.dtype).nbytes / ranks, [one.bytes / ranks for one in alone]
    if inner.scheme == "oned":
        copies = (sizes["y"] - 1) * tokens * inner.model.hidden * share
        return part[0] + (1 if inner.recompute == "full" else 4) * copies, part[1] + 4 * copies
    if not inner.gathers or inner.regather:
        return part[0], part[1] * inner.gathers
    operands = gradients = weights = 0.0
    for place, (k, n) in enumerate(matrices(inner.model)):
        of_a, of_c = ("y", "z") if place % 2 == 0 else ("z", "y")
        operands, gradients = operands + (sizes[of_a] - 1) * tokens * k, gradients + (sizes[of_c] - 1) * tokens * n
        weights = weights + (sizes["x"] > 1) * sizes["x"] * (inner.replicas == 1) * k * n
    if inner.recompute == "full":
        return part[0], part[1] + (operands + gradients - tokens * inner.model.hidden) * share
    weights = np.maximum(0.0, weights * share - alone[0].weights / ranks)
    return part[0] + operands * share + weights, part[1] + (operands + gradients) * share


def _together(every: Iterable[Moved]) -> list[Moved]:
    """Communications that move something, those of a collective along an axis as one, but for chains, whose sizes matter."""
    found: dict[object, Moved] = {}
    for number, one in enumerate(one for one in every if one.size > 0):
        key = (one.axis, one.name, number if one.name in CHAINS else -1)
        before = found.get(key, one._replace(size=0.0, many=0))
        found[key] = one._replace(size=one.size + before.size, many=one.many + before.many)
    return list(found.values())


class Products(NamedTuple):
    """Products of a rank in a block: how many, their sizes, and bytes of an element of what they write."""

    many: Numeric
    m: Numeric
    n: Numeric
    k: Numeric
    written: int


def products(inner: StageGrid, sizes: Mapping[str, Numeric], tokens: Numeric) -> Iterator[Products]:
    """The products with the weights of a block; those of gradients have the same sizes in other places."""
    x, y, z, d = (sizes[axis] for axis in AXES)
    size, passes = dtype_of(inner.dtype).nbytes, 4 if inner.recompute == "full" else 3
    for place, (k, n) in enumerate(matrices(inner.model)):
        if inner.scheme == "oned" or inner.gathers:
            of_k, of_n = (z, y) if place % 2 == 0 else (y, z)
            yield Products(passes, tokens / x, n / of_n, k / of_k, size)
        else:
            panels = np.maximum(x, y)
            of_k, of_n = (y, panels) if place == 3 and inner.scheme == "summa-transposed" else (panels, y)
            yield Products(passes * panels, tokens / (x * d), n / of_n, k / of_k, size)


class SingleRankWork(NamedTuple):
    """What one rank alone does in a cell, in both passes, besides the products of a block's weights.

    launched : seconds of launches. row : seconds for each row of a micro-batch. still : seconds at no rows. cubes : (how many,
    m·n·k of a row) of products whose sizes on a grid are not known.
    """

    launched: float
    still: float
    row: float
    cubes: tuple[tuple[int, float], ...]


class Bounds:
    """Lower bounds of plans on the cluster and with the cells of `times`."""

    def __init__(self, times: Times) -> None:
        self.times, self.cluster = times, times.cluster
        self._alone: dict[tuple[str, bool, str, float], SingleRankWork] = {}
        self._rates: dict[object, tuple[float, float, float]] = {}
        self._blocks: dict[object, float] = {}
        self._work: dict[object, tuple[dict[str, Numeric], float, list[Moved]]] = {}

    # -- bytes

    def bytes(self, rows: PlanTable, at: Any, saving: MemoryOption) -> tuple[Any, Any]:
        """Bytes that a rank holds at least: of the weights of blocks and their states alone; and with what micro-batches keep."""
        inner, zero, dp = rows.inner_of(saving, int(at[0])), rows.era.zero[saving[1]], rows.dp[at]
        kinds, place = np.unique(dp, return_inverse=True)
        each = np.array([sum(kept_per_element(inner.dtype, zero, int(one))) for one in kinds])[place.reshape(-1)]
        sizes, size, ranks = {axis: column[at] for axis, column in rows.sizes.items()}, rows.rows[at], rows.ranks[at]
        layer = inner.block_elements * sizes["d"] / ranks  # copies along d have the same weights
        alone = [self._alone_keeps(inner, zero, way, size, dp) for way in PASSES[:2]]
        saved, owed = kept(inner, sizes, size * inner.model.sequence, alone)
        sums = ((dp > 1) & (zero == 2)) * MARGIN
        states, held = 0.0 * layer, 0.0 * layer
        for layers, flying, waiting in rows.heaviest[:, :, at]:
            own = layers * layer
            states = np.maximum(states, own * each)
            held = np.maximum(
                held, own * each + flying * saved + waiting * owed + sums * summed(inner, own, ranks, rows.micro_batches[at])
            )
        return states, held + in_pipe(inner, size, ranks) * (rows.pp[at] > 1)

    def _alone_keeps(self, inner: StageGrid, zero: int, way: str, rows: Numeric, dp: Numeric) -> Kept:
        """What a block keeps at least of a micro-batch on one rank alone after a pass, less what replicas share of it."""

        def of(replicas: int) -> tuple[int, int]:
            passes = self._cells(inner, replicas).passes
            net = [piece.net for one in PASSES[: PASSES.index(way) + 1] for piece in passes[one] if piece.cell == BLOCK]
            return sum(line.base for line in net), sum(line.slope for line in net)

        base, slope = of(1)
        if zero == 3:
            of_two = of(2)
            base, slope = (one - 2 * (one - two) * (1 - 1 / dp) for one, two in zip((base, slope), of_two, strict=True))
        return Kept(MARGIN * (base + slope * rows), base)

    # -- seconds

    def floor(self, rows: PlanTable, at: Any, saving: MemoryOption) -> Any:
        """Seconds that rows take at least, wherever their ranks lie.

        That is an equal share of what one rank alone would compute, which one trace tells for all plans, products of the sizes
        that they have on the grid, and the words that these must move.
        """
        inner, sizes = rows.inner_of(saving, int(at[0])), {axis: column[at] for axis, column in rows.sizes.items()}
        shards = rows.dp[at] if rows.era.zero[saving[1]] == 3 else 1
        parts, elements = self._computed(inner, sizes, rows.rows[at], shards, int(rows.ranks[0] * rows.dp[0] * rows.pp[0]))
        forward = _forward(inner, parts, elements)
        every = [*moved(inner, sizes, rows.rows[at] * inner.model.sequence)]
        ports, streams = self._anywhere(sizes, every)
        parts[BLOCK] = np.maximum(parts[BLOCK] + ports, streams)
        if rows.era.zero[saving[1]] == 3:
            fastest = min(1 / (level.ports * level.bandwidth) for level in self.cluster.levels)
            gathered = (3 if inner.recompute == "full" else 2) * self._shared(inner, rows.ranks[at], shards)
            parts[BLOCK] = parts[BLOCK] + fastest * gathered
        first, last, least, both = (column[at] for column in rows.layers)
        return _closed(parts, forward, rows.pp[at], rows.micro_batches[at], (first, last, least, both))

    def placed(self, plan: Plan, placements: Sequence[Plan]) -> list[float]:
        """Seconds that the plan takes at least with each of these placements, whose links are known."""
        key = plan.inner, plan.units
        if key not in self._work:
            sizes = {axis: plan.inner.shape.get(axis, 1) for axis in AXES}
            ranks = plan.inner.ranks * plan.dp * plan.pp
            computed = self._computed(plan.inner, sizes, plan.rows, plan.inner.replicas, ranks)
            self._work[key] = *computed, _together(moved(plan.inner, sizes, plan.rows * plan.inner.model.sequence))
        parts, elements, _ = self._work[key]
        around = plan.pp, plan.micro_batches
        stages = plan.layers_of(0), plan.layers_of(plan.pp - 1), min(plan.layers), int(plan.homes[-1] == 0)
        blocks, forward = (self._block(one) for one in placements), _forward(plan.inner, parts, elements)
        return [float(_closed({**parts, BLOCK: block}, forward, *around, stages)) for block in blocks]

    def _block(self, plan: Plan) -> float:
        """Seconds of a block of a placement."""
        key = self.times.key(plan)
        if key not in self._blocks:
            parts, elements, every = self._work[plan.inner, plan.units]
            prices, ports, streams = self.times.prices_of(plan), 0.0, dict[str, float]()
            for term in every:
                fixed, moving = self._seconds(prices, term)
                ports += moving + (fixed if term.waited else 0.0)
                streams[term.axis] = streams.get(term.axis, 0.0) + fixed + moving
            block = max(parts[BLOCK] + ports, max(streams.values(), default=0.0))
            self._blocks[key] = block + (self._gathered(plan, prices, elements) if plan.zero == 3 else 0.0)
        return self._blocks[key]

    def _computed(
        self, inner: StageGrid, sizes: Mapping[str, Numeric], rows: Numeric, shards: Numeric, ranks: int
    ) -> tuple[dict[str, Numeric], Numeric]:
        """Seconds of arithmetic of each cell on a rank; and of a block's element-wise work, behind which sums may hide.

        shards : of the weights of a rank of the grid, over replicas. ranks : all.
        """
        inside, crowding = sizes["x"] * sizes["y"] * sizes["z"] * sizes["d"], self.cluster.crowding(ranks)
        found, half, size = {}, self.cluster["product.half"], dtype_of(inner.dtype).nbytes
        wider = master_dtype(inner.dtype)  # which hosts multiply 16-bit operands in
        peak = max(self.cluster.peak(one) for one in {inner.dtype, wider} if f"peak.{one}" in self.cluster.numbers)
        flop = crowding / (peak * self.cluster["product.efficiency"])
        byte = crowding * self.cluster.byte_time()
        launch = crowding * self.cluster["product.launch"]
        for cell in CELLS:
            launched, still, row, cubes = self._of_one(inner, cell, crowding)
            found[cell] = launched + (still / shards + row * rows) / inside
            for many, volume in cubes:
                share = volume * rows / inside
                found[cell] = found[cell] + many * (2 * share * flop * (1 + half / share ** (1 / 3)) + launch)
        elements = found[BLOCK]
        for many, m, n, k, written in products(inner, sizes, rows * inner.model.sequence):
            side = np.minimum(np.minimum(m, n), k)
            moving = (size * (m * k + k * n) + written * m * n) * byte
            found[BLOCK] = found[BLOCK] + many * (np.maximum(2 * m * n * k * flop * (1 + half / side), moving) + launch)
        return found, elements

    def _of_one(self, inner: StageGrid, cell: str, crowding: float) -> SingleRankWork:
        key = inner.recompute, inner.split, cell, crowding
        if key in self._alone:
            return self._alone[key]
        cells, cubes = self._cells(inner), []
        launched, size, slope, byte = 0.0, 0.0, 0.0, crowding * self.cluster.byte_time()
        prices = self.times.outer("dp", 1, 1)
        for kind, many in (pair for way in PASSES for pair in cells.counts[cell, way].items()):
            still, one = cells.kinds[kind].at(0), cells.kinds[kind].at(1)
            if one.kind == "elements":
                launched += many * crowding * self.cluster["elements.launch"]
                size += many * (still.read + still.written) * byte
                slope += many * ((one.read - still.read) + (one.written - still.written)) * byte
            elif one.kind == "product" and one.batch > still.batch:  # of attention, whose sizes are those of a head on every grid
                launch = self.cluster["product.launch"]
                launched += many * crowding * launch
                slope += many * crowding * (prices.product(one) - launch)
            elif one.kind == "product" and cell != BLOCK:
                cubes.append((many, float(one.m * one.n * one.k)))
        self._alone[key] = SingleRankWork(MARGIN * launched, MARGIN * size, MARGIN * slope, tuple(cubes))
        return self._alone[key]

    def _cells(self, inner: StageGrid, replicas: int = 1) -> Cells:
        """The cells that one rank alone would run, whose units are rows; replicas share their weights."""
        axes = tuple({"x": 1, "y": 1, "z": 1}.items())
        cells, _ = self.times.store.cells(replace(inner, scheme="oned", axes=axes, regather=False, unit=1, replicas=replicas), 1)
        return cells

    # -- communication

    def _seconds(self, prices: Prices, one: Moved) -> tuple[float, float]:
        """Seconds of launches and hops, and of volume, of communications along an axis whose links are known."""
        members = prices.topology.shape[one.axis]
        key = id(prices), one.axis, one.name
        if key not in self._rates:
            word = 4
            (least, _), (most, volume) = (prices.move(move(one.name, one.axis, words, "float32")) for words in (1, MANY))
            fill = (most - least) / max(1.0, self.cluster["collectives.chunk"] - word)
            received = members / (members - 1) if one.name == "broadcast" else 1.0  # its words are those of the message
            self._rates[key] = least, fill, received * volume / (word * MANY)
        fixed, fill, byte = self._rates[key]
        if fill:  # of a chain, by the first chunk of a message
            message = one.size / one.many * members / (members - 1)
            fixed += fill * min(self.cluster["collectives.chunk"], message)
        return one.many * fixed, one.size * byte

    def _gathered(self, plan: Plan, prices: Prices, elements: float) -> float:
        """Seconds of the gathers of a block's shared weights, and of the sums of their gradients, behind element-wise work."""
        passes = 3 if plan.inner.recompute == "full" else 2
        size = self._shared(plan.inner, plan.inner.ranks, plan.dp)
        gathers = sum(self._seconds(prices, Moved("dp", "all_gather", passes * size, passes * 4)))
        return gathers + max(0.0, self._seconds(prices, Moved("dp", "reduce_scatter", size, 4))[1] - elements)

    def _shared(self, inner: StageGrid, ranks: Numeric, dp: Numeric) -> Numeric:
        """Bytes of a block's weights that a rank receives of other replicas when it gathers them."""
        return inner.block_elements / (ranks * dp) * (dp - 1) * dtype_of(inner.dtype).nbytes

    def _anywhere(self, sizes: Mapping[str, Numeric], every: Sequence[Moved]) -> tuple[Numeric, Numeric]:
        """Seconds for which communications use ports, and for which the busiest axis is in use, at least, wherever ranks lie.

        Ports between nodes of s ranks carry their fair share. Of an axis whose rings have k members in a node, s/k rings leave
        it. The k of all axes multiply to s at most (Loomis and Whitney), and of what does not leave the node it is the size of
        the axis. So the sum of volume·s/k is at least n times the geometric mean of what their n axes would have with the whole
        s. Every message has the hops of its axis.
        """
        levels = self.cluster.levels
        if len(levels) < 2 or self.cluster["host.slots"]:
            return 0.0, 0.0
        hop, launch = min(level.latency for level in levels), self.cluster["collectives.launch"]
        volumes, streams, waited = (dict.fromkeys(AXES, 0.0 * sizes["x"]) for _ in range(3))
        for axis, name, size, many, alone in every:
            volumes[axis] = volumes[axis] + size
            hops = (launch + hop * (sizes[axis] - 1) * (name != "all_reduce")) * (size > 0) * many
            (waited if alone else streams)[axis] = (waited if alone else streams)[axis] + hops
        node, port = levels[-2].size, levels[-1]
        fastest = min(1 / level.bandwidth for level in levels) * sum(volumes.values())
        least: Numeric = np.inf
        active = {axis: volume > 0 for axis, volume in volumes.items()}
        for inside in product((False, True), repeat=len(AXES)):
            kept = {axis: active[axis] & one for axis, one in zip(AXES, inside, strict=True)}
            fits = np.all([active[axis] for axis, one in zip(AXES, inside, strict=True) if one] or [active["x"] | True], axis=0)
            share = node / prod(np.where(kept[axis], sizes[axis], 1) for axis in AXES)
            out = [np.where(active[axis] & ~kept[axis], volumes[axis], 0.0) for axis in AXES]
            many = np.maximum(1, sum(one > 0 for one in out))
            mean = many * (prod(np.where(one > 0, one, 1.0) for one in out) / share) ** (1 / many) * (sum(out) > 0)
            taken = np.maximum(mean, sum(out) / node) * node / (port.ports * port.bandwidth)
            least = np.minimum(least, np.where(fits & (share >= 1), taken, np.inf))
        fixed = sum(waited.values())
        return np.maximum(fastest, least) + fixed, np.maximum.reduce([streams[axis] + waited[axis] for axis in AXES])


def _forward(inner: StageGrid, parts: Mapping[str, Numeric], elements: Numeric) -> Numeric | None:
    """Seconds of a block's forward at least, by its products, where backward is split; None where it is not."""
    return (parts[BLOCK] - elements) / (4 if inner.recompute == "full" else 3) if inner.split else None


def _closed(
    parts: Mapping[str, Numeric],
    forward: Numeric | None,
    pp: Numeric,
    micro_batches: Numeric,
    layers: tuple[Numeric, Numeric, Numeric, Numeric],
) -> Numeric:
    """Seconds of a pipeline at least.

    forward : of a block, where backward is split: the last rank waits for the forwards of those before it, and is never sure to
    wait again. layers : of the first and the last rank, and of the smallest stage; whether the first has the last stage too.
    """
    (first, last, least, both), block = layers, parts[BLOCK]
    of_first, of_last = first * block + parts[ENTER] + parts[LEAVE] * both, last * block + parts[LEAVE] * (1 - both)
    if forward is None:
        return micro_batches * np.maximum(of_first, of_last) + (pp - 1) * least * block
    return np.maximum(micro_batches * of_first, micro_batches * of_last + (pp - 1) * least * forward)
