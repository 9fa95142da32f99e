"""The executor of a cuboid product in pieces: operands arrive, and sums leave, while others are multiplied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ...comm.axis import Axis
from ...comm.device.arrays import Array, is_half
from ...comm.pending import Completed, Pending
from ...layout.layout import Coordinates
from ..algorithms.workspace import Workspace
from ..local.blas import accumulation_like, add, scale
from .arrivals import TAG, GatheredBehind, PiecedOperand, Rounds
from .schedule import DimRanges, PiecedSchedule, SumCell, is_crosswise, schedule_of, shared, slabs, within
from .slabs import cut_dims


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
        (start, stop), (low, high) = cell.part
        at = self.whole[1 - self.dim] * (start - base) + (stop - start) * low
        shape = (stop - start, high - low) if self.dim == 0 else (high - low, stop - start)
        return flat[at : at + cell.part.words].reshape(shape)

    def finish(self, memories: list[Array], out: Array, beta: Any) -> None:
        """out = β·out and the members' summands, added in their order; β·out comes along with this rank's own."""
        if beta != 0:
            scale(out, beta)
        base = sum(self.sizes[: self.axis.index])
        for cell, own in zip(self.cells, memories, strict=True):
            if cell.member != self.axis.index:
                continue
            target = out[cell.part.moved(-base).slices(self.dim)]
            if beta != 0:
                own += target
            coming = [pending.wait() for _, pending in self._coming[cell]]
            summands = [*coming[: self.axis.index], own, *coming[self.axis.index :]]
            total = summands[0]  # adjacent in memory, as columns of C are not
            if is_half(out):
                total = self.workspace.copy(self.workspace.buffer("sum", own.shape, own), total)
            for summand in summands[1:]:
                add(summand, total, 1)
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
        """Start out = α·op(A)·op(B) + β·out.

        here : operands that were gathered before, or are on their way; of the others `blocks` has the blocks
        """
        here, roles = here or {}, dict(zip("abc", "yxz", strict=True))
        ahead = {name: item for name, item in here.items() if isinstance(item, GatheredBehind)}
        alike, coming = {**blocks, **here, "c": out}, roles.keys() - ahead.keys()
        whole = [name for name in coming if name in here or self._moves[name].axis.offers_views(alike[name])]
        staged = [getattr(self.plan, roles[name]) for name in whole]
        order = schedule_of(self.plan, self.grid_shape, self.at, staged)
        arrivals = [self._arrival(name, blocks, here, order) for name in "ab"]
        flow = Rounds(arrivals, self.workspace.behind)
        flow.post()
        places, finish = self._places(out, beta, order.cells)
        self._run(order, arrivals, flow, places, alpha, beta if self._z.size == 1 else 0)
        flow.need_all()
        ending = finish()

        def wait() -> Array:
            flow.finish()
            ending()
            for item in ahead.values():
                item.wait()
            self.workspace.behind.step()
            return out

        return StartedProduct({arrival.name: arrival.array for arrival in arrivals}, wait)

    def cut(self, name: str) -> tuple[int, bool]:
        """Into how many pieces A or B is cut, and whether across: what other sizes of the other operand may change."""
        return self.plan.pieces, is_crosswise(self.plan, name, self.grid_shape)

    def start_behind(self, name: str, block: Array) -> GatheredBehind:
        """Start gathering A or B, which this product will need, between nodes, while others run. Words: gathered − own."""
        moves, order = self._moves[name], schedule_of(self.plan, self.grid_shape, self.at)
        sizes = moves.axis, moves.dim, moves.whole
        arrival = PiecedOperand(self.workspace, name, *sizes, order.rounds[name], order.own[name], TAG)
        arrival.begin(block, wide=False)
        alone = all(other.axis.size == 1 for role, other in self._moves.items() if role != name)
        result = GatheredBehind(self.workspace.behind, arrival, self.cut(name), alone)
        self.workspace.behind.add(result)
        return result

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
        moves, given = self._moves[name], here.get(name)
        if isinstance(given, GatheredBehind) and given.cut == self.cut(name):
            return given.take()
        rounds, own = order.rounds[name], order.own[name]
        arrival = PiecedOperand(self.workspace, name, moves.axis, moves.dim, moves.whole, rounds, own)
        if given is not None:
            arrival.complete(given.wait() if isinstance(given, GatheredBehind) else given)
        elif name in order.cut:
            arrival.begin(blocks[name])
        elif prod(moves.whole) == 0:
            arrival.complete(self.workspace.buffer(name, moves.whole, blocks[name]))
        else:
            arrival.complete(self._move.gather(name, blocks[name]))
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
                    cell.ranges(dim),
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
