"""Right calls of an axis or a grid, each beside what numpy gives: what scenes make, interrupt, and make again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from campaigns.core import Finding

COLLECTIVES = ("all_reduce", "max", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "barrier")
LENGTHS = (1, 3, 5000)
"""Elements of each member: a few, and more than what travels without a slot of the node's memory."""


def begin(axis: Any, name: str, number: int, length: int, started: bool = False) -> Callable[[], None]:
    """Make a collective, or start it; what is returned completes it, and raises a Finding for a wrong number."""
    import numpy as np

    size, index, root = axis.size, axis.index, number % axis.size
    everyone = [np.arange(size * length) + 1000.0 * number + 10 * rank for rank in range(size)]
    mine, total = everyone[index].copy(), np.sum(everyone, axis=0)
    part = slice(index * length, (index + 1) * length)
    if name == "barrier":
        axis.barrier()
        return lambda: None
    calls: dict[str, tuple[str, tuple[Any, ...], Any]] = {
        "all_reduce": ("all_reduce", (mine,), total),
        "max": ("all_reduce", (mine, "max"), everyone[-1]),
        "all_gather": ("all_gather", (mine,), np.concatenate(everyone)),
        "reduce_scatter": ("reduce_scatter", (mine,), total[part]),
        "all_to_all": ("all_to_all", (mine,), np.concatenate([one[part] for one in everyone])),
        "broadcast": ("broadcast", (mine, root), everyone[root]),
        "reduce": ("reduce", (mine, root), total if index == root else None),
    }
    operation, arguments, right = calls[name]
    made = getattr(axis, f"start_{operation}" if started else operation)(*arguments)

    def complete() -> None:
        found = made.wait() if started else made
        if (found is None) != (right is None) or (right is not None and not np.array_equal(found, right)):
            raise Finding(f"a wrong number of {name} over {axis.label}")

    return complete


def make(axis: Any, name: str, number: int, length: int = 3, started: bool = False) -> None:
    """Make a collective and compare it."""
    begin(axis, name, number, length, started)()


def ring(axis: Any, number: int, tag: int = 0) -> None:
    """A message to the next member, and one from the last."""
    import numpy as np

    size, index = axis.size, axis.index
    if size == 1:
        return
    sent = axis.start_send(np.full(4, 100.0 * number + index), (index + 1) % size, tag)
    taken = axis.receive(np.zeros(4), (index - 1) % size, tag)
    sent.wait()
    if not np.array_equal(taken, np.full(4, 100.0 * number + (index - 1) % size)):
        raise Finding("a wrong message")


def product(grid: Any, number: int) -> None:
    """A product of two matrices."""
    import numpy as np

    from summa3d import DistMatrix

    a, b = np.arange(72.0).reshape(12, 6) + number, np.arange(36.0).reshape(6, 6) - number
    c = DistMatrix.from_global(a, grid, "m:(x,y) k:z") @ DistMatrix.from_global(b, grid, "k:(z,x) n:y")
    if not np.array_equal(c.to_global(), a @ b):
        raise Finding("a wrong product")


def moved(grid: Any, number: int) -> None:
    """A redistribution there and back."""
    import numpy as np

    from summa3d import DistMatrix

    whole = np.arange(144.0).reshape(12, 12) + number
    if not np.array_equal(DistMatrix.from_global(whole, grid, "m:x k:y").redistribute("m:y k:x").to_global(), whole):
        raise Finding("a wrong redistribution")


def anything(chance: random.Random, planes: tuple[Any, ...] = ("x", "y", ("x", "y"))) -> Callable[[Any, int], None]:
    """A right call of a grid: a collective over one of its planes, a ring of messages, a product or a redistribution."""
    plane, name, length = chance.choice(planes), chance.choice(COLLECTIVES), chance.choice(LENGTHS)
    started, which = chance.random() < 0.3, chance.random()
    if which < 0.1:
        return product
    if which < 0.2:
        return moved
    if which < 0.3:
        return lambda grid, number: ring(grid[plane], number, number % 5)
    return lambda grid, number: make(grid[plane], name, number, length, started)
