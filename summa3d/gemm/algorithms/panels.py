"""The panels of a 2-D product: where a dim is cut, and the broadcasts of an operand's panels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from ...comm.axis import Axis
from ...comm.device.arrays import Array, is_contiguous, is_half, is_on_device
from ...comm.pending import Pending
from ...comm.prepared import Prepared
from ...layout.layout import split_range
from ..pieces.schedule import pieces_of
from .workspace import Workspace


@dataclass(frozen=True)
class Panel:
    """A range of the panelled dim that one x index and one y index own, and where it starts in the blocks of each."""

    width: int
    x_owner: int
    x_start: int
    y_owner: int
    y_start: int


def panels(start: int, stop: int, x_parts: int, y_parts: int, width: int | None = None, grain: int = 1) -> list[Panel]:
    """The range start:stop cut at every boundary of its balanced splits into x_parts and into y_parts, then at `width`.

    grain : what the splits keep whole
    """
    x_ranges = [split_range(start, stop, x_parts, index, grain) for index in range(x_parts)]
    y_ranges = [split_range(start, stop, y_parts, index, grain) for index in range(y_parts)]
    edges = sorted({start, stop, *(end for _, end in x_ranges), *(end for _, end in y_ranges)})
    result, x, y = [], 0, 0
    for low, high in pairwise(edges):
        while x_ranges[x][1] <= low:
            x += 1
        while y_ranges[y][1] <= low:
            y += 1
        for begin in range(low, high, width or high - low):
            result.append(Panel(min(high - begin, width or high - low), x, begin - x_ranges[x][0], y, begin - y_ranges[y][0]))
    return result


def divided(cuts: list[Panel], pieces: int) -> list[Panel]:
    """Each panel cut into at most `pieces`: the first pieces of all, then the second: owners, whose ports send, take turns.

    >>> [(piece.x_owner, piece.x_start, piece.width) for piece in divided(panels(0, 10, 2, 1), 2)]
    [(0, 0, 3), (1, 0, 3), (0, 3, 2), (1, 3, 2)]
    """
    result = [
        [
            replace(cut, width=stop - start, x_start=cut.x_start + start, y_start=cut.y_start + start)
            for start, stop in pieces_of(cut.width, pieces)
        ]
        for cut in cuts
    ]
    return [of[number] for number in range(max(map(len, result), default=0)) for of in result if number < len(of)]


class BroadcastPanels:
    """The panels of one operand, one after the other, each broadcast along `axis` by the member that owns it.

    `role` (x or y) is the axis whose split of the panelled dim the operand has, `dim` is that dim. A panel that is contiguous
    in its owner's block is sent without a copy. `ahead` panels are in flight while one is multiplied, in a node's memory at most
    one. Workspace: a panel and those ahead, where the axis has members.
    """

    def __init__(self, workspace: Workspace, name: str, axis: Axis, role: str, dim: int, cuts: list[Panel], ahead: int) -> None:
        self.workspace, self.name, self.axis, self.dim = workspace, name, axis, dim
        self.cuts, self.most_ahead = cuts, ahead
        self.widest = max((cut.width for cut in cuts), default=0)
        self.owners = [cut.x_owner if role == "x" else cut.y_owner for cut in cuts]
        self.starts = [cut.x_start if role == "x" else cut.y_start for cut in cuts]
        self._broadcasts = [Prepared(axis, "broadcast", root=owner) for owner in self.owners]

    def each(self, block: Array) -> Iterator[Array]:
        """Each panel in turn, in the dtype that sums are taken in; with look-ahead the next ones are already in flight."""
        ahead = self.ahead(block)
        capacity, wide = self.widest * block.shape[1 - self.dim], is_half(block) and not is_on_device(block)
        in_flight: deque[tuple[Array, Pending]] = deque()
        for count in range(len(self.cuts)):
            if self.axis.size == 1:
                panel = self._own(count, block)
            elif not ahead:
                panel = self._target(count, block, capacity, 1)
                self._broadcasts[count].of(panel).run(panel)
            else:
                for number in range(count + len(in_flight), min(count + 1 + ahead, len(self.cuts))):
                    target = self._target(number, block, capacity, ahead + 1)
                    in_flight.append((target, self._broadcasts[number].of(target).start(target)))
                panel, pending = in_flight.popleft()
                pending.wait()
            yield self.workspace.widened(self.name, panel, capacity) if wide else panel

    def ahead(self, block: Array) -> int:
        """Number of panels of a block in flight while one is multiplied."""
        return min(self.most_ahead, 1) if self.axis.offers_views(block) else self.most_ahead

    @property
    def in_slabs(self) -> bool:
        """Return whether a panel is multiplied in slabs, between which MPI moves those ahead: where several are."""
        return self.most_ahead > 1

    def _own(self, count: int, block: Array) -> Array:
        """A panel in its owner's block."""
        part = slice(self.starts[count], self.starts[count] + self.cuts[count].width)
        return block[part] if self.dim == 0 else block[:, part]

    def _target(self, count: int, block: Array, capacity: int, slots: int) -> Array:
        """Source and target of a panel's broadcast: the owner's block, if it is contiguous there, else one of `slots`."""
        width = self.cuts[count].width
        shape = (width, block.shape[1]) if self.dim == 0 else (block.shape[0], width)
        panel = self.workspace.buffer(f"panel {self.name}{count % slots}", shape, block, capacity)
        if self.axis.index != self.owners[count]:
            return panel
        own = self._own(count, block)
        return own if is_contiguous(own) else self.workspace.copy(panel, own)
