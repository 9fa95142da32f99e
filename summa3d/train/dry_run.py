# What a run would need, before any rank is started: bytes per rank term by term, from closed forms.
# Imports comm.grid, nn.memory, nn.schemes, config. Nothing is allocated and nothing communicates.
# Next: nn/memory.py (the formulas), cli/train.py (`--dry-run`).
from __future__ import annotations

from dataclasses import asdict, fields
from math import prod
from typing import Any

from ..comm.grid import Place
from ..nn.memory import Memory, ModelMemory
from ..nn.schemes import scheme
from .config import Config

TERMS = tuple(field.name for field in fields(Memory))


def predict(config: Config) -> dict[str, Any]:
    """The predicted bytes of every rank of the configuration's grid: the fullest rank's terms, and each term's mean.

    Axes are taken to communicate through MPI, as they do between nodes; those inside one node read their neighbours' blocks
    where they lie, which changes workspace and peak. Raises, as the run itself would, GridError and LayoutError for a grid or
    sizes that do not fit, and ConfigError for a family whose memory has no closed form.
    """
    shape, found = config.grid.axes, []
    for rank in range(prod(shape.values())):
        place = Place(shape, rank, order=config.grid.order, tile=config.grid.tile)
        plan = scheme(config.scheme, place, config.regather, config.vectors, config.overlap)
        plan.check(config.model, config.train.micro_batch)
        rows = (config.train.micro_batch, config.model.sequence)
        memory = ModelMemory(config.model, plan, *rows, config.dtype, config.recompute, config.recompute_layers)
        found.append(asdict(memory.memory(config.train.accumulate)))
    fullest = max(range(len(found)), key=lambda rank: found[rank]["peak"])
    return {
        "scheme": config.scheme,
        "grid": shape,
        "ranks": len(found),
        "dtype": config.dtype,
        "recompute": config.recompute,
        "fullest_rank": fullest,
        "bytes": found[fullest],
        "mean_bytes": {term: sum(one[term] for one in found) / len(found) for term in TERMS},
    }
