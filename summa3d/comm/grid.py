"""The process grid: named axes over the ranks of a communicator, and one rank's place on a grid that runs without ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import Any, ClassVar

from mpi4py import MPI

from ..blas_library import TORCH, Rule
from ..errors import GridError, Summa3dError
from ..node_support import watchdog_seconds
from .arrays import Array
from .axis import Axis, free
from .axis_lock import OfThisProcess
from .device.backend import Backend
from .failure import check_agreement, check_comm
from .introduction import introduced
from .profile import flight
from .profile.ledger import Ledger
from .topology import Topology, checked_ranks, describe, divisors
from .transport.call import Carried, Members, Route
from .transport.select import NodeRule, requested
from .transport.transports import TransportFactory, Transports
from .watchdog import guard

AGREED = 4096
"""The calls that a grid remembers as agreed on; then it begins anew, on all ranks alike."""
EVERYONE = ("everyone",)
"""Names the axis of all ranks, those outside the grid included."""


class Grid(OfThisProcess):
    """Ranks as points of a grid with named axes.

    Parameters
    ----------
    comm : the communicator whose ranks fill the grid.
    axes : axis name → size ≥ 1; the product must be the number of ranks.
    order : axis names, fastest first: consecutive ranks differ in the first. A text such as "z,y,x,dp"; without commas it
        names one-letter axes. Axes left out follow, in the order of `axes`. The default puts z, then y, fastest: in a
        transformer block z carries 12 of every 16 units of activation traffic, y 4, and x only weights, so z belongs inside a
        node. Replicas (dp) and pipeline stages (pp) come last.
    tile : axis name → how many of its indices lie in one tile of consecutive ranks, so that a node holds a tile of the
        grid (the "bunched" arrangement of the 2-D paper). Must divide the axis.
    node_memory : whether axes whose ranks share a node communicate through its memory (transport/node.py): True always,
        False never (through MPI), None where it is the quicker.
    transport : what carries device arrays (transport/select.py): auto, cuda-aware, pinned or nccl; None, what
        SUMMA3D_TRANSPORT says, else auto. mpi: there are none, and one that comes is an error.
    device : this process's device, as device/backend.py describes it; None, CuPy's, when the first device array comes.
    check : compare operation, shapes and dtypes over the ranks before every collective (debugging; costs a message each).
    ranks : the ranks of `comm` that fill the grid, in its order; default all. The others are outside (`inside` is False): they
        make the same calls, hold nothing (blocks without elements), and take part in what `everyone` does alone.
    transports : makes the transports of each axis (transport/transports.py); a subclass may move nothing, or record.

    ``grid["y"]`` is an axis, ``grid["x", "y"]`` the plane of both (index = ix·Y + iy), ``grid.world`` all ranks.
    Creating a grid is collective over its ranks; so is the first use of each plane over its members. Each axis has a
    communicator of its own, freed with the grid: what another axis or grid, or the program on `comm`, sends never meets it. Ranks
    that use two axes or grids in different orders wait for each other (docs/faults.md).
    Raises GridError, on every rank and before any communication, where comm, axes, order, tile or ranks do not fit; and
    AgreementError on all ranks where they make different grids.
    """

    made: ClassVar[int] = 0  # grids of several ranks that this process, or another rank of one of them, has made
    fills, freed, sealed = True, False, False  # fills: its ranks are those of its communicator, in that order
    unfinished = ""  # the call that was interrupted while it made an axis
    number = 1  # that of the grid, the same on all its ranks
    device: Backend | None = None
    nodes: Sequence[int] = ()
    """The node of each rank, numbered from 0."""
    _node_rule: NodeRule | None = None
    _whole: tuple[str, ...] | None = None  # the axis of all ranks, which has the communicator that the grid was made with
    blas = Rule(TORCH, "nothing is multiplied here", {})
    """What multiplies torch's host tensors, the same on all ranks."""

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
        transports: TransportFactory = Transports,
    ) -> None:
        self.transport, self.common, self.device = requested(transport), _checked_comm(comm), device
        topology, hung = Topology.checked(axes, order, tile), watchdog_seconds(default=0.0)
        self.ranks = checked_ranks(ranks, comm.size)
        self.fills = self.ranks == tuple(range(comm.size))
        topology.check_size(len(self.ranks))
        with _communicators(f"Grid {describe(topology.shape)}"):
            self._first = _comm_of_some(comm, self.ranks)
        rank = self.ranks.index(comm.rank) if comm.rank in self.ranks else MPI.UNDEFINED
        self._stand(topology, rank, check, Ledger(device), transports)
        if self.inside:
            self._whole = next(((name,) for name, size in self.shape.items() if size == self.size > 1), None)
            guard(comm, hung)
            with _communicators(f"Grid {describe(topology.shape)}"):
                agreed = introduced(self._first, topology, check, node_memory, Grid.made + 1, comm if self.fills else None)
            self.number, self.nodes, self.blas, self._node_rule = agreed
            Grid.made = self.number
            for name in self.shape:
                self._axis((name,))

    def _stand(self, topology: Topology, rank: int, check: bool, ledger: Ledger, transports: TransportFactory) -> None:
        """Set this process up as `rank` of a grid of this topology; axes are made at their first use."""
        self.topology, self.rank, self.check, self.ledger = topology, rank, check, ledger
        self.size, self.inside = topology.size, rank != MPI.UNDEFINED
        self.coordinates = topology.coordinates_of(rank) if self.inside else {}
        self._transports = transports
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._parts: dict[tuple[str, ...], Part] = {}

    @property
    def job(self) -> Grid:
        """The grid of the whole job, of which this is a part; itself, where it is no part."""
        return self

    @cached_property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the grid's ranks, in their order, for what no axis carries; its first use may be collective."""
        return _second_comm(self) if self._whole else self._first

    @property
    def shape(self) -> dict[str, int]:
        """Axis name → size."""
        return self.topology.shape

    @property
    def order(self) -> tuple[str, ...]:
        """Axis names, fastest first."""
        return self.topology.order

    @property
    def tile(self) -> dict[str, int]:
        """Axis name → how many of its indices lie in one tile."""
        return self.topology.tile

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Objects that higher layers keep with the grid until `free`, each under its own key: the executors of products."""
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, in the order of `shape`."""
        return tuple(self.shape)

    def __getitem__(self, key: str | tuple[str, ...]) -> Axis:
        names = (key,) if isinstance(key, str) else key
        if isinstance(names, tuple) and names in self._axes:
            return self._axes[names]
        return self._axis(_check_names(names, self.shape))

    @property
    def world(self) -> Axis:
        """All ranks of the grid as one axis."""
        return self._axis(self.names)

    @property
    def everyone(self) -> Axis:
        """All ranks of the communicator that the grid was made on, in its order, those outside the grid included.

        Its first use is collective over them, where they are not the grid's ranks in the grid's order.
        """
        if self.fills:
            return self.ranked
        size = _checked_comm(self.common).size
        names = self.names if len(self.ranks) == size else EVERYONE
        return self._line(names, "grid.everyone", lambda: _comm_of_some(self.common, range(size)))

    @property
    def ranked(self) -> Axis:
        """All ranks of the grid as one axis, in the order of their ranks; `world` is in the order of coordinates."""
        return self._line(self.names, "grid.ranked", lambda: self.comm) if self.inside else self._axis(self.names)

    def _line(self, names: tuple[str, ...], asked: str, comm_of: Callable[[], MPI.Intracomm]) -> Axis:
        """The axis of all ranks in one of their orders, which is kept under the call that asks for it."""
        if (asked,) not in self._axes:
            _check_in_use(self)
            with _communicators(asked, self):
                comm = comm_of()
                self._axes[asked,] = self._new_axis(names, *self._extent(comm), comm)
        return self._axes[asked,]

    @property
    def places(self) -> list[dict[str, int]]:
        """The coordinates of every rank of the communicator that the grid was made on; {} for those outside the grid."""
        found: list[dict[str, int]] = [{} for _ in range(self._extent(self.common)[0])]
        for place, rank in enumerate(self.ranks):
            found[rank] = self.coordinates_of(place)
        return found

    def run(self, names: tuple[str, ...], size: int) -> Axis:
        """The run of `size` consecutive members of the plane `names` that this rank is in: the plane is cut into such runs.

        The first use is collective over the run. Raises GridError where `size` does not divide the plane.
        """
        plane = self[names]
        if not hasattr(size, "__index__") or size < 1 or plane.size % size:
            fits = ", ".join(map(str, divisors(plane.size)))
            raise GridError(f"Runs of {size} do not divide the {plane.size} members of {plane.label}. Runs that do: {fits}.")
        if size == plane.size:
            return plane
        key = (*names, f"runs of {size}")
        first = plane.index - plane.index % size
        members = self.topology.members(names, self.coordinates)[first : first + size]
        return self._joined(key, members, f"grid.run({names}, {size})", None)

    def pick(self, axis: str, indices: Sequence[int]) -> Axis | None:
        """The members of `axis` at these indices, in ascending order, as an axis; None on the other members.

        The first use is collective over those members. Raises GridError for an index that the axis does not have.
        """
        line = self[_check_names((axis,), self.shape)]
        wanted = sorted(set(indices)) if all(hasattr(one, "__index__") for one in indices) else []
        if not wanted or wanted[0] < 0 or wanted[-1] >= line.size:
            raise GridError(f"Axis {axis} has the indices 0 to {line.size - 1}; grid.pick asks for {list(indices)}.")
        if line.index not in wanted:
            return None
        if len(wanted) == line.size:
            return line
        ranks = self.topology.members((axis,), self.coordinates)
        key, asked = (f"{axis}={'+'.join(map(str, wanted))}",), f"grid.pick({axis!r}, {tuple(wanted)})"
        return self._joined(key, [ranks[index] for index in wanted], asked, self._node_rule)

    def part(self, *names: str) -> Grid:
        """The ranks that differ from this one on these axes alone, as a grid: a view, with this grid's axes and ledger.

        Its `free` does nothing: the grid of the whole job owns what it shares. Moves nothing. Raises GridError for an axis that
        the grid does not have.

        >>> Place({"x": 2, "z": 3, "pp": 4}, rank=17).part("x", "z")
        Grid(x=2, z=3, order=z,x, part of 24 ranks)
        """
        _check_names(names, self.shape)
        key = tuple(name for name in self.shape if name in names)
        if key == self.names:
            return self
        if not key:
            raise GridError(f"A part of a grid needs at least one axis. Axes of {self}: {', '.join(self.shape)}.")
        if key not in self._parts:
            self._parts[key] = Part(self, key)
        return self._parts[key]

    def seal(self) -> None:
        """Refuse new communicators from now on: an axis, a run or a pick of several ranks that was never asked for before.

        Ranks of different pipeline stages run different operations; a communicator that is first made inside one waits for
        ranks that are elsewhere. Moves nothing.
        """
        self.job.sealed = True

    def __repr__(self) -> str:
        part = "" if self.fills else f", ranks={','.join(map(str, self.ranks))}"
        return f"Grid({', '.join(f'{name}={size}' for name, size in self.shape.items())}, order={','.join(self.order)}{part})"

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Axis name → index of `rank`: the digits of the rank, tile digits first, in `order`. GridError for no rank of it."""
        return self.topology.coordinates_of(self.topology.checked_rank(rank))

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; the inverse of `coordinates_of`. GridError for a point that the grid does not have."""
        return self.topology.rank_of(self.topology.checked_point(coordinates))

    def add_axes(self, *names: str) -> None:
        """Give the grid these axes, of size 1, where it has none of that name; a layout may then name them. Moves nothing."""
        for name in names:
            if name not in self.shape:
                self.topology.add(name)
                self.coordinates |= {name: 0} if self.inside else {}

    @property
    def staged(self) -> tuple[str, ...]:
        """The axes that communicate through their node's memory (collective at its first use)."""
        return tuple(name for name in self.shape if self[name].node_bytes is not None)

    def free(self) -> None:
        """Release the axes' communicators and memory (collective); a second call does nothing. No axis communicates afterwards.

        Raises AgreementError, once all is released, where ranks differ in a communication that had not been compared yet.
        """
        if self.freed:
            return
        check_comm(MPI.COMM_WORLD, f"{self}.free()")
        self.freed = True
        _release(self, list(self._parts.values()))

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.free()

    def _axis(self, names: tuple[str, ...]) -> Axis:
        if not self.inside:
            raise _outside(self)
        if names in self._axes:
            return self._axes[names]
        members = self.topology.members(names, self.coordinates)
        return self._joined(names, members, f"grid[{', '.join(map(repr, names))}]", self._node_rule)

    def _joined(self, key: tuple[str, ...], members: list[int], asked: str, rule: NodeRule | None) -> Axis:
        """The axis of these ranks, which is kept under `key`; `asked` is the call that asks for it."""
        if key not in self._axes:
            _check_in_use(self)
            node = rule if len({self.nodes[rank] for rank in members}) == 1 else None
            with flight.waiting_in("the first use", f"{'·'.join(key)} ({len(members)} ranks)"), _communicators(asked, self):
                comm = self._first if key == self._whole else self._comm_of(members, asked)
                self._axes[key] = self._new_axis(key, len(members), members.index(self.rank), comm, node)
        return self._axes[key]

    def _new_axis(self, names: tuple[str, ...], size: int, index: int, comm: MPI.Intracomm, node: NodeRule | None = None) -> Axis:
        number = 1 if names == EVERYONE else self.job.number  # ranks outside do not know it
        members = Members("·".join(names), size, index, comm, self.ledger, node, self.transport, number)
        return Axis(names, self._transports(members), self.check)

    def _extent(self, comm: MPI.Intracomm) -> tuple[int, int]:
        """How many members the line of all ranks of `comm` has, and which this rank is."""
        return _checked_comm(comm).size, comm.rank

    def _comm_of(self, members: list[int], asked: str) -> MPI.Intracomm:
        """A new communicator of these ranks, which no other axis has; `asked`, the call, is for the error of a sealed grid."""
        if len(members) == 1:
            return MPI.COMM_SELF
        _check_unsealed(self, asked)
        return _comm_of_some(self._first, members)


