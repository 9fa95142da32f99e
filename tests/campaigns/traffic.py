"""Traffic beside a grid: two grids on one communicator, also in another order on a rank, and a program's own messages on it.

`python tests/campaigns traffic --cases 1000 --ranks 4 --seed 1`. Grids have communicators of their own: nothing of the program or
of another grid meets a grid's messages. Ranks that use two grids in different orders hang, and are named, or are right.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from campaigns import core, right_calls
from campaigns.core import MODES, Finding, Scene, World, axes_of
from campaigns.threads import NAMED, ours


def orders(chance: random.Random, rank: int, size: int) -> Scene:
    """Two grids whose calls a rank makes in another order: it hangs, or is right where a call is only started."""
    mode, other_mode, victim = chance.choice([*MODES]), chance.choice([*MODES]), chance.randrange(size)
    names, length = chance.choices(right_calls.COLLECTIVES, k=2), chance.choice(right_calls.LENGTHS)

    def play(world: World, grid: Any, number: int) -> str:
        with another(grid, other_mode) as other:
            work = [lambda: right_calls.make(grid["x"], names[0], number, length)]
            work += [lambda: right_calls.make(other["x"], names[1], number + 1, length)]
            found = []
            for one in reversed(work) if rank == victim else work:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(kept(found))
                    one()
        return "refused" if ours(found) else "right"

    return Scene("orders", f"{' and '.join(names)}, the other by {other_mode}", mode, victim, play, NAMED)


@contextlib.contextmanager
def kept(errors: list[Exception | None]) -> Iterator[None]:
    """Keep an error of ours, and go on."""
    from summa3d.errors import Summa3dError

    try:
        yield
    except Summa3dError as error:
        errors.append(error)


@contextlib.contextmanager
def another(grid: Any, mode: str) -> Iterator[Any]:
    """A second grid on the communicator of a grid."""
    with type(grid)(grid.communicators.common, axes_of(grid.communicators.common.size), **MODES[mode]) as other:
        yield other


def beside(chance: random.Random, rank: int, size: int) -> Scene:
    """Two grids on one communicator, used and freed in turns, in one order on all ranks."""
    mode, other_mode, seed = chance.choice([*MODES]), chance.choice([*MODES]), chance.random()

    def play(world: World, grid: Any, number: int) -> str:
        draws = random.Random(seed)
        with another(grid, other_mode) as other:
            in_flight: list[Callable[[], None]] = []
            for turn in range(12):
                which = draws.choice((grid, other))
                if draws.random() < 0.3:
                    name = draws.choice(right_calls.COLLECTIVES[:-1])
                    in_flight.append(right_calls.begin(which[draws.choice("xy")], name, number + turn, 3, True))
                else:
                    while in_flight:
                        in_flight.pop(0)()
                    right_calls.anything(draws)(which, number + turn)
            while in_flight:
                in_flight.pop(0)()
        right_calls.anything(draws)(grid, number)
        return "right"

    return Scene("beside", f"the other by {other_mode}", mode, None, play)


def own_messages(chance: random.Random, rank: int, size: int) -> Scene:
    """A program's messages and collectives on the communicator of a grid: begun before its calls, and completed after them."""
    mode, seed = chance.choice([*MODES]), chance.random()
    kinds = chance.choice(APART) + chance.sample(("a sum", "collectives", "parts"), k=chance.choice((0, 1, 2)))

    def play(world: World, grid: Any, number: int) -> str:
        draws, comm = random.Random(seed), grid.communicators.common
        ends = [TRAFFIC[kind](comm, number * 10 + place) for place, kind in enumerate(kinds)]
        for turn in range(6):
            right_calls.anything(draws)(grid, number + turn)
            if draws.random() < 0.2:
                with another(grid, mode) as other:
                    right_calls.anything(draws)(other, number + turn)
        for end in ends:
            end()
        right_calls.anything(draws)(grid, number)
        return "right"

    return Scene("own messages", ", ".join(kinds), mode, None, play)


