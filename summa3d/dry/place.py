"""One rank's place on a grid whose collectives return at once, for dry runs: the only file of dry/ that depends on transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.arrays import Array, empty, is_half, is_torch
from ..comm.grid import Place
from ..comm.profile.ledger import Amounts, Ledger
from ..comm.signatures import Signed
from ..comm.transport.call import Members, Requests
from ..comm.transport.host import HostTransport
from ..comm.transport.node import NodeTransport
from ..comm.transport.node_buffer import NodeBuffer, Slot
from ..comm.transport.node_memory import LEFT, SLOTS
from ..comm.transport.select import NodeRule
from ..comm.transport.transports import Transports


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
        """Whether reduce-scatters need no workspace for the parts: NCCL sums all but 16-bit floats."""
        return self.on_device and not is_half(array)


class AllSet:
    """The words of flags that every member has set."""

    def __getitem__(self, flag: int) -> int:
        return LEFT - 1


class DryFlags:
    """Flags of a node buffer without processes that wait."""

    broken, words = False, AllSet()

    def check(self) -> None:
        """Do nothing: no member fails."""

    def set(self, flag: int, value: int) -> None:
        """Do nothing: no process waits."""

    def wait(self, flag: int, value: int) -> bool:
        """Return at once; no sleep was needed."""
        return False


class DrySignatures:
    """Signatures without other members."""

    number = 0

    def call(self, signature: Signed) -> int:
        """Do nothing: no member compares."""
        return 0

    post = call

    def wake(self) -> None:
        """Do nothing: no member waits."""

    review = wake

    def compare(self, number: int) -> None:
        """Return at once: no member differs."""

    def compare_with(self, member: int, number: int) -> None:
        """Return at once: no member differs."""


class DrySlot(Slot):
    """A slot without memory: its parts do not count as memory of this rank."""

    def post(self) -> None:
        """Do nothing: no member waits."""

    def part(self, like: Array, offset: int, shape: tuple[int, ...], strides: Sequence[int] | None = None) -> Array:
        """An array of `like`'s kind and dtype that stands for a part of the slot; numbers on the host are 0 until written."""
        if not is_torch(like):
            return np.zeros(shape, like.dtype)
        if prod(shape) == 0:
            return empty(shape, like)
        with _disable_current_modes():
            return torch.empty(shape, dtype=like.dtype, device=like.device)


class DryNodeBuffer(NodeBuffer):
    """The node buffer of one axis without memory; it records the size that each slot would have."""

    slot_type = DrySlot

    def __init__(self, members: Members) -> None:
        self.comm, self.size, self.index, self.flags = members.comm, members.size, members.index, DryFlags()  # type: ignore[assignment]
        self.signatures = DrySignatures()  # type: ignore[assignment]
        self.begin()
        self.sizes = [0] * SLOTS

    @property
    def size_bytes(self) -> int:
        """This rank's share of the slots, each as large as the largest communication of the axis."""
        return SLOTS * max(self.sizes) // self.size

    def take(self, nbytes: int) -> Slot | None:
        """The next slot; ends the view that the last slot may have given."""
        slot = super().take(0)
        place = self.number % SLOTS
        self.sizes[place] = max(self.sizes[place], nbytes)
        return slot


class DryTransports(Transports):
    """The transports of one axis: communications use the node buffer where they can, and move nothing."""

    def __init__(self, members: Members, on_device: bool) -> None:
        super().__init__(replace(members, node=None))
        self.members, self.host = members, DryTransport(on_device)
        self.node = None if members.node is None or members.size == 1 else DryNodeTransport(members)

    def of(self, array: Array) -> Any:
        """The transport for collectives on `array`, and for messages from one member to another."""
        return self.host

    between_two = of


class DryNodeTransport(NodeTransport):
    """The node transport on a buffer without memory."""

    def __init__(self, members: Members) -> None:
        super().__init__(members, NODE_RULE)

    def opened(self) -> NodeBuffer:
        """The buffer without memory."""
        return DryNodeBuffer(self.members)


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
        buffers = (axis.node_buffer for axis in self.communicators.axes.values())
        return sum(buffer.size_bytes for buffer in buffers if buffer is not None)


class DryLedger(Ledger):
    """A ledger that also reports, in order, communications issued, communications waited for, and local products.

    Parameters
    ----------
    issued : (collective, axis, dtype, amounts) → the argument of `waited` for this communication
    waited : called when a communication is waited for
    multiplied : (a, b, form, out) of a local product
    begun : called when an op of a program begins
    """

    def __init__(
        self,
        issued: Callable[[str, str, str, Amounts], Any],
        waited: Callable[[Any], None],
        multiplied: Callable[[Array, Array, str, Array], Any],
        begun: Callable[[], None],
    ) -> None:
        super().__init__()
        self._issued, self._waited, self._multiplied, self._begun = issued, waited, multiplied, begun

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

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Report the op that begins."""
        self._begun()
        yield

    def product(self, a: Array, b: Array, form: str, out: Array) -> Any:
        """Report a local product, and suppress the recording of torch's operations in it."""
        return self._multiplied(a, b, form, out)