def _release(grid: Grid, parts: Sequence[Part]) -> None:
    """Free the axes of a grid and of its parts, and their communicators; then raise the first error that freeing an axis raised.

    All ends are said before one is waited for: the order may differ from rank to rank.
    """
    axes = [axis for one in (*parts, grid) for axis in one._axes.values()]
    steps: list[Callable[[], None]] = [axis.transports.end for axis in axes]
    steps += [partial(free, axis) for axis in axes]
    errors = []
    for step in steps:
        try:
            step()
        except Summa3dError as error:
            errors.append(error)
    made = vars(grid).get("comm", grid._first)  # at its first use, if ever
    for axis in grid._axes.values():
        _free_comm(axis.comm, grid._first, made)
    for part in parts:
        part.release()
    grid._axes.clear()
    grid.kept.clear()
    _free_comm(made, grid._first)
    _free_comm(grid._first)
    if errors:
        raise errors[0]


def agree_on_call(
    grid: Grid, operation: str, facts: Mapping[str, Hashable], axis: Axis | None = None, problem: str | None = None
) -> None:
    """Raise AgreementError on all ranks unless all make this call: compared at the first of a kind, with `grid.check` at each.

    axis : the ranks that make it; default all of the grid. problem : why this rank is about to refuse the call. Where it knows no
    facts of it, the others hear of that only at the first call of the operation on the grid: later they may be past comparing.
    A message round where calls are compared, of bytes that `ledger.control` counts.
    """
    seen: set[Hashable] = grid.kept.setdefault("agreed", set())
    key = (operation, *facts.values())
    makes_none = grid.job.sealed and grid is not grid.job and "comm" not in vars(grid)  # a part's own: a sealed job makes no more
    if ((key if facts else operation) in seen and not grid.check) or makes_none:
        return
    comm = (axis or grid.ranked).comm
    if comm != MPI.COMM_NULL and comm.size > 1:
        grid.ledger.control += check_agreement(comm, operation, facts, problem)
    if problem is None:
        if len(seen) >= AGREED:
            seen.clear()
        seen.update((key, operation))


