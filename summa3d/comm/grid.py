# The process grid: named axes of any sizes over the ranks of a communicator, and where ranks are placed.
# Imports collectives, ledger, errors.
# Next: layout/layout.py, which says what each axis splits.
from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from math import isqrt, log, prod
from operator import index
from types import TracebackType
from typing import Any

from mpi4py import MPI

from ..capability import available
from ..errors import GridError
from .choice import requested
from .collectives import Axis
from .device import Backend
from .ledger import Ledger
from .node import NodeRule
from .transport import Carriers

DEFAULT_ORDER = ("z", "y", "x", "d")
EVERYONE = ("everyone",)
"""Names the axis of all ranks, those outside the grid included."""


class Grid:
    """Ranks as points of a grid with named axes.

    Parameters
    ----------
    comm : the communicator whose ranks fill the grid.
    axes : axis name → size ≥ 1; the product must be the number of ranks.
    order : axis names, fastest first: consecutive ranks differ in the first. A string names one-letter axes. Axes left out
        follow, in the order of `axes`. The default puts z, then y, fastest: in a transformer block z carries 12 of every
        16 units of activation traffic, y 4, and x only weights, so z belongs inside a node.
    tile : axis name → how many of its indices lie in one tile of consecutive ranks, so that a node holds a tile of the
        grid (the "bunched" arrangement of the 2-D paper). Must divide the axis.
    node_memory : whether axes whose ranks share a node communicate through its memory (comm/node.py): True always, False never
        (through MPI), None where it is the quicker.
    transport : what carries device arrays (comm/choice.py): auto, cuda-aware, pinned or nccl; None, what SUMMA3D_TRANSPORT says,
        else auto. mpi: there are none, and one that comes is an error.
    device : this process's device, as comm/device.py describes it; None, CuPy's, when the first device array comes.
    check : compare operation, shapes and dtypes over the ranks before every collective (debugging; costs a message each).
    ranks : the ranks of `comm` that fill the grid, in its order; default all. The others are outside (`inside` is False): they
        make the same calls, hold nothing (blocks without elements), and take part in what `everyone` does alone.

    ``grid["y"]`` is an axis, ``grid["x", "y"]`` the plane of both (index = ix·Y + iy), ``grid.world`` all ranks.
    Creating a grid is collective over its ranks; so is the first use of each plane over its members.
    Raises GridError, on every rank and before any communication, where axes, order, tile or ranks do not fit.
    """

    freed = False

    def __init__(
        self,
        comm: MPI.Intracomm,
        axes: Mapping[str, int],
        order: str | Sequence[str] | None = None,
        tile: Mapping[str, int] | None = None,
        check: bool = False,
        node_memory: bool | None = None,
        ranks: Sequence[int] | None = None,
        transport: str | None = None,
        device: Backend | None = None,
    ) -> None:
        self.transport, self.device = requested(transport), device
        self.common, self.check = comm, check
        self.shape = _sizes(axes)
        self.order = _checked_order(self.shape, order)
        self.tile = _checked_tile(self.shape, tile)
        self.ranks = _checked_ranks(ranks, comm.size)
        self.size = len(self.ranks)
        if prod(self.shape.values()) != self.size:
            raise GridError(_misfit(self.shape, self.size))
        self.inside = comm.rank in self.ranks
        self.comm = comm if self.ranks == tuple(range(comm.size)) else _comm_of_some(comm, self.ranks)
        self.rank = self.ranks.index(comm.rank) if self.inside else MPI.UNDEFINED
        self.coordinates = self.coordinates_of(self.rank) if self.inside else {}
        self.ledger = Ledger(device)
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._node: list[int] = []
        if self.inside:
            self._meet(node_memory)

    def _meet(self, node_memory: bool | None) -> None:
        """Find out, together with the other ranks of the grid, who shares a node; and make the axes."""
        comm = self.comm
        self._node = _node_of_each_rank(comm)
        self._crowded = _is_crowded(comm, self._node)
        self._staged = comm.size > 1 and comm.allreduce(node_memory is not False and available() is None, MPI.MIN)
        self._always = node_memory is True
        for name in self.shape:
            self._axis((name,))

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """What rooms above keep with the grid until it is freed, each under a key of its own: executors of products."""
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shape)

    def __getitem__(self, key: str | tuple[str, ...]) -> Axis:
        names = (key,) if isinstance(key, str) else tuple(key)
        for name in names:
            if name not in self.shape:
                raise GridError(f"The grid has no axis {name!r}. Its axes: {', '.join(self.shape)}.")
            if names.count(name) > 1:
                raise GridError(f"A plane of axes {', '.join(names)} names axis {name!r} twice.")
        return self._axis(names)

    @property
    def world(self) -> Axis:
        """All ranks of the grid as one axis."""
        return self._axis(self.names)

    @property
    def everyone(self) -> Axis:
        """All ranks of the communicator that the grid was made on, in its order; those outside the grid take part."""
        return self._line(self.names if len(self.ranks) == self.common.size else EVERYONE, self.common)

    @property
    def ranked(self) -> Axis:
        """All ranks of the grid as one axis, in the order of their ranks; `world` is in the order of coordinates."""
        return self._line(self.names, self.comm) if self.inside else self._axis(self.names)

    def _line(self, names: tuple[str, ...], comm: MPI.Intracomm) -> Axis:
        key = (*names, "in the order of the grid's ranks" if comm is self.comm else "in the order of the communicator")
        if key not in self._axes:
            self._check_in_use()
            self._axes[key] = Axis(names, comm.size, comm.rank, comm, self.ledger, self.check, carriers=self._carriers())
        return self._axes[key]

    @property
    def places(self) -> list[dict[str, int]]:
        """The coordinates of every rank of the communicator that the grid was made on; {} for those outside the grid."""
        found: list[dict[str, int]] = [{} for _ in range(self.common.size)]
        for place, rank in enumerate(self.ranks):
            found[rank] = self.coordinates_of(place)
        return found

    def run(self, names: tuple[str, ...], size: int) -> Axis:
        """`size` consecutive members of the plane `names`, this rank among them: the plane cut into runs of that many.

        The first use is collective over the run. Raises GridError where `size` does not divide the plane.
        """
        plane = self[names]
        if size < 1 or plane.size % size:
            fits = ", ".join(map(str, divisors(plane.size)))
            raise GridError(f"Runs of {size} do not divide the {plane.size} members of {plane.label}. Runs that do: {fits}.")
        key = (*names, f"runs of {size}")
        if size == plane.size:
            return plane
        if key not in self._axes:
            first = plane.index - plane.index % size
            members = self._members(names)[first : first + size]
            comm = self._comm_of(members)
            self._axes[key] = Axis(key, size, plane.index % size, comm, self.ledger, self.check, carriers=self._carriers())
        return self._axes[key]

    def __repr__(self) -> str:
        part = "" if self.comm is self.common else f", ranks={','.join(map(str, self.ranks))}"
        return f"Grid({', '.join(f'{name}={size}' for name, size in self.shape.items())}, order={','.join(self.order)}{part})"

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Axis name → index of `rank`: the digits of the rank, tile digits first, in `order`."""
        inner, outer = dict.fromkeys(self.shape, 0), dict.fromkeys(self.shape, 0)
        for name in self.order:
            rank, inner[name] = divmod(rank, self.tile[name])
        for name in self.order:
            rank, outer[name] = divmod(rank, self.shape[name] // self.tile[name])
        return {name: outer[name] * self.tile[name] + inner[name] for name in self.shape}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; the inverse of `coordinates_of`."""
        rank, stride = 0, 1
        for name in self.order:
            rank, stride = rank + coordinates[name] % self.tile[name] * stride, stride * self.tile[name]
        for name in self.order:
            rank += coordinates[name] // self.tile[name] * stride
            stride *= self.shape[name] // self.tile[name]
        return rank

    def add_axes(self, *names: str) -> None:
        """Give the grid these axes, of size 1, where it has none of that name; a layout may then name them. Moves nothing."""
        for name in names:
            if name not in self.shape:
                self.shape[name], self.tile[name] = 1, 1
                self.coordinates |= {name: 0} if self.inside else {}
                self.order = (*self.order, name)

    @property
    def nodes(self) -> list[int]:
        """The node of each rank, numbered from 0."""
        return self._node

    @property
    def staged(self) -> tuple[str, ...]:
        """The axes that communicate through their node's memory (collective at its first use)."""
        return tuple(name for name in self.shape if self[name].ring is not None)

    def free(self) -> None:
        """Release the axes' communicators (collective); a second call does nothing. The grid cannot communicate afterwards."""
        if self.freed:
            return
        self.freed = True
        for axis in self._axes.values():
            axis.carriers.free()
            if axis.comm not in (self.comm, self.common, MPI.COMM_SELF):
                axis.comm.Free()
        self._axes.clear()
        self.kept.clear()
        if self.inside and self.comm is not self.common:
            self.comm.Free()

    def __deepcopy__(self, memo: object) -> Grid:
        return self  # copies of what lies on it, a model or a matrix, lie on it too

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.free()

    def _axis(self, names: tuple[str, ...]) -> Axis:
        if not self.inside:
            raise GridError(
                f"Rank {self.common.rank} is outside {self}: it holds nothing, and takes no part in what the grid's ranks do.\n"
                f"  Ask `grid.inside` first, or make the grid of all {self.common.size} ranks."
            )
        if names not in self._axes:
            self._check_in_use()
            members = self._members(names)
            size, index = len(members), members.index(self.rank)
            node = (
                NodeRule(self._crowded, self._always)
                if self._staged and len({self._node[rank] for rank in members}) == 1
                else None
            )
            comm = self._comm_of(members)
            self._axes[names] = Axis(names, size, index, comm, self.ledger, self.check, node, self._carriers())
        return self._axes[names]

    def _check_in_use(self) -> None:
        if self.freed:
            raise GridError(f"{self} was freed: its axes communicate no more. Make another grid.")

    def _carriers(self) -> Carriers:
        return Carriers(self.transport, self.ledger.timeline)

    def _comm_of(self, members: list[int]) -> MPI.Intracomm:
        if len(members) == 1:
            return MPI.COMM_SELF
        if members == list(range(self.size)):
            return self.comm
        return _comm_of_some(self.comm, members)

    def _members(self, names: tuple[str, ...]) -> list[int]:
        """The ranks that share this rank's coordinates on all other axes, in plane order."""
        points = itertools.product(*(range(self.shape[name]) for name in names))
        return [self.rank_of({**self.coordinates, **dict(zip(names, point, strict=True))}) for point in points]


