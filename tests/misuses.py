"""Misuses of the API: a seeded generator of wrong calls on ranks under a plain `mpiexec python`, and of right ones after each.

`python tests/misuses.py --cases 2000 --ranks 4 --seed 1` prints a table of what they end with. A call is held where it raises
one of ours, or gives what numpy gives; another exception, a wrong number, a hang, a dead job, a wrong call after it are findings.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SECONDS, SETTLED = 30.0, 0.3
"""Limit of a case; what a rank that was refused leaves to the others before it takes them to wait for it."""
MODES: dict[str, dict[str, Any]] = {
    "node memory": {"node_memory": True},
    "MPI": {"node_memory": False},
    "MPI, check": {"node_memory": False, "check": True},
    "node memory, check": {"node_memory": True, "check": True},
}
HELD = ("refused", "right")


class MustRefuse(Exception):
    """What the oracle raises for arguments that have no right result."""


@dataclass
class Case:
    """A call that is right but for one argument, on all ranks or on one.

    call : makes it, of a grid and the arguments. oracle : the right result of this rank, of all ranks' arguments as they were.
    """

    group: str
    name: str
    mode: str
    victim: int | None
    good: dict[str, Any]
    bad: dict[str, Any]
    call: Callable[[Any, dict[str, Any]], Any]
    oracle: Callable[[list[dict[str, Any]], int], Any]


@dataclass
class World:
    """What the cases of a job share: communicators, and a grid of each mode."""

    comm: Any
    control: Any
    board: Any = None
    grids: dict[str, Any] = field(default_factory=dict)

    def grid(self, mode: str) -> Any:
        """The grid of a mode, made where there is none."""
        from summa3d import Grid

        if mode not in self.grids:
            own = self.comm.Dup()
            self.grids[mode] = Grid(own, {"x": 2, "y": self.comm.size // 2, "z": 1}, **MODES[mode]), own
        return self.grids[mode][0]

    def drop(self, mode: str) -> None:
        """Free a grid whose ranks are out of step."""
        from summa3d.errors import Summa3dError

        grid, own = self.grids.pop(mode)
        with contextlib.suppress(Summa3dError):
            grid.free()
        own.Free()


# ---------------------------------------------------------------------------------------------------------- arrays and values


def read_only(array: Any) -> Any:
    """A copy that cannot be written."""
    array = array.copy()
    array.flags.writeable = False
    return array


def tensor(array: Any) -> Any:
    """A torch tensor of the same numbers."""
    import torch

    return torch.from_numpy(array.copy())


def spoilt_arrays(array: Any) -> dict[str, Any]:
    """An array's like of other types, shapes, orders and kinds; not all of them are wrong."""
    import numpy as np
    import torch

    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    names = (
        "int8",
        "uint16",
        "uint64",
        "complex64",
        "complex128",
        "float16",
        "float32",
        "int32",
        "int64",
        "bool",
        "object",
        "S4",
    )
    return {
        **{f"dtype {name}": array.astype(name) for name in names},
        "dtype longdouble": array.astype(np.longdouble),
        "dtype datetime": array.astype("int64").astype("datetime64[s]"),
        "dtype of two fields": np.zeros(array.shape, [("a", "f4"), ("b", "i4")]),
        "big-endian": array.astype(">f8"),
        "a list": array.tolist(),
        "None": None,
        "a number": 3.5,
        "a text": "abc",
        "0-d": array.reshape(-1)[0].reshape(()),
        "no elements": array[:0],
        "no columns": array[..., :0],
        "every other column": wide[..., ::2],
        "Fortran order": np.asfortranarray(array),
        "backwards": array[::-1],
        "read-only": read_only(array),
        "one more row": np.concatenate([array, array[:1]]),
        "one more dim": array[None],
        "tensor": tensor(array),
        "tensor with gradient": tensor(array).requires_grad_(),
        "tensor, conjugate": torch.complex(tensor(array), tensor(array)).conj(),
        "tensor, transposed": tensor(array).t().contiguous().t(),
        "tensor, bfloat16": tensor(array).bfloat16(),
        "tensor, sparse": tensor(array).to_sparse(),
        "tensor without memory": tensor(array).to("meta"),
        "tensor, expanded": tensor(array[:1]).expand(array.shape),
        "masked": np.ma.masked_array(array),
        "matrix": np.asmatrix(array),
    }


