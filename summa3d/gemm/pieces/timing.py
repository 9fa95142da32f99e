"""Predicted seconds of a product in pieces, by running its schedule on two clocks: that of the port, and that of arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dtypes import Dtype
from ...layout.layout import Coordinates, split_range, without
from ..algorithms.ca25d import Ca25dPlan
from ..algorithms.cuboid import CuboidPlan
from ..algorithms.oned import OnedPlan, with_alone
from ..algorithms.panels import divided, panels
from ..algorithms.summa import SummaPlan, normal
from ..algorithms.tesseract import TesseractPlan
from .schedule import DimRanges, SumCell, pieces_of, schedule_of, shared

if TYPE_CHECKING:
    from ...comm.grid import BaseGrid
    from ..cost.machine import Machine
    from ..cost.steps import GridShape

CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of pieces that are compared."""

SecondsToMove = Callable[[int], float]
SecondsToMultiply = Callable[[int, int, int], float]


class MovedStep(NamedTuple):
    """A local product, of these m, n, k, the words that arrive for it, a message each, and those that leave when it is done."""

    arriving: tuple[int, ...]
    product: tuple[int, int, int]
    leaving: int = 0


def seconds_of(
    plan: Any,
    grid_shape: GridShape,
    at: Coordinates,
    transfer: SecondsToMove,
    multiply: SecondsToMultiply,
    staged: Collection[str] = (),
) -> float:
    """Seconds of a rank's product whose messages travel one after the other; those of several pieces behind what is multiplied.

    plan : of an algorithm that has `pieces`. transfer : seconds of a message of so many words. multiply : seconds of a local
    product of these m, n, k
    """
    if isinstance(plan, CuboidPlan):
        return seconds_of_cuboid(plan, grid_shape, at, transfer, multiply, staged)
    if isinstance(plan, OnedPlan) and plan.sequence:
        return seconds_of_cuboid(plan.as_cuboid(), with_alone(grid_shape, 1), with_alone(at, 0), transfer, multiply, staged)
    steps, in_pieces = steps_of(plan, grid_shape, at, staged), plan.pieces > 1
    if not in_pieces:
        return sum(sum(map(transfer, step.arriving)) + multiply(*step.product) + _leave(step, transfer) for step in steps)
    port = now = gone = 0.0
    for step in steps:
        port += sum(map(transfer, step.arriving))
        now = max(now, port) + multiply(*step.product)
        gone = max(gone, now) + _leave(step, transfer) if step.leaving else gone
    return max(now, gone, port + sum(_leave(step, transfer) for step in steps))


def _leave(step: MovedStep, transfer: SecondsToMove) -> float:
    return transfer(step.leaving) if step.leaving else 0.0


