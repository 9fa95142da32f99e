"""The workspace of a product of operands in any layouts: exact for each rank, by the order in which arrays live."""

from __future__ import annotations

from math import prod
from typing import Any

from ...dtypes import HALVES
from ..local.blas import adds_in_place

SCATTERED, DIRECT, WHOLE = "scattered", "direct", "whole"
"""How the summands of C are added: scattered along a dim of C, sent to who wants them, or there is one summand alone."""


def peak_of(plan: Any, rank: int) -> int:
    """Words of workspace of a rank at its peak, by an `AnyPlan` (`workspace_of`)."""
    wide = 2 if plan.dtype.name in HALVES else 1
    own, steps, scatters = plan.summand_of(rank), plan.deliveries, plan.how.kind == SCATTERED
    summand = wide * own if scatters or steps or wide > 1 else 0
    most = _multiplying(plan, rank, wide, own, summand)
    if plan.how.kind == DIRECT:
        received, added = sum(step.words_of(rank) for step in steps), prod(steps[0].target.local_shape(plan.c.shape, rank))
        exchange = sum(step.workspace_of(rank) for step in steps)
        total = added if wide > 1 else 0  # else it is C
        return max(most, summand + wide * max(exchange, received + total + added))
    if scatters:
        own = int(plan.received["sums"][rank]) // (plan.summed - 1)
        most = max(most, summand + wide * plan.summed * own)
    rounded = own if wide > 1 and steps else 0
    moved = steps and plan.received["c"].any()
    kept, exchange = wide * own + rounded if steps or wide > 1 else 0, own + steps[0].workspace_of(rank) if moved else 0
    return max(most, kept, exchange)


def _multiplying(plan: Any, rank: int, wide: int, own: int, summand: int) -> int:
    """The peak while panels of A and B come and are multiplied. own : elements of the rank's summand; summand : words of it."""
    peaks, between, scratch = [], 0, own if plan.panels > 1 and not adds_in_place(plan.dtype.name) else 0
    made = summand + (wide * own if plan.views[2].is_copied else 0)
    for number, (fetches, moving) in enumerate(zip(plan.fetches, plan.moving, strict=True)):
        held = between
        blocks = [prod(fetch.target.local_shape(fetch.shape, rank)) for fetch in fetches]
        for block, fetch, moves, view in zip(blocks, fetches, moving, plan.views[:2], strict=True):
            if moves:
                peaks.append(held + block + fetch.workspace_of(rank))
            if view.is_copied:
                peaks.append(held + block * (1 + moves))
            held += block if moves or view.is_copied else 0
        if number == 0:  # the first panel is the largest; what widens it is kept for the others
            widened = 2 * sum(blocks) if wide > 1 else 0
            peaks.append(held + widened + made)
            between = widened + made
        else:
            between += scratch if number == 1 else 0
            peaks.append(held + (scratch if number == 1 else 0))
    return max(peaks)
