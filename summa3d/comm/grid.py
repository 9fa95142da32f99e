"""The process grid: named axes over the ranks of a communicator, its parts, and one rank's place on a grid without ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from ..errors import GridError
from ..node_support import watchdog_seconds
from .axis import Axis
from .axis_lock import OfThisProcess
from .communicators import Communicators, checked_comm, comm_of, release
from .device.backend import Backend
from .health import flight
from .health.agreement import check_agreement
from .health.failure import check_comm
from .health.watchdog import guard
from .job import Job
from .profile.ledger import Ledger
from .topology import RUNS, Topology, checked_ranks, describe, divisors
from .transport.call import Members, Route
from .transport.select import NodeRule, requested
from .transport.transports import TransportFactory, Transports

if TYPE_CHECKING:
    from typing_extensions import Self

AGREED = 4096
"""The calls that a grid remembers as agreed on; then it begins anew, on all ranks alike."""
EVERYONE = ("everyone",)
"""Names the axis of all ranks, those outside the grid included."""


class BaseGrid(OfThisProcess):
    """One rank's view of named axes: what layouts, products and models take as a grid.

    A `Grid` has the ranks of a communicator, a `SubGrid` those that differ on some of its axes, a `Place` has no ranks. ledger :
    what was moved. rank : this process's, of `size`; inside : whether it is one of them; coordinates : axis name → its index.
    """

    def __init__(self, topology: Topology, rank: int, communicators: Communicators, ledger: Ledger, job: Job) -> None:
        self.topology, self.communicators, self.ledger, self.job = topology, communicators, ledger, job
        self.rank, self.size, self.inside = rank, topology.size, rank != MPI.UNDEFINED
        self.coordinates = topology.coordinates_of(rank) if self.inside else {}
        self._axes = communicators.axes
        self._parts: dict[tuple[Hashable, ...], BaseGrid] = {}

    @property
    def whole(self) -> BaseGrid:
        """The grid of the whole job, of which this is a part; itself, where it is no part."""
        return self

    @property
    def shape(self) -> dict[str, int]:
        """Axis name → size."""
        return self.topology.shape

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the grid's ranks, in their order, for what no axis carries; its first use may be collective."""
        return self.communicators.comm

    def __getitem__(self, key: str | tuple[str, ...]) -> Axis:
        names = (key,) if isinstance(key, str) else key
        if isinstance(names, tuple) and names in self._axes:
            return self._axes[names]
        return self._axis(self.topology.checked_names(names))

    @property
    def world(self) -> Axis:
        """All ranks of the grid as one axis."""
        return self._axis(tuple(self.shape))

    @property
    def everyone(self) -> Axis:
        """All ranks of the communicator that the grid was made on, in its order, those outside the grid included.

        Its first use is collective over them, where they are not the grid's ranks in the grid's order.
        """
        if self.communicators.fills:
            return self.ranked
        size, common = self.communicators.common_size, self.communicators.common
        names = tuple(self.shape) if self.size == size else EVERYONE
        return self._line("grid.everyone", names, size, common.rank, lambda: comm_of(common, range(size)))

    @property
    def ranked(self) -> Axis:
        """All ranks of the grid as one axis, in the order of their ranks; `world` is in the order of coordinates."""
        names = tuple(self.shape)
        return self._line("grid.ranked", names, self.size, self.rank, lambda: self.comm) if self.inside else self._axis(names)

    def places(self) -> list[dict[str, int]]:
        """Return the coordinates of every rank of the communicator that the grid was made on; {} for those outside the grid."""
        points: list[dict[str, int]] = [{} for _ in range(self.communicators.common_size)]
        for rank, place in enumerate(self.communicators.ranks):
            points[place] = self.coordinates_of(rank)
        return points

    def contiguous_sub_axis(self, names: tuple[str, ...], size: int) -> Axis:
        """Return the `size` consecutive members of the plane `names` that this rank is among: the plane is cut into such runs.

        The first use is collective over the run. Raises GridError where `size` does not divide the plane.
        """
        plane = self[names]
        if not hasattr(size, "__index__") or size < 1 or plane.size % size:
            fits = ", ".join(map(str, divisors(plane.size)))
            raise GridError(f"Runs of {size} do not divide the {plane.size} members of {plane.label}. Runs that do: {fits}.")
        if size == plane.size:
            return plane
        whole, first = self.whole, plane.index - plane.index % size
        members = whole.topology.members(names, whole.coordinates)[first : first + size]
        return whole._joined((*names, f"{RUNS}{size}"), members, f"grid.contiguous_sub_axis({names}, {size})", None)

    def sub_axis(self, axis: str, indices: Sequence[int]) -> Axis | None:
        """Return the members of `axis` at these indices, in ascending order, as an axis; None on the other members.

        The first use is collective over those members. Raises GridError for an index that the axis does not have.
        """
        line, whole = self[self.topology.checked_names((axis,))], self.whole
        wanted = sorted(set(indices)) if all(hasattr(index, "__index__") for index in indices) else []
        if not wanted or wanted[0] < 0 or wanted[-1] >= line.size:
            raise GridError(f"Axis {axis} has the indices 0 to {line.size - 1}; grid.sub_axis asks for {list(indices)}.")
        if line.index not in wanted:
            return None
        if len(wanted) == line.size:
            return line
        ranks = whole.topology.members((axis,), whole.coordinates)
        key, asked = (f"{axis}={'+'.join(map(str, wanted))}",), f"grid.sub_axis({axis!r}, {tuple(wanted)})"
        return whole._joined(key, [ranks[index] for index in wanted], asked, self.job.node_rule)

    def part(self, *names: str) -> BaseGrid:
        """Return the ranks that differ from this one on these axes alone, as a grid: a view, with this grid's axes and ledger.

        Its `free` does nothing: the grid of the whole job owns what it shares. Moves nothing. Raises GridError for an axis that
        the grid does not have.

        >>> Place({"x": 2, "z": 3, "pp": 4}, rank=17).part("x", "z")
        Grid(x=2, z=3, order=z,x, part of 24 ranks)
        """
        self.topology.checked_names(names)
        if set(names) == set(self.shape):
            return self
        if not names:
            raise GridError(f"A part of a grid needs at least one axis. Axes of {self}: {', '.join(self.shape)}.")
        whole, key = self.whole, tuple(name for name in self.whole.shape if name in names)
        if key not in whole._parts:
            whole._parts[key] = SubGrid(whole, key)
        return whole._parts[key]

    def regrouped(self, ranks: Sequence[int], axes: Mapping[str, int]) -> BaseGrid:
        """Return some ranks of the job's grid, this one among them, as a grid with axes of its own, the last one fastest.

        Its axes divide `ranks` in their order, and count in the job's ledger under their names. Its `free` does nothing, as that
        of a `part`. Moves nothing; the first use of an axis is collective over its members. Raises GridError for ranks that the
        job does not have, or not as many as the axes.

        >>> Place({"x": 2, "z": 3}, rank=5).regrouped((1, 3, 5, 0), {"i": 2, "j": 2}).coordinates
        {'i': 1, 'j': 0}
        """
        whole, members = self.whole, checked_ranks(ranks, self.whole.size)
        topology = Topology.checked(axes, order=list(axes)[::-1])
        topology.check_size(len(members))
        if whole.rank not in members:
            raise GridError(f"Rank {whole.rank} of {whole} is none of {list(members)}: each rank makes the grid that it is in.")
        key = (members, *axes.items())
        if key not in whole._parts:
            whole._parts[key] = RegroupedGrid(whole, members, topology)
        return whole._parts[key]

    def seal(self) -> None:
        """Refuse new communicators from now on: an axis or a sub-axis of several ranks that was never asked for before.

        Ranks of different pipeline stages run different operations; a communicator that is first made inside one waits for
        ranks that are elsewhere. Moves nothing.
        """
        self.job.sealed = True

    def __repr__(self) -> str:
        ranks = "" if self.communicators.fills else f", ranks={','.join(map(str, self.communicators.ranks))}"
        note = ranks if self.whole is self else f", part of {self.whole.size} ranks"
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Grid({sizes}, order={','.join(self.topology.order)}{note})"

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return axis name → index of `rank`: its digits, tile digits first, in the axes' order. GridError for no rank of it."""
        return self.topology.coordinates_of(self.topology.checked_rank(rank))

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at `coordinates`; the inverse of `coordinates_of`. GridError for a point that is not the grid's."""
        return self.topology.rank_of(self.topology.checked_point(coordinates))

    def add_axes(self, *names: str) -> None:
        """Give the grid these axes, of size 1, where it has none of that name; a layout may then name them. Moves nothing."""
        added = [name for name in names if name not in self.shape]
        self.topology = self.topology.extended(added)
        self.coordinates |= dict.fromkeys(added, 0) if self.inside else {}

    @property
    def staged(self) -> tuple[str, ...]:
        """The axes that communicate through their node's memory (collective at its first use)."""
        return tuple(name for name in self.shape if self[name].node_bytes is not None)

    def free(self) -> None:
        """Release the axes' communicators and memory (collective); a second call does nothing. No axis communicates afterwards.

        Raises AgreementError, once all is released, where ranks differ in a communication that had not been compared yet.
        """
        if self.job.freed:
            return
        check_comm(MPI.COMM_WORLD, f"{self}.free()")
        release(self.job, self.linked())

    def linked(self) -> list[Communicators]:
        """Return the communicators of the grid's parts, and its own."""
        return [*(links for part in self._parts.values() for links in part.linked()), self.communicators]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.free()

    def _axis(self, names: tuple[str, ...]) -> Axis:
        whole = self.whole
        if not self.inside:
            common = whole.communicators.common
            raise GridError(
                f"Rank {common.rank} is outside {whole}: it holds nothing, and takes no part in what the grid's ranks do.\n"
                f"  Ask `grid.inside` first, or make the grid of all {common.size} ranks."
            )
        if names in whole._axes:
            return whole._axes[names]
        members = whole.topology.members(names, whole.coordinates)
        return whole._joined(names, members, f"grid[{', '.join(map(repr, names))}]", self.job.node_rule)

    def _in_job(self, members: Sequence[int]) -> Sequence[int]:
        """Return the ranks of the job's grid that these ranks are."""
        return members

    def _joined(self, key: tuple[str, ...], members: list[int], asked: str, rule: NodeRule | None) -> Axis:
        """Return the axis of these ranks, which is kept under `key`; `asked` is the call that asks for it."""
        if key not in self._axes:
            self.communicators.check_in_use(self)
            nodes = tuple(self.job.nodes[rank] for rank in self._in_job(members))
            with flight.waiting_in("the first use", f"{'·'.join(key)} ({len(members)} ranks)"), self.job.making(asked):
                comm = self.communicators.of(members, self, asked, key)
                self._axes[key] = self._new_axis(key, len(members), members.index(self.rank), comm, rule, nodes)
        return self._axes[key]

    def _line(self, asked: str, names: tuple[str, ...], size: int, index: int, new_comm: Callable[[], MPI.Intracomm]) -> Axis:
        """Return the axis of all ranks in one of their orders, which is kept under the call that asks for it."""
        if (asked,) not in self._axes:
            self.whole.communicators.check_in_use(self)
            with self.job.making(asked):
                self._axes[asked,] = self._new_axis(names, size, index, new_comm())
        return self._axes[asked,]

    def _new_axis(
        self,
        names: tuple[str, ...],
        size: int,
        index: int,
        comm: MPI.Intracomm,
        rule: NodeRule | None = None,
        nodes: tuple[int, ...] = (),
    ) -> Axis:
        job = self.job
        number = 1 if names == EVERYONE else job.number  # ranks outside do not know it
        members = Members("·".join(names), size, index, comm, self.ledger, rule, nodes, job.transport, number)
        return Axis(names, job.transports(members), job.check)