NUMBERS: dict[str, Any] = {
    **{repr(one): one for one in (-1, 7, -9, 0.0, 1.5, "0", None, True, 2**40, -(2**70), [0], (1,), float("nan"), b"0", {}, 1j)},
}


def spoilt_sizes(sizes: list[int]) -> dict[str, Any]:
    """Sizes of other types, signs, numbers and sums."""
    import numpy as np

    first, *rest = sizes
    others: dict[str, Any] = {
        "floats": [float(one) for one in sizes],
        "texts": [str(one) for one in sizes],
        "negative": [-first, *rest[:-1], rest[-1] + 2 * first],
        "one too few": rest,
        "one too many": [*sizes, 0],
        "another sum": [first + 1, *rest],
        "a number": first,
        "a text": "44",
        "None inside": [None, *rest],
        "nested": [sizes],
        "numpy": np.array(sizes),
        "numpy floats": np.array(sizes, float),
        "numpy 2-d": np.array([sizes]),
        "shifted": [first + 1, *rest[:-1], rest[-1] - 1],
        "empty": [],
        "huge": [2**62] * len(sizes),
        "a dict": dict.fromkeys(range(len(sizes)), first),
        "a generator": range(len(sizes)),
        "nan": [float("nan"), *rest],
    }
    return others


OPS: dict[str, Any] = {repr(one): one for one in ("prod", None, 3, ["sum"], "SUM", b"sum", "", "max", "min", ("sum",), {})}


def spoilt_into(into: Any) -> dict[str, Any]:
    """A place for a result, of another kind, shape or type."""
    import numpy as np

    wide = np.zeros((*into.shape[:-1], 2 * into.shape[-1]), into.dtype)
    return {
        "a list": into.tolist(),
        "a number": 0.0,
        "a text": "abc",
        "float32": into.astype("f4"),
        "complex": into.astype(complex),
        "one row less": into[1:].copy(),
        "one more dim": into[None].copy(),
        "flat": into.reshape(-1).copy(),
        "read-only": read_only(into),
        "tensor": tensor(into),
        "every other column": wide[..., ::2],
        "Fortran order": np.asfortranarray(into),
        "broadcast": np.broadcast_to(into[:1], into.shape),
        "big-endian": into.astype(">f8"),
    }


def as_numpy(array: Any) -> Any:
    """The elements of an array, a tensor or a list, copied."""
    import numpy as np

    if hasattr(array, "data_ptr"):
        return array.detach().resolve_conj().float().numpy().copy() if "bfloat16" in str(array.dtype) else as_host(array)
    return np.array(array)


def as_host(array: Any) -> Any:
    """A tensor's elements."""
    return array.detach().resolve_conj().to_dense().cpu().numpy().copy()


def type_name(array: Any) -> str:
    """The name of the dtype, numpy's or torch's."""
    return str(array.dtype).removeprefix("torch.")


def snapshot(value: Any) -> Any:
    """An argument as it is now: its elements, where it has any."""
    if hasattr(value, "shape"):
        with contextlib.suppress(Exception):  # what cannot be copied has no right result either
            return type_name(value), as_numpy(value)
        return MustRefuse
    return value


def one_rank(chance: random.Random, size: int) -> int | None:
    """A rank that alone calls otherwise; half of the time None, all of them do."""
    return chance.randrange(size) if chance.random() < 0.5 else None


# ------------------------------------------------------------------------------------------------------------- the collectives


def arrays_of(everyone: list[dict[str, Any]]) -> list[Any]:
    """All ranks' arrays, which must be of one dtype."""
    given = [arguments["array"] for arguments in everyone]
    if any(not isinstance(one, tuple) or not hasattr(one[1], "shape") for one in given) or len({one[0] for one in given}) != 1:
        raise MustRefuse
    return [one[1] for one in given]


def whole(value: Any) -> int:
    """An argument that must be a whole number."""
    import numpy as np

    if not isinstance(value, (int, np.integer)) and not (isinstance(value, float) and value.is_integer()):
        raise MustRefuse  # 4.0 is refused or taken for 4
    return int(value)