class Part(Grid):
    """The ranks of a job's grid that differ on some of its axes alone, as a grid: what `Grid.part` returns."""

    def __init__(self, job: Grid, names: tuple[str, ...]) -> None:
        self._job, self.transport, self.device = job, job.transport, job.device
        topology = job.topology.part(names)
        rank = topology.rank_of(job.coordinates) if job.inside else MPI.UNDEFINED
        self._stand(topology, rank, job.check, job.ledger, job._transports)
        self.ranks = tuple(range(self.size))
        if self.inside:
            self.nodes = [job.nodes[rank] for rank in self._job_ranks()]

    @property
    def job(self) -> Grid:
        """The grid of the whole job."""
        return self._job

    @property
    def blas(self) -> Rule:  # type: ignore[override]
        """What multiplies host tensors: the job's."""
        return self._job.blas

    @cached_property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the part's ranks, in their order; its first use is collective over them."""
        names = ", ".join(map(repr, self.names))
        return self._job._comm_of(self._job_ranks(), f"grid.part({names}).comm") if self.inside else MPI.Intracomm()

    @property
    def common(self) -> MPI.Intracomm:  # type: ignore[override]
        """The communicator that the part is on: its own."""
        return self.comm

    def _job_ranks(self) -> list[int]:
        """The ranks of the job that fill the part, in its order."""
        points = (self.coordinates_of(rank) for rank in range(self.size))
        return [self._job.rank_of({**self._job.coordinates, **point}) for point in points]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Grid({sizes}, order={','.join(self.order)}, part of {self._job.size} ranks)"

    def run(self, names: tuple[str, ...], size: int) -> Axis:
        """`Grid.run`, of the part's axes."""
        _check_names(names, self.shape)
        return self._job.run(names, size)

    def pick(self, axis: str, indices: Sequence[int]) -> Axis | None:
        """`Grid.pick`, of the part's axes."""
        _check_names((axis,), self.shape)
        return self._job.pick(axis, indices)

    def part(self, *names: str) -> Grid:
        """`Grid.part`, of the part's axes."""
        _check_names(names, self.shape)
        return self if set(names) == set(self.names) else self._job.part(*names)

    def add_axes(self, *names: str) -> None:
        """Give the part and its job these axes, of size 1. Raises GridError where the job has a larger one of that name."""
        for name in names:
            if name not in self.shape and self._job.shape.get(name, 1) > 1:
                raise GridError(f"{self} cannot add axis {name}, which has size {self._job.shape[name]} on {self._job}.")
        self._job.add_axes(*names)
        super().add_axes(*names)

    def free(self) -> None:
        """Do nothing: the axes are the job's."""

    def release(self) -> None:
        """Release what the part alone has, when its job is freed."""
        self.freed = True
        self._axes.clear()
        self.kept.clear()
        _free_comm(vars(self).get("comm", MPI.COMM_NULL))

    def _axis(self, names: tuple[str, ...]) -> Axis:
        return self._job._axis(names)

    def _extent(self, comm: MPI.Intracomm) -> tuple[int, int]:
        return self.size, self.rank