class Grid(BaseGrid):
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
        job, comm = Job(check, requested(transport), device, transports), checked_comm(comm)
        topology, hung = Topology.checked(axes, order, tile), watchdog_seconds(default=0.0)
        filling = checked_ranks(ranks, comm.size)
        topology.check_size(len(filling))
        rank = filling.index(comm.rank) if comm.rank in filling else MPI.UNDEFINED
        whole_axes = ((name,) for name, size in topology.shape.items() if size == topology.size > 1 and rank != MPI.UNDEFINED)
        line = next(whole_axes, None)
        links, name = Communicators(job, partial(comm_of, comm, filling), filling, comm, line), f"Grid {describe(topology.shape)}"
        with job.making(name):
            first = links.first
        super().__init__(topology, rank, links, Ledger(device), job)
        if self.inside:
            guard(comm, hung)
            with job.making(name):
                job.introduce(first, topology, node_memory, comm if links.fills else None)
            for axis in self.shape:
                self._axis((axis,))


class SubGrid(BaseGrid):
    """The ranks of a job's grid that differ on some of its axes alone, as a grid: what `part` returns."""

    def __init__(self, whole: BaseGrid, names: tuple[str, ...]) -> None:
        self._whole, topology = whole, whole.topology.part(names)
        rank = topology.rank_of(whole.coordinates) if whole.inside else MPI.UNDEFINED
        links = Communicators(whole.job, self._own_comm, tuple(range(topology.size)))
        super().__init__(topology, rank, links, whole.ledger, whole.job)

    @property
    def whole(self) -> BaseGrid:
        """The grid of the whole job."""
        return self._whole

    def add_axes(self, *names: str) -> None:
        """Give the part and its job these axes, of size 1. Raises GridError where the job has a larger one of that name."""
        for name in names:
            if name not in self.shape and self._whole.shape.get(name, 1) > 1:
                raise GridError(f"{self} cannot add axis {name}, which has size {self._whole.shape[name]} on {self._whole}.")
        self._whole.add_axes(*names)
        super().add_axes(*names)

    def free(self) -> None:
        """Do nothing: the axes are the job's."""

    def _own_comm(self) -> MPI.Intracomm:
        """Return a communicator of the part's ranks, in their order (collective over them)."""
        if not self.inside:
            return MPI.Intracomm()
        points = (self.coordinates_of(rank) for rank in range(self.size))
        members = [self._whole.rank_of({**self._whole.coordinates, **point}) for point in points]
        asked = f"grid.part({', '.join(map(repr, self.shape))}).comm"
        return self._whole.communicators.of(members, self._whole, asked)


