# The most that a rank holds at any time of a step, from what its layers hold one by one and what is in flight between them.
# Imports overlap; plain numbers, nothing is run. Next: memory.py, which says what each layer holds.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .overlap import DEFAULT, Overlap


@dataclass(frozen=True)
class Step:
    """What one layer holds, in bytes.

    saved : kept from its forward to its backward. forward, backward : the most it holds at once meanwhile, inputs, outputs and
    gradients included, beyond what earlier layers saved. gradients : of its parameters. carried : the gradient that a residual
    branch leaves waiting while its layers run backward. gathers : its weight, if that is gathered ahead; copies : of a
    weight made for that in forward. sends : the sum of its weight's gradient in flight, beyond that gradient. inside : the
    layers of a stretch that backward computes again.
    """

    saved: int = 0
    forward: int = 0
    backward: int = 0
    gradients: int = 0
    carried: int = 0
    gathers: int = 0
    copies: int = 0
    sends: int = 0
    inside: tuple[Step, ...] = ()


class _Moment(NamedTuple):
    """While a layer runs: what is held, without what is in flight between layers; what the layer gathers, and what it sends."""

    held: int
    gathers: int
    sends: int


class Peak(NamedTuple):
    """The most held at once, in flight or not, and the most in flight between layers at once."""

    held: int
    in_flight: int


def peak_of(steps: Sequence[Step], gradients: int = 0, overlap: Overlap = DEFAULT, regather: bool = True) -> Peak:
    """The most held at any time of a forward and a backward through `steps`, with `gradients` there from the beginning.

    Forward, a layer holds its own beside what those before it saved; backward, beside what it and those before it saved, the
    gradients of the parameters of those after it, and the gradient that a residual branch leaves waiting. In flight are the
    weights of the next layers that gather one, as many as `overlap` says, and the sums that the last layers sent.
    """
    passes = (list(_forward(steps, gradients)), list(_backward(steps, gradients, regather)))
    totals = [
        (moment.held + flying, flying)
        for moments, begun in zip(passes, (True, False), strict=True)
        for moment, flying in zip(moments, _in_flight(moments, overlap, begun), strict=True)
    ]
    return Peak(max(total for total, _ in totals), max(flying for _, flying in totals))


def _forward(steps: Sequence[Step], held: int, saving: bool = True) -> Iterator[_Moment]:
    for step in steps:
        if step.inside:
            yield from _forward(step.inside, held, saving=False)
        else:
            yield _Moment(held + step.forward, step.gathers + step.copies, 0)
        held += step.saved * saving


def _backward(steps: Sequence[Step], gradients: int, regather: bool) -> Iterator[_Moment]:
    saved, made = sum(step.saved for step in steps), 0
    for step in reversed(steps):
        held = saved + max(gradients, made) + step.backward + step.carried
        if step.inside:
            yield from _forward(step.inside, held)
            for moment in _backward(step.inside, 0, regather):
                yield moment._replace(held=held + moment.held)
        else:
            yield _Moment(held, step.gathers * regather, step.sends)
        saved -= step.saved
        made += step.gradients


def _in_flight(moments: Sequence[_Moment], overlap: Overlap, begun: bool) -> list[int]:
    """Bytes in flight beside each moment of a pass: gathers ahead, from the first one on or from the beginning; sums behind."""
    ahead, behind = [0] * len(moments), [0] * len(moments)
    coming: list[int] = []
    for index in reversed(range(len(moments))):
        ahead[index] = sum(coming[-overlap.gather :]) if overlap.gather else 0
        if moments[index].gathers:
            coming.append(moments[index].gathers)
    first = next((index for index, moment in enumerate(moments) if moment.gathers), len(moments))
    sent: list[int] = []
    for index, moment in enumerate(moments):
        behind[index] = sum(sent[-overlap.weight_gradient :]) if overlap.weight_gradient else 0
        if moment.sends:
            sent.append(moment.sends)
    return [(ahead[index] if begun or index >= first else 0) + behind[index] for index in range(len(moments))]
