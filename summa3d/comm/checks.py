# What an axis verifies before it communicates: dims, sizes, roots and, in debug mode, that its members agree. Imports failure.
# Next: collectives.py, whose collectives all begin with these.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ..errors import ShapeError
from .arrays import Array, dtype_name, into_problem, is_on_device
from .failure import check_agreement


class Checks:
    """The part of an axis that turns a wrong call into an error, alike on every member."""

    size: int
    index: int
    label: str
    comm: MPI.Intracomm
    check: bool

    def _settled(
        self, name: str, array: Array, dim: int, sizes: Sequence[int] | None, whole: bool, into: Array | None = None
    ) -> tuple[int, list[int]]:
        """`dim` counted from the front, and one size per member: `array` holds all of them along it (whole), or this member's."""
        shape, problem = list(array.shape), None
        if not -len(shape) <= dim < len(shape):
            self._check(
                name, array, {"dim": dim}, f"{name} over {self.label}: an array of shape {tuple(shape)} has no dim {dim}."
            )
        dim %= len(shape)
        extent = shape[dim]
        if sizes is None:
            problem = self._parts_problem(name, dim, extent) if whole else None
            sizes = [extent // self.size if whole else extent] * self.size
        elif len(sizes) != self.size or (sum(sizes) if whole else sizes[self.index]) != extent:
            problem = (
                f"{name} over {self.label} = {self.size} was given sizes {list(sizes)} for dim {dim} of size {extent}. "
                f"Pass one size per member that {'sum to it' if whole else 'equals its block'}."
            )
        if problem is None:
            result = [*shape[:dim], sizes[self.index] if whole else sum(sizes), *shape[dim + 1 :]]
            problem = into_problem(into, array, result)
        if problem is None and not self.check:
            return dim, list(sizes)
        facts: dict[str, Any] = {"dim": dim, "other dims": (*shape[:dim], *shape[dim + 1 :])}
        if name != "all_to_all":  # whose members may each send other sizes
            facts |= {"sizes": list(sizes), "extent": extent if whole else sum(sizes)}
        self._check(name, array, facts, problem)
        return dim, list(sizes)

    def _awaited(self, array: Array, sizes: Sequence[int], receive_sizes: Sequence[int]) -> list[int]:
        """`receive_sizes`; in debug mode compared with what the others send."""
        if self.check:
            sent = self.comm.alltoall(list(sizes)) if len(receive_sizes) == self.size else None
            problem = (
                None
                if sent == list(receive_sizes)
                else f"Member {self.index} awaits pieces {list(receive_sizes)} but is sent {sent}."
            )
            self._check("all_to_all", array, {}, problem)
        return list(receive_sizes)

    def _parts_problem(self, name: str, dim: int, extent: int) -> str | None:
        below = extent - extent % self.size
        return (
            None
            if below == extent
            else (
                f"{name}: dim {dim} of size {extent} has no equal parts over {self.label} = {self.size}. "
                f"Pass sizes, or a multiple of {self.size}: {below}, {below + self.size}."
            )
        )

    def _root_problem(self, root: int) -> str | None:
        return (
            None
            if 0 <= root < self.size
            else f"There is no root {root} on axis {self.label}; its members are 0 to {self.size - 1}."
        )

    def _check(self, name: str, array: Array, facts: dict[str, Any], problem: str | None = None) -> None:
        """Raise ShapeError for a `problem` with this call; in debug mode an error on all members if they differ in anything."""
        if self.check:
            memory = "a device's" if is_on_device(array) else "the host's"
            known = {"dtype": dtype_name(array), "memory": memory, **facts, "problem": problem}
            check_agreement(self.comm, f"{name} over {self.label}", known)
        if problem is not None:
            raise ShapeError(problem)

    def _peer_comm(self, name: str, peer: int) -> MPI.Comm:
        if not 0 <= peer < self.size or peer == self.index:
            others = ", ".join(str(member) for member in range(self.size) if member != self.index) or "none"
            raise ShapeError(f"{name} on axis {self.label}: member {self.index} has no peer {peer}. Peers: {others}.")
        return self.comm
