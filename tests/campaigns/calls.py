"""A call that is right but for one argument: made on ranks, judged by an oracle, and followed by right ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from campaigns.core import Board, RankCase, World, blame
from campaigns.spoilt import MustRefuse, as_numpy, snapshot

UNCHECKED = ("grid", "freed", "gradient", "redistribute", "layer")
"""Groups of cases whose result is not compared where the oracle has none."""

ANY = object()
"""What the oracle returns where no rank can know that its numbers are not those of the others: any result is held."""


@dataclass
class Case(RankCase):
    """A call that is right but for one argument, on all ranks or on one.

    call : makes it, of a grid and the arguments. oracle : the right result of this rank, of all ranks' arguments as they were.
    around : what the ranks make before the case, and free after it. close : how far a result may be from the right one.
    """

    good: dict[str, Any]
    bad: dict[str, Any]
    call: Callable[[Any, dict[str, Any]], Any]
    oracle: Callable[[list[dict[str, Any]], int], Any]
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    close: float = 0.0

    def run(self, world: World, number: int) -> tuple[str, str]:
        """Make what the case is about, and judge the call."""
        grid = world.grid(self.mode)
        with self.around(grid):
            return judged(self, world, grid, number)


def same(arrays: list[Any]) -> Any:
    """The array that all ranks give; ANY where they differ in its numbers alone."""
    import numpy as np

    first = arrays[0]
    if any(one.shape != first.shape for one in arrays):
        raise MustRefuse
    return first if all(np.array_equal(one, first, equal_nan=first.dtype.kind in "fc") for one in arrays) else ANY


def attempt(case: Case, grid: Any, arguments: dict[str, Any]) -> tuple[str, Any, Any]:
    """Make a call: what came of it, with the result, or the error; and the arguments as they were."""
    from summa3d.errors import AgreementError, GridError, Summa3dError

    before = {key: snapshot(value) for key, value in arguments.items()}
    try:
        return "done", case.call(grid, arguments), before
    except AgreementError as error:
        return "disagreed", error, before
    except GridError as error:
        return ("disagreed" if "is broken" in str(error) else "refused"), error, before
    except Summa3dError as error:
        return "refused", error, before
    except Exception as error:
        return blame(error), error, before


def judged(case: Case, world: World, grid: Any, number: int) -> tuple[str, str]:
    """The verdict of a case whose ranks have made what it is about."""
    rank = world.comm.rank
    mine = case.bad if case.victim in (None, rank) else case.good
    world.board.write(number, Board.ENTERED)
    what, result, before = attempt(case, grid, mine)
    said, verdict = (str(result)[:300] if what != "done" else ""), "refused" if what in ("refused", "disagreed") else what
    world.board.write(number, Board.DONE if what in ("done", "disagreed") else Board.REFUSED)
    if what not in ("done", "disagreed") and world.board.others_wait(number, world.settled):
        what, result, before = attempt(case, grid, case.good)
        world.board.write(number, Board.DONE)
        if what not in ("done", "disagreed"):
            verdict, said = f"the right call after it: {what}", str(result)[:300]
    everyone = world.control.allgather((what, before))
    if what == "done" and all(one[0] == "done" for one in everyone):
        wrong = compared(case, result, [one[1] for one in everyone], rank)
        if wrong:
            return wrong, repr(result)[:200]
        verdict = "right" if verdict == "done" else verdict
    elif what == "done":
        verdict = "right" if verdict == "done" else verdict  # others were told that the ranks differ
    if any(one[0] != "done" for one in everyone) and any(one[0] in ("disagreed", "done") for one in everyone):
        world.drop(case.mode)
    return verdict, said


def compared(case: Case, result: Any, everyone: list[dict[str, Any]], rank: int) -> str:
    """Return what is wrong with a result; empty if nothing is."""
    import numpy as np

    try:
        right = case.oracle(everyone, rank)
    except (MustRefuse, ValueError, TypeError, IndexError, KeyError):
        return "wrongly accepted"
    if right is ANY:
        return ""
    if right is None or result is None:
        return "" if right is result or case.group in UNCHECKED else "a wrong number"
    found, right = as_numpy(result), np.asarray(right)
    if case.close:
        return "" if np.allclose(found, right, rtol=case.close, atol=0, equal_nan=True) else "a wrong number"
    alike = found.shape == right.shape and np.array_equal(found, right, equal_nan=found.dtype.kind in "fc")
    return "" if alike else "a wrong number"
