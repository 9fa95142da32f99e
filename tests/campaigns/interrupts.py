"""Signals: a handler that raises in the middle of a call, and what raises is caught; handlers that communicate, or only return.

`python tests/campaigns interrupts --cases 1000 --ranks 4 --seed 1`. After a call that was broken off, the axis is broken: later
calls of the interrupted rank are GridErrors, through the node's memory those of all; never a wrong number.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from campaigns import core, right_calls
from campaigns.core import MODES, Finding, Scene, World
from campaigns.threads import NAMED, refused

AFTER = 0.05
"""Seconds after which the signal comes; again and again, until it comes inside of the library."""
NODE = tuple(mode for mode in MODES if "node" in mode)


ONE_WAY = ("broadcast", "reduce")
"""Collectives in which a member that only sends through MPI may be done before the others have come."""


class Interrupted(Exception):
    """What a handler raises."""


def is_inside(frame: FrameType | None) -> bool:
    """Return whether a frame was called by the library's communication."""
    while frame is not None:
        if "/summa3d/comm/" in Path(frame.f_code.co_filename).as_posix():
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def signals(handler: Callable[[FrameType | None], None], again: float = AFTER) -> Iterator[None]:
    """Call a handler again and again."""
    before = signal.signal(signal.SIGALRM, lambda _, frame: handler(frame))
    signal.setitimer(signal.ITIMER_REAL, again, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


CALLS: dict[str, Callable[[Any, str, int, int], object]] = {
    "a collective": lambda grid, name, number, length: right_calls.make(grid["x"], name, number, length),
    "a call in flight": lambda grid, name, number, length: right_calls.make(grid["x"], "all_gather", number, length, True),
    "a product": lambda grid, name, number, length: right_calls.product(grid, number),
    "a redistribution": lambda grid, name, number, length: right_calls.moved(grid, number),
    "a first use": lambda grid, name, number, length: right_calls.make(grid["x", "y"], name, number, length),
}


def broken_off(chance: random.Random, rank: int, size: int) -> Scene:
    """A call for which the others are late is interrupted; what was raised is caught, and calls follow."""
    mode = chance.choice([*NODE] * 8 + [*MODES])
    victim, name, length = chance.randrange(size), chance.choice(right_calls.COLLECTIVES), chance.choice(right_calls.LENGTHS)
    call, error = chance.choice(["a collective"] * 16 + [*CALLS]), chance.choice((KeyboardInterrupt, Interrupted, SystemExit))

    def play(world: World, grid: Any, number: int) -> str:
        from summa3d.errors import Summa3dError

        def handler(frame: FrameType | None) -> None:
            if is_inside(frame):
                signal.setitimer(signal.ITIMER_REAL, 0)
                world.board.write(number, world.board.REFUSED)
                raise error("planted")

        if rank != victim:
            world.board.wait(number, world.board.REFUSED, [victim], seconds=0.3)
            try:
                CALLS[call](grid, name, number, length)
            except Summa3dError:
                return "refused"
            if mode in NODE and call == "a collective" and grid["x"].index == 0 and grid["x"].size == size:
                raise Finding("a call goes on without a member")
            return "right"
        try:
            with signals(handler):
                CALLS[call](grid, name, number, length)
        except (error, Summa3dError) as caught:
            if isinstance(caught, Summa3dError) and "planted" not in str(caught):
                raise
            axis = grid["x"]
            if call in ("a collective", "a call in flight") and axis.size > 1:
                refused(lambda: right_calls.make(axis, name, number, length), "the axis goes on after an interrupt")
            return "refused"
        if mode == "MPI" and call == "a collective" and name in ONE_WAY:
            return "right"
        raise Finding("no signal came")

    alone = mode == "node memory" and call in ("a collective", "a call in flight")  # else ranks compare the call through MPI, too
    return Scene("broken off", f"{call}, {name}, {error.__name__}", mode, victim, play, "" if alone else NAMED)


def handlers_that_communicate(chance: random.Random, rank: int, size: int) -> Scene:
    """A handler that makes a call over the axis that its rank is in: an error of ours."""
    mode, victim, name = chance.choice([*NODE] * 8 + [*MODES]), chance.randrange(size), chance.choice(right_calls.COLLECTIVES)

    def play(world: World, grid: Any, number: int) -> str:
        from summa3d.errors import Summa3dError

        axis, came = grid["x"], []

        def handler(frame: FrameType | None) -> None:
            if is_inside(frame) and not came:
                came.append(1)
                world.board.write(number, world.board.REFUSED)
                right_calls.make(axis, name, number)

        if rank != victim:
            world.board.wait(number, world.board.REFUSED, [victim], seconds=0.3)
        try:
            with signals(handler) if rank == victim else contextlib.nullcontext():
                right_calls.make(axis, name, number)
        except Summa3dError:
            return "refused"
        if rank == victim and came:
            raise Finding("a handler communicates inside of a call")
        return "right"

    return Scene("handlers call", name, mode, victim, play, "" if mode == "node memory" else NAMED)


def handlers_that_return(chance: random.Random, rank: int, size: int) -> Scene:
    """Signals every millisecond on some ranks, whose handlers only return: all is right."""
    mode, seed, share = chance.choice([*MODES]), chance.random(), chance.choice((1.0, 0.5))
    hit = chance.choices((True, False), weights=(share, 1 - share), k=size)[rank]

    def play(world: World, grid: Any, number: int) -> str:
        draws, came = random.Random(seed), []
        with signals(lambda frame: came.append(1), 0.001) if hit else contextlib.nullcontext():
            for turn in range(20):
                right_calls.anything(draws)(grid, number + turn)
            time.sleep(0.002)
        if hit and not came:
            raise Finding("no signal came")
        return "right"

    return Scene("handlers return", f"on {share:.0%} of the ranks", mode, None, play)


KIND = core.Kind(
    *("interrupts", "cases of interrupts"),
    ((broken_off, 6), (handlers_that_communicate, 2), (handlers_that_return, 2)),
    watchdog=1.0,
)


def main() -> int:
    """Run the campaign of the command line."""
    return core.main(KIND, __doc__)
