"""Threads: two on one axis, on two axes, on two grids, in turns, handing over what is in flight, or after a free.

`python tests/campaigns threads --cases 1000 --ranks 4 --seed 1`. A second thread inside an axis gets a GridError; threads on two
axes or grids are right; with check=True turns in another order are an error of ours. A hang that follows is one that is named.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from campaigns import core, right_calls
from campaigns.core import MODES, Finding, Scene, World, axes_of

CHECKED = tuple(mode for mode in MODES if "check" in mode)
PATIENCE = 10.0
"""Seconds for a second thread to be refused, or to have been let in."""
NAMED = r"nothing has gone on; the job ends"


class Worker(threading.Thread):
    """A thread that runs a function; `error` is what it raised."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self.work = work
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Run it."""
        try:
            self.work()
        except Exception as error:
            self.error = error


def together(*work: Callable[[], object]) -> list[Exception | None]:
    """Run functions in a thread each, which have the same names on all ranks."""
    workers = [Worker(f"worker {number}", one) for number, one in enumerate(work)]
    for worker in workers:
        worker.join()
    return [worker.error for worker in workers]


def ours(errors: Sequence[Exception | None]) -> int:
    """Return how many errors there are, all of them ours."""
    from summa3d.errors import Summa3dError

    for error in errors:
        if error is not None and not isinstance(error, Summa3dError):
            raise error
    return sum(error is not None for error in errors)


def refused(call: Callable[[], object], what: str) -> None:
    """Make a call that must be a GridError."""
    from summa3d.errors import GridError

    try:
        call()
    except GridError:
        return
    raise Finding(what)


def two_inside(chance: random.Random, rank: int, size: int) -> Scene:
    """A thread is in a call, for which the others are late, when the main thread begins one."""
    mode, victim = chance.choice([*MODES]), chance.randrange(size)
    first, second, length = *chance.choices(right_calls.COLLECTIVES[:-1], k=2), chance.choice(right_calls.LENGTHS)
    started = chance.random() < 0.3 and "check" not in mode  # where calls are compared, to start one waits, too

    def play(world: World, grid: Any, number: int) -> str:
        axis = grid["x"]
        call = lambda name: lambda: right_calls.make(axis, name, number, length, started)  # noqa: E731
        if rank != victim:
            world.board.wait(number, world.board.REFUSED, [victim])
            ours(together(call(first)))
            return "refused"
        workers = [Worker("worker 0", call(first)), Worker("worker 1", call(second))]
        for _ in range(int(PATIENCE / 0.01)):
            if any(not worker.is_alive() for worker in workers):
                break
            workers[0].join(0.01)
        world.board.write(number, world.board.REFUSED)
        if all(worker.is_alive() for worker in workers):
            raise Finding("a second thread waits inside an axis")
        for worker in workers:
            worker.join()
        if not ours([worker.error for worker in workers]):
            raise Finding("a second thread was let in")
        refused(call(first), "the axis goes on after a second thread was inside")
        return "refused"

    named = "" if mode == "node memory" else NAMED  # through MPI the other thread, or a rank, waits for the refused one
    return Scene("two inside", f"{first} and {second}, started: {started}", mode, victim, play, named)


def two_axes(chance: random.Random, rank: int, size: int) -> Scene:
    """Two threads on two axes of a grid, or on two grids: all is right."""
    ways = ("two axes", "two grids", *(("an axis and all ranks",) if axes_of(size)["x"] < size else ()))
    mode, how, seed = chance.choice([*MODES]), chance.choice(ways), chance.random()

    def play(world: World, grid: Any, number: int) -> str:
        with world.own(mode) as other:
            pairs = {
                "two axes": (lambda: grid["x"], lambda: grid["y"]),
                "an axis and all ranks": (lambda: grid["x"], lambda: grid.world),
                "two grids": (lambda: grid["x"], lambda: other["x"]),
            }
            planes = [plane() for plane in pairs[how]]

            def work(which: int) -> None:
                draws = random.Random(f"{seed} {which}")
                for turn in range(12):
                    name, length = draws.choice(right_calls.COLLECTIVES), draws.choice(right_calls.LENGTHS)
                    right_calls.make(planes[which], name, number + 100 * which + turn, length, draws.random() < 0.3)

            for error in together(lambda: work(0), lambda: work(1)):
                if error is not None:
                    raise error
        return "right"

    return Scene("two axes", how, mode, None, play)


def turns(chance: random.Random, rank: int, size: int) -> Scene:
    """Threads that take turns: one after the other, or, with check=True, in an order of each rank."""
    ordered = chance.random() < 0.5
    mode, number_of, lengths = chance.choice([*MODES] if ordered else CHECKED), chance.choice((2, 3)), right_calls.LENGTHS
    names = chance.choices(right_calls.COLLECTIVES, k=number_of)
    length = chance.choice(lengths)

    def play(world: World, grid: Any, number: int) -> str:
        lock, axis = threading.Lock(), grid["x"]

        def work(name: str) -> None:
            for turn in range(5):
                with lock:
                    right_calls.make(axis, name, number + turn, length)

        if ordered:
            errors = [error for name in names for error in together(lambda name=name: work(name))]
        else:
            errors = together(*(lambda name=name: work(name) for name in names))
        if ordered and ours(errors):
            raise Finding("threads that take turns were refused")
        return "refused" if ours(errors) else "right"

    return Scene(
        "turns", f"{'in order' if ordered else 'in any order'}: {', '.join(names)}", mode, None, play, "" if ordered else NAMED
    )


def racing(chance: random.Random, rank: int, size: int) -> Scene:
    """Two threads that race on one axis with check=True: never a wrong number."""
    mode, names = chance.choice(CHECKED), chance.choices(right_calls.COLLECTIVES, k=2)

    def play(world: World, grid: Any, number: int) -> str:
        axis = grid["x"]

        def work(which: int) -> None:
            for turn in range(30):
                right_calls.make(axis, names[which], 1000 * which + turn)

        return "refused" if ours(together(lambda: work(0), lambda: work(1))) else "right"

    return Scene("racing", ", ".join(names), mode, None, play, NAMED)


def handed_over(chance: random.Random, rank: int, size: int) -> Scene:
    """A call that one thread starts and another one completes."""
    mode, name, length = chance.choice([*MODES]), chance.choice(right_calls.COLLECTIVES[:-1]), chance.choice(right_calls.LENGTHS)

    def play(world: World, grid: Any, number: int) -> str:
        for turn in range(4):
            found: list[Callable[[], None]] = []
            begin = lambda turn=turn, found=found: found.append(  # noqa: E731
                right_calls.begin(grid["x"], name, number + turn, length, True)
            )
            errors = together(begin) if turn % 2 else [begin()]
            errors += together(lambda found=found: found[0]()) if turn < 2 else [found[0]()]
            for error in errors:
                if error is not None:
                    raise error
        return "right"

    return Scene("handed over", name, mode, None, play)


def after_free(chance: random.Random, rank: int, size: int) -> Scene:
    """A thread that calls on an axis, a grid or a call in flight once the main thread has freed the grid."""
    mode, name = chance.choice([*MODES]), chance.choice(right_calls.COLLECTIVES)
    use = chance.choice(("axis", "grid", "first use", "product"))

    def play(world: World, grid: Any, number: int) -> str:
        axis = grid["x"]
        grid.free()
        uses: dict[str, Callable[[], object]] = {
            "axis": lambda: right_calls.make(axis, name, number),
            "grid": lambda: grid["x"],
            "first use": lambda: grid["x", "y"],
            "product": lambda: right_calls.product(grid, number),
        }
        if not ours(together(uses[use])) and (use != "axis" or axis.size > 1):
            raise Finding("a freed grid is used")
        return "refused"

    return Scene("after free", f"{use}, {name}", mode, None, play)


KIND = core.Kind(
    *("threads", "cases of threads"),
    ((two_inside, 4), (two_axes, 4), (turns, 3), (racing, 1), (handed_over, 2), (after_free, 1)),
    watchdog=2.0,
)


def main() -> int:
    """Run the campaign of the command line."""
    return core.main(KIND, __doc__)
