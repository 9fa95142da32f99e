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
import shutil
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
UNCHECKED = ("grid", "freed", "gradient", "redistribute", "layer")
"""Groups of cases whose result is not compared where the oracle has none."""


class MustRefuse(Exception):
    """What the oracle raises for arguments that have no right result."""


ANY = object()
"""What the oracle returns where no rank can know that its numbers are not those of the others: any result is held."""


def axes_of(size: int) -> dict[str, int]:
    """The axes of the grids of so many ranks."""
    return {"x": size, "y": 1, "z": 1} if size % 2 else {"x": 2, "y": size // 2, "z": 1}


@dataclass
class Case:
    """A call that is right but for one argument, on all ranks or on one.

    call : makes it, of a grid and the arguments. oracle : the right result of this rank, of all ranks' arguments as they were.
    around : what the ranks make before the case, and free after it. close : how far a result may be from the right one.
    """

    group: str
    name: str
    mode: str
    victim: int | None
    good: dict[str, Any]
    bad: dict[str, Any]
    call: Callable[[Any, dict[str, Any]], Any]
    oracle: Callable[[list[dict[str, Any]], int], Any]
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    close: float = 0.0


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
            self.grids[mode] = Grid(own, axes_of(self.comm.size), **MODES[mode]), own
        return self.grids[mode][0]

    def drop(self, mode: str) -> None:
        """Free a grid whose ranks are out of step."""
        from summa3d.errors import Summa3dError

        grid, own = self.grids.pop(mode)
        with contextlib.suppress(Summa3dError):
            grid.free()
        own.Free()


def same(arrays: list[Any]) -> Any:
    """The array that all ranks give; ANY where they differ in its numbers alone."""
    import numpy as np

    first = arrays[0]
    if any(one.shape != first.shape for one in arrays):
        raise MustRefuse
    return first if all(np.array_equal(one, first, equal_nan=first.dtype.kind in "fc") for one in arrays) else ANY


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
        "tensor, transposed": tensor(array).transpose(0, 1).contiguous().transpose(0, 1),
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
    if key == "receive_sizes" or (mode == "MPI" and key == "sizes" and operation in ("all_gather", "all_to_all")):
        mode = mode.removesuffix(", check") + ", check"  # else each rank compares its own alone
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
    if size > 7:
        del spoils["peer"]["7"]  # a member, from which all would wait for a message
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        axis, array, peer = grid.world, arguments["array"], arguments["peer"]
        there, back = (
            ((axis.index + peer) % size, (axis.index - peer) % size) if isinstance(peer, int) and abs(peer) < 2 else (peer,) * 2
        )
        place = place_like(array)
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

            with Grid(grid.common, **{"axes": axes_of(size), **arguments}) as made:
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
    """What is left of a freed grid, or of another one."""
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
        with Grid(grid.common, axes_of(size), **MODES[mode]) as other:
            axis, a = other["x"], DistMatrix.from_global(array, other, "m:x k:y")
            if mixed:
                return DistMatrix.from_global(array, grid, "m:x k:y") @ a
        uses[name](other, axis, a)
        return None

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if mixed or name not in ("axis", "from_global", "to_global"):
            raise MustRefuse

    return Case("freed", "two grids" if mixed else name, mode, None, {}, {"use": name}, call, oracle)


def place_like(array: Any) -> Any:
    """A place for what is like an array, where it is one."""
    import numpy as np
    import torch

    if isinstance(array, np.ndarray):
        return np.zeros(array.shape, array.dtype)
    usable = isinstance(array, torch.Tensor) and array.layout is torch.strided and not array.is_meta
    return torch.zeros(array.shape, dtype=array.dtype) if usable else np.zeros((2, 3))


def channels(chance: random.Random, rank: int, size: int) -> Case:
    """A message from each stage of a pipeline to the next, round two stages of each rank, with one argument spoilt."""
    import numpy as np

    from summa3d.comm.channel import Channel

    array, mode = np.arange(6.0).reshape(2, 3) + rank, chance.choice([*MODES])
    good: dict[str, Any] = {"array": array, "out": np.zeros((2, 3)), "stage": 0, "kind": "F", "micro": 0}
    kinds = {repr(one): one for one in ("B", "", "f", None, 3, b"F", ["F"], "FB")}
    homes = {repr(one): one for one in ([size], [-1, 0], "01", [0.0] * size, None, 3, [None], {"a": 0}, [[0]])}
    spoils = {"array": spoilt_arrays(array), "stage": NUMBERS, "kind": kinds, "micro": NUMBERS, "homes": homes}
    spoils["use"] = {"freed": "freed", "freed twice": "freed twice", "of a freed grid": "grid"}
    if "check" in mode:  # what the other end awaits is compared with the message in debug mode alone
        spoils["out"] = spoilt_into(np.zeros((2, 3)))
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])
    made: list[Any] = []

    @contextlib.contextmanager
    def around(grid: Any) -> Any:
        made[:] = [Channel(grid.world, [*range(size), *range(size)])]
        yield  # it is not freed: another communicator would take its number, and a message that nobody has received

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        channel, what = made[0], arguments["array"]
        if "homes" in arguments:
            Channel(grid.world, arguments["homes"]).free()
            return None
        if arguments.get("use") == "grid":
            with type(grid)(grid.common, axes_of(size), **MODES[mode]) as other:
                channel = Channel(other.world, [*range(size), *range(size)])
        for _ in arguments.get("use", "").split() if "freed" in arguments.get("use", "") else ():
            channel.free()
        place = place_like(what) if key == "array" else arguments["out"]
        shift, kind, micro = arguments["stage"], arguments["kind"], arguments["micro"]
        stages = [one if shift == 0 else shift for one in (grid.world.index + 1, grid.world.index or size)]
        if key == "out":
            taken = channel.start_receive(place, stages[1], kind, micro)
            channel.send(what, stages[0], kind, micro)
        else:
            channel.send(what, stages[0], kind, micro)
            taken = channel.start_receive(place, stages[1], kind, micro)
        return taken.wait()

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        if "homes" in everyone[rank]:
            raise MustRefuse
        if "use" in everyone[rank] or everyone[rank]["stage"] != 0 or everyone[rank]["kind"] not in ("F", "B"):
            raise MustRefuse
        return arrays_of(everyone)[(rank - 1) % size]

    return Case("channel", f"{key}: {name}", mode, None, good, {**good, key: spoils[key][name]}, call, oracle, around)


