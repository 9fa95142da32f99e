# What a run would need, before any rank is started: bytes per rank term by term, from closed forms.
# Imports capability, comm.grid, comm.places, nn.memory, nn.schemes, config. Nothing is allocated and nothing communicates.
# Next: nn/memory.py (the formulas), cli/train.py (`--dry-run`).
from __future__ import annotations

from dataclasses import asdict, fields
from math import prod
from typing import Any

from ..capability import available
from ..comm.device.select import requested_device
from ..comm.grid import Place
from ..nn.memory import Memory, ModelMemory
from ..nn.schemes import scheme
from .config import Config, at_least

TERMS = tuple(field.name for field in fields(Memory))


def predict(config: Config, ranks_per_node: int | None = None) -> dict[str, Any]:
    """The predicted bytes of every rank of the configuration's grid: the fullest rank's terms, and each term's mean.

    ranks_per_node : how many consecutive ranks share a node. Axes inside a node communicate through its memory, where blocks are
        read and summands added as they lie; the others through MPI, which takes more workspace. Without it, of a grid with every
        rank on a node of its own, and under "one_node" of one with all ranks on one. On a device NCCL carries all axes alike.

    `node_axes` are the fullest rank's axes inside its node: none where this machine's ranks cannot use its memory
    (`capability.available`). Raises, as the run itself would, GridError and LayoutError for a grid or sizes that do not fit, and
    ConfigError for less than one rank a node.
    """
    ranks = prod(config.grid.axes.values())
    if ranks_per_node is not None:
        at_least("ranks per node", ranks_per_node, 1)
    found = {"scheme": config.scheme, "grid": config.grid.axes, "ranks": ranks, "dtype": config.dtype}
    device = requested_device(config.device)
    found |= {"recompute": config.recompute, "device": device} | _placed(config, ranks_per_node or 1, device == "cuda")
    if ranks_per_node is not None or ranks == 1 or device == "cuda":
        return found
    return found | {"one_node": _placed(config, ranks, False)}


def _placed(config: Config, ranks_per_node: int, on_device: bool) -> dict[str, Any]:
    """What the ranks hold where so many consecutive ones share a node, on the host or on devices."""
    shape, found, inside = config.grid.axes, [], []
    for rank in range(prod(shape.values())):
        place = Place(shape, rank, config.grid.order, config.grid.tile)
        plan = scheme(config.scheme, place, config.regather, config.vectors, config.overlap)
        plan.check(config.model, config.train.micro_batch)
        rows = (config.train.micro_batch, config.model.sequence)
        staged = () if on_device or available() else _inside(place, ranks_per_node)
        recompute = (config.recompute, config.recompute_layers)
        memory = ModelMemory(config.model, plan, *rows, config.dtype, *recompute, staged, on_device)
        found.append(asdict(memory.memory(config.train.accumulate)))
        inside.append(staged)
    fullest = max(range(len(found)), key=lambda rank: found[rank]["peak"])
    return {
        "ranks_per_node": ranks_per_node,
        "node_axes": list(inside[fullest]),
        "fullest_rank": fullest,
        "bytes": found[fullest],
        "mean_bytes": {term: sum(one[term] for one in found) / len(found) for term in TERMS},
    }


def _inside(place: Place, ranks_per_node: int) -> tuple[str, ...]:
    """The axes whose members share the node of the rank at `place`."""

    def nodes(name: str) -> set[int]:
        members = ({**place.coordinates, name: index} for index in range(place.shape[name]))
        return {place.rank_of(member) // ranks_per_node for member in members}

    return tuple(name for name, size in place.shape.items() if size > 1 and len(nodes(name)) == 1)
