"""The executor of a cuboid product in pieces: operands arrive, and sums leave, while others are multiplied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ...comm.axis import Axis
from ...comm.device.arrays import Array, is_half, is_on_device
from ...comm.pending import Completed, Pending
from ...layout.layout import Coordinates
from ..algorithms.workspace import Workspace
from ..local.blas import accumulation_like, add, scale
from .behind import BehindQueue
from .schedule import DimRange, DimRanges, OperandPart, PiecedSchedule, Round, SumCell, schedule_of, shared, slabs, within
from .slabs import cut_dims

WINDOW = 2
"""Rounds in flight: the one that is waited for, and the next, so that a port does not wait for this rank's arithmetic."""


@dataclass
class PiecedOperand:
    """An operand on its way along `axis` in rounds, of which there are none where it is here as a whole.

    dim : the dim of the stored block that the axis splits. whole : the gathered shape. own : the range that is here at first.
        array : the gathered block. operand : that, as it is multiplied
    """

    workspace: Workspace
    name: str
    axis: Axis
    dim: int
    whole: tuple[int, int]
    rounds: Sequence[Round]
    own: DimRange
    array: Array = None
    operand: Array = None

    def begin(self, block: Array) -> None:
        """Lay the own block into the gathered one; on the host 16-bit floats are laid into another in float32, too."""
        self.block = block
        self.array = self.workspace.buffer(self.name, self.whole, block)
        wide = is_half(block) and not is_on_device(block)
        like = accumulation_like(block)
        self.operand = self.workspace.buffer(f"wide {self.name}", self.whole, like) if wide else self.array
        own = OperandPart(self.own, (0, self.whole[1 - self.dim]))
        self.workspace.copy(self.array[own.slices(self.dim)], block)
        self._widen(own)

    def post(self, number: int) -> tuple[Pending | None, Pending | None]:
        """Start a round; returns its receive and its send. Parts of rows travel through memory where each is adjacent."""
        source, receive, target, send = self.rounds[number]
        coming = None if receive is None else self.axis.start_receive(self._landing(receive), source)
        if send is None:
            return coming, None
        part = self.block[send.slices(self.dim)]
        if not send.in_rows(self.dim, self.whole[1]):
            part = self.workspace.copy(self._adjacent(send.moved(self.own[0])), part)
        return coming, self.axis.start_send(part, target)

    def arrived(self, number: int) -> None:
        """Put together what a round has brought."""
        receive = self.rounds[number].receive
        if receive is None:
            return
        if not receive.in_rows(self.dim, self.whole[1]):
            self.workspace.copy(self.array[receive.slices(self.dim)], self._landing(receive))
        self._widen(receive)

    def _landing(self, part: OperandPart) -> Array:
        """Buffer in which a part of the gathered block is received."""
        return self.array[part.slices(0)] if part.in_rows(self.dim, self.whole[1]) else self._adjacent(part)

    def _adjacent(self, part: OperandPart) -> Array:
        """Memory of a part, adjacent: of rows of the gathered block, in which parts of the same rows follow each other."""
        rows, columns = part.slices(self.dim)
        flat = self.workspace.buffer(f"columns {self.name}", (prod(self.whole),), self.array)
        height = rows.stop - rows.start
        start = rows.start * self.whole[1] + height * columns.start
        return flat[start : start + part.words].reshape((height, columns.stop - columns.start))

    def _widen(self, part: OperandPart) -> None:
        if self.operand is not self.array:
            at = part.slices(self.dim)
            self.workspace.copy(self.operand[at], self.array[at])


