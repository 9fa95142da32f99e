"""Checkpoints of a Transformers folder's model, as tensors of such a folder: under the names that they had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm.grid import BaseGrid, Place
from ...layout.layout import Layout, Sharding
from ...nn.adopt.body import AdoptedDecoder
from ...nn.adopt.model import StoredPart
from ...nn.adopt.source import LAYERS
from ...nn.config import ModelConfig
from ...nn.context import scheme
from . import shards


@dataclass(frozen=True)
class FolderForm:
    """The tensors of a folder, and which of our parameters each is made of: one, or the parts of a fused weight in order."""

    model: ModelConfig
    parts: dict[str, list[tuple[str, StoredPart]]]

    @classmethod
    def of(cls, model: ModelConfig) -> FolderForm:
        """That of a model of family hf, made without memory."""
        with torch.device("meta"):
            body = AdoptedDecoder(model, scheme("serial", Place(dict.fromkeys("xyz", 1))))
        parts: dict[str, list[tuple[str, StoredPart]]] = {}
        for name, part in body.stored().items():
            parts.setdefault(part.name, []).append((name, part))
        return cls(model, parts)

    @property
    def listing(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the folder's tensors."""
        return [(name, parts[0][1].shape) for name, parts in self.parts.items()]

    def tensors(self, reader: shards.ShardReader, dtype: torch.dtype, grid: BaseGrid) -> Iterator[Tensor]:
        """The tensors in the order of `listing`, read from a checkpoint in its `dtype`; one at a time is in memory."""
        for parts in self.parts.values():
            whole = torch.empty(parts[0][1].shape, dtype=dtype)
            for name, part in parts:
                block = whole[part.slices]
                shape = tuple(block.shape[::-1]) if part.is_turned else tuple(block.shape)
                ours = shards.TensorBlock(
                    f"model.{name}", torch.empty(shape, dtype=dtype), Sharding(Layout(*[()] * len(shape)), shape)
                )
                reader.read(ours, grid)
                block.copy_(ours.tensor.t() if part.is_turned else ours.tensor)
            yield whole

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json: the folder's own, with the layers and the dtype that there are."""
        assert self.model.config_json is not None, "ModelConfig checks it"
        result: dict[str, Any] = json.loads(self.model.config_json)
        result.pop("torch_dtype", None)
        for name in LAYERS:
            if isinstance(result.get(name), list):
                result[name] = result[name][: self.model.layers]
        return {**result, "num_hidden_layers": self.model.layers, "dtype": dtype}