class Place(Grid):
    """One rank's place on a grid that nobody has started: shape, coordinates and axes, with nothing to communicate through.

    What layouts, schemes and closed forms need of a grid, for any rank of any size. A collective over an axis of more than
    one member fails in MPI. Raises GridError for axes, order or tile that do not fit, or a rank that the grid has not.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        rank: int = 0,
        order: str | Sequence[str] | None = None,
        tile: Mapping[str, int] | None = None,
    ) -> None:
        self.comm = self.common = MPI.Intracomm()  # the null communicator
        self.check, self.inside = False, True
        self.shape = _sizes(axes)
        self.order = _checked_order(self.shape, order)
        self.tile = _checked_tile(self.shape, tile)
        self.rank, self.size = rank, prod(self.shape.values())
        self.ranks = tuple(range(self.size))
        if not 0 <= rank < self.size:
            raise GridError(f"Grid {describe(self.shape)} has no rank {rank}; its ranks are 0 to {self.size - 1}.")
        self.coordinates = self.coordinates_of(rank)
        self.ledger = Ledger()
        self._axes = {}
        self._node = [0] * self.size
        self._crowded = self._staged = self._always = False
        self.transport, self.device = "auto", None

    def _comm_of(self, members: list[int]) -> MPI.Intracomm:
        return self.comm


def grids_of(ranks: int, names: Sequence[str]) -> list[dict[str, int]]:
    """Every grid of `ranks` ranks with these axes."""
    if len(names) == 1:
        return [{names[0]: ranks}]
    return [{names[0]: size, **rest} for size in divisors(ranks) for rest in grids_of(ranks // size, names[1:])]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """1 to `number`, in order: those that divide it."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def describe(shape: Mapping[str, int]) -> str:
    """x=2,y=2,z=1"""
    return ",".join(f"{name}={size}" for name, size in shape.items())


