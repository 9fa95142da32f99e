"""The most that a rank holds at any time of a step, from what its layers hold one by one and what is in flight between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from summa3d.nn.overlap import DEFAULT, Overlap


@dataclass(frozen=True)
class Step:
    """What one layer holds, in bytes.

    saved : kept from its forward to its backward. forward, backward : the most it holds at once meanwhile, inputs, outputs and
    gradients included, beyond what earlier layers saved. gradients : of its parameters. carried : the gradient that a residual
    branch leaves waiting while its layers run backward. gathers : its weight, if that is gathered ahead. copies : of a weight
    that is made of several, in forward. inside : the layers of a stretch that backward computes again; `backward` is then what
    waits while they run forward.
    """

    saved: int = 0
    forward: int = 0
    backward: int = 0
    gradients: int = 0
    carried: int = 0
    gathers: int = 0
    copies: int = 0
    inside: tuple[Step, ...] = ()


class _Moment(NamedTuple):
    """While a layer runs: what is held, without what is in flight between layers; and what the layer gathers.

    again : whether it runs forward in backward.
    """

    held: int
    gathers: int
    again: bool = False


class Peak(NamedTuple):
    """The most held at once, in flight or not, and the most in flight between layers at once."""

    held: int
    in_flight: int


def peak_of(
    steps: Sequence[Step],
    gradients: int = 0,
    overlap: Overlap = DEFAULT,
    regather: bool = True,
    slots: int = 0,
    copied: float = 0.0,
) -> Peak:
    """The most held at any time of a forward and a backward through `steps`, with `gradients` there from the beginning.

    Forward, a layer holds its own beside what those before it saved; backward, beside what it and those before it saved, the
    gradients of the parameters of those after it, and the gradient that a residual branch leaves waiting. In flight are the
    weights of the next layers that gather one, as many as `overlap` says. `slots` :
    of a node's memory, in which that many communications may lie instead. `copied` : bytes of a weight's 16-bit copy, which goes
    when backward has used it, for each byte of its gradient.
    """
    passes = (list(_forward(steps, gradients)), list(_backward(steps, gradients, regather, copied)))
    totals = [
        (moment.held + flying, flying)
        for moments, begun in zip(passes, (True, False), strict=True)
        for moment, flying in zip(moments, _in_flight(moments, overlap, slots, begun), strict=True)
    ]
    return Peak(max(total for total, _ in totals), max(flying for _, flying in totals))


def _forward(steps: Sequence[Step], held: int, saving: bool = True, again: bool = False) -> Iterator[_Moment]:
    for step in steps:
        if step.inside:
            yield from _forward(step.inside, held, saving=False)
        else:
            yield _Moment(held + step.forward, step.gathers + step.copies if step.gathers else 0, again)
        held += step.saved * saving


def _backward(steps: Sequence[Step], gradients: int, regather: bool, copied: float = 0.0) -> Iterator[_Moment]:
    saved, made = sum(step.saved for step in steps), 0
    for step in reversed(steps):
        held = saved + max(gradients, made) - int(copied * made) + step.carried
        if step.inside:
            yield from _forward(step.inside, held + step.backward, again=True)
            for moment in _backward(step.inside, 0, regather):
                yield moment._replace(held=held + moment.held)
        else:
            yield _Moment(held + step.backward, step.gathers * regather)
        saved -= step.saved
        made += step.gradients


def _in_flight(moments: Sequence[_Moment], overlap: Overlap, slots: int, forward: bool) -> list[int]:
    """Bytes in flight beside each moment of a pass: gathers ahead, in backward from the first one on."""
    gathering = [index for index, moment in enumerate(moments) if moment.gathers]
    flying, done, summed = [], 0, False
    for moment in moments:
        done += moment.gathers > 0
        known = _known([moments[after] for after in gathering[done : done + overlap.ahead]] if forward or done else [])
        sums = moment.gathers > 0 and not (forward or moment.again)
        ahead = _outside(known, slots - summed)
        if slots and sums:  # a summand takes a slot, when the layer's own gathered weight is gone
            ahead = max(ahead, _outside(known, slots - 1) - moment.gathers)
        flying.append(ahead)
        summed = sums if moment.gathers and slots else summed
    return flying


def _known(coming: Sequence[_Moment]) -> list[int]:
    """Sizes of the coming gathers that can be started: one for a gradient needs a forward that has begun."""
    known: list[int] = []
    for before, moment in zip([None, *coming], coming, strict=False):
        if before is not None and before.again and not moment.again:
            break
        known.append(moment.gathers)
    return known


def _outside(known: Sequence[int], slots: int) -> int:
    """Return what of the known gathers lies in memory of its own: all but the last ones, for which there are slots."""
    return sum(known[: max(0, len(known) - slots)])
