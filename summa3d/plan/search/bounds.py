"""Lower bounds of plans' seconds and bytes that need no trace of theirs: of columns of plans at once, and of one's placements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...dry.record import ENTER, LEAVE
from ...dtypes import HALVES, dtype_of
from ...nn.schemes.products import OPERANDS, B, Numeric, alone
from ...nn.schemes.registry import SERIAL, row_axes
from ...parallel.outer import SEARCHED
from ...train.config import master_dtype
from ..cells import BLOCK
from ..links import part_of
from ..price import CHAINS, Prices, move
from .cells import PASSES, Cells, StageGrid
from .memory import in_pipe, kept_per_element, summed
from .plans import MemoryOption, Plan, PlanTable
from .timing import CELLS, Times

MARGIN = 0.95
"""Of what one rank alone does element by element, and saves, that no scheme does without: some fuse or leave out a copy."""
SEVERAL = 4
"""Rows at which cells of a grid of one rank are asked for: where half a row's heads are no integer, lines are of two."""


class Moved(NamedTuple):
    """What a rank receives along an axis in a block at least: bytes in all, by so many communications.

    waited : whether nothing else is done meanwhile, so that launches and hops count too. ahead : whether they gather weights,
    and may begin so early that nothing waits for them
    """

    axis: str
    name: str
    size: Numeric
    many: Numeric
    waited: bool = False
    ahead: bool = False


def moved(inner: StageGrid, grid: Mapping[str, Numeric], tokens: Numeric, experts: Numeric = 1) -> Iterator[Moved]:
    """Words that a rank with so many experts of a layer receives along a stage's axes, without what may hide behind arithmetic.

    Operands that are gathered whole are kept for the gradients, unless backward gathers them again, and what is gathered of C's
    gradient is of both products; a sum of A's gradient may run behind the product of B's. Panels move for each product.
    """
    size = dtype_of(inner.dtype).nbytes
    wide = 4 if inner.dtype in HALVES else size  # of sums that are wider than what they sum
    forwards, again = 2 if inner.recompute == "full" else 1, int(inner.regather or inner.replicas > 1)
    for item in [gemm.holding(experts) for gemm in inner.products]:
        whole, panels = not item.panels, item.count(grid)
        gathers = (forwards + inner.regather, forwards + again, 1) if whole else (forwards + 1, forwards + 1, 2)
        sums, name = (int(not whole), 1, forwards), "all_gather" if whole else "broadcast"
        for operand in OPERANDS:
            for axis, words in item.gathered(operand, grid, tokens):
                many, ahead = gathers[operand], whole and operand == B and inner.device == "cuda"
                yield Moved(axis, name, many * words * size, many * panels, not whole, ahead)
            for axis, kept, words in item.summed(operand, grid, tokens) if sums[operand] else ():
                if kept:
                    yield Moved(axis, "all_reduce", sums[operand] * words * wide, sums[operand], True)
                elif whole:
                    yield Moved(axis, name, sums[operand] * words * size, sums[operand])
                else:
                    yield Moved(axis, "reduce", sums[operand] * words * wide, sums[operand] * panels, True)


class Kept(NamedTuple):
    """Bytes of a block that one rank alone keeps of a micro-batch, and those among them that copies of weights take."""

    bytes: Numeric
    weights: Numeric


