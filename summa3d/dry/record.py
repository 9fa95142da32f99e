"""The recorded operations of one rank: products, element-wise work, communications and waits, with the memory held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

KINDS = ("product", "elements", "move", "wait")
ENTER, LEAVE, OPTIMIZER = "enter", "leave", "optimizer"
"""Cells other than blocks: before the blocks, after the blocks, and the optimizer's step."""


class Op(NamedTuple):
    """One operation of one rank.

    kind : product | elements | move | wait. phase : forward | recompute | backward | optimizer. layer : the module's name.
    name : a product's form or "attention", an element-wise operation's name, a move's collective. m, n, k, batch : of a product.
    read, written : bytes of memory. axis, words, messages, dtype : of a move, as the ledger counts them. id : of a move, and of
    the wait that ends it.
    """

    kind: str
    phase: str
    layer: str
    name: str
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    read: int = 0
    written: int = 0
    axis: str = ""
    words: int = 0
    messages: int = 0
    dtype: str = ""
    id: int = -1

    @property
    def flops(self) -> int:
        """2·m·n·k·batch of a product."""
        return 2 * self.m * self.n * self.k * self.batch if self.kind == "product" else 0


@dataclass
class Segment:
    """A stretch of operations of one cell in one pass.

    cell : ENTER, LEAVE, OPTIMIZER, or the number of a cell of blocks, as text. net : bytes held at its end beyond those held at
    its beginning. top : the most that is held meanwhile, beyond what was held at its beginning.
    """

    cell: str
    backward: bool
    net: int = 0
    top: int = 0
    ops: list[Op] = field(default_factory=list)

    @cached_property
    def moves(self) -> dict[tuple[str, str], Counter[str]]:
        """Words, messages and bytes received, by phase and axis, as in the ledger: recomputation is backward's."""
        result: dict[tuple[str, str], Counter[str]] = {}
        for op in self.ops:
            if op.kind == "move":
                line = result.setdefault(("backward" if op.phase == "recompute" else op.phase, op.axis), Counter())
                line.update(words=op.words, messages=op.messages, bytes=op.written)
        return result


class RepeatedSegment(NamedTuple):
    """A segment, and its number of consecutive repetitions."""

    segment: Segment
    times: int


def peak_of(parts: Sequence[RepeatedSegment]) -> int:
    """The peak of bytes held during `parts`, beyond those held before them."""
    held = top = 0
    for segment, times in parts:
        top = max(top, held + segment.top + max(0, (times - 1) * segment.net))
        held += times * segment.net
    return top


def net_of(parts: Sequence[RepeatedSegment]) -> int:
    """Bytes held after `parts` beyond those held before them."""
    return sum(times * segment.net for segment, times in parts)


class TracedOp(NamedTuple):
    """An op of a program as it was traced.

    posted : bytes of the receive that was posted for it, one op before. parts : what it does. left : bytes, negative, that are
    gone when the next op has begun, such as those of what it had received.
    """

    posted: int
    parts: Sequence[RepeatedSegment]
    left: int


def operations(parts: Sequence[RepeatedSegment]) -> Iterator[tuple[Op, int]]:
    """Every operation with its number of repetitions."""
    for segment, times in parts:
        for op in segment.ops:
            yield op, times


def repeated(segments: Sequence[Segment], cell: str, times: int) -> list[RepeatedSegment]:
    """`segments`, with each run of segments of `cell` joined into one that repeats `times` times."""
    parts: list[RepeatedSegment] = []
    run: list[Segment] = []
    for segment in [*segments, None]:
        if run and (segment is None or segment.cell != cell or segment.backward != run[0].backward):
            parts.append(RepeatedSegment(joined(run), times))
            run = []
        if segment is not None:
            if segment.cell == cell:
                run.append(segment)
            else:
                parts.append(RepeatedSegment(segment, 1))
    return parts


def joined(segments: Sequence[Segment]) -> Segment:
    """Consecutive segments as one segment."""
    whole = Segment(segments[0].cell, segments[0].backward)
    for segment in segments:
        whole.top = max(whole.top, whole.net + segment.top)
        whole.net += segment.net
        whole.ops += segment.ops
    return whole


def held_in(program: Sequence[TracedOp], before: int, message: int) -> tuple[int, int]:
    """The peak of bytes held in a program of ops, and what is held at its end.

    before : bytes made before the first op. message : of a send, which may not have arrived before the next op has ended.

    As in the executor, an op first posts the receive of the next one, and then lets go of what the last one has left.
    """
    extents = {id(op): (peak_of(op.parts), net_of(op.parts)) for op in program}
    top = held = before + (program[0].posted if program else 0)
    left = 0
    for op, following in zip(program, [*program[1:], None], strict=True):
        held += 0 if following is None else following.posted
        top = max(top, held)
        held += left
        peak, net = extents[id(op)]
        top = max(top, held + message + peak)
        held, left = held + net, op.left
    return top, held + left


def moved(parts: Sequence[RepeatedSegment], what: str) -> dict[str, dict[str, int]]:
    """Words, messages or bytes (`what`) received, by phase and axis."""
    totals: dict[str, dict[str, int]] = {}
    for segment, times in parts:
        for (phase, axis), amounts in segment.moves.items():
            line = totals.setdefault(phase, {})
            line[axis] = line.get(axis, 0) + times * amounts[what]
    return totals


def totals(parts: Sequence[RepeatedSegment]) -> dict[str, dict[str, int]]:
    """Count, flops and bytes by kind of operation; a move's bytes are those received."""
    result = {kind: {"count": 0, "flops": 0, "bytes": 0} for kind in KINDS[:3]}
    for op, times in operations(parts):
        if op.kind in result:
            line = result[op.kind]
            line["count"] += times
            line["flops"] += times * op.flops
            line["bytes"] += times * (op.read + op.written)
    return result
