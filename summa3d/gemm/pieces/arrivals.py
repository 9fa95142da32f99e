"""Operands that arrive round by round: for the product that runs, and ahead of the one that will need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from ...comm.axis import Axis
from ...comm.device.arrays import Array, empty, is_half, is_on_device
from ...comm.pending import Pending
from ..algorithms.workspace import Workspace
from ..local.blas import accumulation_like
from .behind import BehindQueue
from .schedule import DimRange, OperandPart, Round, SumCell

WINDOW = 2
"""Rounds in flight: the one that is waited for, and the next, so that a port does not wait for this rank's arithmetic."""
TAG = 1 << 16
"""Of messages behind products: those that are waited for have smaller ones."""


@dataclass
class PiecedOperand:
    """An operand on its way along `axis` in rounds, of which there are none where it is here as a whole.

    dim : the dim of the stored block that the axis splits. whole : the gathered shape. own : the range that is here at first.
        tag : of its messages. array : the gathered block. operand : that, as it is multiplied
    """

    workspace: Workspace
    name: str
    axis: Axis
    dim: int
    whole: tuple[int, int]
    rounds: Sequence[Round]
    own: DimRange
    tag: int = 0
    array: Array = None
    operand: Array = None
    # of each round that has started, what it receives: None once that is put together, and where nothing comes
    _posted: list[Pending | None] = field(default_factory=list)
    _sends: list[Pending] = field(default_factory=list)

    def begin(self, block: Array, wide: bool = True) -> None:
        """Lay the own block into the gathered one. wide : whether it is multiplied now, so that `widen` comes, too."""
        self.block = block
        self.array = self.operand = self.workspace.buffer(self.name, self.whole, block)
        self.workspace.copy(self.array[self._own_part.slices(self.dim)], block)
        if wide:
            self.widen()

    def complete(self, array: Array) -> None:
        """Take what is here as a whole, as if all rounds had arrived: products and their order are the same."""
        self.array, self.operand = array, self.workspace.widened(self.name, array)
        self._posted = [None] * len(self.rounds)

    def widen(self) -> None:
        """On the host, lay 16-bit floats into another array, in float32: what is here, and then what comes."""
        if not is_half(self.block) or is_on_device(self.block):
            return
        self.operand = self.workspace.buffer(f"wide {self.name}", self.whole, accumulation_like(self.block))
        self._widen(self._own_part)
        for pending, item in zip(self._posted, self.rounds, strict=False):
            if pending is None and item.receive is not None:
                self._widen(item.receive)

    @property
    def _own_part(self) -> OperandPart:
        return OperandPart(self.own, (0, self.whole[1 - self.dim]))

    def post(self, number: int) -> None:
        """Start a round, the next one, unless it has started. Parts of rows travel through memory where each is adjacent."""
        if number < len(self._posted):
            return
        source, receive, target, send = self.rounds[number]
        self._posted.append(None if receive is None else self.axis.start_receive(self._landing(receive), source, self.tag))
        if send is None:
            return
        part = self.block[send.slices(self.dim)]
        if not send.in_rows(self.dim, self.whole[1]):
            part = self.workspace.copy(self._adjacent(send.moved(self.own[0])), part)
        self._sends.append(self.axis.start_send(part, target, self.tag))

    def has(self, number: int) -> bool:
        """Return whether a round that has started is here, or may be taken without a wait."""
        return (pending := self._posted[number]) is None or pending.done

    def wait(self, number: int) -> None:
        """Return once what a round brings has arrived."""
        pending = self._posted[number]
        if pending is not None:
            pending.wait()

    def put(self, number: int) -> None:
        """Put together what a round has brought, unless that is done."""
        pending, receive = self._posted[number], self.rounds[number].receive
        if pending is None or receive is None:
            return
        self._posted[number] = None
        if not receive.in_rows(self.dim, self.whole[1]):
            self.workspace.copy(self.array[receive.slices(self.dim)], pending.wait())
        self._widen(receive)

    @property
    def is_here(self) -> bool:
        """Return whether all rounds are put together."""
        return self.has_started and all(pending is None for pending in self._posted)

    @property
    def has_started(self) -> bool:
        """Return whether all rounds have started."""
        return len(self._posted) == len(self.rounds)

    @property
    def sent(self) -> bool:
        """Return whether what has left may be overwritten."""
        return all(send.done for send in self._sends)

    def finish(self) -> None:
        """Return once all that was sent may be overwritten."""
        for send in self._sends:
            send.wait()
        self._sends = []

    def _landing(self, part: OperandPart) -> Array:
        """Buffer in which a part of the gathered block is received."""
        return self.array[part.slices(0)] if part.in_rows(self.dim, self.whole[1]) else self._adjacent(part)

    def _adjacent(self, part: OperandPart) -> Array:
        """Memory of a part, adjacent: of rows of the gathered block, in which parts of the same rows follow each other.

        Of what comes behind products it is that of a piece alone, for as long as it is under way.
        """
        rows, columns = part.slices(self.dim)
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if self.tag == TAG:
            return empty((height, width), self.array)
        flat = self.workspace.buffer(f"columns {self.name}", (prod(self.whole),), self.array)
        start = rows.start * self.whole[1] + height * columns.start
        return flat[start : start + part.words].reshape((height, width))

    def _widen(self, part: OperandPart) -> None:
        if self.operand is not self.array:
            at = part.slices(self.dim)
            self.workspace.copy(self.operand[at], self.array[at])


