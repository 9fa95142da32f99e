"""Plans whose workspace is bounded: operands that must move come panel by panel of a letter that is summed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...errors import ConfigError
from .plan import Alternative, AnyPlan

MOST_PANELS = 64
"""Panels at most: each is two all-to-alls and one product."""
TRIED, SMALLEST = 4, 2
"""Plans that are looked at for each rank: the best of those that may fit, and those that need least by estimate."""


def bounded(plans: Iterable[AnyPlan], limit: int) -> AnyPlan:
    """The best of the plans whose workspace is at most `limit` bytes on each rank, in the fewest panels that do, of 1, 2, 4, ….

    plans : best first. Raises ConfigError where none fits that is looked at, naming the least that works.
    """
    every = list(plans)
    needs = [_estimate(plan, most_panels(plan)) for plan in every]
    small = sorted(range(len(every)), key=lambda at: (needs[at], at))[:SMALLEST]
    likely = [at for at, need in enumerate(needs) if need <= limit][:TRIED]
    result = [item for at in sorted({*likely, *small}) for item in _fitting(every[at], limit)]
    if not result:
        least = min(bytes_of(replace(every[at], panels=panels)) for at in small for panels in _panels_of(every[at]))
        raise ConfigError(
            f"No plan needs at most {limit:,} bytes of workspace on each rank; the least that works is {least:,} bytes.\n"
            f"  {every[0].sizes} takes {bytes_of(every[0]):,} bytes by the plan that is best without a limit."
        )
    best, *rest = sorted(result, key=lambda plan: plan.seconds) if every[0].objective == "seconds" else result
    ranks = range(len(best.space))
    others = [Alternative(item.text, item.words, sum(map(item.messages_of, ranks)), item.seconds) for item in rest]
    return replace(best, others=tuple(others))


def bytes_of(plan: AnyPlan) -> int:
    """The workspace of the rank that needs most."""
    return plan.max_workspace * plan.dtype.nbytes


def _fitting(plan: AnyPlan, limit: int) -> list[AnyPlan]:
    """The plan in the fewest panels that fit, priced; none where it does not."""
    for panels in _panels_of(plan):
        cut = replace(plan, panels=panels)
        if bytes_of(cut) <= limit:
            return [_priced(cut)]
    return []


def most_panels(plan: AnyPlan) -> int:
    """The largest power of two that is at most `MOST_PANELS` and what the longest part of the letter has indices."""
    longest = min(plan.longest_part(plan.panelled), MOST_PANELS) if plan.panelled else 1
    return 1 << max(0, longest.bit_length() - 1)


def _panels_of(plan: AnyPlan) -> Iterator[int]:
    """Numbers of panels, powers of two."""
    return (1 << power for power in range(most_panels(plan).bit_length()))


def _estimate(plan: AnyPlan, panels: int) -> int:
    """About the bytes that a rank needs, without a loop over ranks: what it receives of a panel, and its summand of C."""
    return plan.dtype.nbytes * plan.rough_workspace(panels)


def _priced(plan: AnyPlan) -> AnyPlan:
    """The plan with the seconds of its panels: more messages, and C read and written again by each."""
    more, ranks, machine = plan.panels - 1, len(plan.space), plan.machine
    messages = (sum(map(sum, plan.moving)) - sum(any(moves) for moves in zip(*plan.moving, strict=True))) * (ranks - 1)
    passes = 2 * more * plan.dtype.nbytes * max(map(plan.summand_of, range(ranks))) * machine.cluster.byte_time()
    seconds = machine.transfer(0, 0, messages, plan.dtype, ranks) + passes + more * machine.cluster["product.launch"]
    return replace(plan, seconds=plan.seconds + machine.cluster.crowding(ranks) * seconds)
