"""One rank's place on a grid whose collectives return at once, for dry runs: the only file of dry/ that depends on transports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.device.arrays import Array, empty, is_half, is_torch
from ..comm.grid import Place
from ..comm.profile.ledger import Amounts, Ledger
from ..comm.transport.call import MESSAGES, Carried, Members, Requests, Route
from ..comm.transport.host import HostTransport
from ..comm.transport.node import AllReduceInParts, in_slots
from ..comm.transport.node_buffer import lasting
from ..comm.transport.node_memory import SLOTS
from ..comm.transport.select import NodeRule, staged_dtype
from ..comm.transport.slot_collective import SlotCollective
from ..comm.transport.transports import Transports


class Awaited:
    """A message that is not here before it is waited for: what is done meanwhile stands in front of the wait."""

    done = False

    def wait(self) -> None:
        """Return at once."""


class DryTransport(HostTransport):
    """Calls that move nothing and return at once. Shapes and dtypes are right, and so are the words that an axis counts.

    on_device : whether it stands for NCCL, which adds up summands of more than 16 bits as it moves them.
    """

    def __init__(self, on_device: bool) -> None:
        super().__init__()
        self.on_device = on_device

    def all_gather(self, *arguments: Any, **options: Any) -> Requests:
        """Move nothing."""
        return []

    def all_reduce(self, comm: MPI.Comm, array: Array, out: Array, *arguments: Any, **options: Any) -> Requests:
        """Move nothing; numbers on the host are this rank's own."""
        if not is_torch(out):
            out[...] = array
        return []

    all_to_all = broadcast = reduce = send = reduce_scatter = all_gather

    def receive(self, *arguments: Any, **options: Any) -> Requests:
        """Move nothing."""
        return [Awaited()]

    def sums_parts(self, array: Array) -> bool:
        """Return whether reduce-scatters need no workspace for the parts: NCCL sums all but 16-bit floats."""
        return self.on_device and not is_half(array)


class DryTransports(Transports):
    """The transports of an axis that moves nothing. In a node's memory its collectives take their steps on arrays without memory.

    on_device : whether arrays are a device's, which NCCL moves.
    """

    def __init__(self, members: Members, on_device: bool) -> None:
        super().__init__(replace(members, rule=None))
        self.members, self.host = members, DryTransport(on_device)
        self.in_node = members.node is not None and members.size > 1
        self._slot_bytes = [0] * SLOTS
        self._unread: dict[int, Callable[[], None]] = {}
        self._place, self._allocated = 0, None

    def of(self, array: Array) -> Any:
        """The transport for collectives on `array`, and for messages from one member to another."""
        return self.host

    between_two = of

    def carry(
        self, route: Route, array: Array, into: Array | None = None, blocking: bool = True, parts: Array | None = None
    ) -> Carried:
        """Begin a call that moves nothing."""
        if self.in_node and route.operation not in MESSAGES:
            collective = route.bound = route.bound or in_slots(route, array, self.members, NODE_RULE)
            allocated = self._allocated is array and route.operation == "reduce_scatter"
            if isinstance(collective, AllReduceInParts) and collective.in_slots:
                begun = collective.begin(partial(self._begin, blocking=blocking), array, into, fail=lambda error: None)
                assert begun is not None
                return begun
            if isinstance(collective, SlotCollective) and (collective.in_slots or allocated):
                return self._begin(collective, array, into, blocking, allocated)
        return self.host.carry(self.members, route, array, into, blocking, parts)

    def _begin(
        self, collective: SlotCollective, array: Array, into: Array | None, blocking: bool = True, allocated: bool = False
    ) -> Carried:
        """Write now, and combine when it is waited for, or when another communication takes the slot."""
        if not allocated:
            self._take(collective.nbytes)
        self._allocated, place, early = None, self._place, []
        views = collective.views[place]
        if views is None:
            with lasting(collective.is_torch):
                views = collective.views[place] = collective.views_in(_without_memory)
        own = None if allocated else collective.write(views, array, into, blocking)
        into = array if collective.in_place else into
        if collective.gives_view and into is None:
            return Carried([], lambda: _without_memory(collective.like, 0, collective.whole), array)

        def combine() -> None:
            early.append(collective.combine(views, into, own))

        def finish() -> Array:
            if not early:
                del self._unread[place]
                combine()
            return early.pop()

        self._unread[place] = combine
        return Carried([], finish, array)

    def _take(self, nbytes: int) -> None:
        """Take the next slot."""
        self._place = place = (self._place + 1) % SLOTS
        self._slot_bytes[place] = max(self._slot_bytes[place], nbytes)
        if place in self._unread:
            self._unread.pop(place)()

    def allocate(self, shape: Sequence[int], like: Array) -> Array | None:
        """A buffer that the next reduce-scatter sums in place."""
        if not self.offers_views(like):
            return None
        self._take(self.members.size * prod(shape) * like.itemsize)
        self._allocated = _without_memory(like, 0, tuple(shape))
        return self._allocated

    def offers_views(self, array: Array) -> bool:
        """Return whether the members share a node's memory, and it holds arrays of this dtype."""
        return self.in_node and staged_dtype(array)

    @property
    def node_bytes(self) -> int | None:
        """This rank's share of the slots, each as large as the largest communication of the axis."""
        return SLOTS * max(self._slot_bytes) // self.members.size if self.in_node else None

    def barrier(self) -> None:
        """Return at once: no member waits."""