def inner_grids(chance: random.Random, rank: int, size: int) -> Case:
    """A grid on what is no communicator, or on one of another grid; blocks of one on the other; one freed before the other."""
    import numpy as np

    from summa3d import DistMatrix, Grid
    from summa3d.comm.grid import Place

    array, mode = np.arange(36.0).reshape(6, 6), chance.choice([*MODES])

    def outer_freed(grid: Any, use: Callable[[Any], Any]) -> Any:
        outer = Grid(grid.common, axes_of(size), **MODES[mode])
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


MODEL = {"family": "gpt2", "layers": 1, "hidden": 24, "heads": 6, "sequence": 6, "vocabulary": 12}


def spoilt_tokens(tokens: Any) -> dict[str, Any]:
    """Tokens, or labels, of other types, shapes and values; not all of them are wrong."""
    import torch

    def with_one(value: int) -> Any:
        changed = tokens.clone()
        changed[-1, -1] = value
        return changed

    return {
        **{f"dtype {one}": tokens.to(one) for one in (torch.int32, torch.uint8, torch.float32, torch.bool, torch.complex64)},
        **{f"the id {one}": with_one(one) for one in (12, -1, 2**40, -(2**40))},
        "numpy": tokens.numpy(),
        "a list": tokens.tolist(),
        "None": None,
        "a number": 3,
        "one sequence": tokens[0],
        "one more dim": tokens[None],
        "one row less": tokens[1:],
        "no rows": tokens[:0],
        "no columns": tokens[:, :0],
        "longer": torch.cat([tokens, tokens], 1),
        "transposed": tokens.t(),
        "without memory": tokens.to("meta"),
        "sparse": tokens.to_sparse(),
        "every other column": torch.cat([tokens, tokens], 1)[:, ::2],
    }


def models(chance: random.Random, rank: int, size: int) -> Case:
    """A model's loss, or a layer, with one argument spoilt."""
    import torch

    tokens = torch.arange(72).reshape(12, 6) * 7 % 12
    good: dict[str, Any] = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    values = {repr(one): one for one in (0, -1, 7, 5.0, "6", None, True, [2], 2**40, "gpt2", "bert")}
    others = {repr(one): one for one in ("serial", "oned", "summa", "cannon", "", None, 3, ["cuboid"], "cuboid ")}
    dtypes = {repr(one): one for one in (torch.int64, "float32", None, torch.complex64, torch.float64, 3)}
    spoils: dict[str, dict[str, Any]] = {
        **{"tokens": spoilt_tokens(tokens), "labels": spoilt_tokens(tokens), "attention_mask": spoilt_tokens(tokens)},
        **{"documents": spoilt_tokens(tokens), "step": NUMBERS, "first_row": NUMBERS, "count": NUMBERS, "seed": NUMBERS},
        **{f"model {one}": values for one in MODEL},
        **{"scheme": others, "dtype": dtypes, "unknown": {"a key": 1}},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])
    mode = chance.choice([*MODES])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        from summa3d.nn import ModelConfig, build, scheme

        changes = {one.removeprefix("model "): value for one, value in arguments.items() if one.startswith("model ")}
        plan, dtype = scheme(arguments.get("scheme", "cuboid"), grid), arguments.get("dtype", torch.float64)
        model = build(ModelConfig(**{**MODEL, **changes}), plan, dtype, arguments.get("seed", 1))
        rest = {one: arguments[one] for one in ("attention_mask", "documents", "step", "first_row", "count") if one in arguments}
        loss = model(arguments["tokens"], arguments["labels"], **rest)
        loss.backward()
        return loss.detach().reshape(1)

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        """The loss of one rank alone."""
        from summa3d.comm.grid import Place

        if key in ("dtype", "scheme"):
            return ANY
        try:
            return as_numpy(call(Place(dict.fromkeys("xyz", 1)), {**good, key: spoils[key][name], "scheme": "serial"}))
        except Exception as error:
            raise MustRefuse from error

    return Case("model", f"{key}: {name}", mode, None, good, {**good, key: spoils[key][name]}, call, oracle, close=1e-9)