class Rounds:
    """The rounds of arrivals, one after the other, of which `WINDOW` are in flight; and what is sent meanwhile.

    behind : what is gathered behind the product begins its next piece where nothing of the product's is under way, so that what
        is waited for is delayed by at most one piece of what is not; None where its sums are under way until its end
    """

    def __init__(self, arrivals: Sequence[PiecedOperand], behind: BehindQueue | None = None) -> None:
        self._behind = behind
        self._rounds = [(arrival, number) for arrival in arrivals for number in range(len(arrival.rounds))]
        self._posted: list[Pending | None] = []
        self._sends: list[Pending] = []
        self._here = 0
        self._post()

    def need(self, count: int) -> None:
        """Return once the first `count` rounds have arrived."""
        while self._here < count:
            self._take()

    def progress(self) -> None:
        """Take what has arrived."""
        while self._here < len(self._posted) and ((first := self._posted[self._here]) is None or first.done):
            self._take()
        if self._behind and self._here == len(self._rounds) and all(send.done for send in self._sends):
            self._behind.step()

    def send(self, axis: Axis, array: Array, cell: SumCell) -> None:
        """Send a cell, which stays as it is until `finish`; its tag tells it from others, whose products may be done before."""
        self._sends.append(axis.start_send(array, cell.member, cell.number))

    def need_all(self) -> None:
        """Return once all rounds have arrived."""
        self.need(len(self._rounds))

    def finish(self) -> None:
        """Return once all that was sent may be overwritten."""
        for pending in self._sends:
            pending.wait()
        self._sends = []

    def _take(self) -> None:
        """Wait for the next round, and start the one behind those in flight before anything is done with it."""
        pending = self._posted[self._here]
        if pending is not None:
            pending.wait()
            self._posted[self._here] = None
        arrival, number = self._rounds[self._here]
        self._here += 1
        self._post()
        arrival.arrived(number)

    def _post(self) -> None:
        for arrival, number in self._rounds[len(self._posted) : self._here + WINDOW]:
            coming, leaving = arrival.post(number)
            self._posted.append(coming)
            if leaving is not None:
                self._sends.append(leaving)


class Summation:
    """The summands of C[m:x, n:y]: they leave along `axis` cell by cell, and those that come are added in the members' order.

    dim : the dim of C that is cut. sizes : of the members' parts of it. cells : in the order of their products. 16-bit floats are
        multiplied and added in float32; what travels is rounded
    """

    def __init__(
        self,
        workspace: Workspace,
        axis: Axis,
        dim: int,
        whole: tuple[int, int],
        sizes: Sequence[int],
        cells: Sequence[SumCell],
    ) -> None:
        self.workspace, self.axis, self.dim, self.whole, self.cells = workspace, axis, dim, whole, cells
        self.sizes = sizes
        self.own = [cell for cell in self.cells if cell.member == axis.index]
        self.others = [member for member in range(axis.size) if member != axis.index]

    def begin(self, out: Array) -> list[Array]:
        """Post the receives; returns the memory of each cell."""
        rest, extent = self.whole[1 - self.dim], self.whole[self.dim]
        self._like, flat = out, self.workspace.buffer("partial", (rest * extent,), accumulation_like(out))
        own = rest * self.sizes[self.axis.index]
        parts = self.workspace.buffer("parts", (len(self.others) * own,), out)
        base = sum(self.sizes[: self.axis.index])
        self._coming: dict[SumCell, list[tuple[Array, Pending]]] = {cell: [] for cell in self.own}
        for number, member in enumerate(self.others):
            for cell in self.own:
                memory = self._memory(parts[number * own : (number + 1) * own], cell, base)
                self._coming[cell].append((memory, self.axis.start_receive(memory, member, cell.number)))
        return [self._memory(flat, cell, 0) for cell in self.cells]

    def leaving(self, memory: Array, cell: SumCell) -> Array:
        """A cell as it travels."""
        if not is_half(self._like):
            return memory
        return self.workspace.copy(self.workspace.buffer(f"cell {cell.member}.{cell.number}", memory.shape, self._like), memory)

    def _memory(self, flat: Array, cell: SumCell, base: int) -> Array:
        rest, width = self.whole[1 - self.dim], cell.stop - cell.start
        shape = (width, rest) if self.dim == 0 else (rest, width)
        return flat[rest * (cell.start - base) : rest * (cell.stop - base)].reshape(shape)

    def finish(self, memories: list[Array], out: Array, beta: Any) -> None:
        """out = β·out and the members' summands, added in their order; β·out comes along with this rank's own."""
        if beta != 0:
            scale(out, beta)
        base = sum(self.sizes[: self.axis.index])
        for cell, own in zip(self.cells, memories, strict=True):
            if cell.member != self.axis.index:
                continue
            low, high = cell.start - base, cell.stop - base
            target = out[low:high] if self.dim == 0 else out[:, low:high]
            if beta != 0:
                own += target
            coming = [pending.wait() for _, pending in self._coming[cell]]
            summands = [*coming[: self.axis.index], own, *coming[self.axis.index :]]
            total = self.workspace.buffer("sum", own.shape, own) if is_half(out) else target
            self.workspace.copy(total, summands[0])
            for summand in summands[1:]:
                add(summand, total, 1)
            if total is not target:
                self.workspace.copy(target, total)