class RegroupedGrid(BaseGrid):
    """Some ranks of a job's grid as a grid with axes of their own: what `regrouped` returns."""

    def __init__(self, job_grid: BaseGrid, ranks: tuple[int, ...], topology: Topology) -> None:
        self._job_grid, self._ranks = job_grid, ranks
        make = MPI.Intracomm if job_grid.communicators.is_empty else self._own_comm
        links = Communicators(job_grid.job, make, tuple(range(len(ranks))))
        super().__init__(topology, ranks.index(job_grid.rank), links, job_grid.ledger, job_grid.job)

    def free(self) -> None:
        """Do nothing: the job's grid frees what belongs to it."""

    def _in_job(self, members: Sequence[int]) -> Sequence[int]:
        return [self._ranks[member] for member in members]

    def _own_comm(self) -> MPI.Intracomm:
        """Return a communicator of the ranks, in their order (collective over them)."""
        asked = f"grid.regrouped({self._ranks}, {self.shape})"
        return self._job_grid.communicators.of(self._ranks, self._job_grid, asked)


class Unconnected(Transports):
    """The transports of an axis of a grid without processes: its collectives raise GridError."""

    def carry(self, route: Route, *arrays: Any, **options: Any) -> NoReturn:
        """Raise GridError: the axis has no other process to communicate with."""
        raise GridError(
            f"{route.operation} over axis {self.members.label} = {self.members.size}: a Place stands for one rank of a grid "
            "without processes, and cannot communicate. Make a Grid, or a Place with transports that move nothing."
        )


