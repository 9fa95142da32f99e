"""Memory that calls share, tampered blocks, gradients taken oddly, and what is left of grids and of calls in flight."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from typing import Any

from campaigns import right_calls
from campaigns.core import MODES, Finding, Scene, World
from campaigns.spoilt import as_numpy, spoilt_arrays
from campaigns.threads import refused

Way = Callable[[Any, int], object]


def scene(group: str, name: str, mode: str, victim: int | None, way: Way, errors: tuple[type[Exception], ...] = ()) -> Scene:
    """A scene that is right, or ends with an error of ours, or one of `errors`."""

    def play(world: World, grid: Any, number: int) -> str:
        from summa3d.errors import Summa3dError

        try:
            way(grid, number)
        except (Summa3dError, *errors):
            return "refused"
        return "right"

    return Scene(group, name, mode, victim, play)


def wanted(found: Any, right: Any, what: str) -> None:
    """Raise a Finding unless two arrays are equal."""
    import numpy as np

    if not np.array_equal(as_numpy(found), right):
        raise Finding(f"a wrong number of {what}")


def shared(chance: random.Random, rank: int, size: int) -> Scene:
    """Collectives whose result lies in the memory of what is sent, shifted by some elements; products of a matrix and itself."""
    operation = chance.choice(("all_gather", "reduce_scatter", "all_reduce", "reduce", "views", "sent twice", "products", "out"))
    length, started, shift, mode = chance.choice((1, 3, 5000)), chance.random() < 0.3, chance.random(), chance.choice([*MODES])

    def collective(grid: Any, number: int) -> None:
        import numpy as np

        axis = grid["x"]
        whole, part = axis.size * length, slice(axis.index * length, (axis.index + 1) * length)
        sent = length if operation == "all_gather" else whole
        taken = length if operation == "reduce_scatter" else whole
        base = np.arange(2.0 * whole) % 97 + number + axis.index
        offset = round(shift * (2 * whole - max(sent, taken)))
        array, into = base[offset : offset + sent], base[(whole - offset) % max(1, 2 * whole - taken) :][:taken]
        everyone = [(np.arange(2.0 * whole) % 97 + number + member)[offset : offset + sent] for member in range(axis.size)]
        right = np.concatenate(everyone) if operation == "all_gather" else np.sum(everyone, axis=0)
        made = getattr(axis, f"start_{operation}" if started else operation)(array, into=into)
        found = made.wait() if started else made
        if operation != "reduce" or axis.index == 0:
            wanted(found, right[part] if operation == "reduce_scatter" else right, operation)

    def views(grid: Any, number: int) -> None:
        import numpy as np

        axis = grid["x"]
        mine = np.arange(float(length)) + number
        view = axis.all_gather(mine, view=True)
        wanted(view, np.tile(mine, axis.size), "a view")
        wanted(axis.all_reduce(view), np.tile(mine, axis.size) * axis.size, "a sum of a view")

    def sent_twice(grid: Any, number: int) -> None:
        import numpy as np

        axis, mine = grid["x"], np.arange(float(length)) + number
        first, second = axis.start_all_reduce(mine), axis.start_all_gather(mine)
        wanted(first.wait(), mine * axis.size, "a sum of what is sent twice")
        wanted(second.wait(), np.tile(mine, axis.size), "a gather of what is sent twice")

    def products(grid: Any, number: int) -> None:
        import numpy as np

        from summa3d import DistMatrix, matmul

        whole = np.arange(144.0).reshape(12, 12) % 7 + number
        a = DistMatrix.from_global(whole, grid, "m:x k:y")
        wanted((a @ a).to_global(), whole @ whole, "A·A")
        wanted((a.T @ a).to_global(), whole.T @ whole, "Aᵀ·A")
        if operation == "out":
            matmul(a, a, out=a)
            wanted(a.to_global(), whole @ whole, "A·A in A")

    ways: dict[str, Way] = {"views": views, "sent twice": sent_twice, "products": products, "out": products}
    return scene("shared memory", f"{operation}, {length}, started: {started}", mode, None, ways.get(operation, collective))


def tampered(chance: random.Random, rank: int, size: int) -> Scene:
    """A matrix whose block, layout or shape was replaced, on all ranks or on one."""
    import numpy as np

    mode, use = chance.choice([*MODES]), chance.choice(("to_global", "redistribute", "product", "norm", "sum", "scaled"))
    victim = chance.randrange(size) if "check" in mode and use in ("product", "redistribute") and chance.random() < 0.5 else None
    kind = chance.choice(("block", "block", "layout", "shape"))
    spoils: dict[str, list[Any]] = {
        "block": [name for name in spoilt_arrays(np.zeros((2, 2))) if "conjugate" not in name],
        "layout": ["m:y k:x", "m k", "m:(x,y) k"],
        "shape": [(12, 13), (6, 12), (24, 12)],
    }
    name = chance.choice(spoils[kind])

    def way(grid: Any, number: int) -> None:
        from summa3d import DistMatrix
        from summa3d.layout.cyclic import ownership
        from summa3d.layout.distribute import distribute

        whole = np.arange(144.0).reshape(12, 12) % 2
        a, b = (DistMatrix.from_global(whole, grid, "m:x k:y") for _ in range(2))
        if victim in (None, rank):
            make = {"block": lambda: spoilt_arrays(a.block)[name], "layout": lambda: ownership(name), "shape": lambda: name}
            setattr(a, kind, make[kind]())
        uses: dict[str, tuple[Callable[[], Any], Any]] = {
            "to_global": (lambda: a.to_global(), whole),
            "redistribute": (lambda: a.redistribute("m:y k:x").to_global(), whole),
            "product": (lambda: (a @ b).to_global(), whole @ whole),
            "norm": (lambda: np.array(a.norm("max")), np.array(1.0)),
            # local: others go on where a rank refuses
            "sum": (lambda: (a + b).block, distribute(whole + whole, grid, "m:x k:y")),
            "scaled": (lambda: (a * 2).block, distribute(whole * 2, grid, "m:x k:y")),
        }
        call, right = uses[use]
        found = call()
        if kind == "block":
            wanted(found, right, f"a tampered {kind}")

    return scene("tampered", f"{kind} {name}, {use}", mode, victim, way)


def odd_gradients(chance: random.Random, rank: int, size: int) -> Scene:
    """Gradients of a product, taken as torch lets one take them: those of one process."""
    how = chance.choice(
        (
            "a alone",
            "b alone",
            "twice",
            "accumulated",
            "expanded",
            "strided",
            "no_grad",
            "of a view",
            "again",
            "changed",
            "detached",
        )
    )
    mode = chance.choice([*MODES])

    def way(grid: Any, number: int) -> None:
        import numpy as np
        import torch

        from summa3d.autograd import matmul, product
        from summa3d.gemm import CuboidPlan
        from summa3d.layout import collect, distribute

        plan = CuboidPlan("nn", 12, 12, 12, "x", "y", "z")
        wholes = [torch.arange(144.0, dtype=torch.float64).reshape(12, 12) % prime + number % 3 for prime in (5, 7)]
        factor = torch.arange(144.0, dtype=torch.float64).reshape(12, 12) % 3
        layouts = (plan.a_layout, plan.b_layout)
        whole_leaves = [one.clone().requires_grad_(how != f"{other} alone") for one, other in zip(wholes, "ba", strict=True)]
        leaves = [
            distribute(one.detach(), grid, layout).clone().requires_grad_(one.requires_grad)
            for one, layout in zip(whole_leaves, layouts, strict=True)
        ]

        def run(a: Any, b: Any, multiply: Any, weight: Any) -> None:
            if how == "of a view":
                a, b = a.view(a.shape), b.t().t()
            if how == "detached":
                multiply(a.detach(), b.detach())
            with torch.set_grad_enabled(how != "no_grad"):
                c = multiply(a, b)
            if how == "no_grad":
                c = multiply(a, b)
            if how == "expanded":
                return c.sum().backward()
            if how == "strided":
                weight = weight.t().contiguous().t()
            if how == "again":
                (first,) = torch.autograd.grad(c, a, weight, create_graph=True)
                return (first * first).sum().backward()
            c.backward(weight, retain_graph=how == "twice")
            if how == "twice":
                c.backward(weight)
            if how == "accumulated":
                multiply(a, b).backward(weight)
            if how == "changed":
                c = multiply(a, b)
                with torch.no_grad():
                    a.add_(1)
                c.backward(weight)

        run(*leaves, lambda a, b: matmul(a, b, product(plan, grid), None), distribute(factor, grid, plan.c_layout))
        if how == "changed":
            raise Finding("an operand that was changed is multiplied with")
        run(*whole_leaves, lambda a, b: a @ b, factor)
        for leaf, whole, layout in zip(leaves, whole_leaves, layouts, strict=True):
            if (leaf.grad is None) != (whole.grad is None):
                raise Finding("a gradient that is none")
            if whole.grad is not None and leaf.grad is not None:
                found = as_numpy(collect(leaf.grad, grid, layout, (12, 12)))
                if not np.allclose(found, whole.grad.numpy(), rtol=1e-12, atol=0):
                    raise Finding("a wrong gradient")

    errors = (RuntimeError,) if how in ("again", "changed") else ()  # torch's own
    return scene("odd gradients", how, mode, None, way, errors)


def remains(chance: random.Random, rank: int, size: int) -> Scene:
    """In flight when its grid is freed or forgotten, waited for twice or never; pickles and copies of what a grid is."""
    name, length = chance.choice(right_calls.COLLECTIVES[:-1]), chance.choice(right_calls.LENGTHS)
    mode, use = chance.choice([*MODES]), chance.choice([*REMAINS])
    return scene("remains", f"{use}, {name}", mode, None, lambda grid, number: REMAINS[use](grid, number, name, length))


def _after_free(grid: Any, number: int, name: str, length: int) -> None:
    end = right_calls.begin(grid["x"], name, number, length, True)
    grid.free()
    end()


def _dropped(grid: Any, number: int, name: str, length: int) -> None:
    end = right_calls.begin(grid["x"], name, number, length, True)
    del end
    gc.collect()
    right_calls.make(grid["x"], name, number, length)


def _forgotten(grid: Any, number: int, name: str, length: int) -> None:
    other = type(grid)(grid.communicators.common, dict(grid.shape))
    end = right_calls.begin(other["x"], name, number, length, True)
    del other
    gc.collect()
    end()
    right_calls.make(grid["x"], name, number, length)


def _twice(grid: Any, number: int, name: str, length: int) -> None:
    end = right_calls.begin(grid["x"], name, number, length, True)
    end()
    end()


def _without_its_comm(grid: Any, number: int, name: str, length: int) -> None:
    comm = grid.communicators.common.Dup()
    other = type(grid)(comm, dict(grid.shape))
    comm.Free()
    try:
        right_calls.make(other["x"], name, number, length)
        right_calls.product(other, number)
    finally:
        other.free()


def _pickled(grid: Any, number: int, name: str, length: int) -> None:
    import numpy as np

    from summa3d import DistMatrix

    a = DistMatrix.from_global(np.ones((12, 12)), grid, "m:x k:y")
    for one in (grid, grid["x"], a, grid.part("x"), {"a": [a]}):
        refused(lambda one=one: pickle.dumps(one), f"a pickle of {type(one).__name__}")


def _copied(grid: Any, number: int, name: str, length: int) -> None:
    import numpy as np

    from summa3d import DistMatrix

    whole = np.arange(144.0).reshape(12, 12)
    a = DistMatrix.from_global(whole, grid, "m:x k:y")
    for duplicate in (copy.copy, copy.deepcopy):
        wanted(duplicate(a).to_global(), whole, "a copy")
        right_calls.make(duplicate(grid["x"]), name, number, length)
        right_calls.make(duplicate(grid)["x"], name, number, length)


REMAINS: dict[str, Callable[[Any, int, str, int], None]] = {
    "waited for after a free": _after_free,
    "never waited for": _dropped,
    "a grid forgotten": _forgotten,
    "waited for twice": _twice,
    "a communicator freed before its grid": _without_its_comm,
    "pickled": _pickled,
    "copied": _copied,
}
