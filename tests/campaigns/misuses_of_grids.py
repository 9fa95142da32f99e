"""Misuses of grids, layouts and products, with gradients too, of grids in grids, and of what was freed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from campaigns.calls import ANY, Case, same
from campaigns.core import MODES, axes_of
from campaigns.misuses_of_axes import arrays_of
from campaigns.spoilt import NUMBERS, OPS, MustRefuse, as_numpy, one_rank, spoilt_arrays, tensor

NAMES: dict[str, Any] = {
    repr(one): one for one in ("q", "", "x y", 0, None, ("x", "x"), ("x", "q"), ["x"], 1.5, ("x",), b"x", (), {})
}


def grids(chance: random.Random, rank: int, size: int) -> Case:
    """A grid, or one of its parts, that cannot be."""
    axes = (
        {"x": 3, "y": 5},
        {"x": 0},
        {"x": -size},
        {"x": float(size)},
        {"x": "2"},
        {},
        {"": size},
        {0: size},
        {"x": None},
        [("x", 2)],
    )
    makes: dict[str, dict[str, Any]] = {
        "axes": {repr(one): one for one in (*axes, None, 4, "x")},
        "order": {repr(one): one for one in ("q", "xx", "x,x", 3, ["x", "x"], [0], "x;y", "y,y,x", {"x": 1})},
        "tile": {repr(one): one for one in ({"x": 3}, {"q": 1}, {"x": 0}, {"x": -1}, {"x": 0.5}, 3, "x", {"x": "1"}, [2])},
        "ranks": {repr(one): one for one in ([0, 0], [size], [-1], [0.5, 1], "ab", 3, [], [None], list(range(size + 1)))},
        "transport": {repr(one): one for one in ("carrier pigeon", 3, "", ["mpi"])},
    }
    uses: dict[str, Callable[[Any, Any], Any]] = {
        "[]": lambda grid, value: grid[value],
        "part": lambda grid, value: grid.part(value),
        "run": lambda grid, value: grid.contiguous_sub_axis(("x",), value),
        "run of": lambda grid, value: grid.contiguous_sub_axis(value, 1),
        "pick": lambda grid, value: grid.sub_axis("x", [value]),
        "pick of": lambda grid, value: grid.sub_axis(value, [0]),
        "rank_of": lambda grid, value: grid.rank_of({"x": value, "y": 0}),
        "coordinates_of": lambda grid, value: grid.coordinates_of(value),
    }
    mode = chance.choice([*MODES])
    if chance.random() < 0.4:
        key = chance.choice([*makes])
        name = chance.choice([*makes[key]])
        bad = {key: makes[key][name]}

        def make(grid: Any, arguments: dict[str, Any]) -> Any:
            from summa3d import Grid

            with Grid(grid.communicators.common, **{"axes": axes_of(size), **arguments}) as made:
                return [list(made.shape.items()), made.size]

        return Case("grid", f"Grid, {key}: {name}", mode, None, {}, bad, make, lambda everyone, rank: None)
    key = chance.choice([*uses])
    values = NAMES if key in ("[]", "part", "run of", "pick of") else NUMBERS
    name = chance.choice([*values])
    return Case(
        *("grid", f"grid.{key}: {name}", mode, None, {}, {"value": values[name]}),
        lambda grid, arguments: uses[key](grid, arguments["value"]) and None if arguments else None,
        lambda everyone, rank: None,
    )


LAYOUTS: dict[str, Any] = {
    repr(one): one
    for one in (
        *("m:q k", "m:(x,x) k", "m:x k:x", "", "m:x", "m:x k:y n", "m: k", ":x", "m:x,k:y", 5, None, "m:((x) k", "x", "m m"),
        *("m:y k:x", "m:(y,x) k", "m k", "m:x k:y", "m:(x,y) k", b"m k", ["m", "k"], "m:x k:y" * 99, "m[k] k", "m k @x=0"),
    )
}


def redistributions(chance: random.Random, rank: int, size: int) -> Case:
    """A block, a shape, or a layout that do not fit."""
    import numpy as np

    from summa3d import DistMatrix

    matrix = np.arange(72.0).reshape(12, 6)
    good: dict[str, Any] = {"array": matrix, "layout": "m:x k:y", "to": "m:y k"}
    shapes = {
        repr(one): one
        for one in ((12, 5), (12,), (12, 6, 1), (12.0, 6.0), (-12, 6), None, "86", 72, ("12", "6"), (0, 6), (2**70, 6))
    }
    spoils = {"array": spoilt_arrays(matrix), "layout": LAYOUTS, "to": LAYOUTS, "shape": shapes, "order": OPS, "block": {}}
    spoils["block"] = spoilt_arrays(np.ones((12 // axes_of(size)["x"], 6 // axes_of(size)["y"])))
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        from summa3d.layout.redistribute import redistribute

        a = DistMatrix.from_global(arguments["array"], grid, arguments["layout"])
        order = {"order": arguments["order"]} if "order" in arguments else {}
        if "shape" not in arguments and "block" not in arguments:
            return a.redistribute(arguments["to"], **order).to_global()
        shape, block = arguments.get("shape", a.shape), arguments.get("block", a.block)
        moved = redistribute(block, shape, grid, arguments["layout"], arguments["to"])
        if "block" in arguments:
            return None
        return DistMatrix(moved, grid, layout_of(arguments["to"]), a.shape).to_global()

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if "block" in everyone[rank]:
            return None
        array = same(arrays_of(everyone))
        if array is not ANY and array.ndim != 2:
            raise MustRefuse
        return array

    mode = chance.choice([*MODES])
    victim = one_rank(chance, size) if "check" in mode else None  # without, the first call of a kind alone is compared
    if key == "block" and 6 % axes_of(size)["y"]:
        mode = mode.removesuffix(", check") + ", check"  # the blocks are uneven: some ranks refuse one, through MPI on their own
    victim = None if key == "block" else victim  # which ranks then call on a block of their own
    return Case("redistribute", f"{key}: {name}", mode, victim, good, {**good, key: spoils[key][name]}, call, oracle)


def layout_of(text: str) -> Any:
    """The layout that a text says."""
    from summa3d.layout.cyclic import ownership

    return ownership(text)


def products(chance: random.Random, rank: int, size: int) -> Case:
    """A product with one argument spoilt."""
    import numpy as np

    from summa3d import DistMatrix, matmul

    left, right = np.arange(72.0).reshape(12, 6) % 5, np.arange(36.0).reshape(6, 6) % 7
    good: dict[str, Any] = {"array": left, "b": right, "a_layout": "m:(x,y) k:z", "b_layout": "k:(z,x) n:y"}
    forms = {repr(one): one for one in ("tn", "nt", "xx", "", None, 3, ["n", "n"], "nnn", "cn", "N")}
    scales = {repr(one): one for one in ("2", None, [1], float("nan"), 2, 1j, np.ones(2), True, {}, np.float32(2))}
    spoils: dict[str, dict[str, Any]] = {
        **{"array": spoilt_arrays(left), "b": spoilt_arrays(right), "a_layout": LAYOUTS, "b_layout": LAYOUTS, "form": forms},
        **{
            "alpha": scales,
            "beta": scales,
            "algorithm": {**NAMES, "'summa'": "summa", "'cannon'": "cannon", "'cuboid'": "cuboid"},
        },
        **{"out": {**spoilt_arrays(left), "an operand": "operand"}, "panel": NUMBERS, "other": {"a number": 3, "a grid": "grid"}},
        "operand": {**NAMES, "an array": left},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        a = DistMatrix.from_global(arguments["array"], grid, arguments["a_layout"])
        b = DistMatrix.from_global(arguments["b"], grid, arguments["b_layout"])
        rest = {key: arguments[key] for key in ("form", "alpha", "beta", "algorithm", "panel", "other") if key in arguments}
        if "out" in arguments:
            rest["out"] = a if isinstance(arguments["out"], str) else arguments["out"]
        return matmul(arguments.get("operand", a), b, **rest).to_global()

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        mine = everyone[rank]
        if {"out", "other", "operand"} & set(mine):
            raise MustRefuse
        a, b = same(arrays_of(everyone)), same(arrays_of([{"array": one["b"]} for one in everyone]))
        if mine["b"][0] != mine["array"][0] or mine.get("beta", 0) != 0:
            raise MustRefuse
        alpha = mine.get("alpha", 1)
        alpha = alpha[1][()] if isinstance(alpha, tuple) and alpha[1].ndim == 0 else alpha  # a number of numpy's
        if isinstance(alpha, (str, list, dict, tuple)) or alpha is None:
            raise MustRefuse
        form = mine.get("form", "nn")
        if form not in ("nn", "tn", "nt", "tt"):
            raise MustRefuse
        if a is ANY or b is ANY:
            return ANY
        return alpha * ((a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b))

    mode = chance.choice([*MODES])
    victim = one_rank(chance, size) if "check" in mode else None  # without, the first call of a kind alone is compared
    return Case("product", f"{key}: {name}", mode, victim, good, {**good, key: spoils[key][name]}, call, oracle)


def gradients(chance: random.Random, rank: int, size: int) -> Case:
    """A product with gradients of blocks, plans and grids that do not fit."""
    import numpy as np

    a, b = np.arange(144.0).reshape(12, 12) % 5, np.arange(144.0).reshape(12, 12) % 7
    good: dict[str, Any] = {"array": a, "b": b}
    sizes = {repr(one): one for one in (0, -12, 7, 12.0, "12", None, 2**40, 24)}
    spoils = {
        **{
            "local a": spoilt_arrays(a[: 12 // size]),
            "local b": spoilt_arrays(b[: 12 // axes_of(size)["x"], : 12 // axes_of(size)["y"]]),
            "m": sizes,
            "k": sizes,
        },
        **{"form": {repr(one): one for one in ("xx", None, 3, "cn", "tt")}, "roles": NAMES, "bias": spoilt_arrays(a)},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        from summa3d.autograd import matmul, product
        from summa3d.gemm import CuboidPlan
        from summa3d.layout import collect, distribute

        roles = (arguments["roles"], "y", "z") if "roles" in arguments else ("x", "y", "z")
        plan = CuboidPlan(arguments.get("form", "nn"), arguments.get("m", 12), 12, arguments.get("k", 12), *roles)
        at = [arguments.get(f"local {which}") for which in "ab"]
        blocks = [
            distribute(tensor(as_numpy(arguments[key])), grid, layout).requires_grad_() if given is None else given
            for key, given, layout in (("array", at[0], plan.a_layout), ("b", at[1], plan.b_layout))
        ]
        c = matmul(*blocks, product(plan, grid), arguments.get("bias"))
        c.backward(c.new_ones(c.shape))
        return as_numpy(collect(c.detach(), grid, plan.c_layout, plan.c_shape))

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if any(set(one) - {"array", "b"} for one in everyone):
            return None
        return a @ b

    mode = chance.choice([*MODES])
    victim = one_rank(chance, size) if "check" in mode else None  # without, the first call of a kind alone is compared
    return Case("gradient", f"{key}: {name}", mode, victim, good, {**good, key: spoils[key][name]}, call, oracle)


def freed(chance: random.Random, rank: int, size: int) -> Case:
    """Return what is left of a freed grid, or of another one."""
    import numpy as np

    from summa3d import DistMatrix, Grid

    array = np.arange(36.0).reshape(6, 6)
    uses: dict[str, Callable[[Any, Any, Any], Any]] = {
        "all_reduce": lambda grid, axis, a: axis.all_reduce(array),
        "start_broadcast": lambda grid, axis, a: axis.start_broadcast(array.copy()),
        "barrier": lambda grid, axis, a: axis.barrier(),
        "allocate": lambda grid, axis, a: axis.allocate((2,), array),
        "send": lambda grid, axis, a: axis.start_send(array, (axis.index + 1) % axis.size),
        "axis": lambda grid, axis, a: grid["x"],
        "world": lambda grid, axis, a: grid.world.all_reduce(array),
        "part": lambda grid, axis, a: grid.part("x")["x"].all_reduce(array),
        "matmul": lambda grid, axis, a: a @ a.T,
        "to_global": lambda grid, axis, a: a.to_global(),
        "redistribute": lambda grid, axis, a: a.redistribute("m k:x"),
        "norm": lambda grid, axis, a: a.norm(),
        "from_global": lambda grid, axis, a: DistMatrix.from_global(array, grid, "m:x k").to_global(),
        "everyone": lambda grid, axis, a: grid.everyone.all_reduce(array),
    }
    mode, name, mixed = chance.choice([*MODES]), chance.choice([*uses]), chance.random() < 0.2

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        if not arguments:
            return None
        with Grid(grid.communicators.common, axes_of(size), **MODES[mode]) as other:
            axis, a = other["x"], DistMatrix.from_global(array, other, "m:x k:y")
            if mixed:
                return DistMatrix.from_global(array, grid, "m:x k:y") + a  # a product of the two would be right
        uses[name](other, axis, a)
        return None

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if mixed or name not in ("axis", "from_global", "to_global"):
            raise MustRefuse

    return Case("freed", "two grids" if mixed else name, mode, None, {}, {"use": name}, call, oracle)


def inner_grids(chance: random.Random, rank: int, size: int) -> Case:
    """A grid on what is no communicator, or on one of another grid; blocks of one on the other; one freed before the other."""
    import numpy as np

    from summa3d import DistMatrix, Grid
    from summa3d.comm.grid import Place

    array, mode = np.arange(36.0).reshape(6, 6), chance.choice([*MODES])

    def outer_freed(grid: Any, use: Callable[[Any], Any]) -> Any:
        outer = Grid(grid.communicators.common, axes_of(size), **MODES[mode])
        inner = Grid(outer["x"].comm, {"x": 1, "y": x, "z": 1}, **MODES[mode])
        outer.free()
        try:
            return use(inner)
        finally:
            inner.free()

    def both(grid: Any, use: Callable[[Any, Any], Any]) -> Any:
        with Grid(grid["x"].comm, {"x": x}, **MODES[mode]) as inner:
            return use(grid, inner)

    x = axes_of(size)["x"]
    total = np.full(2, x * (x - 1) / 2)

    def matrix(grid: Any, layout: str = "m:x k:y") -> Any:
        return DistMatrix.from_global(array, grid, layout)

    def ranks(grid: Any) -> Any:
        return np.full(2, float(grid.rank))

    after: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "all_reduce": (lambda inner: inner["y"].all_reduce(ranks(inner)), total),
        "all_gather": (lambda inner: inner.world.all_gather(np.ones(1)), np.ones(x)),
        "start_reduce": (lambda inner: inner["y"].start_reduce(ranks(inner)).wait(), ANY),
        "from_global": (lambda inner: matrix(inner).to_global(), array),
        "barrier": (lambda inner: inner["y"].barrier(), None),
        "matmul": (lambda inner: (matrix(inner) @ matrix(inner).T).to_global(), array @ array.T),
        "redistribute": (lambda inner: matrix(inner).redistribute("m:y k").to_global(), array),
        "start_send": (lambda inner: inner["y"].start_send(array, (inner.rank + 1) % x).wait(), ANY),
        "part": (lambda inner: inner.part("y")["y"].all_reduce(ranks(inner)), total),
        "Grid": (lambda inner: Grid(inner.comm, {"x": x})["x"].all_reduce(ranks(inner)), total),
    }
    uses: dict[str, tuple[Callable[[Any], Any], Any]] = {
        **{f"on {one!r}": (lambda grid, one=one: Grid(one, axes_of(size)), MustRefuse) for one in (None, 3, "world", [0], {})},
        "on the null communicator": (lambda grid: Grid(type(grid.comm)(), axes_of(size)), MustRefuse),
        "on a grid": (lambda grid: Grid(grid, axes_of(size)), MustRefuse),
        "on an axis": (lambda grid: Grid(grid["x"], {"x": x}), MustRefuse),
        "on a place's communicator": (lambda grid: Grid(Place({"x": size}).comm, {"x": size}), MustRefuse),
        "too large": (lambda grid: Grid(grid["x"].comm, {"x": x + 1}), MustRefuse),
        "too small": (lambda grid: Grid(grid["x"].comm, {"x": 1, "y": x - 1}), MustRefuse),
        "right": (lambda grid: both(grid, lambda outer, inner: inner["x"].all_reduce(ranks(inner))), total),
        "blocks of two": (
            lambda grid: both(grid, lambda outer, inner: matrix(outer, "m:x k") @ matrix(inner, "m:x k")),
            MustRefuse,
        ),
        "a block too small": (
            lambda grid: both(grid, lambda outer, inner: DistMatrix(array, "m k", inner, (7, 7)).to_global()),
            MustRefuse,
        ),
        "a part's other axis": (lambda grid: grid.part("x").part("y"), MustRefuse),
        "freed twice": (lambda grid: both(grid, lambda outer, inner: inner.free()), None),
        **{
            f"{one} after the outer one's free": (lambda grid, one=one: outer_freed(grid, after[one][0]), after[one][1])
            for one in after
        },
    }
    name = chance.choice([*uses])
    use, right = uses[name]

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if right is MustRefuse:
            raise MustRefuse
        return right if everyone[rank] else None

    return Case(
        *("inner grid", name, mode, None, {}, {"use": name}, lambda grid, arguments: use(grid) if arguments else None, oracle)
    )