class Unconnected(Transports):
    """The transports of an axis of a grid without processes: its collectives raise GridError."""

    def carry(
        self, route: Route, array: Array, into: Array | None = None, blocking: bool = True, parts: Array | None = None
    ) -> Carried:
        """Raise GridError: the axis has no other process to communicate with."""
        raise GridError(
            f"{route.operation} over axis {self.members.label} = {self.members.size}: a Place stands for one rank of a grid "
            "without processes, and cannot communicate. Make a Grid, or a Place with transports that move nothing."
        )


class Place(Grid):
    """One rank's place on a grid without processes: shape, coordinates, and axes with their sizes, indices and ledger.

    It is what layouts, schemes and closed forms need of a grid, for any rank of any grid.

    Parameters
    ----------
    axes, order, tile : as of a Grid. rank : whose place it is.
    transports : what makes each axis's transports from its `Members`; a dry run's move nothing and return at once. By default a
        collective over an axis of more than one member raises GridError.
    nodes : the node of each rank; by default all ranks share one.
    node_rule : how axes inside a node use its memory: `Members.node` of those that lie in one; None, they do not.

    Raises GridError for axes, order or tile that do not fit, or a rank that the grid does not have.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        rank: int = 0,
        order: str | Sequence[str] | None = None,
        tile: Mapping[str, int] | None = None,
        transports: TransportFactory = Unconnected,
        nodes: Sequence[int] | None = None,
        node_rule: NodeRule | None = None,
    ) -> None:
        self._first = self.comm = self.common = MPI.Intracomm()  # the null communicator
        self.transport = "auto"
        topology = Topology.checked(axes, order, tile)
        self.ranks = tuple(range(topology.size))
        self._stand(topology, topology.checked_rank(rank), False, Ledger(), transports)
        self.nodes = [0] * self.size if nodes is None else list(nodes)
        self._node_rule = node_rule

    def _comm_of(self, members: list[int], asked: str) -> MPI.Intracomm:
        if len(members) > 1:
            _check_unsealed(self, asked)
        return self.comm

    def _extent(self, comm: MPI.Intracomm) -> tuple[int, int]:
        return self.size, self.rank


@contextmanager
def _communicators(asked: str, grid: Grid | None = None) -> Iterator[None]:
    """Within the block, MPI's error where it has no communicator left becomes a GridError; what interrupts it is noted."""
    try:
        yield
    except MPI.Exception as error:
        if "communicators" not in str(error):
            raise
        raise GridError(
            f"MPI has no communicator left for {asked}: too many grids are in use. Free those that are not needed any more, by\n"
            "  grid.free() or `with Grid(…) as grid:`."
        ) from error
    except Summa3dError:
        raise
    except BaseException:
        if grid is not None:
            grid.unfinished = asked
        raise


