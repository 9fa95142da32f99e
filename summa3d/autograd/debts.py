"""Postponed weight gradients: backward takes the gradients of inputs, and keeps what those of weights need as debts.

A debt is paid by dB, which continues into the graph behind B alone: a 16-bit copy, joined columns, a transpose, the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .root import root_of


class Debt:
    """A gradient dB that is owed to a weight B. Of B it keeps the graph alone."""

    def __init__(self, b: Tensor, debts: Debts) -> None:
        self.debts = debts
        self.slot: list[Tensor] = []
        self.root = root_of(b, self.slot)
        self.gradient: Callable[[], Tensor] | None = None

    def record(self, gradient: Callable[[], Tensor]) -> None:
        """Record the debt where the backward that runs has its debts recorded. gradient : computes dB when it is paid."""
        assert self.debts.recorded is not None, "a backward of postponed gradients runs within `postponed`"
        self.gradient = gradient
        self.debts.recorded.append(self)

    @torch.no_grad()
    def settle(self) -> None:
        """Compute dB, for the next backward of `root`, and let go of what it is computed from."""
        assert self.gradient is not None, "backward has recorded it"
        self.debts.paid = self
        self.slot.append(self.gradient())
        self.gradient = None

    def targets(self) -> frozenset[int]:
        """Which parameters dB reaches, by identity."""
        return frozenset(_leaves(self.root.grad_fn))


def _leaves(node: Any) -> Iterator[int]:
    if hasattr(node, "variable"):
        yield id(node.variable)
    for behind, _ in node.next_functions:
        if behind is not None:
            yield from _leaves(behind)


class Debts:
    """Whether the products of a model postpone their weight gradients, and where backward records the debts.

    Attributes
    ----------
    recorded : the debts of the forward or backward that runs; None, weight gradients are taken in backward
    paid : the debt that is paid now
    """

    def __init__(self) -> None:
        self.recorded: list[Debt] | None = None
        self.paid: Debt | None = None

    @contextmanager
    def postponed(self, recorded: list[Debt] | None) -> Iterator[None]:
        """Within the with-block, a forward, or a backward that recomputes one, has its debts recorded in this list."""
        before, self.recorded = self.recorded, recorded
        try:
            yield
        finally:
            self.recorded = before


def pay(debts: list[Debt], announce: Callable[[frozenset[int]], None] = lambda parameters: None) -> None:
    """Compute the gradients that are owed and add them to the parameters, in the order of backward; empties the list. Collective.

    The gradients of a weight that several products use are summed before they are added, as one backward does: the same bits.
    announce : called before with the parameters that they reach, by identity
    """
    of_weights: dict[frozenset[int], list[Debt]] = {}
    for debt in debts:
        of_weights.setdefault(debt.targets(), []).append(debt)
    debts.clear()
    announce(frozenset().union(*of_weights))
    for together in of_weights.values():
        for debt in together:
            debt.settle()
        torch.autograd.backward([debt.root for debt in together])
    for together in of_weights.values():
        together[-1].debts.paid = None