def _misfit(shape: Mapping[str, int], ranks: int) -> str:
    def distance(candidate: Mapping[str, int]) -> float:
        return sum(abs(log(candidate[name] / max(shape[name], 1))) for name in shape)

    fits = sorted(grids_of(ranks, list(shape)), key=distance)[:6]
    return (
        f"Grid {describe(shape)} has {prod(shape.values())} places, but there are {ranks} ranks.\n"
        f"  Start {prod(shape.values())} ranks, or choose a grid of {ranks}: {' · '.join(describe(fit) for fit in fits)}."
    )


def _sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes as a dict of Python's own whole numbers; what is no whole number is left as it is, to be refused."""
    if not isinstance(axes, Mapping):
        raise GridError(f"axes is {axes!r}; a grid takes names and sizes, such as {{'x': 2, 'y': 2}}.")
    return {name: index(size) if hasattr(size, "__index__") else size for name, size in axes.items()}


def _checked_order(shape: Mapping[str, int], order: str | Sequence[str] | None) -> tuple[str, ...]:
    if not shape:
        raise GridError("A grid needs at least one axis, such as x=1.")
    for name, size in shape.items():
        if not isinstance(size, int) or size < 1:
            raise GridError(f"Axis {name} has size {size!r}; sizes are whole numbers ≥ 1.")
    named = [name for name in DEFAULT_ORDER if name in shape] if order is None else list(order)
    for name in named:
        if name not in shape or named.count(name) > 1:
            raise GridError(f"order {''.join(named)!r} must name each axis at most once; the axes are {', '.join(shape)}.")
    return tuple(named + [name for name in shape if name not in named])