def _check_names(names: object, shape: Mapping[str, int]) -> tuple[str, ...]:
    """The names of axes as a tuple. Raises GridError for none, for one that the grid does not have, or one that stands twice."""
    if not isinstance(names, Sequence):
        raise GridError(f"The grid has no axis {names!r}. Its axes: {', '.join(shape)}; several of them are a plane.")
    for name in names:
        if not isinstance(name, str) or name not in shape:
            raise GridError(f"The grid has no axis {name!r}. Its axes: {', '.join(shape)}.")
        if names.count(name) > 1:
            raise GridError(f"A plane of axes {', '.join(names)} names axis {name!r} twice.")
    return tuple(names)


def _checked_comm(comm: Any) -> MPI.Intracomm:
    """A communicator. Raises GridError for what is none, or was freed."""
    if isinstance(comm, MPI.Comm):
        check_comm(comm, "a grid")
    elif not hasattr(comm, "rank") or hasattr(comm, "shape"):  # a grid has both
        raise GridError(f"A grid takes an MPI communicator, as mpi4py.MPI.COMM_WORLD; it was given a {type(comm).__name__}.")
    return comm


def _check_in_use(grid: Grid) -> None:
    """Raise GridError if the grid was freed, or interrupted while it made an axis, or this process was forked from its rank."""
    if grid.inside and not grid.freed and not isinstance(grid.job, Place):
        check_comm(grid.job._first, f"{grid}")
    if grid.freed:
        raise GridError(f"{grid} was freed: its axes communicate no more. Make another grid.")
    if grid.unfinished:
        raise GridError(
            f"{grid} was interrupted in {grid.unfinished}, which other ranks may have finished: it makes no further axes.\n"
            "  Free it and make another grid."
        )


