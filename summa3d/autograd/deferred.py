"""Deferred weight gradients: backward takes the gradients of inputs, and leaves those of weights for later.

A deferred gradient dB, once it is computed, continues into the graph after B alone: a 16-bit copy, joined columns, a transpose,
the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .root import root_of


class MicroBatchKey(NamedTuple):
    """The chunk of a pipeline stage and the micro-batch that a forward and its backward are of."""

    chunk: int = 0
    micro: int = 0


class PassState:
    """The state of the pass, a forward or a backward, that the layers of a model run.

    Attributes
    ----------
    key : its chunk and micro-batch
    deferred : where its weight gradients are left; None, backward takes them
    running : the deferred gradient that is computed now
    terms : where layers add terms of the loss; None, nobody collects them
    pending_gathers : waits for the pending all-gathers of the weights that it is given; None where none is pending
    """

    def __init__(self) -> None:
        self.key = MicroBatchKey()
        self.deferred: list[DeferredWeightGradient] | None = None
        self.running: DeferredWeightGradient | None = None
        self.terms: list[Tensor] | None = None
        self.pending_gathers: Callable[[Iterable[Tensor]], None] | None = None

    def __reduce__(self) -> tuple[type[PassState], tuple[()]]:
        """Return what the state of a copied model is made of: it runs no pass."""
        return PassState, ()

    def await_weights(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        """Wait for the pending all-gathers of these weights: before the forward that uses them."""
        if self.pending_gathers is not None:
            self.pending_gathers(weights())

    def add_term(self, term: Tensor) -> None:
        """Add this rank's summand of a term of the loss, if it is collected."""
        if self.terms is not None:
            self.terms.append(term)

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """Within the with-block, the terms that layers add are collected in the list."""
        before, self.terms = self.terms, []
        try:
            yield self.terms
        finally:
            self.terms = before

    @contextmanager
    def of(self, key: MicroBatchKey, deferred: list[DeferredWeightGradient] | None) -> Iterator[None]:
        """Within the with-block, layers run a pass of `key`, and leave weight gradients in this list."""
        before = self.key, self.deferred
        self.key, self.deferred = key, deferred
        try:
            yield
        finally:
            self.key, self.deferred = before


class DeferredWeightGradient:
    """A gradient dB of a weight B that backward leaves for later. Of B it keeps the graph alone."""

    def __init__(self, b: Tensor, state: PassState) -> None:
        self.state = state
        self.slot: list[Tensor] = []
        self.root = root_of(b, self.slot)
        self.gradient: Callable[[], Tensor] | None = None

    def record(self, gradient: Callable[[], Tensor]) -> None:
        """Leave dB to later, where the backward that runs leaves its weight gradients. gradient : computes dB."""
        assert self.state.deferred is not None, "a backward of deferred gradients runs in a pass that defers them"
        self.gradient = gradient
        self.state.deferred.append(self)

    @torch.no_grad()
    def run(self) -> None:
        """Compute dB, for the next backward of `root`, and let go of what it is computed from."""
        assert self.gradient is not None, "backward has recorded it"
        self.state.running = self
        self.slot.append(self.gradient())
        self.gradient = None

    def targets(self) -> frozenset[int]:
        """Identities of the parameters that dB reaches."""
        return frozenset(_leaves(self.root.grad_fn))


def _leaves(node: Any) -> Iterator[int]:
    if hasattr(node, "variable"):
        yield id(node.variable)
    for following, _ in node.next_functions:
        if following is not None:
            yield from _leaves(following)


def run_deferred(
    deferred: list[DeferredWeightGradient], announce: Callable[[frozenset[int]], None] = lambda parameters: None
) -> None:
    """Compute the deferred gradients and add them to the parameters, in the order of backward; empties the list. Collective.

    The gradients of a weight that several products use are summed before they are added, as one backward does: the same bits.
    announce : called before with the parameters that they reach, by identity
    """
    of_weights: dict[frozenset[int], list[DeferredWeightGradient]] = {}
    for gradient in deferred:
        of_weights.setdefault(gradient.targets(), []).append(gradient)
    deferred.clear()
    announce(frozenset().union(*of_weights))
    for together in of_weights.values():
        for gradient in together:
            gradient.run()
        torch.autograd.backward([gradient.root for gradient in together])
    for together in of_weights.values():
        together[-1].state.running = None