def _checked_tile(shape: Mapping[str, int], tile: Mapping[str, int] | None) -> dict[str, int]:
    for name, size in (tile or {}).items():
        if name not in shape:
            raise GridError(f"tile names axis {name!r}; the axes are {', '.join(shape)}.")
        if size < 1 or shape[name] % size:
            fits = ", ".join(map(str, divisors(shape[name])))
            raise GridError(f"tile {name}={size} does not divide axis {name} = {shape[name]}. Tiles that fit: {fits}.")
    return {name: (tile or {}).get(name, 1) for name in shape}


def _checked_ranks(ranks: Sequence[int] | None, size: int) -> tuple[int, ...]:
    named = tuple(range(size)) if ranks is None else tuple(ranks)
    for rank in named:
        if not 0 <= rank < size or named.count(rank) > 1:
            raise GridError(f"ranks {list(named)} must name each rank at most once; the communicator has 0 to {size - 1}.")
    return named


def _comm_of_some(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """A communicator of these ranks of `comm`, in this order: collective over them; the null communicator on others."""
    if comm.rank not in ranks:
        return MPI.Intracomm()
    everyone = comm.Get_group()
    group = everyone.Incl(ranks)
    part = comm.Create_group(group)
    group.Free()
    everyone.Free()
    return part


def _is_crowded(comm: MPI.Intracomm, nodes: Sequence[int]) -> bool:
    """Whether some node has more of these ranks than cores they may run on."""
    if comm.size == 1:
        return False
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: dict[int, set[int]] = {}
    for node, usable in zip(nodes, comm.allgather(mine), strict=True):
        cores.setdefault(node, set()).update(usable)
    return any(nodes.count(node) > len(usable) for node, usable in cores.items())


def _node_of_each_rank(comm: MPI.Intracomm) -> list[int]:
    if comm.size == 1:
        return [0]
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(comm.rank)
    node.Free()
    leaders = comm.allgather(leader)
    numbers = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
    return [numbers[leader] for leader in leaders]
