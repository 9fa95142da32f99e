"""A communication as an axis asks for it (`Call`), and as a transport has begun it (`Carried`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from ..arrays import Array
from ..profile.ledger import Ledger
from .progress import is_done

if TYPE_CHECKING:
    from .node_buffer import NodeRule

Requests = list[Any]
"""What is in flight: MPI's requests, or a device transport's own, which have a `wait` each."""


@dataclass(frozen=True)
class Members:
    """The members of an axis as one of them sees them: what the axis's transports are made of.

    ledger : counts workspace, and times on a device. node : which collectives use the node buffer; None if the members do not
    share a node's memory. wanted : the requested device transport (select.py).
    """

    label: str
    size: int
    index: int
    comm: MPI.Intracomm
    ledger: Ledger
    node: NodeRule | None = None
    wanted: str = "auto"


@dataclass(slots=True)
class Call:
    """A communication, checked: all members pass the same, but for their arrays, and `sizes` of an all-to-all.

    operation : the name of a collective, send or receive. array : what is sent, or overwritten. dim, sizes : along which
    dim, and each member's extent there. into : where the result goes; None, a new array. view : whether the result may lie in
    memory that the members share. blocking : whether it completes before the call returns. in_order : whether all members
    complete it between the same two of their communications. op : the reduction. root : the root, or the other side of a
    message. parts : workspace of a reduce-scatter. receive_sizes : of an all-to-all; None where all pieces are equal.
    """

    operation: str
    array: Array
    dim: int = 0
    sizes: Sequence[int] = ()
    into: Array | None = None
    blocking: bool = True
    view: bool = False
    in_order: bool = True
    op: str = "sum"
    root: int = 0
    tag: int = 0
    parts: Array | None = None
    receive_sizes: Sequence[int] | None = None


class Counts(NamedTuple):
    """The elements that one member of an all-to-all sends to each member, and those that it receives from each.

    equal : whether all pieces of all members have one size. largest : how many elements any member sends or receives at most;
    None, not known. All members must take the same way, so neither can be read off one member's counts.
    """

    sent: Sequence[int]
    received: Sequence[int]
    equal: bool = False
    largest: int | None = None


class Carried:
    """A communication that has been begun.

    requests : what is to be waited for. finish : gives the result once they have completed. keep : what must stay alive until
    then. moved : an array of the dtype that travels.
    """

    __slots__ = ("finish", "keep", "moved", "requests")

    def __init__(self, requests: Requests, finish: Callable[[], Any], keep: Any, moved: Array) -> None:
        self.requests, self.finish, self.keep, self.moved = requests, finish, keep, moved


def is_complete(requests: Requests) -> bool:
    """Whether they have completed, so that `complete` would not wait; MPI works on its own meanwhile."""
    return all(is_done(request) if isinstance(request, MPI.Request) else request.done for request in requests)


def complete(requests: Requests) -> None:
    """Wait for them: on the host for MPI's, on the caller's stream for a device's."""
    if isinstance(requests[0], MPI.Request):
        MPI.Request.Waitall(requests)
    else:
        for request in requests:
            request.wait()