def layers(chance: random.Random, rank: int, size: int) -> Case:
    """A linear layer or a norm with one argument spoilt."""
    import torch

    x = torch.arange(72.0).reshape(12, 6) % 5
    good: dict[str, Any] = {"x": x[: 12 // size]}
    sizes = {repr(one): one for one in (0, -6, 7, 6.0, "6", None, True, [6], 2**70)}
    spoils: dict[str, dict[str, Any]] = {
        **{"x": spoilt_arrays(good["x"].numpy()), "k": sizes, "n": sizes, "layout": LAYOUTS, "rows": NUMBERS},
        **{"dtype": {"int64": torch.int64, "float64": torch.float64, "a text": "float32", "None": None}, "std": NUMBERS},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        from summa3d.nn import Linear, initialise, scheme

        plan = scheme("cuboid", grid)
        rest = {one: arguments[one] for one in ("layout", "std", "dtype") if one in arguments}
        layer = Linear(arguments.get("k", 6), arguments.get("n", 6), plan, **rest)
        initialise(layer, plan, 1)
        y = layer(arguments["x"], *([arguments["rows"]] if "rows" in arguments else []))
        y.sum().backward()
        return None

    return Case(
        *("layer", f"{key}: {name}", chance.choice([*MODES]), None, good, {**good, key: spoils[key][name]}, call),
        lambda everyone, rank: None,
    )


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "altered": lambda file: file.write_bytes(file.read_bytes()[:-3] + b"abc"),
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: file.unlink() or file.mkdir(),
    "another one": lambda file: file.with_name("rank-99.safetensors").write_bytes(file.read_bytes()) and None,
}


def checkpoints(chance: random.Random, rank: int, size: int) -> Case:
    """A checkpoint that is written, damaged or not, and read, by this grid or by another, with one argument spoilt."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from summa3d import Grid, Layout, Sharding
    from summa3d.train import config
    from summa3d.train.checkpoint import folder as checkpoint
    from summa3d.train.checkpoint import writer
    from summa3d.train.checkpoint.shards import TensorBlock

    whole = {"w": torch.arange(84.0).reshape(12, 7), "b": torch.arange(5.0)}
    good: dict[str, Any] = {"step": 3}
    spoils: dict[str, dict[str, Any]] = {
        "step": NUMBERS,
        "damage": {f"{damage}: {file}": (damage, file) for damage in DAMAGES for file in ("rank-0.safetensors", "index.json")},
        "read": {repr(one): one for one in ("step-4", "nowhere", "", "..", "step-3/index.json", "step-3/", "\0", "a" * 300)},
        "blocks": {one: one for one in ("of another name", "of another dtype", "of another shape", "none", "twice")},
        "grid": {repr(one): one for one in ({"z": size}, {"x": 1, "y": size}, {"y": size})},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])
    mode, victim = chance.choice([*MODES]), None if key in ("damage", "grid") else one_rank(chance, size)
    folders: list[Path] = []

    @contextlib.contextmanager
    def around(grid: Any) -> Any:
        folders[:] = [Path(MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if rank == 0 else None))]
        yield
        MPI.COMM_WORLD.Barrier()
        if rank == 0:
            shutil.rmtree(folders[0])

    def blocks(grid: Any, filled: bool, how: str = "") -> list[TensorBlock]:
        layouts = {"w": [("x",), ("y",)], "b": [("y",)]}
        found = []
        for tensor, dims in layouts.items():
            layout = Layout(*(dim if set(dim) <= set(grid.shape) else () for dim in dims))
            sharding = Sharding(layout, whole[tensor].shape)
            block = whole[tensor][sharding.slices(grid)].clone()
            found.append(TensorBlock(tensor, block if filled else torch.full_like(block, torch.nan), sharding))
        one = found[0]
        odd = {
            "of another name": TensorBlock("v", one.tensor, one.sharding),
            "of another dtype": TensorBlock("w", one.tensor.double(), one.sharding),
            "of another shape": TensorBlock("w", one.tensor, Sharding(one.sharding.layout, (12, 8))),
        }
        return {"none": [], "twice": found * 2}.get(how, [odd.get(how, one), *found[1:]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        folder, step = folders[0], arguments["step"]
        path = writer.save(folder, step, blocks(grid, True), grid, config.load("demo", ["dtype=float32"]))
        if "damage" in arguments and grid.rank == 0:
            damage, file = arguments["damage"]
            DAMAGES[damage](path / file)
        grid.comm.Barrier()
        with Grid(grid.common, arguments["grid"]) if "grid" in arguments else contextlib.nullcontext(grid) as reads:
            found = checkpoint.read(folder / arguments["read"] if "read" in arguments else path, grid.comm)
            found.verify(grid.comm)
            wanted = blocks(reads, False, arguments.get("blocks", ""))
            found.load(wanted, reads)
            off = [(one.tensor - whole[one.name][one.sharding.slices(reads)]).abs().max() for one in wanted if one.tensor.numel()]
        return np.array([max(map(float, off), default=0.0)])

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        read = {one.get("read", "step-3/") for one in everyone}
        wrong = any("damage" in one or one.get("blocks", "").startswith("of another") for one in everyone)
        if wrong or read != {"step-3/"} or len({whole_step(one["step"]) for one in everyone}) > 1:
            raise MustRefuse
        return np.zeros(1)

    def whole_step(step: Any) -> int:
        if not isinstance(step, int) or step < 0:
            raise MustRefuse
        return step

    bad = {**good, key: spoils[key][name]}
    return Case("checkpoint", f"{key}: {name}", mode, victim, good, bad, call, oracle, around)


GROUPS: tuple[tuple[Callable[[random.Random, int, int], Case], int], ...] = (
    *((collective, 8), (message, 2), (grids, 3), (redistributions, 3), (products, 3), (gradients, 3), (freed, 1)),
    *((channels, 3), (inner_grids, 2), (models, 3), (layers, 1), (checkpoints, 2)),
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
    grid = world.grid(case.mode)
    with case.around(grid):
        return judged(case, world, grid, number, settled)


def judged(case: Case, world: World, grid: Any, number: int, settled: float) -> tuple[str, str]:
    """The verdict of a case whose ranks have made what it is about."""
    rank = world.comm.rank
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
    if right is ANY:
        return ""
    if right is None or result is None:
        return "" if right is result or case.group in UNCHECKED else "a wrong number"
    found, right = as_numpy(result), np.asarray(right)
    if case.close:
        return "" if np.allclose(found, right, rtol=case.close, atol=0, equal_nan=True) else "a wrong number"
    alike = found.shape == right.shape and np.array_equal(found, right, equal_nan=found.dtype.kind in "fc")
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
    if not np.array_equal(grid["x"].all_gather(np.full(2, number)), np.full(2 * grid["x"].size, number)):
        return "a wrong gather afterwards"
    whole_matrix = np.arange(72.0).reshape(12, 6) + number
    if number % 8 == 0 and not np.array_equal(
        DistMatrix.from_global(whole_matrix, grid, "m:x k:y").redistribute("m k:y").to_global(), whole_matrix
    ):
        return "a wrong redistribution afterwards"
    return ""


def on_ranks(numbers: list[int], seed: int, folder: Path, settled: float, seconds: float) -> None:
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
        faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
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


def run(numbers: list[int], ranks: int, seed: int, settled: float = SETTLED, seconds: float = SECONDS) -> list[dict[str, Any]]:
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
            words += ["--limit", str(seconds)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            limit = seconds * (4 + 0.03 * len(left))
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
    parser.add_argument("--limit", type=float, default=SECONDS, help="Seconds after which a case hangs; more on a busy machine.")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_ranks is not None:
        numbers = json.loads((args.on_ranks / "numbers").read_text())
        on_ranks(numbers, args.seed, args.on_ranks, args.settled, args.limit)
        return 0
    numbers = args.only or list(range(10_000 if args.full else args.cases))
    lines = run(numbers, args.ranks, args.seed, args.settled, args.limit)
    again = [line["number"] for line in lines if line["verdict"] == "hang"]
    if again:  # a rank that had no processor for long was taken for one that waits: only what hangs twice does
        slower = {line["number"]: line for number in again for line in run([number], args.ranks, args.seed, 3.0, args.limit)}
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