def along(arguments: dict[str, Any], arrays: list[Any], key: str = "sizes") -> tuple[int, list[int] | None]:
    """The dim, and the sizes where they are given."""
    dim = whole(arguments.get("dim", 0))
    if not -arrays[0].ndim <= dim < arrays[0].ndim:
        raise MustRefuse
    sizes = arguments.get(key)
    if isinstance(sizes, tuple):
        sizes = sizes[1]
    return dim, None if sizes is None else [whole(one) for one in sizes]


def parts(array: Any, dim: int, sizes: list[int] | None, size: int) -> list[Any]:
    """The pieces of an array along a dim."""
    import numpy as np

    extent = array.shape[dim]
    if sizes is None:
        if extent % size:
            raise MustRefuse
        sizes = [extent // size] * size
    if len(sizes) != size or sum(sizes) != extent or min(sizes) < 0:
        raise MustRefuse
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


def gathered(everyone: list[dict[str, Any]], rank: int) -> Any:
    """What an all-gather gives."""
    import numpy as np

    arrays = arrays_of(everyone)
    dim, sizes = along(everyone[rank], arrays)
    if sizes is not None and sizes != [one.shape[dim] for one in arrays]:
        raise MustRefuse
    return np.concatenate(arrays, axis=dim)


def combined(everyone: list[dict[str, Any]], op: Any) -> Any:
    """All ranks' arrays, reduced."""
    import numpy as np

    arrays, how = arrays_of(everyone), {"sum": np.add, "max": np.maximum, "min": np.minimum}
    if not isinstance(op, str) or op not in how or len({one.shape for one in arrays}) != 1:
        raise MustRefuse
    return how[op].reduce(arrays)


def scattered(everyone: list[dict[str, Any]], rank: int) -> Any:
    """What a reduce-scatter gives."""
    total = combined(everyone, "sum")
    dim, sizes = along(everyone[rank], [total])
    return parts(total, dim, sizes, len(everyone))[rank]


def reduced(everyone: list[dict[str, Any]], rank: int) -> Any:
    """What an all-reduce gives."""
    return combined(everyone, everyone[rank].get("op", "sum"))


def rooted(everyone: list[dict[str, Any]], rank: int) -> Any:
    """What a reduce gives."""
    total, root = combined(everyone, everyone[rank].get("op", "sum")), whole(everyone[rank]["root"])
    if not 0 <= root < len(everyone):
        raise MustRefuse
    return total if rank == root else None


def told(everyone: list[dict[str, Any]], rank: int) -> Any:
    """What a broadcast gives."""
    arrays, root = arrays_of(everyone), whole(everyone[rank]["root"])
    if not 0 <= root < len(everyone) or len({one.shape for one in arrays}) != 1:
        raise MustRefuse
    return arrays[root]


def exchanged(everyone: list[dict[str, Any]], rank: int) -> Any:
    """What an all-to-all gives."""
    import numpy as np

    arrays = arrays_of(everyone)
    mine = [parts(one, *along(arguments, [one]), len(everyone)) for one, arguments in zip(arrays, everyone, strict=True)]
    dim, received = along(everyone[rank], arrays, "receive_sizes")
    arriving = [one[rank] for one in mine]
    if received is not None and received != [one.shape[dim] for one in arriving]:
        raise MustRefuse
    return np.concatenate(arriving, axis=dim)


ORACLES = {
    **{"all_gather": gathered, "reduce_scatter": scattered, "all_reduce": reduced, "reduce": rooted},
    **{"broadcast": told, "all_to_all": exchanged},
}


def collective(chance: random.Random, rank: int, size: int) -> Case:
    """A collective over all ranks with one argument spoilt."""
    import numpy as np

    operation = chance.choice([*ORACLES])
    rows = size * chance.choice([1, 3])
    array = np.arange(rows * 4.0).reshape(rows, 4) % 5 + rank
    good: dict[str, Any] = {"array": array}
    spoils: dict[str, dict[str, Any]] = {"array": spoilt_arrays(array)}
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        good |= {"dim": 0, "sizes": [rows] * size if operation == "all_gather" else [rows // size] * size}
        spoils |= {"dim": NUMBERS, "sizes": spoilt_sizes(good["sizes"])}
    if operation == "all_to_all":
        good["receive_sizes"] = good["sizes"]
        spoils["receive_sizes"] = {**spoilt_sizes(good["sizes"]), "None": None}
    if operation in ("broadcast", "reduce"):
        good["root"], spoils["root"] = chance.randrange(size), NUMBERS
    if operation in ("all_reduce", "reduce"):
        good["op"], spoils["op"] = "sum", OPS
    if operation in ("all_gather", "reduce_scatter", "all_reduce", "reduce"):
        results = {"all_gather": (rows * size, 4), "reduce_scatter": (rows // size, 4)}
        spoils["into"] = spoilt_into(np.zeros(results.get(operation, array.shape)))
    if operation == "all_gather" and chance.random() < 0.3:
        good["view"] = True
    started = chance.random() < 0.4
    if operation == "reduce_scatter" and not started:
        spoils["parts"] = spoilt_into(np.zeros((size, rows // size, 4)))
    key = chance.choice([*spoils, "array"])
    name = chance.choice([*spoils[key]])
    mode = chance.choice([*MODES])
    if mode == "MPI" and (key == "receive_sizes" or (operation, key) == ("all_gather", "sizes")):
        mode = "MPI, check"  # each rank compares its own alone
    victim = None if mode == "MPI" else one_rank(chance, size)  # ranks that differ through MPI are compared with check=True only
    bad = {**good, key: spoils[key][name]}

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        rest = {key: value for key, value in arguments.items() if key != "array"}
        made = getattr(grid.world, f"start_{operation}" if started else operation)(arguments["array"], **rest)
        return made.wait() if started else made

    return Case("collective", f"{operation}, {key}: {name}", mode, victim, good, bad, call, ORACLES[operation])


def message(chance: random.Random, rank: int, size: int) -> Case:
    """A message round the ring with one argument spoilt."""
    import numpy as np

    array = np.arange(6.0).reshape(2, 3) + rank
    good: dict[str, Any] = {"array": array, "peer": 1, "tag": 3}
    tags = {repr(one): one for one in (-1, 2**31 - 1, 2**40, 0.5, "1", None, [])}
    spoils = {"array": spoilt_arrays(array), "peer": {**NUMBERS, "itself": 0}, "tag": tags}
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        axis, array, peer = grid.world, arguments["array"], arguments["peer"]
        there, back = (
            ((axis.index + peer) % size, (axis.index - peer) % size) if isinstance(peer, int) and abs(peer) < 2 else (peer,) * 2
        )
        place = np.zeros((2, 3)) if not isinstance(array, np.ndarray) else np.zeros_like(array)
        sent = axis.start_send(array, there, arguments["tag"])  # before a receive is posted that would take the next message
        taken = axis.receive(place, back, arguments["tag"])
        sent.wait()
        return taken

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        arrays, peer, tag = arrays_of(everyone), whole(everyone[rank]["peer"]), everyone[rank]["tag"]
        if abs(peer) != 1 or not isinstance(tag, int) or tag < 0:
            raise MustRefuse
        return arrays[(rank - peer) % size]

    mode = chance.choice([*MODES])
    return Case("message", f"{key}: {name}", mode, None, good, {**good, key: spoils[key][name]}, call, oracle)


# ------------------------------------------------------------------------------------------------------- grids, products, layouts

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
        "run": lambda grid, value: grid.run(("x",), value),
        "run of": lambda grid, value: grid.run(value, 1),
        "pick": lambda grid, value: grid.pick("x", [value]),
        "pick of": lambda grid, value: grid.pick(value, [0]),
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

            with Grid(grid.common, **{"axes": {"x": 2, "y": size // 2}, **arguments}) as made:
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

    matrix = np.arange(48.0).reshape(8, 6)
    good: dict[str, Any] = {"array": matrix, "layout": "m:x k:y", "to": "m:y k"}
    shapes = {
        repr(one): one for one in ((8, 5), (8,), (8, 6, 1), (8.0, 6.0), (-8, 6), None, "86", 48, ("8", "6"), (0, 6), (2**70, 6))
    }
    spoils = {"array": spoilt_arrays(matrix), "layout": LAYOUTS, "to": LAYOUTS, "shape": shapes, "order": OPS, "block": {}}
    spoils["block"] = spoilt_arrays(np.ones((4, 6 // max(1, size // 2))))
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
        array = arrays_of(everyone)[rank]
        if array.ndim != 2 or len({one.shape for one in arrays_of(everyone)}) != 1:
            raise MustRefuse
        return array

    mode = chance.choice([*MODES])
    victim = one_rank(chance, size) if "check" in mode else None  # without, the first call of a kind alone is compared
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

    left, right = np.arange(48.0).reshape(8, 6) % 5, np.arange(24.0).reshape(6, 4) % 7
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
        b = arrays_of([{"array": one["b"]} for one in everyone])[rank]
        a = arrays_of(everyone)[rank]
        if mine["b"][0] != mine["array"][0] or mine.get("beta", 0) != 0:
            raise MustRefuse
        alpha = mine.get("alpha", 1)
        if isinstance(alpha, (str, list, dict, tuple)) or alpha is None:
            raise MustRefuse
        form = mine.get("form", "nn")
        if form not in ("nn", "tn", "nt", "tt"):
            raise MustRefuse
        return alpha * ((a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b))

    mode = chance.choice([*MODES])
    victim = one_rank(chance, size) if "check" in mode else None  # without, the first call of a kind alone is compared
    return Case("product", f"{key}: {name}", mode, victim, good, {**good, key: spoils[key][name]}, call, oracle)


def gradients(chance: random.Random, rank: int, size: int) -> Case:
    """A product with gradients of blocks, plans and grids that do not fit."""
    import numpy as np

    a, b = np.arange(64.0).reshape(8, 8) % 5, np.arange(64.0).reshape(8, 8) % 7
    good: dict[str, Any] = {"array": a, "b": b}
    sizes = {repr(one): one for one in (0, -8, 7, 8.0, "8", None, 2**40, 16)}
    spoils = {
        **{
            "local a": spoilt_arrays(a[: 8 // size]),
            "local b": spoilt_arrays(b[:4, : 8 // max(1, size // 2)]),
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
        plan = CuboidPlan(arguments.get("form", "nn"), arguments.get("m", 8), 8, arguments.get("k", 8), *roles)
        at = [arguments.get(f"local {which}") for which in "ab"]
        blocks = [
            distribute(tensor(as_numpy(arguments[key])), grid, layout).requires_grad_() if given is None else given
            for key, given, layout in (("array", at[0], plan.a_layout), ("b", at[1], plan.b_layout))
        ]
        c = matmul(*blocks, product(plan, grid), arguments.get("bias"))
        c.backward(c.new_ones(c.shape))
        return as_numpy(collect(c.detach(), grid, plan.c_layout, plan.c_shape))

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if set(everyone[rank]) - {"array", "b"}:
            return None
        return a @ b

    mode = chance.choice([*MODES])
    victim = one_rank(chance, size) if "check" in mode else None  # without, the first call of a kind alone is compared
    return Case("gradient", f"{key}: {name}", mode, victim, good, {**good, key: spoils[key][name]}, call, oracle)


def freed(chance: random.Random, rank: int, size: int) -> Case:
    """What is left of a freed grid, or of another one."""
    import numpy as np

    from summa3d import DistMatrix, Grid

    array = np.arange(16.0).reshape(4, 4)
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
        with Grid(grid.common, {"x": 2, "y": size // 2}, **MODES[mode]) as other:
            axis, a = other["x"], DistMatrix.from_global(array, other, "m:x k:y")
            if mixed:
                return DistMatrix.from_global(array, grid, "m:x k:y") @ a
        uses[name](other, axis, a)
        return None

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if mixed or name not in ("axis", "from_global", "to_global"):
            raise MustRefuse

    return Case("freed", "two grids" if mixed else name, mode, None, {}, {"use": name}, call, oracle)


GROUPS: tuple[tuple[Callable[[random.Random, int, int], Case], int], ...] = (
    *((collective, 8), (message, 2), (grids, 3), (redistributions, 3), (products, 3), (gradients, 3), (freed, 1)),
)


def drawn(seed: int, number: int, rank: int, size: int) -> Case:
    """Case `number`, alike on all ranks but for the numbers in its arrays."""
    chance = random.Random(seed * 1_000_003 + number)
    groups = [group for group, weight in GROUPS for _ in range(weight)]
    return chance.choice(groups)(chance, rank, size)


# ---------------------------------------------------------------------------------------------------- on the ranks of a job


class Board:
    """What each rank has come to, in memory that all of them map."""

    ENTERED, REFUSED, DONE = 1, 2, 3

    def __init__(self, file: Path, rank: int, size: int) -> None:
        import numpy as np

        if rank == 0:
            np.zeros((size, 8)).tofile(file)
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
        self.states, self.rank = np.memmap(file, np.float64, "r+", shape=(size, 8)), rank

    def write(self, number: int, state: int) -> None:
        """What this rank has come to in a case."""
        self.states[self.rank, :3] = number, state, time.monotonic()

    def others_wait(self, number: int, settled: float) -> bool:
        """Whether others are in the call, or through it, in which this rank was refused. False where all were refused."""
        while True:
            came, state, since = self.states[:, 0], self.states[:, 1], self.states[:, 2]
            if (came == number).all():
                if (state == self.REFUSED).all():
                    return False
                if (state == self.DONE).any() or time.monotonic() - since.max() > settled:
                    return True
            time.sleep(0.001)


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
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}", error, before


def verdict_of(case: Case, world: World, number: int, settled: float) -> tuple[str, str]:
    """Run a case on this rank, and right calls after it: a verdict and what was said."""
    rank, grid = world.comm.rank, world.grid(case.mode)
    mine = case.bad if case.victim in (None, rank) else case.good
    world.board.write(number, Board.ENTERED)
    what, result, before = attempt(case, grid, mine)
    said, verdict = (str(result)[:300] if what != "done" else ""), "refused" if what in ("refused", "disagreed") else what
    world.board.write(number, Board.DONE if what in ("done", "disagreed") else Board.REFUSED)
    if what not in ("done", "disagreed") and world.board.others_wait(number, settled):
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
    if (
        any(one[0] == "disagreed" for one in everyone)
        and any(one[0] != "disagreed" for one in everyone)
        and not late(world, case)
    ):
        return "told to some ranks only", said
    if any(one[0] != "done" for one in everyone) and any(one[0] in ("disagreed", "done") for one in everyone):
        world.drop(case.mode)
    return verdict, said


def late(world: World, case: Case) -> bool:
    """Whether a rank through which nobody waited, as a broadcast's root, is told at its next call."""
    return True


def compared(case: Case, result: Any, everyone: list[dict[str, Any]], rank: int) -> str:
    """What is wrong with a result; empty if nothing is."""
    import numpy as np

    try:
        right = case.oracle(everyone, rank)
    except (MustRefuse, ValueError, TypeError, IndexError, KeyError):
        return "wrongly accepted"
    if right is None or result is None:
        return "" if right is result or case.group in ("grid", "freed", "gradient", "redistribute") else "a wrong number"
    found = as_numpy(result)
    alike = found.shape == np.shape(right) and np.array_equal(found, np.asarray(right), equal_nan=found.dtype.kind in "fc")
    return "" if alike else "a wrong number"


def afterwards(world: World, mode: str, number: int) -> str:
    """Whether right calls are right after a misuse."""
    import numpy as np

    from summa3d import DistMatrix

    grid, size = world.grid(mode), world.comm.size
    if not np.array_equal(
        grid.world.all_reduce(np.full(3, float(number + world.comm.rank))), np.full(3, size * number + size * (size - 1) / 2)
    ):
        return "a wrong sum afterwards"
    if not np.array_equal(grid["x"].all_gather(np.full(2, number)), np.full(4, number)):
        return "a wrong gather afterwards"
    whole_matrix = np.arange(48.0).reshape(8, 6) + number
    if number % 8 == 0 and not np.array_equal(
        DistMatrix.from_global(whole_matrix, grid, "m:x k:y").redistribute("m k:y").to_global(), whole_matrix
    ):
        return "a wrong redistribution afterwards"
    return ""


def on_ranks(numbers: list[int], seed: int, folder: Path, settled: float) -> None:
    """The program of each rank: the cases of these numbers; rank 0 writes a line for each."""
    from mpi4py import MPI

    world = World(MPI.COMM_WORLD, MPI.COMM_WORLD.Dup())
    rank, size = world.comm.rank, world.comm.size
    world.board = Board(folder / "board", rank, size)
    for number, mode in enumerate(MODES):  # what takes long is no part of a case
        world.grid(mode)
        afterwards(world, mode, 8 * number)
    for group, _ in GROUPS:
        group(random.Random(seed), rank, size)
    for number in numbers:
        if rank == 0:
            (folder / "now").write_text(str(number))
        stacks = (folder / f"stacks{rank}").open("w")
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=stacks)
        case = drawn(seed, number, rank, size)
        verdict, said = verdict_of(case, world, number, settled)
        try:
            wrong = afterwards(world, case.mode, number)
        except Exception as error:
            wrong, said = f"{type(error).__name__} afterwards", str(error)[:300]
            verdict = wrong
        every = world.control.allgather((wrong or verdict, said))
        faulthandler.cancel_dump_traceback_later()
        stacks.close()
        if rank == 0:
            found = next((one for one in every if one[0] not in HELD), every[case.victim or 0])
            line = {"number": number, "group": case.group, "name": case.name, "mode": case.mode, "victim": case.victim}
            with (folder / "lines").open("a") as lines:
                lines.write(json.dumps({**line, "verdict": found[0], "said": found[1]}) + "\n")
    for mode in list(world.grids):
        world.drop(mode)


# -------------------------------------------------------------------------------------------------------------------- the parent


def run(numbers: list[int], ranks: int, seed: int, settled: float = SETTLED) -> list[dict[str, Any]]:
    """Run cases on ranks; a job that dies is restarted behind the case at which it died."""
    from summa3d.cli.launch import find_launcher, loaded_runtime

    lines: list[dict[str, Any]] = []
    left = list(numbers)
    launcher = find_launcher(loaded_runtime(), os.environ).command
    while left:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "numbers").write_text(json.dumps(left))
            words = [sys.executable, __file__, "--on-ranks", name, "--seed", str(seed), "--settled", str(settled)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            limit = 60 + SECONDS * 2 + 1.0 * len(left)
            job = subprocess.run(
                [*launcher, "-n", str(ranks), *words], capture_output=True, text=True, timeout=limit, env=environ
            )
            done = (
                [json.loads(line) for line in (folder / "lines").read_text().splitlines()] if (folder / "lines").exists() else []
            )
            tell(done)
            lines += done
            left = left[len(done) :]
            if not left:
                break
            if not (folder / "now").exists():
                raise RuntimeError(job.stdout + job.stderr)
            stacks = "\n".join(file.read_text() for file in sorted(folder.glob("stacks*")))
            hung = "Timeout" in stacks
            case = drawn(seed, left[0], 0, ranks)
            line = {"number": left[0], "group": case.group, "name": case.name, "mode": case.mode, "victim": case.victim}
            line |= {
                "verdict": "hang" if hung else f"the job died: {job.returncode}",
                "said": (stacks if hung else job.stderr)[-1500:],
            }
            tell([line])
            lines.append(line)
            left = left[1:]
    return lines


def tell(lines: list[dict[str, Any]]) -> None:
    """Print the findings among them."""
    for line in lines:
        if line["verdict"] not in HELD:
            where = "all ranks" if line["victim"] is None else f"rank {line['victim']}"
            print(f"{line['number']}: {line['group']}, {line['name']}, {line['mode']}, on {where}: {line['verdict']}")
            print(f"    {line['said']}", flush=True)


def main() -> int:
    """Print each finding as it comes, and a table of groups and verdicts at the end; the status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--full", action="store_true", help="Run 10,000 cases.")
    parser.add_argument("--only", type=int, nargs="*", help="Run these cases alone.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settled", type=float, default=SETTLED, help=argparse.SUPPRESS)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks is not None:
        on_ranks(json.loads((args.on_ranks / "numbers").read_text()), args.seed, args.on_ranks, args.settled)
        return 0
    numbers = args.only or list(range(10_000 if args.full else args.cases))
    lines = run(numbers, args.ranks, args.seed, args.settled)
    again = [line["number"] for line in lines if line["verdict"] == "hang"]
    if again:  # a rank that had no processor for long was taken for one that waits: only what hangs twice does
        slower = {line["number"]: line for number in again for line in run([number], args.ranks, args.seed, 3.0)}
        lines = [slower.get(line["number"], line) for line in lines]
    table = Counter((line["group"], line["verdict"] if line["verdict"] in HELD else "finding") for line in lines)
    print(f"{'group':<14}{'cases':>8}{'refused':>9}{'right':>7}{'findings':>10}")
    for group in sorted({line["group"] for line in lines}):
        counts = [table[group, one] for one in (*HELD, "finding")]
        print(f"{group:<14}{sum(counts):>8}{counts[0]:>9}{counts[1]:>7}{counts[2]:>10}")
    found = [line for line in lines if line["verdict"] not in HELD]
    print(f"{len(lines)} misuses on {args.ranks} ranks: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
