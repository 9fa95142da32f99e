"""A load of experts, given in place of tokens that nobody knows: how many tokens of each rank each expert takes in a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...comm.topology import Topology
from ...errors import ConfigError
from ...files import read_json
from ..config import ModelConfig


@dataclass(frozen=True)
class GivenLoad:
    """Whole numbers of tokens that experts take in a step: [layers of experts, E] of all ranks, or of each rank and micro-batch.

    Those are [ranks, micro-batches, layers of experts, E], with copies on ranks that hold parts of the same tokens.
    """

    counts: np.ndarray

    @classmethod
    def of(cls, given: Any, model: ModelConfig, ranks: int, micro_batches: int) -> GivenLoad:
        """The load of a table of counts. Raises ConfigError for one that is none of the model on so many ranks."""
        try:
            counts = np.asarray(given)
        except ValueError:  # rows of several lengths
            counts = np.zeros(0)
        layers = model.layers - len(model.dense_layers)
        fits = (layers, model.num_experts), (ranks, micro_batches, layers, model.num_experts)
        if not model.num_experts:
            raise ConfigError(f"A load is given, but {model.family} has no experts. Leave it out.")
        if counts.shape not in fits or counts.dtype.kind not in "iu" or counts.min() < 0:
            raise ConfigError(
                f"The load has the shape {list(counts.shape)} of {counts.dtype}; it is whole numbers from 0, [layers of experts, "
                f"experts] = {list(fits[0])}, or [ranks, micro-batches, layers, experts] = {list(fits[1])}."
            )
        return cls(counts.astype(np.int64))

    @property
    def by_rank(self) -> bool:
        """Return whether each rank and micro-batch has counts of its own."""
        return self.counts.ndim > 2

    def members(
        self, topology: Topology, rank: int, plane: tuple[str, ...], micro_batches: int, at: tuple[int, int]
    ) -> np.ndarray:
        """The tokens of each member of a rank's plane that each expert takes, [members, E], in `at` = (micro-batch, layer).

        A load of all ranks is shared out evenly over micro-batches and over all ranks whose tokens differ.
        """
        (micro, layer), here = at, topology.coordinates_of(rank)
        names = (*plane, *(axis for axis in ("cp", "dp") if topology.shape.get(axis, 1) > 1))
        if self.by_rank:
            return self.counts[topology.members(plane, here), micro, layer]
        every = topology.members(names, {**here, **dict.fromkeys(names, 0)})
        units = np.array([every.index(member) for member in topology.members(plane, here)]) * micro_batches + micro
        many, totals = len(every) * micro_batches, self.counts[layer]
        return (units[:, None] + 1) * totals // many - units[:, None] * totals // many


def read_load(file: Path) -> Any:
    """The table of counts of a JSON file, or of the last step of a metrics.jsonl. Raises ConfigError where there is none."""
    try:
        if file.suffix != ".jsonl":
            return read_json(file)
        steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [step["expert_tokens"] for step in steps if "expert_tokens" in step][-1]
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--load {file} has no load: {error}. It is a JSON file of counts, or the metrics.jsonl of a mixture."
        ) from error