class Place(BaseGrid):
    """One rank's place on a grid without processes: shape, coordinates, and axes with their sizes, indices and ledger.

    It is what layouts, schemes and closed forms need of a grid, for any rank of any grid.

    Parameters
    ----------
    axes, order, tile : as of a Grid. rank : whose place it is.
    transports : what makes each axis's transports from its `Members`; a dry run's move nothing and return at once. By default a
        collective over an axis of more than one member raises GridError.
    nodes : the node of each rank; by default all ranks share one.
    node_rule : how axes inside a node use its memory: `Members.node` of those that lie in one; None, they do not.
    ledger : where communications are counted; default a new one.

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
        ledger: Ledger | None = None,
    ) -> None:
        topology = Topology.checked(axes, order, tile)
        nodes = [0] * topology.size if nodes is None else list(nodes)
        job = Job(False, "auto", None, transports, nodes, node_rule)
        links = Communicators(job, MPI.Intracomm, tuple(range(topology.size)))
        super().__init__(topology, topology.checked_rank(rank), links, Ledger() if ledger is None else ledger, job)


def agree_on_call(
    grid: BaseGrid, operation: str, facts: Mapping[str, Hashable], axis: Axis | None = None, problem: str | None = None
) -> None:
    """Raise AgreementError on all ranks unless all make this call: compared at the first of a kind, with `check` at each.

    axis : the ranks that make it; default all of the grid. problem : why this rank is about to refuse the call. Where it knows no
    facts of it, the others hear of that only at the first call of the operation on the grid: later they may be past comparing.
    A message round where calls are compared, of bytes that `ledger.control` counts.
    """
    job = grid.job
    seen: set[Hashable] = job.kept[grid].setdefault("agreed", set())
    key = (operation, *facts.values())
    makes_none = job.sealed and not grid.communicators.is_made  # a part's own: a sealed job makes no more
    if ((key if facts else operation) in seen and not job.check) or makes_none:
        return
    comm = (axis or grid.ranked).comm
    if comm != MPI.COMM_NULL and comm.size > 1:
        grid.ledger.control += check_agreement(comm, operation, facts, problem)
    if problem is None:
        if len(seen) >= AGREED:
            seen.clear()
        seen.update((key, operation))