class Rounds:
    """The rounds of arrivals, one after the other, of which `window` are in flight; and what is sent meanwhile.

    behind : what is gathered behind the product begins its next piece where nothing of the product's is under way, so that what
        is waited for is delayed by at most one piece of what is not; once its sums leave, no more
    """

    def __init__(self, arrivals: Sequence[PiecedOperand], behind: BehindQueue | None = None, window: int = WINDOW) -> None:
        self._arrivals, self._behind, self._window = arrivals, behind, window
        self._rounds = [(arrival, number) for arrival in arrivals for number in range(len(arrival.rounds))]
        self._sends: list[Pending] = []
        self._here = 0

    def post(self) -> None:
        """Start the rounds that may be in flight now."""
        for arrival, number in self._rounds[self._here : self._here + self._window]:
            arrival.post(number)

    def need(self, count: int) -> None:
        """Return once the first `count` rounds have arrived."""
        while self._here < count:
            self.post()
            self._take()

    def progress(self) -> None:
        """Take what has arrived."""
        self.post()
        while self._here < len(self._rounds) and self._rounds[self._here][0].has(self._rounds[self._here][1]):
            self._take()
        idle = self._here == len(self._rounds) and not self._sends
        if self._behind and idle and all(arrival.sent for arrival in self._arrivals):
            self._behind.step()

    def send(self, axis: Axis, array: Array, cell: SumCell) -> None:
        """Send a cell, which stays as it is until `finish`; its tag tells it from others, whose products may be done before."""
        self._sends.append(axis.start_send(array, cell.member, cell.number))

    def need_all(self) -> None:
        """Return once all rounds have arrived."""
        self.need(len(self._rounds))

    def finish(self) -> None:
        """Return once all that was sent may be overwritten."""
        for arrival in self._arrivals:
            arrival.finish()
        for pending in self._sends:
            pending.wait()
        self._sends = []

    def _take(self) -> None:
        """Wait for the next round, and start the one behind those in flight before anything is done with it."""
        arrival, number = self._rounds[self._here]
        arrival.wait(number)
        self._here += 1
        self.post()
        arrival.put(number)


class GatheredBehind(Pending):
    """An operand on its way behind products that do not need it; `wait` brings what is left of it, and of those before it.

    A product in pieces that uses it takes it as far as it has come, and multiplies while the rest arrives; one that cuts it
    otherwise (`cut`), as with fewer rows it may, waits. One piece is under way at a time; two where it is `alone`, the one
    operand of its product that moves, so that no other is delayed.
    """

    def __init__(self, queue: BehindQueue, operand: PiecedOperand, cut: tuple[int, bool], alone: bool) -> None:
        self.operand, self.cut, self._queue, self._alone = operand, cut, queue, alone
        self._rounds = Rounds([operand], window=WINDOW if alone else 1)

    @property
    def done(self) -> bool:
        """Return whether every piece is here."""
        return self.operand.is_here

    def step(self) -> None:
        """Take the pieces that are here, and start those that may be under way next."""
        self._rounds.progress()

    def fill(self) -> bool:
        """Start all pieces, if it is alone; whether all have started."""
        if self._alone:
            for number in range(len(self.operand.rounds)):
                self.operand.post(number)
        return self.operand.has_started

    def finish(self) -> None:
        """Return once every piece is here, and what was sent may be overwritten."""
        self._rounds.need_all()
        self._rounds.finish()

    def take(self) -> PiecedOperand:
        """The operand as far as it has come, widened: the next that is waited for."""
        self._queue.advance_to(self)
        self.operand.widen()
        return self.operand

    def wait(self) -> Array:
        """The gathered operand; a second call returns the same."""
        self._queue.finish(self)
        return self.operand.array
