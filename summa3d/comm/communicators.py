"""The communicators of a grid's ranks, and the axes that have them: made at their first use, kept, and freed with the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from mpi4py import MPI

from ..errors import GridError, Summa3dError
from .axis import Axis
from .health.failure import check_comm
from .job import Job


class Communicators:
    """The communicators of a grid, or of a part of one: each axis has its own, made of one of all ranks.

    Parameters
    ----------
    make : makes the communicator of the grid's ranks, in their order: collective over them, at the first use. MPI.Intracomm, the
        grid has no processes.
    common : the one that the grid was made on, its owner's; default the grid's own.
    ranks : those of `common` that fill the grid, in the grid's order. Where they are all of them, in their order, they fill it.
    line : the names of an axis that has all ranks, and so the communicator which `make` makes; then `comm` is another one.
    """

    def __init__(
        self,
        job: Job,
        make: Callable[[], MPI.Intracomm],
        ranks: tuple[int, ...],
        common: MPI.Intracomm | None = None,
        line: tuple[str, ...] | None = None,
    ) -> None:
        self.ranks, self.fills = ranks, common is None or ranks == tuple(range(common.size))
        self.axes: dict[tuple[str, ...], Axis] = {}
        self._job, self._make, self._common, self._line = job, make, common, line

    @cached_property
    def first(self) -> MPI.Intracomm:
        """The communicator of which the others are made; the null communicator on ranks outside the grid."""
        return self._make()

    @cached_property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the grid's ranks, in their order, that no axis of names has; its first use may be collective."""
        if self._line is None:
            return self.first
        with self._job.making("grid.comm"):
            return comm_of(self.first, range(len(self.ranks)))

    @property
    def common(self) -> MPI.Intracomm:
        """The communicator that the grid was made on; of a part, its own."""
        return self.first if self._common is None else self._common

    @property
    def is_made(self) -> bool:
        """Return whether there is a communicator of the grid's ranks already."""
        return "first" in vars(self)

    @property
    def is_empty(self) -> bool:
        """Return whether the grid has no processes: each of its communicators is the null one."""
        return self._make is MPI.Intracomm

    @property
    def common_size(self) -> int:
        """The number of ranks of `common`. Raises GridError where it was freed and is needed to tell."""
        return len(self.ranks) if self.fills else int(checked_comm(self.common).size)

    def of(self, members: Sequence[int], grid: object, asked: str, names: tuple[str, ...] = ()) -> MPI.Intracomm:
        """Return a communicator of these ranks, for the axis of these names if for one (collective over them).

        Raises GridError where the grid is sealed and the call `asked` would make one of several ranks.
        """
        if self._job.sealed and len(members) > 1:
            raise GridError(
                f"{grid} is sealed: {asked} would make a new communicator, which other ranks may not be there to make.\n"
                f"  Ask for {asked} on every rank before grid.seal()."
            )
        if self.is_empty:
            return self.first
        if len(members) == 1:
            return MPI.COMM_SELF
        return self.first if names == self._line else comm_of(self.first, members)

    def check_in_use(self, grid: object) -> None:
        """Raise GridError if the grid was freed, or interrupted as it made an axis, or this process was forked from its rank."""
        if self.first != MPI.COMM_NULL:
            check_comm(self.first, f"{grid}")
        self._job.check_in_use(grid)

    def free(self) -> None:
        """Free all that were made, the axes' own and those of all ranks, but for those of axes that are broken.

        MPI would give another communicator the number of a broken one, and with it a message that nobody has received.
        """
        comms = [axis.comm for axis in self.axes.values()]
        broken = [axis.comm for axis in self.axes.values() if axis.lock.is_broken]
        for comm in (*comms, *(vars(self)[name] for name in ("comm", "first") if name in vars(self))):
            if comm not in (MPI.COMM_NULL, MPI.COMM_SELF, *broken):  # one that is freed is null, wherever it stands
                comm.Free()
        self.axes.clear()


def release(job: Job, grids: Sequence[Communicators]) -> None:
    """Free what belongs to a job, and all of its grid's parts and of the grid; then raise the first error of freeing an axis.

    All ends are said before one is waited for: the order may differ from rank to rank.
    """
    job.freed = True
    axes = [axis for communicators in grids for axis in communicators.axes.values()]
    for axis in axes:
        axis.records.ranks = None  # the communicator, which would name them, is gone soon
    errors = []
    for step in [axis.transports.end for axis in axes] + [axis.transports.free for axis in axes]:
        try:
            step()
        except Summa3dError as error:
            errors.append(error)
    for communicators in grids:
        communicators.free()
    job.kept.clear()
    if errors:
        raise errors[0]


def checked_comm(comm: Any) -> MPI.Intracomm:
    """Return a communicator, of an MPI that has started. Raises GridError for what is none, or was freed."""
    if not MPI.Is_initialized():  # its names were imported for a dry run alone
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if isinstance(comm, MPI.Comm):
        check_comm(comm, "a grid")
    elif not hasattr(comm, "rank") or hasattr(comm, "shape"):  # a grid has both
        raise GridError(f"A grid takes an MPI communicator, as mpi4py.MPI.COMM_WORLD; it was given a {type(comm).__name__}.")
    return comm


def comm_of(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of these ranks of `comm`, in this order: collective over them; the null communicator on others."""
    if comm.rank not in ranks:
        return MPI.Intracomm()
    if len(ranks) == 1:
        return MPI.COMM_SELF
    group = comm.Get_group()
    some = group.Incl(ranks)
    part = comm.Create_group(some)
    some.Free()
    group.Free()
    return part
