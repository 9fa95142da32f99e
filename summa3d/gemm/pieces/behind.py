"""What is gathered behind products that do not need it: in pieces, of which one is under way while nothing is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...comm.axis import Axis
from ...comm.device.arrays import Array, contiguous, copy_into, empty
from ...comm.grid import BaseGrid
from ...comm.pending import Pending
from .schedule import OperandPart, rounds

TAG = 1 << 16
"""Of messages behind: those that are waited for have smaller ones."""


class GatheredBehind(Pending):
    """The block of an operand, gathered along an axis in pieces; `wait` brings what is left of it, and of those before it.

    whole : the gathered shape. dim : along which the members' blocks, of `sizes`, are put together
    """

    def __init__(
        self, queue: BehindQueue, axis: Axis, block: Array, whole: tuple[int, int], dim: int, sizes: Sequence[int], pieces: int
    ) -> None:
        self._queue, self._axis, self._block, self._dim = queue, axis, block, dim
        self._rounds = rounds(sizes, axis.index, pieces, whole[1 - dim])
        self._posted, self._sends = 0, list[Pending]()
        self._coming: tuple[Array, Pending] | None = None
        self._result = empty(whole, block)
        own = OperandPart((0, sizes[axis.index]), (0, whole[1 - dim])).moved(sum(sizes[: axis.index]))
        copy_into(self._result[own.slices(dim)], block)

    @property
    def done(self) -> bool:
        """Return whether every piece has arrived."""
        return self._coming is None and self._posted == len(self._rounds)

    def step(self) -> None:
        """Take the piece that is under way if it has arrived, and start the next one."""
        if self._coming is None or self._coming[1].done:
            self._take()
            self._post()

    def finish(self) -> None:
        """Return once every piece has arrived."""
        while not self.done:
            self._take()
            self._post()
        for send in self._sends:
            send.wait()
        self._sends = []

    def wait(self) -> Array:
        """The gathered operand; a second call returns the same."""
        self._queue.finish(self)
        return self._result

    def _take(self) -> None:
        if self._coming is not None:
            (target, pending), self._coming = self._coming, None
            landed = pending.wait()
            if landed is not target:
                copy_into(target, landed)

    def _post(self) -> None:
        """Start the next round in which this rank receives, and what it sends until then."""
        while self._coming is None and self._posted < len(self._rounds):
            source, receive, to, send = self._rounds[self._posted]
            self._posted += 1
            if receive is not None:
                target = self._result[receive.slices(self._dim)]
                landing = target if self._dim == 0 else empty(tuple(target.shape), target)
                self._coming = target, self._axis.start_receive(landing, source, TAG)
            if send is not None:
                self._sends.append(self._axis.start_send(contiguous(self._block[send.slices(self._dim)]), to, TAG))


class BehindQueue:
    """What is gathered behind products, in the order in which it was started, alike on all ranks: one at a time."""

    def __init__(self) -> None:
        self._waiting: deque[GatheredBehind] = deque()

    @classmethod
    def of(cls, grid: BaseGrid) -> BehindQueue:
        """That of a job, which all parts of its grid share."""
        result: BehindQueue = grid.job.kept[cls].setdefault("queue", cls())
        return result

    def __bool__(self) -> bool:
        """Return whether something is not waited for yet: alike on all ranks, whatever has arrived."""
        return bool(self._waiting)

    def start(
        self, axis: Axis, block: Array, whole: tuple[int, int], dim: int, sizes: Sequence[int], pieces: int
    ) -> GatheredBehind:
        """Begin a gather; its first piece is under way if it is the only one."""
        result = GatheredBehind(self, axis, block, whole, dim, sizes, pieces)
        self._waiting.append(result)
        if len(self._waiting) == 1:
            result.step()
        return result

    def step(self) -> None:
        """Let the next piece begin, where the last one has arrived: called where nothing that is waited for is under way."""
        for item in self._waiting:
            if not item.done:
                item.step()
                return

    def finish(self, last: GatheredBehind) -> None:
        """Complete all up to one of them, in order."""
        while last in self._waiting:
            self._waiting[0].finish()
            self._waiting.popleft()
