"""A training step whose ranks each hold a part of every weight, and gather a layer's before its passes: ZeRO-3 and FSDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from summa3d.comm.topology import Topology
from summa3d.dry.record import ENTER, LEAVE, Op
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.price import Prices, move
from summa3d.plan.programs.programs import PROGRAMS, edited
from summa3d.plan.programs.step import HALF, optimizer, setting
from summa3d.plan.replay import UnorderedWork

from .fit import Numbers, Predict
from .units import in_unit


@dataclass(frozen=True)
class ShardedStep:
    """A step of `micro_batches` micro-batches.

    work, moves : what one of them computes, and gathers or reduces. after : the optimizer. A program's number `overlap` is the
    part of the arithmetic behind which communication runs; `bandwidth`, where it has one, bytes per second that a rank receives,
    in place of those of the cluster's links.
    """

    work: UnorderedWork
    moves: UnorderedWork
    received: int
    after: UnorderedWork
    micro_batches: int

    def seconds(self, numbers: Numbers) -> float:
        """Seconds of the step."""
        prices = Prices(numbers.cluster, self.work.topology)
        computed = self.work.computed(prices)
        bandwidth = numbers.program.get("bandwidth")
        moved = self.received / bandwidth if bandwidth else self.moves.moved(prices)
        exposed = max(0.0, moved - numbers.program["overlap"] * computed)
        return self.micro_batches * (computed + exposed) + self.after.computed(prices)


def step(given: Mapping[str, Any]) -> ShardedStep:
    """The step of a row: hidden, heads, layers, gpus, micro_batch of a rank, batch of all; recompute ("full")."""
    ranks, layers, hidden = given["gpus"], given["layers"], given["hidden"]
    whole = {name: edited(cell, PROGRAMS[given["profile"]].edits) for name, cell in cells(setting({**given, "tp": 1})).items()}
    topology = Topology.checked({"dp": ranks})
    trace = [op for name, times in ((ENTER, 1), (BLOCK, layers), (LEAVE, 1)) for way in whole[name] for op in way * times]
    block, ends = 12 * hidden**2, given["vocabulary"] * hidden
    gathers = 3 if given.get("recompute", "full") == "full" else 2
    moves = [*_moves(block, ranks, gathers) * layers, *_moves(ends, ranks, 2)]
    received = 2 * sum(op.words for op in moves)
    after = UnorderedWork.of(topology, [optimizer((layers * block + ends) // ranks)])
    many = given["batch"] // (given["micro_batch"] * ranks)
    return ShardedStep(UnorderedWork.of(topology, trace), UnorderedWork.of(topology, moves), received, after, many)


def _moves(parameters: int, ranks: int, gathers: int) -> list[Op]:
    """Gathers of so many parameters, and the sum of their gradients."""
    words = parameters * (ranks - 1) // ranks
    names = ["all_gather"] * gathers + ["reduce_scatter"]
    return [move(name, "dp", words, HALF) for name in names]


def predictor(given: Mapping[str, Any]) -> Predict:
    """The prediction of a row, in the unit of what it reports."""
    return in_unit(given, step(given).seconds)