def steps_of(plan: SummaPlan | OnedPlan, grid_shape: GridShape, at: Coordinates, staged: Collection[str] = ()) -> list[MovedStep]:
    """The products of a plan of panels, or of a 1-D plan whose C is summed everywhere, in order; sums over depths come last.

    In one piece a rank is busy with the panels that it sends, too.
    """
    if isinstance(plan, OnedPlan):
        (m, k), (_, n) = op_blocks(plan, grid_shape, at)
        size, summed = grid_shape[plan.y], plan.split_dim == "k"
        parts = pieces_of(m, plan.pieces) if summed and size > 1 and plan.y not in staged else [(0, m)]
        each = 2 * (size - 1) * summed
        return [MovedStep((), (stop - start, n, k), each * (stop - start) * n // size) for start, stop in parts]
    plan = plan.swapped() if plan.by_transpose else plan
    (m, k), (_, n) = op_blocks(plan, grid_shape, at)
    form, pieces = normal(plan.form), plan.pieces_on(grid_shape, staged)
    rows, columns = grid_shape[plan.x], grid_shape[plan.y]
    stays = form == "nn" or isinstance(plan, Ca25dPlan)
    span = split_range(0, plan.k, grid_shape[plan.d], at[plan.d]) if isinstance(plan, Ca25dPlan) else (0, plan.k)
    span = span if stays else (0, plan.n if form == "nt" else plan.m)

    def words(size: int, owner: int, index: int, count: int) -> tuple[int, ...]:
        return (count,) if size > 1 and (owner != index or pieces == 1) else ()

    result = []
    grain = plan.grain("k" if stays else "n" if form == "nt" else "m", 0)
    for cut in divided(panels(*span, rows, columns, plan.panel, grain), pieces):
        from_row, from_column = (columns, cut.y_owner, at[plan.y]), (rows, cut.x_owner, at[plan.x])
        if stays:
            coming = (*words(*from_row, cut.width * m), *words(*from_column, cut.width * n))
            result.append(MovedStep(coming, (m, n, cut.width)))
        elif form == "nt":
            leaving = (columns - 1) * m * cut.width // columns
            result.append(MovedStep(words(*from_column, cut.width * k), (m, cut.width, k), leaving))
        else:
            result.append(MovedStep(words(*from_row, cut.width * k), (cut.width, n, k), (rows - 1) * n * cut.width // rows))
    if isinstance(plan, Ca25dPlan) or (isinstance(plan, TesseractPlan) and form == "tn"):
        depth, copy = grid_shape[plan.d], prod(without(plan.c_layout, plan.d).local_shape(plan.c_shape, grid_shape, at))
        result.append(MovedStep((), (0, 0, 0), (1 if stays else 2) * (depth - 1) * copy // depth))
    return result


def op_blocks(plan: Any, grid_shape: GridShape, at: Coordinates) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of this rank's blocks of op(A) and op(B)."""
    a, b, _ = (layout.local_shape(shape, grid_shape, at) for layout, shape in plan.stored)
    return (a if plan.form[0] == "n" else a[::-1]), (b if plan.form[1] == "n" else b[::-1])


def seconds_of_cuboid(
    plan: CuboidPlan,
    grid_shape: GridShape,
    at: Coordinates,
    transfer: SecondsToMove,
    multiply: SecondsToMultiply,
    staged: Collection[str],
) -> float:
    """`seconds_of` a cuboid product, by its schedule."""
    order = schedule_of(plan, grid_shape, at, staged)
    extents = order.extents
    work, port, arrived = prod(extents.values()), 0.0, [0.0]
    for operand in "ab":
        for item in order.rounds[operand]:
            port += transfer(max(part.words for part in (item.receive, item.send) if part is not None))
            arrived.append(port)
    whole = {letter: (0, extents[letter]) for letter in "mn"}
    places: list[tuple[SumCell | None, DimRanges]] = [(cell, cell.ranges(plan.c_fine)) for cell in order.cells]
    places = places or [(None, whole)]
    own, area = (
        at[plan.z],
        {number: prod(stop - start for start, stop in place.values()) for number, (_, place) in enumerate(places)},
    )
    if plan.pieces == 1:
        leaving = sum(
            transfer(area[number]) for number, (cell, _) in enumerate(places) if cell is not None and cell.member != own
        )
        return port + leaving + multiply(*(extents[letter] for letter in "mnk"))
    ends, now = {}, 0.0
    for step in order.steps:
        now = max(now, arrived[step.needs])
        for number, (_, place) in enumerate(places):
            ranges = shared(step.ranges, place)
            if ranges is not None and work:
                now += multiply(*(ranges[letter][1] - ranges[letter][0] for letter in "mnk"))
                ends[number] = now
    for number, (cell, _) in sorted(enumerate(places), key=lambda each: ends.get(each[0], 0.0)):
        if cell is not None and cell.member != own:
            port = max(port, ends.get(number, 0.0)) + transfer(area[number])
    return max(port, now)


def summed_words(plan: Any, grid_shape: GridShape, at: Coordinates) -> float:
    """Words that a rank adds of what others send."""
    if isinstance(plan, OnedPlan) and plan.sequence:
        return summed_words(plan.as_cuboid(), with_alone(grid_shape, 1), with_alone(at, 0))
    if isinstance(plan, CuboidPlan):
        m, n, _ = plan.local_extents(grid_shape, at)
        return (grid_shape[plan.z] - 1) * m * n / grid_shape[plan.z]
    return sum(step.leaving for step in steps_of(plan, grid_shape, at))


def best_pieces(plan: Any, grid_shape: GridShape, dtype: Dtype, machine: Machine, staged: Collection[str] = ()) -> int:
    """The number of pieces of fewest predicted seconds on a described cluster, the same on every rank: 1 in a node's memory.

    More pieces are looked at as long as they take less.
    """
    if machine.node:
        return 1
    at, best, least = dict.fromkeys(grid_shape, 0), 1, float("inf")
    for count in CHOICES:
        seconds = predicted(replace(plan, pieces=count), grid_shape, at, dtype, machine, staged)
        if seconds >= least:
            break
        best, least = count, seconds
    return best


def pieces_on(plan: Any, grid: BaseGrid, dtype: Dtype, machine: Machine) -> int:
    """`best_pieces` on a grid, by the sizes, the nodes of its ranks and the description alone, so that ranks agree."""
    between = axes_between_nodes(plan.axes, grid)
    staged = [axis for axis in plan.axes if grid.shape[axis] > 1 and axis not in between]
    return best_pieces(plan, grid.shape, dtype, machine, staged) if between else 1


def axes_between_nodes(axes: Sequence[str], grid: BaseGrid) -> list[str]:
    """Those along which some member of the plane of axes sends beyond its node: the same on all members, whatever its own do."""
    topology, nodes = grid.whole.topology, grid.job.nodes
    several = [axis for axis in axes if grid.shape[axis] > 1]
    ranks = topology.members(several, grid.whole.coordinates)

    def leaves(axis: str) -> bool:
        lines = {tuple(topology.members([axis], topology.coordinates_of(rank))) for rank in ranks}
        return any(len({nodes[rank] for rank in line}) > 1 for line in lines)

    return [axis for axis in several if grid.job.node_rule is None or leaves(axis)]


def predicted(
    plan: Any, grid_shape: GridShape, at: Coordinates, dtype: Dtype, machine: Machine, staged: Collection[str] = ()
) -> float:
    """Seconds of a rank's product on a described cluster; the sums' reading and writing is not hidden."""
    ranks = prod(grid_shape.values())
    byte_time, latency = machine.cluster.link(ranks)
    sums = 3 * summed_words(plan, grid_shape, at) * dtype.nbytes * machine.cluster.byte_time()
    return machine.cluster.crowding(ranks) * (
        sums
        + seconds_of(
            plan,
            grid_shape,
            at,
            lambda words: latency + words * dtype.nbytes * byte_time,
            lambda m, n, k: machine.product(m, n, k, dtype),
            staged,
        )
    )
