"""Forks: a child of a rank that communicates, frees, makes a grid, exits in some way, or raises; the ranks go on right.

`python tests/campaigns forks --cases 1000 --ranks 2 --seed 1`. What a child asks of a grid is an error of ours in the child,
at once; however it ends, its rank and the job go on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from campaigns import core, right_calls
from campaigns.core import MODES, Finding, Scene, World

PATIENCE = 20.0
"""Seconds in which a child must end."""
REFUSED, LET_IN, OTHER, WRONG = 41, 42, 43, 44
"""How a child that uses a grid says what came of it."""


class InChild(Exception):
    """What a child raises."""


def ends(child: int) -> int:
    """The exit code of a child; negative where a signal ended it. Raises a Finding where it does not end."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Finding("a child hangs")


def told(use: Callable[[], object]) -> None:
    """Use a grid in a child, and end the child with what came of it."""
    from summa3d.errors import Summa3dError

    code = LET_IN
    try:
        use()
    except Summa3dError:
        code = REFUSED
    except Finding:
        code = WRONG
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = OTHER
    finally:
        os._exit(code)


def uses(chance: random.Random, rank: int, size: int) -> Scene:
    """A child that uses its rank's grid, while the ranks go on, or wait for it."""
    mode, name, length = chance.choice([*MODES]), chance.choice(right_calls.COLLECTIVES), chance.choice(right_calls.LENGTHS)
    use, victim, at_once = (
        chance.choice([*USES]),
        chance.randrange(size) if chance.random() < 0.5 else None,
        chance.random() < 0.5,
    )
    in_flight = chance.random() < 0.3

    def play(world: World, grid: Any, number: int) -> str:
        right_calls.make(grid["x"], name, number, length)
        pending = right_calls.begin(grid["x"], "all_reduce", number, length, True) if in_flight else lambda: None
        child = None
        if victim in (None, rank):
            child = os.fork()
            if child == 0:
                told(lambda: USES[use](grid, name, length, pending))
        if at_once:
            for turn in range(5):
                right_calls.make(grid["x"] if not in_flight else grid["y"], name, number + turn, length)
        code = None if child is None else ends(child)
        pending()
        for turn in range(5):
            right_calls.anything(random.Random(number + turn))(grid, number + turn)
        if code not in (None, REFUSED) and not (code == LET_IN and alone(use, grid)):
            raise Finding(f"a child that uses {use} ended with {CODES.get(code or 0, code)}")
        return "right" if code is None else "refused"

    return Scene("uses", f"{use}, {name}, in flight: {in_flight}", mode, victim, play)


CODES = {LET_IN: "a right result", OTHER: "an error that is not ours", WRONG: "a wrong number"}
USES: dict[str, Callable[[Any, str, int, Callable[[], None]], object]] = {
    "the axis": lambda grid, name, length, pending: right_calls.make(grid["x"], name, 7, length),
    "the world": lambda grid, name, length, pending: right_calls.make(grid.world, name, 7, length),
    "a call that it starts": lambda grid, name, length, pending: right_calls.make(grid["x"], "all_gather", 7, length, True),
    "a call in flight": lambda grid, name, length, pending: pending(),
    "a product": lambda grid, name, length, pending: right_calls.product(grid, 7),
    "a redistribution": lambda grid, name, length, pending: right_calls.moved(grid, 7),
    "a message": lambda grid, name, length, pending: right_calls.ring(grid["x"], 7),
    "free": lambda grid, name, length, pending: grid.free(),
    "a grid of its own": lambda grid, name, length, pending: type(grid)(grid.communicators.common, dict(grid.shape)),
}


def alone(use: str, grid: Any) -> bool:
    """Return whether a child may do this: what communicates with nobody."""
    return use == "free" or (use == "a call in flight")


def leaves(chance: random.Random, rank: int, size: int) -> Scene:
    """A child that does not communicate, and ends in some way."""
    mode, how, victim = chance.choice([*MODES]), chance.choice([*WAYS]), chance.randrange(size) if chance.random() < 0.5 else None
    name, length, inside = chance.choice(right_calls.COLLECTIVES), chance.choice(right_calls.LENGTHS), chance.random() < 0.5

    def play(world: World, grid: Any, number: int) -> str:
        right_calls.make(grid["x"], name, number, length)
        if victim in (None, rank):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its traceback is no finding
                with grid if inside else contextlib.nullcontext():
                    WAYS[how]()
        for turn in range(5):
            right_calls.make(grid["x"], name, number + turn, length)
        if victim in (None, rank):
            ends(child)
        for turn in range(5):
            right_calls.anything(random.Random(number + turn))(grid, number + turn)
        return "right"

    return Scene("leaves", f"{how}, in a with: {inside}", mode, victim, play)


def _raise(error: BaseException) -> None:
    raise error


WAYS: dict[str, Callable[[], object]] = {
    "exit 0": lambda: sys.exit(0),
    "exit 3": lambda: sys.exit(3),
    "exit with words": lambda: sys.exit("no"),
    "an exception": lambda: _raise(InChild("no")),
    "an interrupt": lambda: _raise(KeyboardInterrupt()),
    "at once": lambda: os._exit(5),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "aborted": lambda: os.abort(),
    "a child of its own": lambda: (os.fork(), sys.exit(3)),
}


def pools(chance: random.Random, rank: int, size: int) -> Scene:
    """Processes of multiprocessing, by a fork, that work, raise or exit."""
    mode, how = chance.choice([*MODES]), chance.choice(("work", "raise", "exit", "pool"))
    name, length = chance.choice(right_calls.COLLECTIVES), chance.choice(right_calls.LENGTHS)

    def play(world: World, grid: Any, number: int) -> str:
        context = multiprocessing.get_context("fork")
        if how == "pool":
            with context.Pool(2) as pool:
                if pool.map_async(abs, range(-3, 0)).get(PATIENCE) != [3, 2, 1]:
                    raise Finding("a pool is wrong")
            codes, right = [0], 0
        else:
            work, right = {"work": (int, 0), "raise": (_quietly, 1), "exit": (_exit, 3)}[how]
            made = [context.Process(target=work) for _ in range(2)]
            for process in made:
                process.start()
            right_calls.make(grid["x"], name, number, length)
            for process in made:
                process.join(PATIENCE)
            codes = [process.exitcode for process in made]
            for process in made:
                process.kill()
        for turn in range(3):
            right_calls.make(grid["x"], name, number + turn, length)
        if set(codes) != {right}:
            raise Finding(f"processes end with {codes}")
        return "right"

    return Scene("pools", how, mode, None, play)


def _quietly() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise InChild("no")


def _exit() -> None:
    sys.exit(3)


KIND = core.Kind("forks", "cases of forks", ((uses, 5), (leaves, 4), (pools, 1)), watchdog=25.0)


def main() -> int:
    """Run the campaign of the command line."""
    return core.main(KIND, __doc__)