def kept(
    inner: StageGrid, grid: Mapping[str, Numeric], tokens: Numeric, alone: Sequence[Kept], experts: Numeric = 1
) -> tuple[Numeric, Numeric]:
    """Bytes of a block that a rank keeps of a micro-batch at least: from F to B or X; and then to W, where backward is split.

    alone : those of one rank alone, of which a rank has its share; copies of weights among them are those that it gathers.
    experts : of a layer, on the rank

    Beside it, a stream of which ranks hold copies is whole around products and norms; products keep the operands that they
    gathered unless backward gathers or computes them again, and what X has gathered for gradients of weights waits for W, but for
    a stream that one rank computes again, and not every grid. Products in panels compute these in X, and owe nothing.
    """
    ranks, size, stream = prod(grid.values()), dtype_of(inner.dtype).nbytes, tokens * inner.model.hidden
    full, part = inner.recompute == "full", [item.bytes / ranks for item in alone]
    copies = (1 / prod(grid[axis] for axis in inner.split_stream) - 1 / ranks) * stream * size
    saved, owed = part[0] + (1 if full else 4) * copies, part[1] * (not inner.products[0].panels) + 4 * copies
    if not inner.gathers or inner.regather:
        return saved, owed
    products = [product.holding(experts) for product in inner.products]
    operands, weights, gradients = (
        sum(words for product in products for _, words in product.gathered(operand, grid, tokens)) * size for operand in OPERANDS
    )
    if full:
        return saved, owed + operands + gradients - stream * size / ranks
    own = sum(
        product.words(B, grid, tokens) * size * (words > 0) for product in products for _, words in product.gathered(B, grid, 1)
    )
    weights = np.maximum(0.0, (weights + own) * (inner.replicas == 1) - alone[0].weights / ranks)
    return saved + operands + weights, owed + operands + gradients


def _together(every: Iterable[Moved]) -> list[Moved]:
    """Communications that move something, those of a collective along an axis as one, but for chains, whose sizes matter."""
    result: dict[object, Moved] = {}
    for number, item in enumerate(entry for entry in every if entry.size > 0):
        key = (item.axis, item.name, number if item.name in CHAINS else -1)
        before = result.get(key, item._replace(size=0.0, many=0))
        result[key] = item._replace(size=item.size + before.size, many=item.many + before.many)
    return list(result.values())


class AloneMove(NamedTuple):
    """Communications along a further axis that a grid of one rank waits for: bytes at no rows, and for each row."""

    axis: str
    name: str
    many: int
    still: int
    row: float


class SingleRankWork(NamedTuple):
    """What one rank alone does in a cell, in both passes, besides the products of a block's weights.

    launched : seconds of launches. row : seconds for each row of a micro-batch. still : seconds at no rows. cubes : (how many,
    m·n·k of a row) of products whose sizes on a grid are not known. moves : along axes that split sequences, of a block
    """

    launched: float
    still: float
    row: float
    cubes: tuple[tuple[int, float], ...]
    moves: tuple[AloneMove, ...]


SPLIT_SEQUENCES = frozenset(axis.name for axis in SEARCHED if not axis.splits_rows)
"""Further axes whose ranks take other positions of the same rows."""


def contexts(inner: StageGrid) -> int:
    """Ranks of further axes that share a row of a micro-batch."""
    return prod(size for axis, size in inner.outer if axis in SPLIT_SEQUENCES)


