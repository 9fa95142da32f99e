"""The executor of pipeline programs: a training step is its forwards and backwards, in the order of the rank's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..autograd.deferred import DeferredWeightGradient, MicroBatchKey, run_deferred
from ..autograd.root import leaf_of, root_of
from ..comm.channel import Channel, Incoming
from ..comm.profile.ledger import Ledger
from ..layout.copies import Copies
from ..nn.layers.dropout import Batch
from ..nn.models.base import Body, Inputs, LanguageModel, summed_terms
from .schedule import PipelineMessage, Schedule, ScheduleOp

Feed = Callable[[int], tuple[Inputs, Batch]]
"""A micro-batch by its number: equal on all stages, each of which takes from it what it needs."""


@dataclass(frozen=True)
class Stage:
    """The layers first … last−1 of a model, with what is before its first layer (`enters`) and after its last (`leaves`).

    position : of which the last stage returns the global logits [b, v]; None, it returns the loss
    """

    model: Body
    chunk: int
    first: int
    last: int
    enters: bool
    leaves: bool
    position: int | None = None

    def await_weights(self) -> None:
        """Wait for the pending all-gathers of the weights that its forward uses first."""

        def first() -> Iterable[Tensor]:
            return self.model.before_layers() if self.enters else self.model.blocks[self.first : self.first + 1].parameters()

        self.model.context.state.await_weights(first)

    def forward(self, x: Tensor | None, inputs: Inputs, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The stream behind the stage for the stream x before it (None: it enters); the loss, where the stage is the last.

        And what its layers add to the loss; None, where they add nothing.
        """
        model = self.model
        x = model.enter(inputs, batch) if x is None else x
        with model.context.state.collecting() as terms:
            x = model.through(x, self.first, self.last, batch, model.visible(inputs))
        if not self.leaves:
            return x, summed_terms(model.context, terms)
        if self.position is None:
            return model.leave(x, inputs, batch), summed_terms(model.context, terms)
        return cast(LanguageModel, model).leave_at(x, self.position, batch), None


class ProgramStep(NamedTuple):
    """An op of a rank's program, with the message that it waits for and the one that it sends."""

    op: ScheduleOp
    received: PipelineMessage | None
    sent: PipelineMessage | None


Program = Sequence[ProgramStep]


def ops_of(schedule: Schedule, rank: int, overlap: bool = True) -> Sequence[ScheduleOp]:
    """The ops of a rank under a schedule. Without `overlap` its sums over replicas (R) start behind all other ops."""
    return schedule.ops_of(rank) if overlap else sorted(schedule.ops_of(rank), key=lambda op: op.kind == "R")


def program_of(schedule: Schedule, rank: int, overlap: bool = True) -> Program:
    """The program of a rank: `ops_of`, with their messages."""
    return [ProgramStep(op, schedule.received(rank, op), schedule.sent(rank, op)) for op in ops_of(schedule, rank, overlap)]


@dataclass(frozen=True)
class Wire:
    """The form in which streams travel from stage to stage: each member of `copies` sends its part, all receive the whole.

    shape, dtype, device : of a rank's block of the stream, as stored
    """

    copies: Copies
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def buffer(self) -> Tensor:
        """An array that a message is received into."""
        return torch.empty(self.copies.sizes(self.shape)[self.copies.axis.index], dtype=self.dtype, device=self.device)

    def arrived(self, incoming: Incoming) -> Tensor:
        """The stream that arrives: gathered, where ranks hold copies of it."""
        return self.copies.whole(incoming.wait(), self.shape)


class PendingBackward(NamedTuple):
    """What backward needs of a forward: the root of its graph, and where the gradients of its output and input are put.

    deferred : where X leaves the weight gradients that W computes; None where B takes both gradients
    term : what the layers add to the loss; None, nothing
    """

    root: Tensor
    of_output: list[Tensor]
    of_input: list[Tensor]
    deferred: list[DeferredWeightGradient] | None
    term: Tensor | None