class CellMemory(NamedTuple):
    """Memory of a part of C, its ranges of m and n, and the cell that it is; None where C stays as a whole.

    leave : makes of the memory of another member's cell what travels
    """

    ranges: DimRanges
    memory: Array
    cell: SumCell | None = None
    leave: Callable[[Array, SumCell], Array] | None = None


class WholeMoves(NamedTuple):
    """How operands move that are not cut: the gather of one, memory for a summand and for parts of C, and their sum, started."""

    gather: Callable[[str, Array], Array]
    summand: Callable[[Array], tuple[Array, Array | None]]
    add: Callable[[Array, Array | None, Array, Any], Pending]


HERE = WholeMoves(lambda name, block: block, lambda out: (out, None), lambda partial, parts, out, beta: Completed(out))
"""How they move along axes of one member: they are here."""


class StartedProduct(Pending):
    """A product whose operands are here and multiplied, and whose sums along z may be in flight; `wait` returns C.

    gathered : A and B as they were multiplied, before 16-bit floats were widened
    """

    def __init__(self, gathered: Mapping[str, Array], finish: Callable[[], Array]) -> None:
        self.gathered, self._finish = gathered, finish
        self._carried = None
        self._ended = False

    @property
    def done(self) -> bool:
        """Return whether C was waited for."""
        return self._ended

    def wait(self) -> Array:
        """C; a second call returns the same."""
        if not self._ended:
            self._result, self._ended = self._finish(), True
        return self._result