def _outside(grid: Grid) -> GridError:
    """The error of what a rank outside the grid asks of its axes."""
    return GridError(
        f"Rank {grid.common.rank} is outside {grid}: it holds nothing, and takes no part in what the grid's ranks do.\n"
        f"  Ask `grid.inside` first, or make the grid of all {grid.common.size} ranks."
    )


def _check_unsealed(grid: Grid, asked: str) -> None:
    """Raise GridError if the grid is sealed."""
    if grid.sealed:
        raise GridError(
            f"{grid} is sealed: {asked} would make a new communicator, which other ranks may not be there to make.\n"
            f"  Ask for {asked} on every rank before grid.seal()."
        )


def _second_comm(grid: Grid) -> MPI.Intracomm:
    """Another communicator of the grid's ranks: what is carried over two never mixes, in whatever order it is begun."""
    with _communicators("grid.comm", grid):
        return _comm_of_some(grid._first, range(grid.size))


def _comm_of_some(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """A communicator of these ranks of `comm`, in this order: collective over them; the null communicator on others."""
    if comm.rank not in ranks:
        return MPI.Intracomm()
    if len(ranks) == 1:
        return MPI.COMM_SELF
    everyone = comm.Get_group()
    group = everyone.Incl(ranks)
    part = comm.Create_group(group)
    group.Free()
    everyone.Free()
    return part


def _free_comm(comm: MPI.Intracomm, *shared: MPI.Intracomm) -> None:
    """Free a communicator, unless it is null, this process's alone, or one of `shared`."""
    if comm not in (MPI.COMM_NULL, MPI.COMM_SELF, *shared):
        comm.Free()