@dataclass
class PipelineExecutor:
    """What runs the program of one rank of a pipeline.

    Attributes
    ----------
    stages : its stages, one a chunk. channel : to its neighbours; None where p = 1
    wire : how a stream and its gradient travel
    sums : kind → what an op R or T of a chunk does
    announce : called by a W with the parameters whose gradients it takes, by identity
    expect : called before the backward behind which the op R of its chunk comes
    pending : of the forwards whose backward is still to come, what it needs
    deferred : the weight gradients that an X has deferred, and its W computes
    handed : (kind, chunk, micro-batch) → the message of one of its stages to the next one, where both are its own
    split : whether backward is split into X and W
    op : what it runs, or has failed in; None between programs
    """

    stages: Sequence[Stage]
    ledger: Ledger
    channel: Channel | None
    wire: Wire
    sums: Mapping[str, Callable[[int], None]] = field(default_factory=dict)
    announce: Callable[[frozenset[int]], None] = lambda parameters: None
    expect: Callable[[int], None] = lambda chunk: None
    pending: dict[MicroBatchKey, PendingBackward] = field(default_factory=dict)
    deferred: dict[MicroBatchKey, list[DeferredWeightGradient]] = field(default_factory=dict)
    handed: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    split: bool = False
    op: ScheduleOp | None = None

    @property
    def state(self) -> str:
        """State of this rank: its op, as "F 1.3"."""
        return "between steps" if self.op is None else str(self.op)

    def run(self, program: Program, feed: Feed, scale: float = 1.0, forwarded: Callable[[], None] | None = None) -> list[Tensor]:
        """Run a program, and return the losses of its micro-batches in order: on the last stage; elsewhere what its layers add.

        Without gradients (torch.no_grad), its forwards alone. scale : the loss is multiplied by it before backward.
        forwarded : called once, behind the last forward.
        """
        trains, self.pending, self.deferred, self.handed, losses = torch.is_grad_enabled(), {}, {}, {}, []
        program = program if trains else [step for step in program if step.op.kind == "F"]
        self.split = any(step.op.kind == "X" for step in program)
        last = max((place for place, step in enumerate(program) if step.op.kind == "F"), default=-1)
        posted: dict[PipelineMessage, Incoming] = {}
        for place, (op, message, sent) in enumerate(program):
            self.op = op
            with self.ledger.run(str(op)):
                for ahead in program[place : place + 2]:  # the next op's receive is posted before it is needed
                    self._post(ahead.received, posted)
                incoming = None if message is None else posted.pop(message)
                if op.kind == "F":
                    micro = feed(op.micro)
                    with self.ledger.phase("forward" if trains else "other"):
                        losses += self._forward(op, incoming, sent, micro, trains)
                elif op.kind in "BX":
                    if op.kind == "B" and any(step.op == ScheduleOp("R", op.chunk) for step in program[place + 1 : place + 2]):
                        self.expect(op.chunk)
                    with self.ledger.phase("backward"):
                        self._backward(op, incoming, sent, scale)
                elif op.kind == "W":
                    with self.ledger.phase("backward"):
                        run_deferred(self.deferred.pop(MicroBatchKey(op.chunk, op.micro)), self.announce)
                else:
                    with self.ledger.phase("optimizer" if op.kind == "R" else "backward"):
                        self.sums[op.kind](op.chunk)
                if self.channel is not None:
                    self.channel.progress()
            if place == last and forwarded is not None:
                forwarded()
        if self.channel is not None:
            self.channel.finish()
        self.op = None
        return losses

    def _post(self, message: PipelineMessage | None, posted: dict[PipelineMessage, Incoming]) -> None:
        if message is not None and message not in posted and self.channel is not None:
            posted[message] = self.channel.start_receive(self.wire.buffer(), message.stage, message.kind, message.micro)

    def _pass(self, array: Tensor, kind: str, chunk: int, op: ScheduleOp, message: PipelineMessage | None) -> None:
        """Send an array to the stage that takes it; without a message that is this rank's own, in `chunk`."""
        if message is None:
            self.handed[kind, chunk, op.micro] = array.detach().contiguous()
        else:
            assert self.channel is not None
            self.channel.send(self.wire.copies.part(array), message.stage, message.kind, message.micro)

    def _taken(self, kind: str, op: ScheduleOp, incoming: Incoming | None) -> Tensor:
        """Tensor that another stage has sent, or a stage of this rank has passed."""
        return self.handed.pop((kind, op.chunk, op.micro)) if incoming is None else self.wire.arrived(incoming)

    def _forward(
        self, op: ScheduleOp, incoming: Incoming | None, sent: PipelineMessage | None, micro: tuple[Inputs, Batch], trains: bool
    ) -> list[Tensor]:
        stage, of_output, of_input = self.stages[op.chunk], list[Tensor](), list[Tensor]()
        stage.await_weights()  # before the receive, so that all-gathers are in flight while the stage waits for its input
        x = None if stage.enters else self._taken("F", op, incoming)
        if x is not None and trains:
            x = leaf_of(x, of_input)
        key, deferred = MicroBatchKey(op.chunk, op.micro), list[DeferredWeightGradient]() if self.split else None
        with stage.model.context.run_pass(key, deferred, forward=True):
            y, term = stage.forward(x, *micro)
        if trains:
            root = y if stage.leaves else root_of(y, of_output)
            self.pending[key] = PendingBackward(root, of_output, of_input, deferred, term)
        if not stage.leaves:
            self._pass(y, "F", op.chunk + 1, op, sent)
        return [item.detach() for item in ([y] if stage.leaves else []) + ([] if term is None else [term])]

    def _backward(self, op: ScheduleOp, incoming: Incoming | None, sent: PipelineMessage | None, scale: float) -> None:
        key, stage = MicroBatchKey(op.chunk, op.micro), self.stages[op.chunk]
        pending = self.pending.pop(key)
        with stage.model.context.run_pass(key, pending.deferred):
            roots = [pending.root * scale if stage.leaves else pending.root]
            if not stage.leaves:
                pending.of_output.append(self._taken("B", op, incoming))
            if pending.term is not None:
                roots.append(pending.term * scale)
            torch.autograd.backward(roots)
        if pending.deferred is not None:
            self.deferred[key] = pending.deferred
        if not stage.enters:
            self._pass(pending.of_input.pop(), "B", op.chunk - 1, op, sent)