class Bounds:
    """Lower bounds of plans on the cluster and with the cells of `times`."""

    def __init__(self, times: Times) -> None:
        self.times, self.cluster = times, times.cluster
        self._alone: dict[object, SingleRankWork] = {}
        self._blocks: dict[object, float] = {}
        self._work: dict[object, tuple[dict[str, Numeric], float, list[Moved]]] = {}

    # -- bytes

    def bytes(self, rows: PlanTable, at: Any, saving: MemoryOption) -> tuple[Any, Any]:
        """Bytes that a rank holds at least: of the weights of blocks and their states alone; and with what micro-batches keep."""
        inner, zero, dp = rows.inner_of(saving, int(at[0])), rows.era.zero[saving[1]], rows.copies[at]
        moments = 2 if self.times.train.optimizer == "adamw" else 1
        sizes, size, ranks = {axis: column[at] for axis, column in rows.sizes.items()}, rows.share[at], rows.ranks[at]
        experts, of_experts, own = inner.own_experts, dp // inner.expert_groups, size * contexts(inner)

        def each(copies: Any) -> Any:
            kinds, place = np.unique(copies, return_inverse=True)
            return np.array([sum(kept_per_element(inner.dtype, zero, int(kind), moments)) for kind in kinds])[place.reshape(-1)]

        dense = sum(product.holding(0).words(B, sizes, size) for product in inner.products)
        routed = 0.0 * dense
        if inner.model.num_experts:
            routed = sum(product.holding(experts).words(B, sizes, size) for product in inner.products) - dense
        layer = dense * each(dp) + routed * each(of_experts)
        alone = [self._alone_keeps(inner, zero, way, own, dp) for way in PASSES[:2]]
        (enter, leave, tied), head, top = self._beside(inner, zero, own)
        saved, owed = kept(inner, sizes, size * inner.model.sequence, alone, experts)
        states, held = 0.0 * layer, 0.0 * layer
        for layers, flying, waiting, heads, is_first, is_last in rows.heaviest[:, :, at]:
            kinds = [(layers * dense, dp), (layers * routed, of_experts)]
            alike = [(layers * (dense + routed), dp)]  # of which one is shared out to fewer buckets
            sums: Any = 0.0
            if zero == 2 and not inner.split:  # else nobody knows how many gradients are then made
                several = (
                    summed(inner, item, ranks, np.maximum(0, rows.micro_batches[at] - flying))[0] for item in (kinds, alike)
                )
                sums = MARGIN * np.where(of_experts < dp, *several)
            ends = (is_first * enter + is_last * (leave + tied * (1 - is_first))) / ranks * each(dp)
            states = np.maximum(states, layers * layer + ends)
            flown = flying * saved + waiting * owed + (heads * head + np.maximum(0, top - is_last * head)) / ranks
            held = np.maximum(held, layers * layer + ends + flown + sums)
        return states, held + in_pipe(inner, size, ranks) * (rows.pp[at] > 1)

    def _alone_keeps(self, inner: StageGrid, zero: int, way: str, rows: Numeric, dp: Numeric) -> Kept:
        """Bytes that a block keeps at least of so many rows on one rank alone after a pass, less what replicas share of it.

        That are copies of weights, of which contexts have those that one rank has.
        """

        def of(inner: StageGrid, replicas: int = 1) -> tuple[float, float]:
            cells, unit = self._cells(inner, replicas)
            net = [piece.net for pass_ in PASSES[: PASSES.index(way) + 1] for piece in cells.passes[pass_] if piece.cell == BLOCK]
            return sum(line.base for line in net), unit * sum(line.slope for line in net)

        base, slope = of(inner)
        if zero == 3:
            inner = replace(inner, outer=tuple(item for item in inner.outer if item[0] not in SPLIT_SEQUENCES), options=())
            both, groups = 2 * inner.copies, inner.expert_groups
            most = np.maximum(*((1 - many / dp) / (1 - many / both) for many in (1, groups)))
            base -= most * (of(inner)[0] - of(inner, 2)[0])
        return Kept(MARGIN * (base + slope * rows), base)

    def _beside(self, inner: StageGrid, zero: int, rows: Numeric) -> tuple[tuple[int, int, int], Numeric, Numeric]:
        """Elements and bytes that one rank alone holds beside its blocks' inputs: of a grid's ranks each has its share at least.

        They are the parameters of the first stage, of the last one, and of a tied table; bytes that the last stage saves, and
        those that backward of a block takes for a while, of so many rows.
        """
        cells, unit = self._cells(inner)
        head = sum(pass_.net.at(unit * rows) for pass_ in cells.passes["F"] if pass_.cell == LEAVE)
        shared = cells.elements[BLOCK] * dtype_of(inner.dtype).nbytes if zero == 3 else 0  # gradients, until replicas sum them
        top = 0.0 if inner.split else np.maximum(0.0, MARGIN * _top(cells, unit * rows) - shared)
        return (cells.elements[ENTER], cells.elements[LEAVE], cells.elements["tied"]), MARGIN * head, top

    # -- seconds

    def floor(self, rows: PlanTable, at: Any, saving: MemoryOption) -> Any:
        """Seconds that rows take at least, wherever their ranks lie.

        That is an equal share of what one rank alone would compute, which one trace tells for all plans, products of the sizes
        that they have on the grid, and the words that these must move.
        """
        inner, sizes = rows.inner_of(saving, int(at[0])), {axis: column[at] for axis, column in rows.sizes.items()}
        shards = rows.copies[at] if rows.era.zero[saving[1]] == 3 else 1
        parts, elements, beside = self._computed(inner, sizes, rows.share[at], shards, rows.total)
        split = _split(inner, parts, elements, rows.chunks[at])
        every = moved(inner, sizes, rows.share[at] * inner.model.sequence, inner.own_experts)
        around = *beside, *_dispatched(inner, rows.share[at], rows.ranks[at]), *_gathered(inner, rows.ranks[at], shards)
        fastest = min(1 / (level.ports * level.bandwidth) for level in self.cluster.levels)
        ports = self._anywhere(sizes, [item for item in every if not item.ahead])
        parts[BLOCK] = parts[BLOCK] + ports + fastest * sum(item.size for item in around if not item.ahead)
        return _closed(parts, split, rows.pp[at], rows.micro_batches[at], [column[at] for column in rows.layers])

    def placed(self, plan: Plan, placements: Sequence[Plan]) -> list[float]:
        """Seconds that the plan takes at least with each of these placements, whose links are known."""
        key = plan.inner, plan.units
        if key not in self._work:
            shape, share = plan.inner.shape, plan.rows / plan.inner.copies
            *computed, beside = self._computed(plan.inner, shape, share, plan.inner.replicas, plan.stage_ranks * plan.pp)
            within = moved(plan.inner, shape, share * plan.inner.model.sequence, plan.inner.own_experts)
            others = *_dispatched(plan.inner, share, plan.inner.ranks), *_gathered(plan.inner, plan.inner.ranks, plan.copies)
            waited = _together(item for item in (*within, *beside, *others) if not item.ahead)
            self._work[key] = *computed, waited
        parts, elements, _ = self._work[key]
        stages = plan.layers_of(0), plan.layers_of(plan.pp - 1), min(plan.layers), int(plan.homes[-1] == 0)
        split = _split(plan.inner, parts, elements, plan.chunks)
        blocks = np.array([self._block(item) for item in placements])
        result: list[float] = _closed({**parts, BLOCK: blocks}, split, plan.pp, plan.micro_batches, stages).tolist()
        return result

    def _block(self, plan: Plan) -> float:
        """Seconds of a block of a placement."""
        key = self.times.key(plan)
        if key not in self._blocks:
            parts, elements, every = self._work[plan.inner, plan.units]
            prices, seconds = self.times.prices_of(plan), float(parts[BLOCK])
            for term in every:
                fixed, moving = self._seconds(prices, term)
                seconds += moving + (fixed if term.waited else 0.0)
            if plan.inner.replicas > 1:  # whose sums may run behind element-wise work
                sums = Moved(plan.inner.plane, "reduce_scatter", _shared(plan.inner, plan.inner.ranks, plan.copies), 4)
                seconds += max(0.0, self._seconds(prices, sums)[1] - elements)
            self._blocks[key] = seconds
        return self._blocks[key]

    def _computed(
        self, inner: StageGrid, sizes: Mapping[str, Numeric], rows: Numeric, shards: Numeric, ranks: int
    ) -> tuple[dict[str, Numeric], Numeric, list[Moved]]:
        """Seconds of arithmetic of each cell on a rank; of a block's element-wise work, behind which sums may hide; its contexts.

        These are what the ranks that share a row move along their axis. shards : of the weights of a rank of the grid, over
        replicas. ranks : all.
        """
        inside, crowding = prod(sizes.values()), self.cluster.crowding(ranks)
        result, half, size = {}, self.cluster["product.half"], dtype_of(inner.dtype).nbytes
        wider = master_dtype(inner.dtype)  # which hosts multiply 16-bit operands in
        peak = max(self.cluster.peak(item) for item in {inner.dtype, wider} if f"peak.{item}" in self.cluster.numbers)
        flop = crowding / (peak * self.cluster["product.efficiency"])
        byte = crowding * self.cluster.byte_time()
        launch = crowding * self.cluster["product.launch"]
        own, beside = rows * contexts(inner), []
        for cell in CELLS:
            launched, still, row, cubes, moves = self._of_one(inner, cell, crowding)
            result[cell] = launched + (still / shards + row * own) / inside
            beside += [Moved(move.axis, move.name, (move.still + move.row * own) / inside, move.many) for move in moves]
            for many, volume in cubes:
                share = volume * own / inside
                result[cell] = result[cell] + many * (2 * share * flop * (1 + half / share ** (1 / 3)) + launch)
        elements, passes = result[BLOCK], 4 if inner.recompute == "full" else 3
        for m, n, k, many in self._multiplied(inner, sizes, rows):  # those of gradients have these sizes in other places
            many = passes * many
            side, moving = np.minimum(np.minimum(m, n), k), size * (m * k + k * n + m * n) * byte
            result[BLOCK] = result[BLOCK] + many * (np.maximum(2 * m * n * k * flop * (1 + half / side), moving) + launch)
        return result, elements, beside

    def _multiplied(
        self, inner: StageGrid, sizes: Mapping[str, Numeric], rows: Numeric
    ) -> Iterator[tuple[Numeric, Numeric, Numeric, Numeric]]:
        """(m, n, k, how many) of a block's products on a rank, forward: of each of its experts one, of as many tokens."""
        experts, groups, model = inner.own_experts, inner.expert_groups, inner.model
        for gemm in inner.products:
            (m, n, k), many = gemm.local(sizes, rows * model.sequence), gemm.count(sizes)
            if not gemm.expert:
                yield m, n, k, many
                continue
            into = gemm.sizes["k"] == model.hidden  # else out of the experts' width
            for width, tokens, times in (
                (gemm.expert, m * model.num_chosen * groups / model.num_experts, experts),
                (model.shared_width / model.matrices[-1][0], m, 1),
            ):
                if width:
                    yield tokens, n * (width if into else 1), k * (1 if into else width), many * times

    def _of_one(self, inner: StageGrid, cell: str, crowding: float) -> SingleRankWork:
        key = inner.recompute, inner.split, inner.outer, inner.options, cell, crowding
        if key in self._alone:
            return self._alone[key]
        (cells, unit), cubes, moves = self._cells(inner), [], []
        launched, size, slope, attended, byte = 0.0, 0.0, 0.0, 0.0, crowding * self.cluster.byte_time()
        prices = self.times.outer("dp", 1, 1)
        every = (
            (kind, many - cells.hidden[at].get(kind, 0))
            for at in ((cell, way) for way in PASSES)
            for kind, many in cells.counts[at].items()
        )
        for kind, many in every:
            still, item = cells.kinds[kind].at(0), cells.kinds[kind].at(1)
            if item.kind == "elements":
                launched += many * crowding * self.cluster["elements.launch"]
                size += many * (still.read + still.written) * byte
                slope += many * ((item.read - still.read) + (item.written - still.written)) * byte
            elif (
                item.kind == "product" and item.batch > still.batch
            ):  # of attention, whose sizes are those of a head on every grid
                launch = self.cluster["product.launch"]
                launched += many * crowding * launch
                attended += many * crowding * (prices.product(item) - launch)
            elif item.kind == "product" and cell != BLOCK:
                cubes.append((many, unit * item.m * item.n * item.k))
            elif item.kind == "move" and cell == BLOCK and not SPLIT_SEQUENCES.isdisjoint(part_of(item.axis).names):
                still_words, width = still.words, many * dtype_of(item.dtype).nbytes
                moves.append(
                    AloneMove(item.axis, item.name, many, width * still_words, unit * width * (item.words - still_words))
                )
        row = unit * (MARGIN * slope + attended)
        self._alone[key] = SingleRankWork(MARGIN * launched, MARGIN * size, row, tuple(cubes), tuple(moves))
        return self._alone[key]

    def _cells(self, inner: StageGrid, replicas: int = 1) -> tuple[Cells, float]:
        """The cells of a grid of one rank, and their units for a row of all its contexts; replicas share their weights.

        What is no line of any number of rows is of one row.
        """
        unit, replicas = inner.copies // contexts(inner), replicas * inner.copies if replicas > 1 else 1
        item = replace(inner, scheme=SERIAL, axes=tuple(alone(SERIAL).sizes), regather=False, unit=unit, replicas=replicas)
        cells, units = self.times.store.cells(item, SEVERAL)
        return (cells, units / SEVERAL) if units > 1 else self.times.store.cells(item, 1)

    # -- communication

    def _seconds(self, prices: Prices, place: Moved) -> tuple[float, float]:
        """Seconds of launches and hops, and of volume, of communications along an axis whose links are known."""
        members = prices.members(place.axis)
        of_message = members / (members - 1) if place.name == "broadcast" else 1.0  # whose words are those that its root sends
        words: Any = of_message * place.size / place.many / dtype_of("float32").nbytes  # mostly no whole number
        fixed, moving = prices.move(move(place.name, place.axis, words, "float32"))
        return place.many * fixed, place.many * moving

    def _anywhere(self, sizes: Mapping[str, Numeric], every: Sequence[Moved]) -> Numeric:
        """Seconds for which communications use ports, and of the hops of those that are waited for, at least, wherever ranks lie.

        Ports between nodes of s ranks carry their fair share. Of an axis whose rings have k members in a node, s/k rings leave
        it. The k of all axes multiply to s at most (Loomis and Whitney), and of what does not leave the node it is the size of
        the axis. So the sum of volume·s/k is at least n times the geometric mean of what their n axes would have with the whole
        s. Every message has the hops of its axis.
        """
        levels = self.cluster.levels
        if len(levels) < 2 or self.cluster["host.slots"]:
            return 0.0
        hop, launch = min(level.latency for level in levels), self.cluster["collectives.launch"]
        nothing = 0.0 * next(iter(sizes.values()))
        volumes, fixed = dict.fromkeys(sizes, nothing), nothing
        for item in every:
            volumes[item.axis] = volumes[item.axis] + item.size
            hops = (launch + hop * (sizes[item.axis] - 1) * (item.name != "all_reduce")) * (item.size > 0) * item.many
            fixed = fixed + hops * item.waited
        node, port = levels[-2].size, levels[-1]
        fastest = min(1 / level.bandwidth for level in levels) * sum(volumes.values())
        least: Numeric = np.inf
        active = {axis: np.greater(volume, 0) for axis, volume in volumes.items()}
        for inside in product((False, True), repeat=len(sizes)):
            kept = {axis: active[axis] & item for axis, item in zip(sizes, inside, strict=True)}
            fits = np.all([active[axis] | (not item) for axis, item in zip(sizes, inside, strict=True)], axis=0)
            share = node / prod(np.where(item, sizes[axis], 1) for axis, item in kept.items())
            out = [np.where(active[axis] & ~item, volumes[axis], 0.0) for axis, item in kept.items()]
            many = np.maximum(1, sum(item > 0 for item in out))
            mean = many * (prod(np.where(item > 0, item, 1.0) for item in out) / share) ** (1 / many) * (sum(out) > 0)
            taken = np.maximum(mean, sum(out) / node) * node / (port.ports * port.bandwidth)
            least = np.minimum(least, np.where(fits & (share >= 1), taken, np.inf))
        return np.maximum(fastest, least) + fixed


