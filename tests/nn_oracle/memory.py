"""Closed forms: the bytes that one rank holds in a training step, term by term, in any scheme.

Nothing is run. tests hold it to what tracked.py measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from summa3d.comm.transport.node_memory import SLOTS

from .memory_ends import ENDS, pixels_of
from .memory_layers import LayerMemory
from .memory_peak import Step, peak_of
from .memory_products import Need, largest

MOMENTS = 2  # of AdamW


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    parameters : with their 16-bit copies, where there are. gradients : of all parameters. optimizer : AdamW's moments.
    activations : what forward saves for backward. workspace : the most that a single layer holds at once, forward or backward,
    beyond what is saved. in_flight : the most that weights gathered ahead of layers and sums sent behind them hold. peak : the
    most of these at any time of a step; not all are there at that time, so it is below their sum. node : this rank's share of
    the node's memory that its axes communicate through, at most; beside the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    in_flight: int
    peak: int
    node: int


class ModelMemory(LayerMemory):
    """The memory of a model, of any family."""

    def steps(self) -> list[Step]:
        """Every layer in the order of forward; blocks that are computed again as one."""
        enter, leave = ENDS[self.config.family]
        blocks: list[Step] = []
        run = max(1, self.layers) if self.recompute == "full" else 1
        for first in range(0, self.config.layers, run):
            count = min(run, self.config.layers - first)
            blocks += [self.stretch(count)] if self.recompute == "full" else self.transformer_block()
        return [*enter(self), *blocks, *leave(self)]

    @property
    def saved(self) -> int:
        """Return what forward saves for backward, parameters and the caller's batch excluded."""
        return sum(step.saved for step in self.steps())

    def memory(self, accumulate: int = 1, training: bool = True) -> Memory:
        """The terms and the peak of a step of `accumulate` micro-batches; not training: of a forward and backward alone."""
        steps = self.steps()
        gradients = sum(step.gradients for step in steps)
        elements = gradients // self.master
        parameters = elements * (self.master + (self.word if self.word < self.master else 0))
        optimizer = MOMENTS * gradients if training else 0
        workspace = max(map(_alone, steps)) + self.kept_workspace
        slots = SLOTS if "x" in self.staged else 0
        there, copied = gradients if accumulate > 1 else 0, self.word / self.master if self.word < self.master else 0.0
        most = peak_of(steps, there, self.context.overlap, self.context.regather, slots, copied)
        peak = parameters + optimizer + most.held + self.kept_workspace
        return Memory(parameters, gradients, optimizer, self.saved, workspace, most.in_flight, peak, self.node)

    @property
    def kept_workspace(self) -> int:
        """Buffers that the 2-D products share and keep from one call to the next."""
        return sum(largest(need.rooms for need in self._products()).values())

    @property
    def node(self) -> int:
        """Every axis has its slots, each as large as what the largest communication lays there."""
        return SLOTS * sum(largest(need.shares for need in self._products()).values())

    def _products(self) -> list[Need]:
        """Those that may need more than any other."""
        config, stream, inner = self.config, self.scheme.residual, self.inner
        gated, images = config.architecture.activation == "swiglu", config.family == "vit"
        return [
            self.product(stream, "nn", config.hidden, self.qkv_columns),
            self.product(inner, "nn", config.hidden, config.hidden),
            self.product(stream, "nn", config.hidden, config.ffn_dim * (1 + gated)),
            self.product(inner, self.scheme.down_form, config.ffn_dim, config.hidden),
            self.product(inner, "nn", pixels_of(self), config.hidden)
            if images
            else self.product(stream, "nt", config.hidden, config.vocabulary),
        ]


def _alone(step: Step) -> int:
    """Return what a layer, or a stretch that is computed again, holds at most by itself."""
    return peak_of([step]).held - step.saved if step.inside else max(step.forward, step.backward)
