"""Checks before a collective: dims, sizes, roots, targets and, in debug mode, agreement; the routes of calls that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from threading import current_thread
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from ..errors import ShapeError
from .device.arrays import (
    Array,
    array_problem,
    count,
    dtype_name,
    into_problem,
    is_contiguous,
    is_on_device,
    is_writable,
    place_of,
    share,
)
from .health.agreement import check_agreement
from .transport.call import Members, Route
from .transport.p2p import CODES
from .transport.transports import Transports

Sizes = Sequence[int] | None
"""The members' extents along a dim; None, they are equal."""
LEAST_TAG = 32767
"""The largest tag that every MPI has."""


class Checks:
    """Checks of the calls over an axis: a wrong call raises the same error on every member.

    debug : compare operation, shapes and dtypes over the members before every collective, for a message each.
    """

    def __init__(self, members: Members, transports: Transports, debug: bool) -> None:
        self.size, self.index, self.label, self.comm = members.size, members.index, members.label, members.comm
        self.name, self.debug, self.ledger = members.name, debug, members.ledger
        self.transports = transports

    def normalized(
        self, name: str, array: Array, dim: int, sizes: Sizes, whole: bool, into: Array | None = None, parts: Array | None = None
    ) -> tuple[int, list[int]]:
        """`dim` counted from the front, and one size per member: `array` holds all of them along it (whole), or this member's.

        into, parts : the result's memory and the workspace, where they are given
        """
        shape = list(array.shape)
        problem = _not_whole(name, "dim", dim) or next((_not_whole(name, "a size", size, 0) for size in sizes or ()), None)
        if problem is not None:
            self.agreed(name, array, {"dim": dim, "sizes": sizes}, problem)
        if not -len(shape) <= dim < len(shape):
            problem = f"{name} over {self.label}: an array of shape {tuple(shape)} has no dim {dim}."
            self.agreed(name, array, {"dim": dim}, problem)
        dim %= len(shape)
        extent = shape[dim]
        if sizes is None:
            sizes, left = [extent // self.size if whole else extent] * self.size, extent % self.size if whole else 0
            if left:
                below = extent - left
                problem = (
                    f"{name}: dim {dim} of size {extent} has no equal parts over {self.label} = {self.size}. "
                    f"Pass sizes, or a multiple of {self.size}: {below}, {below + self.size}."
                )
        elif len(sizes) != self.size or (sum(sizes) if whole else sizes[self.index]) != extent:
            problem = (
                f"{name} over {self.label} = {self.size} was given sizes {list(sizes)} for dim {dim} of size {extent}. "
                f"Pass one size per member that {'sum to it' if whole else 'equals its block'}."
            )
        if problem is None:
            shape_of_result = [*shape[:dim], sizes[self.index] if whole else sum(sizes), *shape[dim + 1 :]]
            problem = into_problem(into, array, shape_of_result)
            if problem is None and parts is not None:  # here, so that it is agreed on as the other problems
                problem = self.workspace_problem(array, parts, prod(shape_of_result) * self.size)
        if problem is None and not self.debug:
            return dim, list(sizes)
        facts: dict[str, Any] = {"dim": dim, "other dims": (*shape[:dim], *shape[dim + 1 :])}
        if name != "all_to_all":  # whose members may each send other sizes
            facts |= {"sizes": list(sizes), "extent": extent if whole else sum(sizes)}
        self.agreed(name, array, facts, problem)
        return dim, list(sizes)

    def pieces(self, array: Array, dim: int, sizes: Sizes, receive_sizes: Sizes) -> tuple[int, list[int], list[int] | None]:
        """An all-to-all's dim, and what this member sends and receives of it; the latter None where all pieces are equal."""
        if (sizes is None) != (receive_sizes is None):
            raise ShapeError(f"all_to_all over {self.label} takes sizes and receive_sizes together, or neither for equal pieces.")
        equal = sizes is None
        dim, sizes = self.normalized("all_to_all", array, dim, sizes, True)
        receive_sizes = sizes if receive_sizes is None else list(receive_sizes)
        wrong = next((_not_whole("all_to_all", "a size", size, 0) for size in receive_sizes), None)
        if wrong is None and len(receive_sizes) != self.size:
            wrong = f"all_to_all over {self.label} = {self.size} was given receive_sizes {receive_sizes}. Pass one per member."
        elif wrong is None and sizes[self.index] != receive_sizes[self.index]:  # all that a member knows by itself
            wrong = (
                f"all_to_all over {self.label} = {self.size}: member {self.index} keeps a piece of {sizes[self.index]} by sizes "
                f"{sizes} and of {receive_sizes[self.index]} by receive_sizes {receive_sizes}. Pass the same for its own piece."
            )
        if wrong is not None or self.debug:  # before the exchange of sizes, to which all must come
            self.agreed("all_to_all", array, {}, wrong)
        if self.debug:  # compare with what the others send
            sent = self.comm.alltoall(list(sizes))
            known = f"Member {self.index} awaits pieces {receive_sizes} but is sent {sent}."
            self.agreed("all_to_all", array, {}, None if sent == receive_sizes else known)
        return dim, sizes, None if equal else receive_sizes

    def target(self, name: str, array: Array) -> None:
        """Raise ShapeError unless `array` can be overwritten in place."""
        problem = self.target_problem(name, array)
        if problem is None and not is_contiguous(array):
            problem = f"{name} overwrites its array in place, so the array must be C-contiguous."
        if problem is not None:
            raise ShapeError(problem)

    def target_problem(self, name: str, array: Array) -> str | None:
        """The reason why `array` cannot be overwritten in place; None if it can."""
        return None if is_writable(array) else f"{name} overwrites its array in place, and this one is read-only."

    def root_problem(self, root: object) -> str | None:
        """The reason why `root` is no member of the axis; None if it is one."""
        if isinstance(root, (int, np.integer)) and 0 <= root < self.size:
            return None
        return f"There is no root {root} on axis {self.label}; its members are 0 to {self.size - 1}."

    def agreed(self, name: str, array: Array, facts: dict[str, Any], problem: str | None = None) -> None:
        """Raise ShapeError for a `problem` with this call; in debug mode an error on all members if they differ in anything."""
        if self.debug:
            self.transports.check()
            memory = "a device's" if is_on_device(array) else "the host's"
            known = {"dtype": dtype_name(array), "memory": memory, **facts, "problem": problem}
            self._compare(name, known)
        if problem is not None:
            raise ShapeError(problem)

    def refuse(self, name: str, array: Array, facts: dict[str, Any], problem: str) -> NoReturn:
        """Raise ShapeError for a call that other members may make: those that share a node's memory compare it with theirs."""
        if not self.debug:
            self.transports.refuse(f"{name} of {dtype_name(array)} {list(array.shape)}, which is refused")
        self.agreed(name, array, facts, problem)
        raise ShapeError(problem)

    def barrier(self) -> None:
        """In debug mode, raise AgreementError on all members unless all are at a barrier."""
        if self.debug:
            self.transports.check()
            self._compare("barrier", {})

    def _compare(self, operation: str, facts: dict[str, Any]) -> None:
        """Raise AgreementError unless all members make this call, in threads of one name: those of a job are named alike."""
        known = {**facts, "thread": current_thread().name}
        self.ledger.control += check_agreement(self.comm, f"{operation} over {self.name}", known)

    def array(self, name: str, array: Any) -> None:
        """Raise ShapeError for what is no array that can be communicated."""
        problem = array_problem(array, self.comm != MPI.COMM_NULL)
        if problem is not None:
            raise ShapeError(f"{name} over {self.label}: {problem}.")

    def workspace_problem(self, array: Array, parts: Any, elements: int) -> str | None:
        """The reason why `parts` cannot hold these elements of `array`'s dtype; None if it can."""
        problem = array_problem(parts, self.comm != MPI.COMM_NULL)
        if problem is None and count(parts) != elements:
            problem = f"it has {count(parts)} elements, where {elements} are needed"
        if problem is None and not is_contiguous(parts):
            problem = "it is not C-contiguous"
        problem = problem or into_problem(parts, array, parts.shape)
        return problem and f"reduce_scatter over {self.label}: parts cannot be its workspace: {problem}"

    def peer(self, name: str, peer: int, tag: int) -> None:
        """Raise ShapeError unless there is such a member, other than this one, and such a tag."""
        bound = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) if MPI.Is_initialized() else None  # a dry run may be without it
        most = (bound or LEAST_TAG) // CODES - 1
        if not isinstance(tag, (int, np.integer)) or not 0 <= tag <= most:
            raise ShapeError(f"{name} on axis {self.label}: a tag is a whole number from 0 to {most}; it is {tag!r}.")
        if not isinstance(peer, (int, np.integer)) or not 0 <= peer < self.size or peer == self.index:
            others = ", ".join(str(member) for member in range(self.size) if member != self.index) or "none"
            raise ShapeError(f"{name} on axis {self.label}: member {self.index} has no peer {peer}. Peers: {others}.")