def _gathered(inner: StageGrid, ranks: Numeric, copies: Numeric) -> Iterator[Moved]:
    """Gathers of a block's weights that ranks share with the replicas of a grid; of all of them, with ZeRO-3."""
    if inner.replicas > 1:
        passes = 3 if inner.recompute == "full" else 2
        yield Moved(inner.plane, "all_gather", passes * _shared(inner, ranks, copies), passes * 4, True, inner.device == "cuda")


def _shared(inner: StageGrid, ranks: Numeric, copies: Numeric) -> Numeric:
    """Bytes of a block's weights that a rank receives of other replicas when it gathers them; of experts, of none."""
    model = inner.model
    elements = model.block_elements - model.num_experts * 3 * model.hidden * model.expert_width
    return elements / (ranks * copies) * (copies - 1) * dtype_of(inner.dtype).nbytes


def _dispatched(inner: StageGrid, rows: Numeric, ranks: Numeric) -> Iterator[Moved]:
    """Words of all-to-alls to experts and back: of a rank's tokens, those of experts that only other ranks along ep hold.

    ranks : of a grid, on which such a rank has its share of so many rows.
    As many tokens go to each expert.
    """
    model, groups = inner.model, inner.expert_groups
    if groups > 1:
        passes = 5 if inner.recompute == "full" else 4
        words = rows * model.sequence * model.num_chosen * model.hidden / ranks * (1 - 1 / groups)
        rows_of = [axis for axis in row_axes(alone(inner.scheme).residual) if inner.shape[axis] > 1]
        yield Moved("·".join(("ep", *rows_of)), "all_to_all", passes * words * dtype_of(inner.dtype).nbytes, passes)