def _without_memory(like: Array, offset: int, shape: tuple[int, ...]) -> Array:
    """An array of `like`'s kind and dtype that stands for one in a slot; numbers on the host are 0 until written."""
    if not is_torch(like):
        return np.zeros(shape, like.dtype)
    if prod(shape) == 0:
        return empty(shape, like)
    with _disable_current_modes():
        return torch.empty(shape, dtype=like.dtype, device=like.device)


NODE_RULE = NodeRule(crowded=True, always=True)
"""Inside a node, every communication that the node's memory can take goes through it."""


class DryPlace(Place):
    """The place of rank `rank` on a grid without processes, where collectives return at once and are counted.

    Parameters
    ----------
    axes, rank, order, tile : as of `Place`
    ranks_per_node : how many consecutive ranks share a node's memory, by which the axes inside a node then communicate
    on_device : whether arrays are a device's, which NCCL moves; then no node's memory is used
    ledger : where communications, products and workspace are counted; default a new one

    Raises GridError for axes, order or tile that do not fit, or a rank that the grid does not have.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        rank: int = 0,
        order: str | Sequence[str] | None = None,
        tile: Mapping[str, int] | None = None,
        ranks_per_node: int = 1,
        on_device: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        size = prod(axes.values())
        nodes = [other // ranks_per_node for other in range(size)]
        rule = NODE_RULE if ranks_per_node > 1 and not on_device else None
        super().__init__(axes, rank, order, tile, partial(DryTransports, on_device=on_device), nodes, rule, ledger)

    def node_bytes(self) -> int:
        """Return this rank's share of the node's memory that its axes have used so far."""
        return sum(axis.node_bytes or 0 for links in self.linked() for axis in links.axes.values())


TURNS = 3
"""Turns of a loop that are made before one stands for all that follow: in these, buffers that take turns are allocated."""


class DryLedger(Ledger):
    """A ledger that also reports, in order, communications issued, communications waited for, and local products.

    Parameters
    ----------
    issued : (collective, axis, dtype, amounts) → the argument of `waited` for this communication
    waited : called when a communication is waited for
    multiplied : (a, b, form, out) of a local product
    begun : called when an op of a program begins
    kept : called with workspace that stays from one product to the next, when it has been made
    repeating : (how often) → around a turn of a loop that stands for so many alike
    """

    def __init__(
        self,
        issued: Callable[[str, str, str, Amounts], Any],
        waited: Callable[[Any], None],
        multiplied: Callable[[Array, Array, str, Array], Any],
        begun: Callable[[], None],
        kept: Callable[[Array], None],
        repeating: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._kept, self._repeating = kept, repeating
        self._issued, self._waited, self._multiplied, self._begun = issued, waited, multiplied, begun
        self.alike = self._alike

    by_steps = True

    def begin(self, collective: str, axis: str, dtype: str, amounts: Amounts, start: float, issue: float) -> Any:
        """Report an issued communication."""
        return self._issued(collective, axis, dtype, amounts)

    def complete(self, line: Amounts, traced: Any, seconds: float, cpu_seconds: float, wait: float) -> None:
        """Report the wait for a communication."""
        if traced is not None:
            self._waited(traced)

    def expect(self, line: Amounts, traced: Any, spans: Sequence[Any]) -> None:
        """Do nothing: a dry run has no device to wait for."""

    def track(self, array: Array, stays: bool = False) -> Array:
        """Count a workspace array, and report one that stays."""
        if stays:
            self._kept(array)
        return super().track(array)

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Report the op that begins."""
        self._begun()
        yield

    def _alike(self, kinds: Sequence[Hashable]) -> Iterator[int]:
        """Of consecutive places of one kind the first ones, which may allocate, and one that stands for all behind them."""
        for _, group in groupby(range(len(kinds)), key=lambda place: kinds[place]):
            places = [*group]
            yield from places[:TURNS]
            if len(places) > TURNS:
                with self._repeating(len(places) - TURNS):
                    yield places[TURNS]

    def product(self, a: Array, b: Array, form: str, out: Array, made: int | None = None) -> Any:
        """Report a local product, or `made` elements of it, and suppress the recording of torch's operations in it."""
        if made is not None:
            part = slice(made // len(out))
            b = b[:, part] if form[1] == "n" else b[part]
        return self._multiplied(a, b, form, out)