def _not_whole(name: str, what: str, value: object, least: int | None = None) -> str | None:
    """The reason why a dim or a size is refused; None if it is a whole number, and at least `least`."""
    if isinstance(value, (int, np.integer)) and (least is None or value >= least):
        return None
    return f"{name}: {what} must be a whole number{'' if least is None else f' ≥ {least}'}; it is {value!r}."


ROUTES = 1024
"""Routes that an axis keeps; a step of training takes the same few again and again."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "all_to_all")


class Routes:
    """The routes of an axis's calls: each is checked and counted once for all calls that are alike.

    There is a method for each operation. array : what is sent, or overwritten. into : where the result goes, if a caller says so.
    parts : workspace of a reduce-scatter. What follows them are the operation's options.
    """

    def __init__(self, checks: Checks) -> None:
        self.checks, self.size, self.index, self.label = checks, checks.size, checks.index, checks.label
        self._routes: dict[Hashable, Route] = {}

    def all_gather(
        self, block: Array, into: Array | None, parts: None, dim: int = 0, sizes: Sizes = None, view: bool = False
    ) -> Route:
        """The route of an all-gather."""
        sizes = listed("all_gather", sizes)
        key, route = self._known("all_gather", block, into, dim, sizes, view)
        if route is not None:
            return route
        dim, extents = self.checks.normalized("all_gather", block, dim, sizes, False, into)
        words = (sum(extents) - extents[self.index]) * prod(block.shape[:dim]) * prod(block.shape[dim + 1 :])
        return self._kept(key, Route("all_gather", is_on_device(block), words, self.size - 1, dim, extents, view=view))

    def reduce_scatter(self, array: Array, into: Array | None, parts: Array | None, dim: int = 0, sizes: Sizes = None) -> Route:
        """The route of a reduce-scatter."""
        sizes = listed("reduce_scatter", sizes)
        key, route = self._known("reduce_scatter", array, into, dim, sizes)
        if route is not None and parts is not None:
            problem = self.checks.workspace_problem(array, parts, route.words // (self.size - 1) * self.size)
            if problem is not None:
                raise ShapeError(problem)
        if route is not None:
            return route
        dim, extents = self.checks.normalized("reduce_scatter", array, dim, sizes, True, into, parts)
        words = (self.size - 1) * extents[self.index] * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        return self._kept(key, Route("reduce_scatter", is_on_device(array), words, self.size - 1, dim, extents))

    def all_reduce(self, array: Array, into: Array | None, parts: None, op: str = "sum", in_order: bool = False) -> Route:
        """The route of an all-reduce."""
        return self._reduction("all_reduce", array, into, op, None, in_order)

    def reduce(self, array: Array, into: Array | None, parts: None, root: int = 0, op: str = "sum") -> Route:
        """The route of a reduction onto the root."""
        return self._reduction("reduce", array, into, op, root, True)

    def _reduction(self, name: str, array: Array, into: Array | None, op: Any, root: int | None, in_order: bool) -> Route:
        in_place = into is not None and into is array and is_writable(array)
        key, route = self._known(name, array, None if in_place else into, op, root, in_order)
        if route is not None:
            return route
        facts = {"shape": tuple(array.shape), "op": op, "root": root}
        problem = None if name == "all_reduce" else self.checks.root_problem(root)
        if problem is None and not isinstance(op, str):  # of a text the transport says what it means
            problem = f"Reduction {op!r} is not defined; it is a text, such as sum."
        if problem is None and root in (None, self.index):
            problem = into_problem(into, array, array.shape)
        self.checks.agreed(name, array, facts, problem)
        own = share(count(array), self.size, self.index)
        words, messages = (self.size - 1) * own, self.size - 1
        if root is None:
            words, messages = count(array) - own + words, 2 * messages
        route = Route(name, is_on_device(array), words, messages, op=op, root=-1 if root is None else root, in_order=in_order)
        return self._kept(key, route)

    def broadcast(self, array: Array, into: None, parts: None, root: int = 0) -> Route:
        """The route of a broadcast."""
        key, route = self._known("broadcast", array, None, root)
        if route is not None and (not route.words or is_writable(array)):
            return route
        received = self.index != root
        problem = self.checks.root_problem(root) or (self.checks.target_problem("broadcast", array) if received else None)
        self.checks.agreed("broadcast", array, {"shape": tuple(array.shape), "root": root}, problem)
        return self._kept(key, Route("broadcast", is_on_device(array), count(array) * received, int(received), root=root))

    def all_to_all(
        self, array: Array, into: None, parts: None, dim: int = 0, sizes: Sizes = None, receive_sizes: Sizes = None
    ) -> Route:
        """The route of an all-to-all."""
        sizes, receive_sizes = listed("all_to_all", sizes), listed("all_to_all", receive_sizes)
        key, route = self._known("all_to_all", array, None, dim, sizes, receive_sizes)
        if route is not None:
            return route
        dim, extents, received = self.checks.pieces(array, dim, sizes, receive_sizes)
        arriving = extents if received is None else received
        words = (sum(arriving) - arriving[self.index]) * prod(array.shape[:dim]) * prod(array.shape[dim + 1 :])
        return self._kept(
            key, Route("all_to_all", is_on_device(array), words, self.size - 1, dim, extents, receive_sizes=received)
        )

    def send(self, array: Array, into: None, parts: None, to: int, tag: int) -> Route:
        """The route of a message to member `to`."""
        return self._message("send", array, to, tag, 0)

    def receive(self, array: Array, into: None, parts: None, source: int, tag: int) -> Route:
        """The route of a message from member `source`."""
        route = self._message("receive", array, source, tag, 1)
        self.checks.target("receive", array)
        return route

    def _message(self, name: str, array: Array, peer: int, tag: int, arriving: int) -> Route:
        key, route = self._known(name, array, None, peer, tag)
        if route is not None:
            return route
        self.checks.peer(name, peer, tag)
        return self._kept(key, Route(name, is_on_device(array), count(array) * arriving, arriving, root=peer, tag=tag))

    def _known(self, name: str, array: Array, into: Array | None, *rest: Hashable) -> tuple[Hashable, Route | None]:
        """Key that calls like this one share, and their route; None where this one must be checked itself.

        Raises ShapeError for what is no array, and for arguments of types that no call takes.
        """
        key: Hashable = None
        try:
            key = (name, array.shape, array.dtype, place_of(array), rest)
            route = self._routes.get(key)
            if route is not None and into is None and not self.checks.debug:
                return key, route
        except (AttributeError, TypeError) as error:
            self.checks.array(name, array)
            said = ", ".join(map(repr, rest))
            raise ShapeError(f"{name} over {self.label} does not take arguments of these types: {said}.") from error
        self.checks.array(name, array)
        return key, None

    def _kept(self, key: Hashable, route: Route) -> Route:
        if len(self._routes) >= ROUTES:
            self._routes.clear()
        return self._routes.setdefault(key, route)


def listed(name: str, sizes: Sizes) -> tuple[int, ...] | None:
    """Sizes as a tuple, where there are any. Raises ShapeError for what is no sequence."""
    try:
        return None if sizes is None else tuple(sizes)
    except TypeError as error:
        raise ShapeError(f"{name}: sizes are whole numbers, one per member; they are given as {sizes!r}.") from error
