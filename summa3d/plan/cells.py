"""Cells of a model, traced by the dry run: what comes before the blocks, a block, what comes after them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ..dry.record import ENTER, LEAVE, Op, RepeatedSegment
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..dry.step import Setting

BLOCK = "block"
OpTrace = tuple[Op, ...]


class Cell(NamedTuple):
    """The operations of a cell in forward, and in backward with what it computes again."""

    forward: OpTrace = ()
    backward: OpTrace = ()


_known: dict[str, dict[str, Cell]] = {}
"""The cells traced by this process, by their setting."""


def cells(setting: Setting) -> dict[str, Cell]:
    """The cells of one micro-batch: ENTER, BLOCK (one of them), LEAVE.

    They are traced on a model of one block, on rank 0, which holds the largest blocks of every dim. Where parts are uneven, a
    communication has the words of that corner of the grid which has most: a gather along z of what y splits too, of the first
    along y and the last along z. A broadcast has those of its message: its root receives none.
    """
    item = replace(setting, model=replace(setting.model, layers=1))
    key = repr(item)
    if key not in _known:
        _known[key] = _of_all_ranks(item)
    return _known[key]


def _of_all_ranks(setting: Setting) -> dict[str, Cell]:
    from ..dry.rank_classes import even  # torch is imported where something is traced

    first = _traced(setting)
    if even(setting):
        return {name: Cell(*map(with_messages, cell)) for name, cell in first.items()}
    place, result = setting.place(), first
    for corner in product(*({0, size - 1} for size in place.shape.values())):
        rank = place.rank_of(dict(zip(place.shape, corner, strict=True)))
        if rank:
            other = _traced(replace(setting, rank=rank))
            result = {name: Cell(*map(largest, result[name], other[name])) for name in result}
    return result


def _traced(setting: Setting) -> dict[str, Cell]:
    from ..dry.step import run

    parts, names = run(setting).parts, {ENTER: ENTER, BLOCK: "0", LEAVE: LEAVE}
    return {name: Cell(_ops(parts, cell, False), _ops(parts, cell, True)) for name, cell in names.items()}


def _ops(parts: Iterable[RepeatedSegment], cell: str, backward: bool) -> OpTrace:
    return tuple(op for segment, _ in parts if (segment.cell, segment.backward) == (cell, backward) for op in segment.ops)


def with_messages(trace: OpTrace) -> OpTrace:
    """A trace in which broadcasts of this rank have the words of those that it receives in the same layer and pass."""
    words: dict[tuple[str, str, str], int] = {}
    for op in trace:
        if op.name == "broadcast":
            words[op.phase, op.layer, op.axis] = max(op.words, words.get((op.phase, op.layer, op.axis), 0))
    return tuple(op._replace(words=words[op.phase, op.layer, op.axis]) if op.name == "broadcast" else op for op in trace)


def largest(trace: OpTrace, other: OpTrace) -> OpTrace:
    """A trace whose communications have the words of that of the two which has more."""
    words = iter([op for op in other if op.kind == "move"])
    merged = []
    for op in trace:
        if op.kind == "move":
            twin = next(words, None)
            if twin is None or (twin.name, twin.axis, twin.layer) != (op.name, op.axis, op.layer):
                raise ConfigError(f"ranks of one grid issue different communications: {op.name} along {op.axis} in {op.layer}.")
            op = op._replace(words=max(op.words, twin.words))
        merged.append(op)
    return tuple(merged)
