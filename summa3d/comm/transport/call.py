"""A communication as an axis asks for it (`Route`), and as a transport has begun it (`Carried`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mpi4py import MPI

from ...errors import GridError
from ..device.arrays import Array, count, dtype_name
from ..health.signatures import Signed
from ..profile.ledger import Amounts, Ledger
from .progress import Naps, is_done

if TYPE_CHECKING:
    from .select import NodeRule

Requests = list[Any]
"""What is in flight: MPI's requests, or a device transport's own, which have a `wait` each."""

MESSAGES = ("send", "receive")
ALONG_A_DIM = ("all_gather", "reduce_scatter", "all_to_all")
ALL_REDUCE_LIMIT = 1 << 20
"""Bytes up to which every member of a node reads every array to reduce it; of larger ones each sums its share."""

NO_SIGNATURE: Signed = b"", 0


@dataclass(frozen=True)
class Members:
    """The members of an axis as one of them sees them: what the axis's transports are made of.

    ledger : counts workspace, and times on a device. rule : what uses the memory of nodes; None, nothing does. nodes : each
    member's node. wanted : the requested device transport (select.py). grid : the number of the axis's grid.
    """

    label: str
    size: int
    index: int
    comm: MPI.Intracomm
    ledger: Ledger
    rule: NodeRule | None = None
    nodes: Sequence[int] = ()
    wanted: str = "auto"
    grid: int = 1

    @property
    def node(self) -> NodeRule | None:
        """Rule by which collectives use the node's memory; None if the members do not share a node's memory."""
        return self.rule if len(set(self.nodes)) == 1 else None

    @property
    def name(self) -> str:
        """The axis, and its grid where that is not the first one."""
        return self.label if self.grid == 1 else f"{self.label} of grid {self.grid}"


@dataclass(eq=False, slots=True)
class Route:
    """What the calls of one kind over an axis have in common: checked and counted once, by an axis that keeps it.

    operation : the name of a collective, send or receive. on_device : whether the array lies on a device. dim, sizes : along
    which dim, and each member's extent there. op : the reduction. root : the root, or the other side of a message. view : whether
    the result may lie in memory that the members share. in_order : whether all members complete it between the same two of their
    communications. receive_sizes : of an all-to-all; None where all pieces are equal. what : of a pipeline's message, which it is
    and who is at the other end. words, messages : what the ledger counts.
    bound : the transport's own, kept from its first call on. lines : of the ledger, by phase and dtype. signed : what a member
    posts of such a call, for the others to compare. recorded : the flight recorder's number of its text.
    naps : counts the seconds that this rank sleeps, of calls that are too short to read the clock of its processor time.
    """

    operation: str
    on_device: bool
    words: int
    messages: int
    dim: int = 0
    sizes: Sequence[int] = ()
    op: str = "sum"
    root: int = 0
    tag: int = 0
    view: bool = False
    in_order: bool = True
    receive_sizes: Sequence[int] | None = None
    what: str = ""
    bound: Any = None
    naps: Naps | None = None
    signed: Signed = NO_SIGNATURE
    recorded: int = -1
    lines: dict[tuple[str, Any], Amounts] = field(default_factory=dict)

    def result_shape(self, shape: Sequence[int], index: int) -> tuple[int, ...]:
        """The shape of the result on member `index`, for an array of `shape`."""
        if self.operation not in ALONG_A_DIM:
            return tuple(shape)
        if self.operation == "reduce_scatter":
            extent = self.sizes[index]
        else:
            extent = sum(self.sizes if self.receive_sizes is None else self.receive_sizes)
        return (*shape[: self.dim], extent, *shape[self.dim + 1 :])

    def described(self, array: Array) -> str:
        """Describe a call of this kind with such an array: in these words all members must call alike."""
        shape: list[Any] = list(array.shape)
        marks = [self.op] if "reduce" in self.operation else []
        if self.operation in ALONG_A_DIM:
            shape[self.dim] = "·"
            uneven = self.receive_sizes is not None  # each member has other pieces
            marks = [f"dim {self.dim}", "pieces of any sizes" if uneven else f"sizes {list(self.sizes)}"]
        marks += [f"root {self.root}"] if self.operation in ("broadcast", "reduce") else []
        marks += [self.what or f"member {self.root} at the other end"] if self.operation in MESSAGES else []
        marks += ["as a view"] if self.view else []
        marks += ["on a device"] if self.on_device else []
        if self.operation == "all_reduce" and array.itemsize * count(array) > ALL_REDUCE_LIMIT and not self.in_order:
            marks.append("in any order")
        if self.operation == "barrier":
            return "barrier"
        return ", ".join([f"{self.operation} of {dtype_name(array)} [{', '.join(map(str, shape))}]", *marks])


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
    then. moved : an array of the dtype that travels; None, that of the call. before : what is done before it is waited for.
    """

    requests: Sequence[Any] = ()
    keep: Any = None
    moved: Array = None
    before: Callable[[], None] | None = None

    def __init__(self, requests: Requests, finish: Callable[[], Any], keep: Any, moved: Array = None) -> None:
        self.requests, self.finish, self.keep, self.moved = requests, finish, keep, moved

    def complete(self) -> Any:
        """Wait for the requests, on the host for MPI's and on the caller's stream for a device's; returns the result."""
        if self.before is not None:
            self.before()
        wait_for(self.requests)
        return self.finish()

    @property
    def is_complete(self) -> bool:
        """Return whether `complete` would not wait; MPI works on its own meanwhile."""
        return are_done(self.requests)


def refuse_freed(label: str, *asked: Any, **options: Any) -> NoReturn:
    """Raise the error of whatever an axis is asked for that was freed."""
    raise GridError(f"axis {label} was freed with its grid, and communicates no more. Make another grid.")


def wait_for(requests: Sequence[Any]) -> None:
    """Wait for requests of one kind: on the host for MPI's, on the caller's stream for a device's."""
    if requests and isinstance(requests[0], MPI.Request):
        MPI.Request.Waitall(requests)
    else:
        for request in requests:
            request.wait()


def are_done(requests: Sequence[Any]) -> bool:
    """Return whether all of them have completed; never waits."""
    return all(is_done(request) if isinstance(request, MPI.Request) else request.done for request in requests)