class PiecedProduct:
    """A cuboid product whose messages between nodes travel in `plan.pieces` pieces; in a node's memory they are whole.

    A's pieces arrive along y, then B's along x, `WINDOW` rounds in flight, while what is here is multiplied slab by slab; a
    cell of C leaves along z as soon as its last product is done. Words are those of the product in one piece; messages are
    those of `schedule.messages` for each axis that is cut.

    plan : a `CuboidPlan`. grid_shape, at : of all its axes, and this rank's coordinates. moves : of a, b and c, their axis, the
        dim of their fine split, and the shape of what is gathered
    """

    def __init__(
        self,
        plan: Any,
        grid_shape: Mapping[str, int],
        at: Coordinates,
        workspace: Workspace,
        moves: Mapping[str, Any],
        whole: WholeMoves = HERE,
    ) -> None:
        self.plan, self.grid_shape, self.at = plan, grid_shape, at
        self.workspace, self._moves, self._move = workspace, moves, whole
        self._z: Axis = moves["c"].axis

    def start(self, blocks: Mapping[str, Array], out: Array, alpha: Any = 1, beta: Any = 0, here: Any = None) -> StartedProduct:
        """Start out = α·op(A)·op(B) + β·out. here : operands that were gathered before; of the others `blocks` has the blocks."""
        here, roles = here or {}, dict(zip("abc", "yxz", strict=True))
        alike = {**blocks, **here, "c": out}
        whole = [name for name in roles if name in here or self._moves[name].axis.offers_views(alike[name])]
        staged = [getattr(self.plan, roles[name]) for name in whole]
        order = schedule_of(self.plan, self.grid_shape, self.at, staged)
        arrivals = [self._arrival(name, blocks, here, order) for name in "ab"]
        flow = Rounds(arrivals, None if order.cells else self.workspace.behind)
        places, finish = self._places(out, beta, order.cells)
        self._run(order, arrivals, flow, places, alpha, beta if self._z.size == 1 else 0)
        flow.need_all()
        ending = finish()

        def wait() -> Array:
            flow.finish()
            ending()
            return out

        return StartedProduct({arrival.name: arrival.array for arrival in arrivals}, wait)

    def _run(
        self,
        order: PiecedSchedule,
        arrivals: Sequence[PiecedOperand],
        flow: Rounds,
        places: Sequence[CellMemory],
        alpha: Any,
        beta: Any,
    ) -> None:
        """Multiply what is here, slab by slab where something travels meanwhile, and send each cell that is done."""
        work, in_slabs = prod(order.extents.values()), order.cut or bool(self.workspace.behind)
        left = Counter(number for step in order.steps for number, place in enumerate(places) if shared(step.ranges, place.ranges))
        for step in order.steps:
            flow.need(step.needs)
            for number, place in enumerate(places):
                ranges = shared(step.ranges, place.ranges)
                if ranges is None:
                    continue
                first = beta if step.first else 1
                for slab in slabs(ranges, work, cut_dims(place.memory)) if in_slabs else (ranges,):
                    self._multiply(arrivals, slab, place, alpha, first if slab["k"][0] == ranges["k"][0] else 1)
                    flow.progress()
                left[number] -= 1
                if left[number] == 0 and place.leave is not None and place.cell is not None:
                    flow.send(self._z, place.leave(place.memory, place.cell), place.cell)

    def _arrival(self, name: str, blocks: Mapping[str, Array], here: Mapping[str, Array], order: PiecedSchedule) -> PiecedOperand:
        """An operand that arrives in pieces, or as a whole: given, through the node's memory, or without elements."""
        moves = self._moves[name]
        rounds, own = order.rounds[name], order.own[name]
        arrival = PiecedOperand(self.workspace, name, moves.axis, moves.dim, moves.whole, rounds, own)
        if name in order.cut:
            arrival.begin(blocks[name])
        else:
            if name in here:
                arrival.array = here[name]
            elif prod(moves.whole) == 0:
                arrival.array = self.workspace.buffer(name, moves.whole, blocks[name])
            else:
                arrival.array = self._move.gather(name, blocks[name])
            arrival.operand = self.workspace.widened(name, arrival.array)
        return arrival

    def _places(
        self, out: Array, beta: Any, cells: Sequence[SumCell]
    ) -> tuple[list[CellMemory], Callable[[], Callable[[], object]]]:
        """Buffers for products of C, and the function that starts their sums and returns what ends them."""
        z, (m, n), dim = self._z, self._moves["c"].whole, self.plan.c_fine
        whole = {"m": (0, m), "n": (0, n)}
        if m * n == 0:
            return [], lambda: lambda: None
        if z.size > 1 and cells:
            summation = Summation(self.workspace, z, dim, (m, n), self.plan.fine_sizes("c", (m, n)[dim], z.size), cells)
            memories = summation.begin(out)
            places = [
                CellMemory(
                    {**whole, "mn"[dim]: (cell.start, cell.stop)},
                    memory,
                    cell,
                    None if cell.member == z.index else summation.leaving,
                )
                for cell, memory in zip(cells, memories, strict=True)
            ]
            return places, lambda: partial(summation.finish, memories, out, beta)
        product, parts = (out, None) if z.size == 1 else self._move.summand(out)
        memory = self.workspace.buffer("product in float32", (m, n), accumulation_like(out)) if is_half(out) else product

        def start() -> Callable[[], object]:
            if memory is not product:
                self.workspace.copy(product, memory)
            return (lambda: None) if z.size == 1 else self._move.add(product, parts, out, beta).wait

        return [CellMemory(whole, memory)], start

    def _multiply(self, arrivals: Sequence[PiecedOperand], slab: DimRanges, place: CellMemory, alpha: Any, beta: Any) -> None:
        """One slab: ranges of the operands into those of a place."""
        letters = (self.plan.a_names, self.plan.b_names)
        a, b = (item.operand[within(slab, names)] for item, names in zip(arrivals, letters, strict=True))
        lows = {letter: place.ranges[letter][0] for letter in "mn"}
        moved = {letter: (slab[letter][0] - low, slab[letter][1] - low) for letter, low in lows.items()}
        target = place.memory[within(moved, "mn")]
        scratch = None if beta == 0 else self.workspace.scratch(target, prod(self._moves["c"].whole))
        self.workspace.accumulate(a, b, self.plan.form, target, alpha, beta, scratch)
