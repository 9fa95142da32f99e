"""The rounds of a race: every contender once a round, so that what else the machine does falls on all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from .clock import sleep_until_all_are_here

if TYPE_CHECKING:
    from mpi4py import MPI

Span = TypeVar("Span", covariant=True)


class Racer(Protocol, Generic[Span]):
    """What is timed: on its first `ranks` ranks, while the others sleep."""

    ranks: int

    def seconds(self) -> Span:
        """Seconds of one more run, over all its ranks; collective."""
        ...


def raced(racers: Sequence[Racer[Span]], rounds: int, world: MPI.Intracomm) -> list[list[Span]]:
    """Seconds of every racer in `rounds` interleaved rounds, after one that is not counted; collective over `world`.

    Where ranks were idle, or will be, a racer runs once before it is timed: idle cores and cold caches make the first run of a
    product slower by a fifth.
    """
    times: list[list[Span]] = [[] for _ in racers]
    idle = False
    for _ in range(rounds + 1):
        for racer, taken in zip(racers, times, strict=True):
            partial = racer.ranks < world.size
            if idle or partial:
                sleep_until_all_are_here(world)
                racer.seconds()
            taken.append(racer.seconds())
            idle = partial
    sleep_until_all_are_here(world)
    return [taken[1:] for taken in times]