def _top(cells: Cells, units: Numeric) -> Numeric:
    """The most bytes that backward of a block takes beyond those before it."""
    net, top = 0.0, 0.0
    for piece in next(list(run) for cell, run in groupby(cells.passes["B"], lambda item: item.cell) if cell == BLOCK):
        top = np.maximum(top, net + piece.top.at(units))
        net = net + piece.net.at(units)
    return top


class SplitPasses(NamedTuple):
    """Seconds of a block's products at least, where backward is split: of forward, and as much of gradients of weights; of X.

    single : whether each rank has one chunk (ZB-H1)
    """

    forward: Numeric
    inputs: Numeric
    single: Numeric


def _split(inner: StageGrid, parts: Mapping[str, Numeric], elements: Numeric, chunks: Numeric) -> SplitPasses | None:
    """The seconds of its passes; None where backward is one."""
    again = inner.recompute == "full"
    forward = (parts[BLOCK] - elements) / (3 + again)
    return SplitPasses(forward, (1 + again) * forward, np.equal(chunks, 1)) if inner.split else None


def _closed(
    parts: Mapping[str, Numeric],
    split: SplitPasses | None,
    pp: Numeric,
    micro_batches: Numeric,
    layers: Sequence[Numeric],
) -> Numeric:
    """Seconds of a pipeline at least: of its first rank, and of its last one behind those before it.

    split : of a block, where backward is split: the last rank waits for the forwards of those before it, and is never sure to
    wait again. layers : of the first and the last rank, and of the smallest stage; whether the first has the last stage too.
    """
    (first, last, least, both), block = layers, parts[BLOCK]
    of_first, of_last = first * block + parts[ENTER] + parts[LEAVE] * both, last * block + parts[LEAVE] * (1 - both)
    if split is None:
        return np.maximum(micro_batches * of_first, micro_batches * of_last + (pp - 1) * least * block)
    result = np.maximum(micro_batches * of_first, micro_batches * of_last + (pp - 1) * least * split.forward)
    return np.maximum(result, split.single * _of_one_chunk(parts, split, pp, micro_batches, layers))


def _of_one_chunk(
    parts: Mapping[str, Numeric], split: SplitPasses, pp: Numeric, micro_batches: Numeric, layers: Sequence[Numeric]
) -> Numeric:
    """The same of ranks of one chunk, as `PredictedStep.least` counts the ops of the first and of the last rank.

    What is known of all passes together counts as often as the op of them that comes least.
    """
    (first, last, least, _), (forward, inputs, _) = layers, split
    others = (pp - 1) * least
    rest = parts[BLOCK] - 2 * forward - inputs
    waiting = np.maximum(0, micro_batches - pp)
    behind = 1 + waiting
    of_first = (others + behind * first) * forward + (others + micro_batches * first) * inputs + micro_batches * first * forward
    of_last = (others + micro_batches * last) * (forward + inputs) + waiting * last * forward
    return np.maximum(of_first + behind * (first * rest + parts[ENTER]), of_last + waiting * (last * rest + parts[LEAVE]))
