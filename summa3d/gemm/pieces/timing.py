"""Predicted seconds of a product in pieces, by running its schedule on two clocks: that of the port, and that of arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ...dtypes import Dtype
from ...layout.layout import Coordinates
from .schedule import DimRanges, SumCell, schedule_of, shared

if TYPE_CHECKING:
    from ...comm.grid import BaseGrid
    from ..algorithms.cuboid import CuboidPlan
    from ..cost.machine import Machine
    from ..cost.steps import GridShape

CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of pieces that are compared."""


def seconds_of(
    plan: CuboidPlan,
    grid_shape: GridShape,
    at: Coordinates,
    transfer: Callable[[int], float],
    multiply: Callable[[int, int, int], float],
    staged: Collection[str] = (),
) -> float:
    """Seconds of a rank's product whose messages travel one after the other; those of several pieces behind what is multiplied.

    transfer : seconds of a message of so many words. multiply : seconds of a local product of these m, n, k
    """
    order = schedule_of(plan, grid_shape, at, staged)
    extents = order.extents
    work, port, arrived = prod(extents.values()), 0.0, [0.0]
    for operand, names in (("a", "mk"), ("b", "kn")):
        rest = prod(extents[letter] for letter in names if letter != plan.fine_dims[operand])
        for one in order.rounds[operand]:
            widest = max(stop - start for start, stop in (one.receive or (0, 0), one.send or (0, 0)))
            port += transfer(widest * rest)
            arrived.append(port)
    fine = plan.fine_dims["c"]
    whole = {letter: (0, extents[letter]) for letter in "mn"}
    places: list[tuple[SumCell | None, DimRanges]] = [(cell, {**whole, fine: (cell.start, cell.stop)}) for cell in order.cells]
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


def best_pieces(plan: CuboidPlan, grid_shape: GridShape, dtype: Dtype, machine: Machine, staged: Collection[str] = ()) -> int:
    """The number of pieces of fewest predicted seconds on a described cluster, the same on every rank: 1 in a node's memory."""
    if machine.node:
        return 1
    at = dict.fromkeys(grid_shape, 0)
    times = {count: predicted(replace(plan, pieces=count), grid_shape, at, dtype, machine, staged) for count in CHOICES}
    return min(times, key=times.__getitem__)


def pieces_on(plan: CuboidPlan, grid: BaseGrid, dtype: Dtype, machine: Machine) -> int:
    """`best_pieces` on a grid, by the sizes, the nodes of its ranks and the description alone, so that ranks agree."""
    topology, nodes, staged = grid.whole.topology, grid.job.nodes, []
    axes = [axis for axis in plan.axes if grid.shape[axis] > 1]
    ranks = topology.members(axes, grid.whole.coordinates)
    for axis in axes:
        lines = {tuple(topology.members([axis], topology.coordinates_of(rank))) for rank in ranks}
        if grid.job.node_rule is not None and all(len({nodes[rank] for rank in line}) == 1 for line in lines):
            staged.append(axis)
    return 1 if len(staged) == len(axes) else best_pieces(plan, grid.shape, dtype, machine, staged)


def predicted(
    plan: CuboidPlan, grid_shape: GridShape, at: Coordinates, dtype: Dtype, machine: Machine, staged: Collection[str] = ()
) -> float:
    """Seconds of a rank's product on a described cluster; the sums' reading and writing is not hidden."""
    ranks = prod(grid_shape.values())
    byte_time, latency = machine.cluster.link(ranks)
    extents, z = schedule_of(plan, grid_shape, at, staged).extents, grid_shape[plan.z]
    sums = 3 * (z - 1) * extents["m"] * extents["n"] / z * dtype.nbytes * machine.cluster.byte_time()
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
