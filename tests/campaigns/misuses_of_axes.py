"""Misuses of axes: collectives, messages round the ring, channels of a pipeline; what numpy gives is right."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from campaigns.calls import Case
from campaigns.core import MODES, axes_of
from campaigns.spoilt import NUMBERS, OPS, MustRefuse, one_rank, place_like, spoilt_arrays, spoilt_into, spoilt_sizes


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
    """Return what an all-gather gives."""
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
    """Return what a reduce-scatter gives."""
    total = combined(everyone, "sum")
    dim, sizes = along(everyone[rank], [total])
    return parts(total, dim, sizes, len(everyone))[rank]


def reduced(everyone: list[dict[str, Any]], rank: int) -> Any:
    """Return what an all-reduce gives."""
    return combined(everyone, everyone[rank].get("op", "sum"))


def rooted(everyone: list[dict[str, Any]], rank: int) -> Any:
    """Return what a reduce gives."""
    total, root = combined(everyone, everyone[rank].get("op", "sum")), whole(everyone[rank]["root"])
    if not 0 <= root < len(everyone):
        raise MustRefuse
    return total if rank == root else None


def told(everyone: list[dict[str, Any]], rank: int) -> Any:
    """Return what a broadcast gives."""
    arrays, root = arrays_of(everyone), whole(everyone[rank]["root"])
    if not 0 <= root < len(everyone) or len({one.shape for one in arrays}) != 1:
        raise MustRefuse
    return arrays[root]


def exchanged(everyone: list[dict[str, Any]], rank: int) -> Any:
    """Return what an all-to-all gives."""
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
            with type(grid)(grid.communicators.common, axes_of(size), **MODES[mode]) as other:
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