def _wanted(found: Any, right: Any, what: str) -> None:
    if found != right:
        raise Finding(f"{what} is {found}, and was to be {right}")


def _wildcard(comm: Any, number: int) -> Callable[[], None]:
    """A receive from anybody, with any tag, posted first; what is sent, later."""
    import numpy as np
    from mpi4py import MPI

    place = np.zeros(4)
    taken = comm.Irecv(place, MPI.ANY_SOURCE, MPI.ANY_TAG)

    def end() -> None:
        comm.Send(np.full(4, number + comm.rank / 8), (comm.rank + 1) % comm.size, number)
        taken.Wait()
        _wanted(place.tolist(), [number + (comm.rank - 1) % comm.size / 8] * 4, "a message to a wildcard")

    return end


def _sent_before(comm: Any, number: int) -> Callable[[], None]:
    """A message that is sent first, and received later."""
    import numpy as np

    sent = comm.Isend(np.full(4, number + comm.rank / 8), (comm.rank + 1) % comm.size, number)

    def end() -> None:
        place = np.zeros(4)
        comm.Recv(place, (comm.rank - 1) % comm.size, number)
        sent.Wait()
        _wanted(place.tolist(), [number + (comm.rank - 1) % comm.size / 8] * 4, "a message that was sent before")

    return end


def _objects(comm: Any, number: int) -> Callable[[], None]:
    """A Python object, by mpi4py's own messages."""
    sent = comm.isend({"number": number, "of": comm.rank}, (comm.rank + 1) % comm.size, tag=number)

    def end() -> None:
        found = comm.recv(source=(comm.rank - 1) % comm.size, tag=number)
        sent.wait()
        _wanted(found, {"number": number, "of": (comm.rank - 1) % comm.size}, "an object")

    return end


def _collective(comm: Any, number: int) -> Callable[[], None]:
    """A sum that is begun first."""
    import numpy as np

    mine, total = np.full(3, float(number + comm.rank)), np.zeros(3)
    begun = comm.Iallreduce(mine, total)

    def end() -> None:
        begun.Wait()
        right = comm.size * number + comm.size * (comm.size - 1) / 2
        _wanted((mine[0], total.tolist()), (number + comm.rank, [right] * 3), "a program's sum")

    return end


def _collectives(comm: Any, number: int) -> Callable[[], None]:
    """Collectives at the beginning and at the end."""

    def end() -> None:
        _wanted(comm.allgather(number + comm.rank), [number + rank for rank in range(comm.size)], "a program's gather")
        comm.Barrier()
        _wanted(comm.bcast(number if comm.rank == 0 else None), number, "a program's broadcast")

    end()
    return end


def _nothing_arrives(comm: Any, number: int) -> Callable[[], None]:
    """A look for messages of anybody."""
    from mpi4py import MPI

    return lambda: _wanted(comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG), False, "a message of nobody")


def _parts(comm: Any, number: int) -> Callable[[], None]:
    """Communicators that are split off before and freed after."""
    half = comm.Split(comm.rank % 2, -comm.rank)

    def end() -> None:
        _wanted(half.allreduce(number), number * half.size, "a sum of a part")
        half.Free()

    return end


TRAFFIC: dict[str, Callable[[Any, int], Callable[[], None]]] = {
    "objects": _objects,
    "a sum": _collective,
    "collectives": _collectives,
    "probes": _nothing_arrives,
    "parts": _parts,
    "sent before": _sent_before,
    "a wildcard": _wildcard,
}
APART = (["a wildcard"], ["probes"], ["objects"], ["sent before"], ["objects", "sent before"])
"""Messages of which none takes another's."""

KIND = core.Kind(*("traffic", "cases of traffic"), ((own_messages, 12), (beside, 8), (orders, 1)), watchdog=1.0)


def main() -> int:
    """Run the campaign of the command line."""
    return core.main(KIND, __doc__)
