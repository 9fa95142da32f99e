"""A grid of one rank's place whose collectives return at once: the only file of the dry run that knows how `comm` is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from mpi4py import MPI
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.arrays import Array, empty, is_half, is_torch
from ..comm.collectives import Axis
from ..comm.grid import Place
from ..comm.ledger import Amounts, Ledger
from ..comm.node import SLOTS, NodeRule, Ring, Turn
from ..comm.transport import Carriers, HostTransport, Requests


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

    all_to_all = broadcast = reduce = send = receive = reduce_scatter = all_gather

    def sums_parts(self, array: Array) -> bool:
        """Whether reduce-scatters need no room for the parts of the sum."""
        return self.on_device and not is_half(array)


class DryCarriers(Carriers):
    """The transport of one axis, the same for every array."""

    def __init__(self, on_device: bool) -> None:
        super().__init__()
        self.host = DryTransport(on_device)

    def of(self, array: Array, comm: MPI.Comm) -> Any:
        """The transport for `array`."""
        return self.host

    def between_two(self, array: Array) -> Any:
        """The transport for a message from one member to another."""
        return self.host


class DryFlags:
    """Flags for which nobody waits."""

    def set(self, flag: int, value: int) -> None:
        """Wake nobody."""

    def wait(self, flag: int, value: int) -> bool:
        """Return at once; no sleep was needed."""
        return False


class DryTurn(Turn):
    """One communication in a slot of the node's memory, which is not there: its parts are no memory of this rank."""

    def part(self, like: Array, offset: int, shape: Sequence[int]) -> Array:
        """An array of `like`'s kind and dtype that stands for a part of the slot."""
        if prod(shape) == 0 or not is_torch(like):
            return empty(shape, like)
        with _disable_current_modes():
            return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


class DryRing(Ring):
    """The slots of one axis in the node's memory: none is there, but how large each would be is known."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index, self.flags = size, index, DryFlags()  # type: ignore[assignment]
        self.number, self.last = 0, size - 1
        self.sizes = [0] * SLOTS
        self.turns: list[Turn | None] = [None] * SLOTS
        self.kept: Turn | None = None
        self.room: tuple[Turn, Array] | None = None

    @property
    def size_bytes(self) -> int:
        """This rank's share of the slots, each as large as the largest communication of the axis."""
        return SLOTS * max(self.sizes) // self.size

    def turn(self, nbytes: int) -> Turn | None:
        """The next slot; ends the view that the last turn may have given."""
        for ended in (self.kept, None if self.room is None else self.room[0]):
            if ended is not None:
                ended.close()
        self.kept = self.room = None
        self.number += 1
        slot = self.number % SLOTS
        before = self.turns[slot]
        if before is not None:
            before.finish()
        self.sizes[slot] = max(self.sizes[slot], nbytes)
        taken = self.turns[slot] = DryTurn(self, self.number, None)
        return taken


class DryNodeRule(NodeRule):
    """Every communication that the node's memory can take goes through it."""

    def __init__(self, size: int, index: int) -> None:
        super().__init__(crowded=True, always=True)
        self._made, self._ring = True, DryRing(size, index)


class DryPlace(Place):
    """The place of rank `rank` on a grid that nobody has started, where collectives return at once and are counted.

    Parameters
    ----------
    axes, rank, order, tile : as of `Place`
    ranks_per_node : how many consecutive ranks share a node's memory, by which the axes inside a node then communicate
    on_device : whether arrays are a device's, which NCCL moves; then no node's memory is used
    ledger : where communications, products and workspace are counted; default a new one

    Raises GridError for axes, order or tile that do not fit, or a rank that the grid has not.
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
        super().__init__(axes, rank, order, tile)
        self.on_device = on_device
        self.ledger = Ledger() if ledger is None else ledger
        self._node = [other // ranks_per_node for other in range(self.size)]
        self._staged = self._always = ranks_per_node > 1 and not on_device

    @property
    def node_bytes(self) -> int:
        """This rank's share of the node's memory that its axes have used so far."""
        rules = (axis._node for axis in self._axes.values())
        return sum(rule._ring.size_bytes for rule in rules if isinstance(rule, DryNodeRule) and rule._ring is not None)

    @property
    def node_axes(self) -> tuple[str, ...]:
        """The axes of more than one member that lie inside a node and communicate through its memory."""
        return tuple(name for name, size in self.shape.items() if size > 1 and self._axis((name,))._node is not None)

    def _axis(self, names: tuple[str, ...]) -> Axis:
        axis = super()._axis(names)
        if axis._node is not None and not isinstance(axis._node, DryNodeRule):
            axis._node = DryNodeRule(axis.size, axis.index)
        return axis

    def _carriers(self) -> Carriers:
        return DryCarriers(self.on_device)

    def _line(self, names: tuple[str, ...], comm: MPI.Intracomm) -> Axis:
        key = (*names, "in the order of ranks")
        if key not in self._axes:
            self._axes[key] = Axis(names, self.size, self.rank, comm, self.ledger, carriers=self._carriers())
        return self._axes[key]


class DryLedger(Ledger):
    """A ledger that also tells, in order, what is issued, what is waited for and what is multiplied.

    Parameters
    ----------
    issued : (collective, axis, dtype, amounts) → what `waited` gets when the communication is waited for
    waited : called when a communication is waited for
    multiplied : (form, m, n, k, dtype, bytes read, bytes written) of a local product
    """

    def __init__(
        self,
        issued: Callable[[str, str, str, Amounts], Any],
        waited: Callable[[Any], None],
        multiplied: Callable[[Array, Array, str, Array], Any],
    ) -> None:
        super().__init__()
        self._issued, self._waited, self._multiplied = issued, waited, multiplied

    def begin(self, collective: str, axis: str, dtype: str, amounts: Amounts, start: float, issue: float) -> Any:
        """Tell that a communication was issued."""
        return self._issued(collective, axis, dtype, amounts)

    def complete(self, line: Amounts, traced: Any, seconds: float, cpu_seconds: float, wait: float) -> None:
        """Tell that a communication was waited for."""
        if traced is not None:
            self._waited(traced)

    def expect(self, line: Amounts, traced: Any, spans: Sequence[Any]) -> None:
        """There is no device to wait for."""

    def product(self, a: Array, b: Array, form: str, out: Array) -> Any:
        """Tell of a local product, and leave out what computes it."""
        return self._multiplied(a, b, form, out)
